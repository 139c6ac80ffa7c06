"""Checkpoints: how long a save holds training, and how much memory it takes.

Three ways in the same processes, in turn: shardstep.save, the same with asynchronous=True, and what a program does with
torch's ZeroRedundancyOptimizer: consolidate_state_dict on all ranks, then torch.save of model and optimizer on rank 0.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching import Result, start_all
from report import Grid, Report, Spread, Target, make_console

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine:

  python benchmarks/checkpoint.py                   fifteen minutes; up to 20 GB of memory and 12 GB of disk
  python benchmarks/checkpoint.py --folder /data    on another disk
  python benchmarks/checkpoint.py --quick           a million parameters: shows that everything runs

Results go to benchmarks/results/checkpoint.md and .json. Exit status: 0 if every target is met, 1 if one is not.
"""
METHOD = """\
AdamW in fp32: three times the parameters' bytes. Gloo over loopback, all ranks and the disk on one machine. Files are
durable (fsync) when shardstep.save returns or its thread ends; torch.save leaves them to the page cache. Times are of
the slowest rank, memory is what the rank that takes most has resident at most beyond what it had before. Medians over
the rounds; "first": the first asynchronous save also finds the memory that later ones take again; it is the one that is
judged."""

NAMES = {
    "consolidate": "torch: consolidate + torch.save",
    "sync": "shardstep.save",
    "async": "asynchronous: held",
    "first async": "asynchronous: held, first",
    "wait": "asynchronous: until it is there",
    "load": "shardstep.load",
}
JUDGED = (300, 4)  # millions of parameters, ranks: others are for information


@dataclass(frozen=True, slots=True)
class Launch:
    millions: int
    ranks: int
    rounds: int
    folder: Path
    rate: str | None = None

    @property
    def title(self) -> str:
        return f"{self.millions} M parameters, {self.ranks} ranks"

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("checkpoint_worker.py"))
        given = {"millions": self.millions, "rounds": self.rounds, "folder": self.folder, "out": out}
        return [worker, *(text for key, value in given.items() for text in (f"--{key}", str(value)))]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="of 30 M; of 300 M two (default: 5)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="1 M parameters, one round; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace, folder: Path) -> Iterator[Launch]:
    if arguments.quick:
        yield Launch(1, 2, 1, folder)
        return
    for millions, rounds in ((30, arguments.rounds), (300, 2)):
        for ranks in (2, 4):
            yield Launch(millions, ranks, rounds, folder)


def spread(result: Result, name: str) -> Spread:
    return Spread.of([one["seconds"] for one in result["times"][name]])


def ratios(result: Result, name: str) -> Spread:
    """Within a round."""
    base = result["times"]["consolidate"]
    rows = zip(result["times"][name], base, strict=True)
    return Spread.of([ours["seconds"] / theirs["seconds"] for ours, theirs in rows])


def times_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        for name, words in NAMES.items():
            memory = Spread.of([one["extra_memory"] / 1e6 for one in result["times"][name]])
            rows.append((result["title"], words, *spread(result, name).cells(), f"{memory.median:,.0f}"))
    columns = ("", "", "seconds", "quartiles", "extremes", "extra MB")
    return Grid("Times", "", columns, tuple(rows), labels=2)


def ratios_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (result["title"], NAMES[name], *ratios(result, name).cells())
        for result in results
        for name in ("sync", "first async", "async")
    ]
    note = "To torch's consolidate + torch.save, within a round."
    return Grid("Ratios", note, ("", "", "median", "quartiles", "extremes"), tuple(rows), labels=2)


def targets(results: Sequence[Result]) -> Iterator[Target]:
    for result in results:
        title, most = result["title"], max(result["bytes_of_ranks"])
        if title.startswith(f"{JUDGED[0]} M") and len(result["bytes_of_ranks"]) == JUDGED[1]:
            yield Target(f"save / consolidate + torch.save, {title}", 0.5, ratios(result, "sync").median)
            yield Target(f"held by an asynchronous one / the same, {title}", 0.1, ratios(result, "first async").median)
        share = result["total"] / len(result["bytes_of_ranks"])
        yield Target(f"bytes of the rank that writes most / its share, {title}", 1.02, most / share)


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        results: Any = start_all(list(launches(arguments, Path(folder))), console)
    if results is None:
        return 2
    report = Report(
        "checkpoint",
        "Checkpoints",
        METHOD,
        (times_grid(results), ratios_grid(results)),
        tuple(targets(results)),
        {"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
