"""What a training step costs the host when a model has few parameters or thousands, of the same size in all.

128,000 elements in 20, 200 and 2,000 parameters, on two ranks: there is next to nothing to compute or to send, so what
is measured is what the host does for each parameter and for each bucket. DDP with foreach AdamW, torch's
ZeroRedundancyOptimizer over foreach AdamW, and shardstep.shard with AdamW train in the same processes, in turn; so does
a model without data parallelism, to show what autograd takes for itself.
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
from typing import Any

from report import Grid, Report, Spread, Target, make_console

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine:

  python benchmarks/host_work.py            a minute
  python benchmarks/host_work.py --quick    20 and 200 parameters, seconds: shows that everything runs

Results go to benchmarks/results/host_work.md and .json (--quick: the same names in benchmarks/results/quick/, which git
ignores). Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed.
"""

METHOD = """\
Gloo over loopback, 2 ranks, one thread each. Times are of the processor, on the thread that trains (Linux's clock of
the thread), so that waiting for another rank does not count; medians over the rounds, rank 0."""

FEW, MANY = 20, 2_000
PARTS = ("backward", "step", "both")

Result = dict[str, Any]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=30, help="steps of each contender that are measured (default: 30)"
    )
    parser.add_argument("--quick", action="store_true", help="20 and 200 parameters, 3 rounds; numbers mean nothing")
    return parser.parse_args()


def run(count: int, rounds: int, out: Path) -> Result:
    worker = str(Path(__file__).with_name("host_work_worker.py"))
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # as in drop_in.py
    arguments = ["--parameters", str(count), "--rounds", str(rounds), "--out", str(out)]
    subprocess.run([*starter, worker, *arguments], env=os.environ | settings, check=True)
    result: Result = json.loads(out.read_text())
    return result


def milliseconds(result: Result, name: str, part: str) -> Spread:
    rows = result["seconds"][name]
    chosen = [sum(row.values()) for row in rows] if part == "both" else [row[part] for row in rows]
    return Spread.of([1e3 * value for value in chosen])


def time_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (f"{result['parameters']:,}", name, *(f"{milliseconds(result, name, part).median:.2f}" for part in PARTS))
        for result in results
        for name in result["seconds"]
    ]
    note = "Milliseconds of one step: backward with the hooks in it, then step and zero_grad."
    return Grid("Host time of a step", note, ("parameters", "contender", *PARTS), tuple(rows), labels=2)


def growth(results: Sequence[Result], name: str, part: str) -> float:
    """Microseconds for each parameter more, between the fewest and the most."""
    fewest, most = results[0], results[-1]
    more = milliseconds(most, name, part).median - milliseconds(fewest, name, part).median
    return 1e3 * more / (most["parameters"] - fewest["parameters"])


def growth_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (name, *(f"{growth(results, name, part):.1f}" for part in PARTS), f"{results[-1]['tensors'][name]:,}")
        for name in results[0]["seconds"]
    ]
    note = (
        "Microseconds for each parameter more. 'Tensors stepped' is what the optimizer of rank 0 sees with the most "
        "parameters."
    )
    return Grid("Growth", note, ("contender", *PARTS, "tensors stepped"), tuple(rows))


def calls_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (name, part, *(f"{result['calls'][name][part]:,}" for result in results))
        for name in results[0]["calls"]
        for part in ("backward", "step")
    ]
    counts = [f"{result['parameters']:,} parameters" for result in results]
    note = "Calls of functions written in Python, in one step on rank 0; exact. Step includes zero_grad."
    return Grid("Python calls", note, ("contender", "part", *counts), tuple(rows), labels=2)


def all_targets(results: Sequence[Result]) -> list[Target]:
    most = results[-1]
    both = {name: milliseconds(most, name, "both").median for name in most["seconds"]}
    what = f"{most['parameters']:,} parameters"
    peers = ("DDP, foreach", "torch ZeRO, foreach")
    return [Target(f"shardstep / {peer}, {what}", 1.0, both["shardstep"] / both[peer]) for peer in peers]


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    counts, rounds = ([FEW, 200], 3) if arguments.quick else ([FEW, 200, MANY], arguments.rounds)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for count in counts:
            console.print(f"[bold]{count:,} parameters")
            try:
                results.append(run(count, rounds, Path(folder) / f"{count}.json"))
            except subprocess.CalledProcessError as error:
                console.print(f"[red]the ranks ended with status {error.returncode}; see above")
                return 2
    report = Report(
        name="host_work",
        title="Host work: many small parameters",
        method=METHOD,
        grids=(time_grid(results), growth_grid(results), calls_grid(results)),
        targets=tuple(all_targets(results)),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
