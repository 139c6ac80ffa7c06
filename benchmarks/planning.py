"""Time shardstep.planning.make_plan: 10,000 parameters over 1,024 ranks should take less than a second.

Planning runs on every rank at start-up and again whenever parameters change, before any tensor moves. It must stay
cheap for jobs far larger than this machine; it needs no process group, so it is timed here as it runs there. Two
tables show how it grows with the number of parameters P and of ranks N: no faster than P log N, far from P times N.
A third shows how evenly whole matrices are dealt by what stepping them costs (dealing.py).
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice

from dealing import CASES, QUICK_CASES, dealing_grid, dealing_targets, look_at
from report import Grid, Report, Spread, Target, make_console
from rich.console import Console
from rich.progress import track

from shardstep.planning import Layout, ParamSpec, make_plan
from shardstep.planning.cost import muon_cost

EPILOG = """\
  python benchmarks/planning.py            all tables, about half a minute
  python benchmarks/planning.py --quick    one repetition of a few small cases, seconds

Results go to benchmarks/results/planning.md and .json (--quick: benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not.
"""

METHOD = """\
The parameters are those of transformer blocks of thirteen different widths, ten per block, float32. Repetitions go
round all cases in turn, so that a disturbance hits one repetition of several cases and not all repetitions of one. The
targets are about wall time; growth is judged by the least CPU time, which other processes disturb least."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of make_plan."""

    layout: str
    params: int
    ranks: int

    @property
    def work(self) -> float:
        """What the time should be proportional to: P (1 + log2 N); the 1 is the pass over the parameters itself."""
        return self.params * (1 + math.log2(self.ranks))


@dataclass(frozen=True, slots=True)
class Timing:
    """A case, and what was seen of it."""

    case: Case
    pieces: int
    imbalance: float  # elements of the fullest rank over the mean
    seconds: tuple[float, ...]  # of wall time
    cpu_seconds: tuple[float, ...]  # what another process on the same core does not change


LAYOUTS = (Layout.WHOLE, Layout.FLAT)
BY_COST = "WHOLE by cost"
HEADLINE = [Case(layout, 10_000, 1_024) for layout in ("WHOLE", BY_COST, "FLAT")]
BY_PARAMS = [Case(layout.name, p, 1_024) for layout in LAYOUTS for p in (1_000, 2_000, 5_000, 10_000, 20_000)]
BY_RANKS = [Case(layout.name, 10_000, 2**k) for layout in LAYOUTS for k in range(13)]
QUICK_BY_PARAMS = [Case(layout.name, p, 16) for layout in LAYOUTS for p in (100, 200)]
QUICK_BY_RANKS = [Case(layout.name, 100, n) for layout in LAYOUTS for n in (1, 16)]


def make_specs(count: int) -> list[ParamSpec]:
    """The first `count` parameters of an endless stack of transformer blocks, width 256 to 1,024."""

    def endless() -> Iterable[ParamSpec]:
        block = 0
        while True:
            width = 256 + 64 * (block % 13)
            matrices = [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)]
            vectors = [(3 * width,), (width,), (4 * width,), (width,), (width,), (width,)]
            for number, shape in enumerate([*matrices, *vectors]):
                yield ParamSpec(f"blocks.{block}.{number}", shape, "float32", "cpu", 0)
            block += 1

    return list(islice(endless(), count))


def time_cases(cases: Sequence[Case], repetitions: int, console: Console) -> dict[Case, Timing]:
    distinct = list(dict.fromkeys(cases))
    specs = {count: make_specs(count) for count in {case.params for case in distinct}}
    seconds: dict[Case, list[tuple[float, float]]] = {case: [] for case in distinct}
    shape: dict[Case, tuple[int, float]] = {}
    calls = [case for _ in range(repetitions) for case in distinct]
    for case in track(calls, "planning", console=console):
        costs = [muon_cost("cuda").of(spec) for spec in specs[case.params]] if case.layout == BY_COST else None
        layout = Layout.FLAT if case.layout == "FLAT" else Layout.WHOLE
        start, cpu_start = time.perf_counter(), time.process_time()
        plan = make_plan(specs[case.params], layout, world_size=case.ranks, costs=costs)
        seconds[case].append((time.perf_counter() - start, time.process_time() - cpu_start))
        held = plan.held()
        shape[case] = (sum(1 for _ in plan.pieces), max(held) * case.ranks / sum(held))
    return {case: Timing(case, *shape[case], *zip(*seconds[case], strict=True)) for case in distinct}


def grid(title: str, cases: Sequence[Case], timings: dict[Case, Timing], note: str) -> Grid:
    rows = []
    for timing in (timings[case] for case in cases):
        case, spread = timing.case, Spread.of([1e3 * value for value in timing.seconds])
        cpu = min(timing.cpu_seconds)
        rows.append(
            (
                case.layout,
                f"{case.params:,}",
                f"{case.ranks:,}",
                f"{timing.pieces:,}",
                f"{timing.imbalance:.3f}",
                f"{spread.median:.1f}",
                f"{spread.minimum:.1f} to {spread.maximum:.1f}",
                f"{1e3 * cpu:.1f}",
                f"{1e9 * cpu / case.work:,.0f}",
            )
        )
    columns = (
        "layout",
        "P",
        "N",
        "pieces",
        "fullest / mean",
        "median ms",
        "extremes ms",
        "CPU ms, least",
        "ns / P(1 + log2 N)",
    )
    return Grid(title, note, columns, tuple(rows))


def growth(cases: Sequence[Case], timings: dict[Case, Timing], by: str) -> str:
    """The exponent of a power law through the least CPU times, per layout: 1 is linear, 0 does not grow."""
    parts = []
    for layout in LAYOUTS:
        points = [
            (math.log(getattr(case, by)), math.log(min(timings[case].cpu_seconds)))
            for case in cases
            if case.layout == layout.name
        ]
        mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x) ** 2 for x, _ in points)
        parts.append(f"{layout.name} {slope:.2f}")
    return ", ".join(parts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=7, help="calls per case (default: 7)")
    parser.add_argument("--quick", action="store_true", help="one call of a few small cases; numbers mean nothing")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    quick = arguments.quick
    headline, by_params, by_ranks = (
        (HEADLINE[:0], QUICK_BY_PARAMS, QUICK_BY_RANKS) if quick else (HEADLINE, BY_PARAMS, BY_RANKS)
    )
    timings = time_cases([*headline, *by_params, *by_ranks], 1 if quick else arguments.repetitions, console)
    dealings = [look_at(case) for case in (QUICK_CASES if quick else CASES)]
    exponent = "The exponent of the growth is {}; 1 would be linear."
    grids = (
        grid("Growth with the parameters", by_params, timings, exponent.format(growth(by_params, timings, "params"))),
        grid("Growth with the ranks", by_ranks, timings, exponent.format(growth(by_ranks, timings, "ranks"))),
        dealing_grid(dealings),
    )
    targets = tuple(
        Target(
            f"make_plan, {case.params:,} parameters, {case.ranks:,} ranks, {case.layout}",
            1.0,
            Spread.of(timings[case].seconds).median,
            " s",
            strict=True,
        )
        for case in headline
    )
    raw = {
        "cases": [asdict(timing) for timing in timings.values()],
        "dealing": [asdict(dealing) for dealing in dealings],
    }
    targets += dealing_targets(dealings)
    report = Report("planning", "The time planning takes, and how evenly it deals", METHOD, grids, targets, raw)
    return report.publish(console, quick=quick)


if __name__ == "__main__":
    sys.exit(main())
