"""What one rank of 8 to 16,384 costs its host: building an optimizer with shardstep.shard, its hooks, and step().

A process group whose collectives do nothing stands for the other ranks (nobody.py), so that what is left is the work of
one host. Planning alone is timed too, for a model of 7 B parameters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from report import Grid, Report, Target, make_console
from rich.console import Console

EPILOG = """\
It needs no ranks and no network; run it from the root of the repository:

  python benchmarks/scale.py            8, 64, 1,024 and 16,384 ranks: about six minutes
  python benchmarks/scale.py --quick    8 and 64 ranks once, a minute: shows that everything runs

Results go to benchmarks/results/scale.md and .json (--quick: the same names in benchmarks/results/quick/, which git
ignores). Exit status: 0 if every target is met, 1 if one is not, 2 if a process failed.
"""

METHOD = """\
Every number is of a process of its own, one thread, on the CPU, with SGD; cases take turns, and a number is the median
over the repetitions. Parameters lie four to a bucket, 65,536 elements each. Times of
hooks and of step() are processor time of the thread, medians over up to 40 steps. A case that takes longer than {limit}
seconds is called too slow and not tried again."""

RANKS, QUICK_RANKS = (8, 64, 1_024, 16_384), (8, 64)
BUCKETS = (7, 250)
LIMIT_SECONDS = 60
BUILD_RANKS, BUILD_SECONDS, BUILD_MB = 1_024, 0.5, 50.0
MOST_GROWTH = 1.3  # of step()'s host time, from the fewest ranks to the most
TOO_SLOW = "too slow"
NOTHING = "-"
EXACT = ("count", "traced")  # which come out the same every time

Found = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """One process of the benchmark."""

    measure: str
    ranks: int
    buckets: int  # 0: as many as planning makes

    @property
    def title(self) -> str:
        buckets = f", {self.buckets} buckets" if self.buckets else ""
        return f"{self.measure}, {self.ranks:,} ranks{buckets}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all repetitions of a case found, or why there is nothing."""

    case: Case
    found: list[Found]
    failed: str | None = None  # TOO_SLOW, or what the process says of itself

    def middle(self, *path: str) -> float | None:
        """The median of one number."""
        values = list(self.each(*path))
        return median(values) if values and self.failed is None else None

    def each(self, *path: str) -> Iterator[float]:
        for found in self.found:
            value: Any = found
            for key in path:
                value = value[key]
            yield value

    def cell(self, *path: str, scale: float = 1.0, digits: int = 2) -> str:
        value = self.middle(*path)
        return self.failed or NOTHING if value is None else f"{value * scale:,.{digits}f}"


Outcomes = dict[Case, Outcome]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repetitions", type=int, default=3, help="processes of each case (default: 3)")
    parser.add_argument("--quick", action="store_true", help="8 and 64 ranks, one repetition; numbers mean nothing")
    return parser.parse_args()


# -- running -----------------------------------------------------------------------------------------------------------


def all_cases(ranks: Sequence[int]) -> list[Case]:
    """In the order of their turns: those that are compared lie next to each other."""
    most = max(BUCKETS)
    steps = [Case("step", count, buckets) for buckets in BUCKETS for count in ranks]
    builds = [Case(measure, count, most) for measure in ("build", "traced") for count in ranks]
    counts = [Case("count", case.ranks, case.buckets) for case in steps]
    return [*steps, *builds, *(Case("plan", count, 0) for count in ranks), *counts]


def run(case: Case) -> Found:
    """What the process wrote; {"failed": why} if it took too long. RuntimeError if it broke."""
    worker = str(Path(__file__).with_name("scale_worker.py"))
    arguments = ["--measure", case.measure, "--ranks", str(case.ranks)]
    arguments += ["--buckets", str(case.buckets)] if case.buckets else []
    try:
        done = subprocess.run(
            [sys.executable, worker, *arguments],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            check=False,
            timeout=LIMIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"failed": TOO_SLOW}
    if done.returncode:
        raise RuntimeError(f"the process ended with status {done.returncode}; see above")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def run_all(cases: Sequence[Case], repetitions: int, console: Console) -> tuple[Outcomes, bool]:
    """Cases in turn, round after round, and whether none broke; one that fails is not tried again."""
    outcomes = {case: Outcome(case, []) for case in cases}
    sound = True
    for turn in range(repetitions):
        for case in cases:
            if outcomes[case].failed is not None or (turn and case.measure in EXACT):
                continue
            try:
                found = run(case)
            except RuntimeError as error:
                console.print(f"{case.title}: {error}", style="red", markup=False)
                found, sound = {"failed": "failed"}, False
            if "failed" in found:
                outcomes[case] = Outcome(case, [], found["failed"])
            else:
                outcomes[case].found.append(found)
            console.print(f"repetition {turn + 1}, {case.title}: {found.get('failed', 'done')}", markup=False)
    return outcomes, sound


# -- tables ------------------------------------------------------------------------------------------------------------


