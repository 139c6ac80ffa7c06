"""One step of AdamW on a GPU: the kernel that makes one pass over memory, against torch's fused one and torch.compile.

All are compared with the floor: the time in which this GPU copies as many bytes as the step reads and writes.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from gpu_contenders import EventStopwatch, HostStopwatch
from gpu_one_rank import gpt2_shapes
from gpu_step_contenders import (
    BY_CHANCE,
    FLOAT32,
    MASTERS,
    Case,
    Share,
    Step,
    by_compiler,
    by_kernel,
    by_torch_fused,
    in_a_graph,
    largest_difference,
)
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, environment, make_console
from rich.console import Console

from shardstep.stepping.kernel import BlockShape

EPILOG = """\
  PYTHONPATH=src python3 benchmarks/gpu_step.py              two minutes
  PYTHONPATH=src python3 benchmarks/gpu_step.py --no-shapes  without the table of block shapes
  TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/gpu_step.py --quick   toy tensors, also without a GPU

Results go to benchmarks/results/gpu_step.md and .json. Exit status: 0 if every target is met, 1 if one is not, 2 if the
kernel does not step as torch does, or could not be run.
"""

METHOD = """\
{device}. AdamW on {ranges} flat ranges with as many elements as GPT-2 XL has, and on a 64th of each; all of one size.
{check}

