"""Time, bytes and memory of `shardstep.shard`, against DDP with AdamW, torch's ZeroRedundancyOptimizer and FSDP2.

All train a GPT of 30 M parameters (64 % of them one tied embedding), batch 2 per rank, in the same processes, in turn;
what counts is the ratio within a round. "fused" is AdamW(fused=True); torch ZeRO has bucket views, its best setting.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from drop_in_tables import megabytes
from hosts import why_impossible
from launching import Result, start_all
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, make_console

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine:

  python benchmarks/fast_lane.py            2 and 4 ranks over loopback: about fifteen minutes on two cores, 12 GB
  python benchmarks/fast_lane.py --hosts 4 --rate 1gbit    4 hosts with slow links: nine minutes; needs root, iproute2
  python benchmarks/fast_lane.py --quick    a toy model on 2 ranks, seconds: shows that everything runs

Results go to benchmarks/results/fast_lane.md and .json (--hosts: fast_lane_hosts.md and .json; --quick: the same names
in benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed, the contenders disagree, or hosts cannot be
made.
"""

METHOD = """\
Gloo, one thread per rank; {network}. All train in the same processes, in turn; a ratio is that of two blocks of one
round. A block is two steps, after one that is not timed; a time is that of the slowest rank, from a barrier on. Memory
comes from launches of one contender each: the peak of resident memory while it trains, over that of the process before
the model was made. The C library keeps freed blocks of up to 32 MB for later, so that this peak differs by 100 MB
between two launches of one program. To weigh what training needs, not what the library hoards, it is also told to
return blocks from 1 MB on at once; the targets are for these launches, which repeat to a few MB. Times are of launches
that leave the library as it is."""

ON_ONE_MACHINE = ("DDP", "DDP fused", "torch ZeRO", "torch ZeRO fused", "FSDP2", "shardstep", "shardstep fused")
ON_HOSTS = ("DDP fused", "torch ZeRO fused", "shardstep fused", "shardstep fused, overlap")
WEIGHED = ("DDP", "shardstep")
WEIGHINGS = {"returned": 3, "kept": 3}  # launches of each, by what the C library does with freed memory
BASE_OF = {"shardstep": "DDP", "shardstep fused": "DDP fused"}
LIMITS = {("shardstep", 2): 0.90, ("shardstep", 4): 0.85, ("shardstep fused", 2): 1.00, ("shardstep fused", 4): 0.97}