def step_grid(outcomes: Outcomes) -> Grid:
    rows = []
    for case, outcome in chosen(outcomes, "step"):
        times = [outcome.cell("seconds", name, scale=1e3) for name in ("hooks", "step", "host")]
        counted = outcomes[Case("count", case.ranks, case.buckets)]
        calls = [
            counted.cell("calls", part, kind, digits=0) for part in ("backward", "step") for kind in ("python", "c")
        ]
        rows.append((f"{case.ranks:,}", made(outcome), *times, *calls))
    note = (
        "Milliseconds: what the hooks add to a backward pass; step(); and step() without SGD's own function, whose "
        "arithmetic shrinks as ranks are more. Calls are of functions in Python and in C, in backward and in step()."
    )
    kinds = [f"{kind} calls, {part}" for part in ("backward", "step") for kind in ("Python", "C")]
    columns = ("ranks", "buckets", "hooks ms", "step() ms", "without SGD ms", *kinds)
    return Grid("Host time of a step", note, columns, tuple(rows))


def sent_grid(outcomes: Outcomes) -> Grid:
    rows = [
        (f"{case.ranks:,}", made(outcome), collectives(outcome), outcome.cell("record_nbytes", digits=0))
        for case, outcome in chosen(outcomes, "count")
    ]
    note = (
        "In one iteration. Records are combined between hosts, by a tree of groups of 32: those are the all-reduces, "
        "and with more ranks the reductions and broadcasts."
    )
    return Grid(
        "Collectives of a step", note, ("ranks", "buckets", "collectives", "records, bytes"), tuple(rows), labels=3
    )


def collectives(outcome: Outcome) -> str:
    if not outcome.found:
        return outcome.failed or NOTHING
    return ", ".join(f"{name} {count:,}" for name, count in outcome.found[0]["sent"].items())


def build_grid(outcomes: Outcomes) -> Grid:
    rows = []
    for case, outcome in chosen(outcomes, "build"):
        traced = outcomes[Case("traced", case.ranks, case.buckets)]
        memory = [outcome.cell(key, scale=1e-6, digits=1) for key in ("kept", "peak")]
        objects = [traced.cell(key, scale=1e-6, digits=1) for key in ("kept", "peak")]
        rows.append((f"{case.ranks:,}", made(outcome), outcome.cell("seconds", digits=3), *memory, *objects))
    sizes = [found["model"] for _, outcome in chosen(outcomes, "build") for found in outcome.found]
    size = f"{sizes[0] / 1e6:,.0f} MB" if sizes else "unknown size"
    note = (
        f"shard() of a model of {size}. Memory in MB: resident, beyond that before the call, in which the model is "
        "already, when it is over and at its peak, where the model may be there twice; and Python's own objects by "
        "tracemalloc."
    )
    columns = ("ranks", "buckets", "seconds", "kept", "peak", "Python, kept", "Python, peak")
    return Grid("Building", note, columns, tuple(rows))


def plan_grid(outcomes: Outcomes) -> Grid:
    rows = [
        (
            f"{case.ranks:,}",
            made(outcome),
            outcome.cell("seconds", digits=3),
            outcome.cell("peak", scale=1e-6, digits=1),
        )
        for case, outcome in chosen(outcomes, "plan")
    ]
    note = "make_plan for a model of 7 B parameters, buckets of 25 M elements; MB are resident, at the peak."
    return Grid("Planning", note, ("ranks", "buckets", "seconds", "MB"), tuple(rows))


def chosen(outcomes: Outcomes, measure: str) -> list[tuple[Case, Outcome]]:
    return [(case, outcome) for case, outcome in outcomes.items() if case.measure == measure]


def made(outcome: Outcome) -> str:
    """As many buckets as there were, or as were wanted."""
    return f"{next(outcome.each('buckets_made'), outcome.case.buckets or NOTHING)}"


# -- targets -----------------------------------------------------------------------------------------------------------


def all_targets(outcomes: Outcomes, ranks: Sequence[int]) -> Iterator[Target]:
    most = max(BUCKETS)
    if BUILD_RANKS in ranks:
        built = outcomes[Case("build", BUILD_RANKS, most)]
        what = f"shard(), {most} buckets, {BUILD_RANKS:,} ranks"
        seconds, kept = built.middle("seconds"), built.middle("kept")
        yield Target(what, BUILD_SECONDS, math.inf if seconds is None else seconds, " s")
        yield Target(
            f"{what}, beyond the model's bytes", BUILD_MB, math.inf if kept is None else float(kept) / 1e6, " MB"
        )
    for buckets in BUCKETS:
        few, many = (outcomes[Case("step", count, buckets)] for count in (min(ranks), max(ranks)))
        yield Target(
            f"step() without SGD, {max(ranks):,} ranks over {min(ranks)}, {buckets} buckets",
            MOST_GROWTH,
            growth(few, many),
        )


def growth(few: Outcome, many: Outcome) -> float:
    """The median of the ratios within a repetition; infinite if there is none."""
    if few.failed or many.failed:
        return math.inf
    times = (outcome.each("seconds", "host") for outcome in (many, few))
    return float(median(more / less for more, less in zip(*times, strict=True)))


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    ranks, repetitions = (QUICK_RANKS, 1) if arguments.quick else (RANKS, arguments.repetitions)
    outcomes, sound = run_all(all_cases(ranks), repetitions, console)
    report = Report(
        name="scale",
        title="Scale: one rank of many",
        method=METHOD.format(limit=LIMIT_SECONDS),
        grids=tuple(make(outcomes) for make in (step_grid, sent_grid, build_grid, plan_grid)),
        targets=tuple(all_targets(outcomes, ranks)),
        raw={"cases": [asdict(outcome) for outcome in outcomes.values()]},
    )
    status = report.publish(console, quick=arguments.quick)
    return status if sound else 2


if __name__ == "__main__":
    sys.exit(main())