Contenders step the same tensors, in turn, in every round (torch's fused one has moments of its own). A time is that
between two events on the device, of several steps in a row (5 of all, 50 of a 64th), after one that is not timed. The
floor is what the copy of a tensor of {copied:.1f} GB, timed in the same round, takes for as many bytes as the step
reads and writes. A ratio is that of two times of one round. Host: microseconds until step() returns, on a device that
is idle at the first of the steps.{failed}"""

KERNEL, FUSED, COMPILED = "kernel", "torch fused", "torch.compile"
IN_A_GRAPH = ", in a CUDA graph"
RANGES, SHARE = 50, 64
SHAPES = (BlockShape(512, 2), BlockShape(1_024, 2), BlockShape(1_024, 4), BlockShape(1_024, 8), BlockShape(2_048, 4),
          BlockShape(2_048, 8), BlockShape(4_096, 8))  # fmt: skip
LIMITS = {(FLOAT32, 1): 1.05, (MASTERS, 1): 1.06, (FLOAT32, SHARE): 1.3, (MASTERS, SHARE): 1.3}
AGREES = 2e-6  # relative to the largest weight: a few roundings in each of five steps


class Bench:
    def __init__(self, arguments: argparse.Namespace, console: Console) -> None:
        self.quick, self.console = arguments.quick, console
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rounds = 2 if self.quick else arguments.rounds
        self.failed: list[str] = []
        numel = 10_000 if self.quick else 2**30  # 4 GB
        self._source, self._copy = (torch.zeros(numel, device=self.device) for _ in range(2))

    @property
    def copied(self) -> int:
        return self._source.nbytes

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def copy(self) -> None:
        self._copy.copy_(self._source)

    def seconds(self, step: Step, steps: int) -> tuple[float, float]:
        """Of one among `steps`: on the device, and until the host goes on."""
        watch = EventStopwatch() if self.device.type == "cuda" else HostStopwatch()
        step()
        self.synchronize()
        watch.start()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        host = time.perf_counter() - begun
        watch.stop()
        self.synchronize()
        return watch.seconds() / steps, host / steps

    def attempt(self, what: str, make: Callable[[], Any]) -> Any:
        """What it makes, or None; a contender that fails does not end the others."""
        begun = time.perf_counter()
        try:
            made = make()
            self.synchronize()
        except Exception as error:
            self.console.print(f"{what} failed: {type(error).__name__}: {error}", markup=False)
            traceback.print_exc(limit=-3)
            self.failed.append(f"{what}: {type(error).__name__}")
            return None
        self.console.print(f"  {what}: ready after {time.perf_counter() - begun:.1f} s", markup=False)
        return made


def cases(quick: bool) -> Iterator[Case]:
    shapes = list(gpt2_shapes(2, 16, 100, 8) if quick else gpt2_shapes(48, 1600, 50_257, 1_024))
    total = sum(torch.Size(shape).numel() for shape in shapes)
    ranges = 3 if quick else RANGES
    for share in (1, SHARE):
        numel = -(-total // (ranges * share * 64)) * 64
        for kind in (FLOAT32, MASTERS, BY_CHANCE):
            yield Case(kind, share, numel, ranges, steps=2 if quick else 5 if share == 1 else 50)


def warmed(step: Step) -> Step:
    step()
    return step


def contenders(bench: Bench, case: Case, share: Share) -> dict[str, Step]:
    makers: dict[str, Callable[[], Step]] = {KERNEL: lambda: warmed(by_kernel(share, case.kind))}
    if case.kind == FLOAT32:
        makers[FUSED] = lambda: warmed(by_torch_fused(share))
    if case.kind != BY_CHANCE:
        makers[COMPILED] = lambda: warmed(by_compiler(share))
    found = {name: bench.attempt(f"{case.name}: {name}", make) for name, make in makers.items()}
    if case.share > 1 and bench.device.type == "cuda":
        for name in (KERNEL, COMPILED):
            if found.get(name):
                made = bench.attempt(f"{case.name}: {name}{IN_A_GRAPH}", lambda step=found[name]: in_a_graph(step))
                found[name + IN_A_GRAPH] = made
    return {name: step for name, step in found.items() if step is not None}


def measure(bench: Bench, case: Case) -> dict[str, Any]:
    """Seconds by contender and round; of the floor as well."""
    share = Share(case, bench.device)
    steps = contenders(bench, case, share)
    times: dict[str, list[float]] = {name: [] for name in steps}
    host: dict[str, list[float]] = {name: [] for name in steps}
    floors: list[float] = []
    for turn in range(bench.rounds):
        names = list(steps)
        shift = turn % max(len(names), 1)
        for name in names[shift:] + names[:shift]:
            device_seconds, host_seconds = bench.seconds(steps[name], case.steps)
            times[name].append(device_seconds)
            host[name].append(host_seconds)
        floors.append(bench.seconds(bench.copy, 3)[0] * case.nbytes / (2 * bench.copied))
    found = ", ".join(f"{name} {1e3 * Spread.of(values).median:.3f}" for name, values in times.items())
    bench.console.print(f"{case.name}: floor {1e3 * Spread.of(floors).median:.3f}, {found} ms", markup=False)
    return {"case": case.name, "nbytes": case.nbytes, "floor": floors, "seconds": times, "host": host}


def measure_shapes(bench: Bench, case: Case) -> list[dict[str, Any]]:
    share = Share(case, bench.device)
    rows = []
    for shape in SHAPES[:2] if bench.quick else SHAPES:
        name = f"{case.name}: blocks of {shape.numel}, {shape.warps} warps"
        step = bench.attempt(name, lambda shape=shape: warmed(by_kernel(share, case.kind, shape)))
        if step is None:
            continue
        floor = bench.seconds(bench.copy, 3)[0] * case.nbytes / (2 * bench.copied)
        ratios = [bench.seconds(step, case.steps)[0] / floor for _ in range(3)]
        rows.append({"case": case.name, "block": shape.numel, "warps": shape.warps, "ratios": ratios})
    return rows


def ratios(result: dict[str, Any], name: str) -> list[float]:
    return [seconds / floor for seconds, floor in zip(result["seconds"][name], result["floor"], strict=True)]


def grids(results: Sequence[dict[str, Any]], shapes: Sequence[dict[str, Any]]) -> Iterator[Grid]:
    rows = []
    for result in results:
        floor = 1e3 * Spread.of(result["floor"]).median
        bandwidth = result["nbytes"] / (1e9 * floor / 1e3)
        rows.append((result["case"], "floor", f"{floor:.3f}", "", "1", "", "", f"{bandwidth:,.0f} GB/s"))
        for name, seconds in result["seconds"].items():
            milliseconds = f"{1e3 * Spread.of(seconds).median:.3f}"
            low_high = [
                f"{1e3 * s:.3f}" for s in (Spread.of(seconds).lower_quartile, Spread.of(seconds).upper_quartile)
            ]
            host = f"{1e6 * Spread.of(result['host'][name]).median:.0f}"
            cells = Spread.of(ratios(result, name)).cells()
            rows.append((result["case"], name, milliseconds, " to ".join(low_high), *cells, host))
    note = "Milliseconds of a step on the device, their quartiles, and how often the floor fits in, within a round."
    columns = ("case", "contender", "ms", "quartiles", *(f"/ floor: {c}" for c in SPREAD_COLUMNS), "host us")
    yield Grid("A step of AdamW", note, columns, tuple(rows), labels=2)
    if shapes:
        cells = [
            (row["case"], str(row["block"]), str(row["warps"]), *Spread.of(row["ratios"]).cells()) for row in shapes
        ]
        columns = ("case", "elements", "warps", *SPREAD_COLUMNS)
        yield Grid("Shapes of a block", "Time over that of the floor.", columns, tuple(cells))


def targets(results: Sequence[dict[str, Any]], all_cases: Sequence[Case]) -> Iterator[Target]:
    by_name = {case.name: case for case in all_cases}
    for result in results:
        case = by_name[result["case"]]
        limit = LIMITS.get((case.kind, case.share))
        if limit is not None and KERNEL in result["seconds"]:
            measured = Spread.of(ratios(result, KERNEL)).median
            yield Target(f"kernel, {case.name}: step / floor", limit, measured)


def facts(device: torch.device) -> str:
    if device.type != "cuda":
        return "On the CPU, in Triton's interpreter"
    return f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def released(result: Any) -> Any:
    """The share before is gone when the next is made: compiled functions and optimizers hold on to it in circles."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return result


def parse_arguments() -> argparse.Namespace:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, epilog=EPILOG, formatter_class=formatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--no-shapes", action="store_true", help="without the table of block shapes")
    parser.add_argument("--quick", action="store_true", help="toy tensors; numbers mean nothing")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    environment()  # what would fail in it should fail now, not when the GPU's time is spent
    bench = Bench(arguments, console)
    differences = {}
    for way, fused in (("foreach", False), ("fused", True)):
        check_it = partial(largest_difference, bench.device, fused=fused)
        differences[way] = bench.attempt(f"check against torch's AdamW, {way}", check_it)
    if None in differences.values():
        return 2
    check = "After five steps the kernel differs from torch's AdamW by " + " and ".join(
        f"{difference:.1e} ({way})" for way, difference in differences.items()
    )
    check += " of the largest weight."
    console.print(check, markup=False)
    all_cases = list(cases(arguments.quick))
    results = [released(measure(bench, case)) for case in all_cases]
    wanted = [] if arguments.no_shapes else [c for c in all_cases if c.kind != BY_CHANCE]
    shapes = list(chain.from_iterable(released(measure_shapes(bench, case)) for case in wanted))
    failed = f" Failed: {'; '.join(bench.failed)}." if bench.failed else ""
    method = METHOD.format(
        device=facts(bench.device), ranges=all_cases[0].ranges, check=check, copied=bench.copied / 1e9, failed=failed
    )
    report = Report(
        name="gpu_step",
        title="One step of AdamW on a GPU",
        method=method,
        grids=tuple(grids(results, shapes)),
        targets=tuple(targets(results, all_cases)),
        raw={"differences": differences, "results": results, "shapes": shapes, "failed": bench.failed},
    )
    status = report.publish(console, quick=arguments.quick)
    agrees = max(differences.values()) <= AGREES and all(KERNEL in result["seconds"] for result in results)
    return status if agrees else 2


if __name__ == "__main__":
    sys.exit(main())
