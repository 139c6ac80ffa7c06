"""Bytes and time of `ShardConfig(wire="bf16")` against DDP and against `shard` in fp32.

All train a GPT of 30 M parameters (64 % of them one tied embedding), batch 2 per rank, with AdamW(fused=True), in the
same processes, in turn; what counts is the ratio within a round.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from drop_in_tables import megabytes
from fast_lane import ideal_bytes, ratio
from hosts import why_impossible
from launching import Result, start_all
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, make_console
from wire_worker import DDP, EXACT_GRADIENTS, WIRE

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine:

  python benchmarks/wire.py            2 ranks over loopback, then 4 hosts with links of 1 Gbit/s: ten minutes on two
                                       cores, 12 GB; hosts need root and iproute2, and are left out without them
  python benchmarks/wire.py --quick    a toy model, seconds: shows that everything runs

Results go to benchmarks/results/wire.md and .json (--quick: to benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed or ranks hold different parameters.
"""

METHOD = """\
Gloo, one thread per rank. All train in the same processes, in turn; a ratio is that of two blocks of one round. A block
is two steps, after one that is not timed; a time is that of the slowest rank, from a barrier on. Hosts are network
namespaces on one machine, whose two cores they share, with links of limited rate. Afterwards all ranks of a contender
hold the same bits.{left_out}"""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process group of the benchmark."""

    ranks: int
    rate: str | None
    rounds: int
    toy: bool
    steps: int = 2

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks" if self.rate is None else f"{self.ranks} hosts, {self.rate}"

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("wire_worker.py"))
        counts = ["--rounds", str(self.rounds), "--steps", str(self.steps), *(["--toy"] if self.toy else [])]
        return [worker, *counts, "--out", str(out)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rate", default="1gbit", help="of a host's link, as tc writes it (default: 1gbit)")
    parser.add_argument(
        "--rounds", type=int, default=8, help="per launch (default: 8); 0: only bytes, which need no idle machine"
    )
    parser.add_argument("--quick", action="store_true", help="toy model, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace) -> Iterator[Launch]:
    rounds = 2 if arguments.quick else arguments.rounds
    yield Launch(2, None, rounds, arguments.quick)
    if why_impossible() is None:
        yield Launch(4, arguments.rate, rounds, arguments.quick)


def steps_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        for name, seconds in result["step_seconds"].items():
            sent = sent_by_each(result, name)
            times = (f"{Spread.of(seconds).median:.3f}", *ratio(result, name, DDP).cells()) if seconds else ("-",) * 4
            rows.append((result["title"], name, megabytes(max(sent)), f"{share_sent(result, name):.3f}", *times))
    columns = ("", "contender", "MB sent, max", "of DDP's", "median s", *SPREAD_COLUMNS)
    note = (
        "A full step. MB sent is TCP payload by the kernel's TCP_INFO, of the rank that sends most; 'of DDP's' is the "
        "mean over 2(N-1)/N of the parameters' bytes. Median, quartiles and extremes are of the time's ratio to DDP."
    )
    return Grid("A full training step", note, columns, tuple(rows), labels=2)


def sent_by_each(result: Result, name: str) -> list[int]:
    return [rank["sent"] for rank in result["traffic"][name]["step"]]


def share_sent(result: Result, name: str) -> float:
    return fmean(sent_by_each(result, name)) / ideal_bytes(result)


def targets(results: Sequence[Result]) -> Iterator[Target]:
    for result in results:
        for name, limit in ((WIRE, 0.51), (EXACT_GRADIENTS, 0.76)):
            yield Target(f"{name}: bytes over DDP's, {result['title']}", limit, share_sent(result, name))
        if not result["step_seconds"][WIRE]:
            continue
        limit = 0.80 if "hosts" in result["title"] else 1.00
        yield Target(f"{WIRE}: time over DDP's, {result['title']}", limit, ratio(result, WIRE, DDP).median)


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # or a terminated run would leave its hosts behind
    results = start_all(list(launches(arguments)), console)
    if results is None:
        return 2
    reason = why_impossible()
    report = Report(
        name="wire",
        title='Half the bytes: wire="bf16"',
        method=METHOD.format(left_out=f" No hosts here: {reason}" if reason else ""),
        grids=(steps_grid(results),),
        targets=tuple(targets(results)),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