@dataclass(frozen=True, slots=True)
class Launch:
    """One process group of the benchmark; without rounds it weighs the memory of one contender, with freed memory
    returned to the system at once or kept as the C library likes."""

    ranks: int
    contenders: tuple[str, ...]
    rate: str | None
    rounds: int
    steps: int
    toy: bool
    freed: str = "kept"

    @property
    def title(self) -> str:
        where = f"{self.ranks} ranks" if self.rate is None else f"{self.ranks} hosts, {self.rate}"
        return where if self.rounds else f"{where}, memory of {self.contenders[0]}, freed {self.freed}"

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("fast_lane_worker.py"))
        counts = ["--rounds", str(self.rounds), "--steps", str(self.steps), *(["--toy"] if self.toy else [])]
        returned = ["--returned"] if self.freed == "returned" else []
        return [worker, "--contenders", *self.contenders, *counts, *returned, "--out", str(out)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="world sizes to run (default: 2 4)")
    parser.add_argument("--hosts", type=int, default=None, help="one rank on each of so many hosts, instead of --ranks")
    parser.add_argument("--rate", default="1gbit", help="of a host's link, as tc writes it (default: 1gbit)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds per launch (default: 10; with --hosts 12)")
    parser.add_argument("--quick", action="store_true", help="toy model, 2 ranks, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace) -> Iterator[Launch]:
    quick = arguments.quick
    if arguments.hosts:
        yield Launch(arguments.hosts, ON_HOSTS, arguments.rate, arguments.rounds or (2 if quick else 12), 2, quick)
        return
    for ranks in arguments.ranks or ([2] if quick else [2, 4]):
        yield Launch(ranks, ON_ONE_MACHINE, None, arguments.rounds or (2 if quick else 10), 2, quick)
        for freed, count in WEIGHINGS.items():
            for name in WEIGHED * (1 if quick else count):
                yield Launch(ranks, (name,), None, 0, 1, quick, freed)


def ratio(result: Result, ours: str, base: str) -> Spread:
    seconds = result["step_seconds"]
    return Spread.of([mine / theirs for mine, theirs in zip(seconds[ours], seconds[base], strict=True)])


def time_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        base = result["contenders"][0]
        for name, seconds in result["step_seconds"].items():
            sent = [rank["sent"] for rank in result["traffic"][name]["step"]]
            calls = result["traffic"][name]["calls"]
            counts = [str(max(rank[kind] for rank in calls)) for kind in ("collectives", "messages")]
            of_ideal = fmean(sent) / ideal_bytes(result)
            times = (f"{Spread.of(seconds).median:.3f}", *ratio(result, name, base).cells())
            rows.append((result["title"], name, *times, megabytes(max(sent)), f"{of_ideal:.3f}", *counts))
    columns = ("", "contender", "median s", *(f"{c}" for c in SPREAD_COLUMNS), "MB sent, max", "of DDP's", "collectives", "messages")  # fmt: skip # noqa: E501
    note = (
        "A full step. Median, quartiles and extremes are of the ratio to the first contender of the launch. MB sent is "
        "TCP payload by TCP_INFO of the rank that sends most; 'of DDP's' is the mean over 2(N-1)/N of the parameters' "
        "bytes. Collectives and messages are the c10d operators in the profiler, of the rank with most."
    )
    return Grid("A full training step", note, columns, tuple(rows), labels=2)


def ideal_bytes(result: Result) -> float:
    ranks = result["ranks"]
    return float(2 * (ranks - 1) / ranks * result["parameter_bytes"])


def memory_grid(results: Sequence[Result]) -> Grid:
    rows = tuple(
        (r["title"], r["contenders"][0], megabytes(max(r["memory"]["peak"])), megabytes(min(r["memory"]["peak"])))
        for r in sorted(results, key=lambda r: (r["ranks"], r["memory"]["returned"], r["contenders"][0]))
    )
    note = (
        "Peak of resident memory while training, over that before the model was made; the rank with most, and least, "
        "of each launch. The targets take the median of the most, of the launches that return freed memory."
    )
    return Grid("Memory", note, ("", "contender", "MB, most", "MB, least"), rows, labels=2)


def saved_grid(timed: Sequence[Result], weighed: Sequence[Result]) -> Grid:
    rows = [
        (
            result["title"],
            freed,
            *(megabytes(peak(weighed, result["ranks"], name, freed)) for name in WEIGHED),
            f"{saved_share(result, weighed, freed):.2f}",
        )
        for result in timed
        for freed in WEIGHINGS
    ]
    note = "Median of the launches' most, and what is saved over what sharding gradients and two moments should save."
    return Grid("Memory saved", note, ("", "freed memory", *(f"{n}, MB" for n in WEIGHED), "saved"), tuple(rows), labels=2)  # fmt: skip # noqa: E501


def saved_share(timed: Result, weighed: Sequence[Result], freed: str) -> float:
    """What is saved, over what sharding gradients and AdamW's two moments should save."""
    should = 3 * timed["parameter_bytes"] * (1 - 1 / timed["ranks"])
    ddp, ours = (peak(weighed, timed["ranks"], name, freed) for name in WEIGHED)
    return (ddp - ours) / should


def peak(weighed: Sequence[Result], ranks: int, name: str, freed: str) -> float:
    """Of the rank with most; the median of the launches."""
    alike = [r for r in weighed if r["ranks"] == ranks and r["memory"]["returned"] == (freed == "returned")]
    return float(median(max(r["memory"]["peak"]) for r in alike if r["contenders"][0] == name))


def all_targets(timed: Sequence[Result], weighed: Sequence[Result]) -> Iterator[Target]:
    for result in timed:
        title, hosts = result["title"], "hosts" in result["title"]
        ours = "shardstep fused" if hosts else "shardstep"
        sent = max(rank["sent"] for rank in result["traffic"][ours]["step"])
        yield Target(f"bytes sent, of 2(N-1)/N of the parameters', {title}", 1.02, sent / ideal_bytes(result))
        if hosts:
            best, overlapped = "shardstep fused", "shardstep fused, overlap"
            yield Target(f"{best} / torch ZeRO fused, {title}", 0.60, ratio(result, best, "torch ZeRO fused").median)
            yield Target(f"{best} / DDP fused, {title}", 1.00, ratio(result, best, "DDP fused").median)
            yield Target(f"{overlapped} / DDP fused, {title}", 0.90, ratio(result, overlapped, "DDP fused").median)
            continue
        for name, base in BASE_OF.items():
            limit = LIMITS.get((name, result["ranks"]))
            if limit is not None:
                yield Target(f"{name} / {base}, {title}", limit, ratio(result, name, base).median)
        for peer in ("torch ZeRO fused", "FSDP2"):
            yield Target(f"shardstep fused / {peer}, {title}", 1.0, ratio(result, "shardstep fused", peer).median, strict=True)  # fmt: skip # noqa: E501
        yield Target(f"memory not saved, of what should be, {title}", 0.15, 1 - saved_share(result, weighed, "returned"))  # fmt: skip # noqa: E501


def bounds_grid(result: Result, rate: str) -> Grid:
    """What no implementation can go below: computing, and wire time at link rate of what cannot overlap with it."""
    bits = {"gbit": 1e9, "mbit": 1e6}[rate.lstrip("0123456789.")] * float(rate.rstrip("gmbit"))
    once = ideal_bytes(result) / 2 * 8 / bits  # to bring all gradients to their holders, or all parameters to everyone
    last = once * result["largest_bytes"] / result["parameter_bytes"]
    compute = median(result["compute_seconds"])
    after = {"DDP fused": 2 * last, "shardstep fused": last + once, "shardstep fused, overlap": 2 * last}
    base = median(result["step_seconds"]["DDP fused"])
    rows = []
    for name, wire in after.items():
        bound, measured = compute + wire, median(result["step_seconds"][name])
        rows.append((name, *(f"{value:.2f}" for value in (wire, bound, measured, bound / base))))
    note = (
        f"Forward and backward take {compute:.2f} s when nothing is sent; all bytes of DDP or of shardstep take "
        f"{2 * once:.2f} s at link rate. The gradient of the tied embedding ({result['largest_bytes'] / 1e6:.0f} MB) "
        "comes last, and the next forward begins with it. After backward DDP sends it there and back. shardstep sends "
        "it there, then all parameters, which are not stepped before step() is called; with gather='overlap' all but "
        "the embedding may go under the next forward. The bound is computing and this, without the optimizer and TCP's "
        "own bytes."
    )
    columns = ("contender", "wire after backward, s", "bound, s", "measured, s", "bound / DDP fused as measured")
    return Grid("Lower bounds", note, columns, tuple(rows))


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    if arguments.hosts and (reason := why_impossible()):
        console.print(reason)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(2))  # or a terminated run would leave its hosts behind
    planned = list(launches(arguments))
    results = start_all(planned, console)
    if results is None:
        return 2
    timed = [result for result in results if "step_seconds" in result]
    weighed = [result for result in results if "memory" in result]
    network = "links of network namespaces on one machine" if arguments.hosts else "all ranks on one machine's loopback"
    grids = [time_grid(timed)]
    if weighed:
        grids += [memory_grid(weighed), saved_grid(timed, weighed)]
    if arguments.hosts:
        grids.append(bounds_grid(timed[0], arguments.rate))
    report = Report(
        name="fast_lane_hosts" if arguments.hosts else "fast_lane",
        title="The fast lane: shardstep.shard" + (", on slow links" if arguments.hosts else ""),
        method=METHOD.format(network=network),
        grids=tuple(grids),
        targets=tuple(all_targets(timed, weighed)),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
