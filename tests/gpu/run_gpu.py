"""The tests that need a GPU, in several processes side by side: a test waits for the other ranks and for the host most
of its time, and not for the GPU. Prints what each process found, and one sum at the end.

    python tests/gpu/run_gpu.py                    all of them
    python tests/gpu/run_gpu.py --processes 1 -x   one after the other; other options go to pytest
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from gpu_ranks import side_by_side  # noqa: E402

PROCESSES = 5
CHUNK = 24  # tests of one file that go to one process: starting the ranks of a process takes seconds
# Seconds of a test, where they are known to be many or few; others take two.
SECONDS = {
    "test_fast_lane_gpu": 2.4,
    "test_checkpoint_gpu": 2.3,
    "test_drop_in_gpu": 4.2,
    "test_overlap_with_ddp_gpu": 0.5,
    "test_kernel": 0.2,
}
COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped|deselected|warnings?)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=PROCESSES)
    parser.add_argument(
        "--seconds", type=float, default=540, help="after which what still runs is ended (default: 540)"
    )
    arguments, options = parser.parse_known_args()
    began = time.monotonic()
    shares = share_out(collect(options), arguments.processes)
    found: Counter[str] = Counter()
    with side_by_side() as service, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(len(shares))]
        started = [start(share, options, log, os.environ | service) for share, log in zip(shares, logs, strict=True)]
        wait(started, began + arguments.seconds)
        codes = [process.returncode for process in started]
        for number, (share, log, code) in enumerate(zip(shares, logs, codes, strict=True), 1):
            text = log.read_text()
            summary = text.strip().splitlines()[-1] if text.strip() else "no output"
            if code:
                print(text)
            print(f"process {number} of {len(shares)}, {len(share)} tests: {summary}", flush=True)
            found.update({kind: int(count) for count, kind in COUNTS.findall(summary)})
    asked = sum(map(len, shares))
    ran = found["passed"] + found["failed"] + found["skipped"]
    print(f"{found['passed']} passed, {found['failed']} failed, {found['skipped']} skipped")
    print(f"of {asked} tests that need a GPU, in {time.monotonic() - began:.0f} s; exit codes {codes}")
    return 0 if not any(codes) and ran == asked and found["passed"] else 1  # all skipped: there was no GPU


def wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    """Until all have ended, or it is too late: their logs say which tests they were in."""
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def collect(options: Sequence[str]) -> list[str]:
    """The tests by name, as pytest runs them."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "--collect-only", "-q", *options]
    out = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return [line for line in out.splitlines() if "::" in line and not line.startswith(("SKIPPED", "ERROR"))]


def share_out(tests: Sequence[str], processes: int) -> list[list[str]]:
    """Neighbours stay together, as they use the same ranks; the longest chunks first, each to whoever has least."""
    chunks = []
    for _, members in groupby(tests, key=lambda test: test.partition("::")[0]):
        of_file = list(members)
        chunks += [of_file[at : at + CHUNK] for at in range(0, len(of_file), CHUNK)]
    shares: list[list[str]] = [[] for _ in range(min(processes, len(chunks)))]
    for chunk in sorted(chunks, key=seconds, reverse=True):
        min(shares, key=seconds).extend(chunk)
    return shares


def seconds(tests: Sequence[str]) -> float:
    return sum(SECONDS.get(Path(test.partition("::")[0]).stem, 2.0) for test in tests)


def start(tests: Sequence[str], options: Sequence[str], log: Path, settings: dict[str, str]) -> subprocess.Popen[bytes]:
    chosen = [option for option in options if not option.startswith("tests")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider", *chosen, *tests]
    with log.open("wb") as out:
        return subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env=settings)


if __name__ == "__main__":
    sys.exit(main())
