"""What a training step waits for the network, where there is next to nothing to compute and to send.

Three Linear(64) under DDP with AdamW, torch's ZeroRedundancyOptimizer, shardstep's, and shardstep.shard, in turn in the
same processes: on four hosts five milliseconds apart, where a step takes as many crossings of the network as it makes
one behind the other; and with two ranks on this machine, where it is what messages and threads cost.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from distant_hosts import run_far_apart, why_impossible
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, make_console

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine. Hosts far apart need root
and iproute2, and are left out without them:

  python benchmarks/latency.py            a minute
  python benchmarks/latency.py --quick    seconds: shows that everything runs

Results go to benchmarks/results/latency.md and .json (--quick: the same names in benchmarks/results/quick/, which git
ignores). Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed.
"""

METHOD = """\
Gloo, one thread per rank. Each round trains every contender for some steps (forward, backward, step, zero_grad) after a
barrier; the times are those of rank 0. Ratios are of the same round, and the median over the rounds is compared
with the target. Crossings are the time divided by that of one packet from host to host."""

HOSTS, MILLISECONDS = 4, 5.0
BASE = "DDP"
TARGETS = {  # of DDP's time
    "far apart": {"shard": 0.28},
    "one machine": {"shard": 2.0, "drop-in": 1.5},
}

Result = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each setting (default: 15)")
    parser.add_argument("--quick", action="store_true", help="2 rounds; numbers mean nothing")
    return parser.parse_args()


def run(where: str, rounds: int, out: Path) -> Result:
    """Start the ranks of one setting, wait, and read what rank 0 wrote."""
    worker = [str(Path(__file__).with_name("latency_worker.py")), "--rounds", str(rounds), "--out", str(out)]
    if where == "far apart":
        run_far_apart([sys.executable, *worker, "--steps", "5"], HOSTS, MILLISECONDS / 1e3)
    else:
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # as in drop_in.py
        subprocess.run([*starter, *worker, "--steps", "50"], env=os.environ | settings, check=True)
    result: Result = json.loads(out.read_text())
    return result | {"where": where}


def ratio(result: Result, name: str) -> float:
    """Return how many times DDP's time a contender takes, in the median of the rounds."""
    pairs = zip(result["milliseconds"][name], result["milliseconds"][BASE], strict=True)
    return median(own / base for own, base in pairs)


def grid_of(result: Result) -> Grid:
    far = result["where"] == "far apart"
    title = f"{HOSTS} hosts, {MILLISECONDS:g} ms apart" if far else "2 ranks on one machine"
    columns = ("contender", *SPREAD_COLUMNS, f"of {BASE}'s", *(["crossings"] if far else []))
    rows = []
    for name, values in result["milliseconds"].items():
        spread = Spread.of(values)
        crossings = [f"{spread.median / MILLISECONDS:.1f}"] if far else []
        rows.append((name, *spread.cells(2), f"{ratio(result, name):.2f}", *crossings))
    return Grid(title, "Milliseconds of one step.", columns, tuple(rows))


def targets_of(results: Sequence[Result]) -> list[Target]:
    return [
        Target(f"{name} / {BASE}, {result['where']}", most, ratio(result, name))
        for result in results
        for name, most in TARGETS[result["where"]].items()
    ]


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    lacking = why_impossible()
    if lacking is not None:
        console.print(f"{lacking} That part is left out.", style="yellow")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for where in TARGETS if lacking is None else ["one machine"]:
            console.print(f"[bold]{where}")
            try:
                results.append(run(where, 2 if arguments.quick else arguments.rounds, Path(folder) / "result.json"))
            except (subprocess.CalledProcessError, RuntimeError) as error:
                console.print(f"{where}: {error}", style="red", markup=False)
                return 2
    report = Report(
        name="latency",
        title="Latency: what a step waits for the network",
        method=METHOD,
        grids=tuple(grid_of(result) for result in results),
        targets=tuple(targets_of(results)),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
