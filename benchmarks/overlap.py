"""Time a training step whose optimizer steps inside DDP's backward pass, against one that steps after it.

Five contenders train a GPT of 30 M parameters in the same processes, same seed, same batches: DDP with plain AdamW
("AdamW"), with shardstep's ZeroRedundancyOptimizer after the backward pass ("sharded"), and with the same inside it, by
hook_with_zero_step ("overlap"), by hook_with_zero_step_interleaved ("interleaved"), and by the latter with
reduce_to_holders in place of allreduce_hook ("to holders"). They run in turn; what counts is the ratio within a round.
At the end all must hold the same parameters, or the run fails.

64 % of the elements are one embedding, whose gradient is the last to come. On slow links the gradients then keep the
links busy from the first bucket to the last, and there is nothing to hide the parameters behind: "overlap" and
"interleaved" send the same bytes as "sharded" over the same links. "to holders" sends a third less.
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
from hosts import why_impossible
from launching import Result, start_all
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, make_console

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine:

  python benchmarks/overlap.py            2 and 4 ranks over loopback: about ten minutes on two cores, 8 GB
  python benchmarks/overlap.py --hosts 4 --rate 1gbit    4 hosts with slow links: five minutes; needs root, iproute2
  python benchmarks/overlap.py --quick    a toy model on 2 ranks, seconds: shows that everything runs

Results go to benchmarks/results/overlap.md and .json (--hosts: overlap_hosts.md and .json; --quick: the same names in
benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed, the contenders disagree, or hosts cannot be
made.
"""

METHOD = """\
DDP with AdamW, Gloo, one thread per rank; {network}. Every contender but 'to holders' reduces gradients with torch's
`allreduce_hook`, and those that overlap wrap their hook with `shard_buckets=True`. All train in the same processes, in
turn; a ratio is that of two blocks of one round. A time is that of the slowest rank, from a barrier on, after a step
that is not timed. After every launch all ranks held the same bits; 'largest difference' is between contenders."""

PAIRS = (
    *(("sharded", "AdamW"), ("overlap", "AdamW"), ("interleaved", "AdamW"), ("to holders", "AdamW")),
    *(("overlap", "sharded"), ("interleaved", "sharded"), ("to holders", "sharded")),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """One process group of the benchmark."""

    ranks: int
    rate: str | None  # of a host's link; None: all ranks on this machine's loopback
    rounds: int
    steps: int
    toy: bool

    @property
    def title(self) -> str:
        return f"{self.ranks} ranks" if self.rate is None else f"{self.ranks} hosts, {self.rate}"

    def command(self, out: Path) -> list[str]:
        """Of one rank."""
        counts = ["--rounds", str(self.rounds), "--steps", str(self.steps)]
        worker = str(Path(__file__).with_name("overlap_worker.py"))
        return [worker, *counts, *(["--toy"] if self.toy else []), "--out", str(out)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="world sizes to run (default: 2 4)")
    parser.add_argument("--hosts", type=int, default=None, help="one rank on each of so many hosts, instead of --ranks")
    parser.add_argument("--rate", default=None, help="of a host's link, as tc writes it (default: 1gbit)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds per launch (default: 12)")
    parser.add_argument("--steps", type=int, default=None, help="steps of each in a round (default: 3; with --hosts 1)")
    parser.add_argument("--quick", action="store_true", help="toy model, 2 ranks, 3 rounds; numbers mean nothing")
    arguments = parser.parse_args()
    if arguments.hosts and arguments.ranks:
        parser.error("--hosts starts one rank on each host: give --hosts or --ranks, not both")
    if arguments.rate and not arguments.hosts:
        parser.error("--rate limits the links of hosts: give --hosts too")
    return arguments


def launches(arguments: argparse.Namespace) -> list[Launch]:
    quick = arguments.quick
    if arguments.hosts:
        rounds, steps = arguments.rounds or (3 if quick else 12), arguments.steps or 1
        return [Launch(arguments.hosts, arguments.rate or "1gbit", rounds, steps, quick)]
    rounds, steps = arguments.rounds or (3 if quick else 12), arguments.steps or 3
    worlds = arguments.ranks or ([2] if quick else [2, 4])
    return [Launch(ranks, None, rounds, steps, quick) for ranks in worlds]


def ratio(result: Result, pair: tuple[str, str]) -> Spread:
    """Of the first of the pair to the second, over the rounds."""
    ours, base = (result["step_seconds"][name] for name in pair)
    return Spread.of([mine / theirs for mine, theirs in zip(ours, base, strict=True)])


def ratio_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (result["title"], f"{pair[0]} / {pair[1]}", *ratio(result, pair).cells())
        for result in results
        for pair in PAIRS
    ]
    note = "One ratio per round; below 1 the first is faster."
    return Grid("Ratios of step times", note, ("", "ratio", *SPREAD_COLUMNS), tuple(rows), labels=2)


def step_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        for name, seconds in result["step_seconds"].items():
            traffic = result["traffic"][name]
            sent = [rank["sent"] for rank in traffic["step"]]
            calls = [str(max(rank[kind] for rank in traffic["calls"])) for kind in ("collectives", "messages")]
            times = (f"{Spread.of(seconds).median:.3f}", f"{min(seconds):.3f}")
            difference = f"{result['differences'].get(name, 0):g}"
            rows.append(
                (result["title"], name, *times, *calls, megabytes(fmean(sent)), megabytes(max(sent)), difference)
            )
    columns = (
        *("", "contender", "median s", "least s", "collectives", "messages"),
        *("MB sent, mean", "MB sent, max", "largest difference"),
    )
    note = (
        "A full step: forward, backward, and the optimizer's step. Collectives and messages are the c10d operators "
        "in the profiler, of the rank with most (messages are point-to-point sends and receives). MB sent is TCP "
        "payload by TCP_INFO, over the ranks. The largest difference of any parameter is from that of AdamW."
    )
    return Grid("A full training step", note, columns, tuple(rows), labels=2)


def all_targets(results: Sequence[Result]) -> Iterator[Target]:
    """On slow links, where it counts, a step inside the backward pass is faster than one after it."""
    for result in results:
        if "hosts" in result["title"]:
            measured = ratio(result, ("to holders", "sharded")).median
            yield Target(f"step time, to holders / sharded, {result['title']}", 1.0, measured, strict=True)


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    if arguments.hosts and (reason := why_impossible()):
        console.print(reason)
        return 2
    # Otherwise a terminated run would leave its hosts behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))
    planned = launches(arguments)
    results = start_all(planned, console)
    if results is None:
        return 2
    network = "links of network namespaces on one machine" if arguments.hosts else "all ranks on one machine's loopback"
    report = Report(
        name="overlap_hosts" if arguments.hosts else "overlap",
        title="The optimizer's step inside DDP's backward pass" + (", on slow links" if arguments.hosts else ""),
        method=METHOD.format(network=network),
        grids=(step_grid(results), ratio_grid(results)),
        targets=tuple(all_targets(results)),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
