"""Muon for the matrices and AdamW for the rest on a GPU: shardstep against the same by hand.

By hand in two ways: with same-shaped matrices stacked, in one compiled step and ZeRO-2, as nanochat does it; and under
DDP with torch's classes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from gpu_muon_contenders import BY_HAND, RATIOS, SHARD, STEP_RATIOS
from gpu_ranks import Launch, Result, start_all, stop
from gpu_training import in_words, ratios_grid, ratios_in, steps_grid, targets, tasks_in
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, environment, make_console

EPILOG = """\
It starts its own ranks and the multi-process service; as root, from the root of the repository:

  PYTHONPATH=src python benchmarks/gpu_muon.py                  two and a half minutes
  PYTHONPATH=src python benchmarks/gpu_muon.py --ranks 1        one part
  python benchmarks/gpu_muon.py --device cpu --quick            a toy model without a GPU: shows that everything runs

Results go to benchmarks/results/gpu_muon.md and .json after each part, those of one part to gpu_muon_<ranks>_ranks.md.
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank or a contender failed.
"""

METHOD = """\
{device}. {ended}

A step is forward, backward, step() and zero_grad(), eager, in fp32 with TF32 products, on random tokens: {tasks}. Muon
steps the matrices of the blocks, AdamW the embedding, which is the output layer as well, positions and norms; rates and
all other options are the same. "Stacked by hand": matrices of one shape in one tensor, reduce-scattered, stepped by one
function under torch.compile and all-gathered, and AdamW likewise (parameters of less than 1,024 elements as one), all
inside step(). "torch's classes": torch.optim.Muon, and AdamW with fused=True; under DDP with gradients as views of its
buckets. Ranks share the GPU, side
by side under the multi-process service, and talk by NCCL over loopback.

Contenders train in the same processes, in turn; a ratio is that of two blocks of one round. A block is five steps after
one that is not timed. "step() alone": from an idle device until it has done the step, the shortest of three in a round,
on one rank. The losses of all contenders agree to 1 % after the first steps, or there is no result."""

RANKS = (1, 2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=RANKS, help="this part and no other")
    parser.add_argument("--rounds", type=int, default=6, help="of every contender (default: 6)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="a toy model, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace) -> Iterator[Launch]:
    rounds = 2 if arguments.quick else arguments.rounds
    common = ("--device", arguments.device, *(["--toy"] if arguments.quick else []), "--rounds", str(rounds))
    for ranks in [arguments.ranks] if arguments.ranks else RANKS:
        title = f"{ranks} rank{'s' if ranks > 1 else ''}"
        yield Launch(title, ranks, common, seconds=240, worker="gpu_muon_worker.py")


def only_steps(results: Sequence[Result]) -> list[tuple[str, dict[str, Any]]]:
    """Of one rank, with step() alone in the place of the whole step."""
    one = [result for result in results if result["ranks"] == 1]
    return [(title, {**task, "step_seconds": task["only_step_seconds"]}) for title, task in tasks_in(one)]


def only_steps_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for title, task in only_steps(results):
        seconds = task["step_seconds"]
        for name, own in seconds.items():
            ratios = [mine / theirs for mine, theirs in zip(own, seconds.get(BY_HAND[0], own), strict=True)]
            rows.append((title, name, f"{1e3 * median(own):.2f}", *Spread.of(ratios).cells()))
    columns = ("", "contender", "ms", *SPREAD_COLUMNS)
    note = f"Median, quartiles and extremes are of the ratio to {BY_HAND[0]}, within a round."
    return Grid("step() alone", note, columns, tuple(rows), labels=2)


def all_targets(results: Sequence[Result]) -> Iterator[Target]:
    for title, task in only_steps(results):
        for one in ratios_in(task, STEP_RATIOS):
            if one.limit is not None:
                pairs = zip(task["step_seconds"][one.ours], task["step_seconds"][one.base], strict=True)
                yield Target(
                    f"step() alone, {one.ours} / {one.base}, {title}", one.limit, median(a / b for a, b in pairs)
                )
    yield from targets([result for result in results if result["ranks"] > 1], RATIOS)
    for title, task in tasks_in(results):
        known = task["contenders"]
        for base in BY_HAND:
            if {SHARD, base} <= known.keys():
                ratio = known[SHARD]["peak"] / max(known[base]["peak"], 1)
                yield Target(f"peak memory, {SHARD} / {base}, {title}", 1.0, ratio)


def report_of(results: Sequence[Result], failures: Sequence[str], arguments: argparse.Namespace) -> Report:
    device = ", ".join(f"{key} {value}" for key, value in results[0]["device"].items())
    ended = "Failed: " + "; ".join(failures) + "." if failures else "All launches ended well."
    every = [replace(one, limit=None) for one in RATIOS]  # wanted on two ranks alone
    return Report(
        name="gpu_muon" + (f"_{arguments.ranks}_ranks" if arguments.ranks else ""),
        title="Muon and AdamW on a GPU",
        method=METHOD.format(device=device, ended=ended, tasks=in_words(results)),
        grids=(
            steps_grid(results),
            only_steps_grid(results),
            ratios_grid([one for one in results if one["ranks"] == 1], every),
            ratios_grid([one for one in results if one["ranks"] > 1], RATIOS),
        ),
        targets=tuple(all_targets(results)),
        raw={"launches": list(results), "failures": list(failures)},
    )


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    environment()  # what would fail in it should fail now, not when the GPU's time is spent
    signal.signal(signal.SIGTERM, stop)
    results: list[Result] = []
    failures: list[str] = []
    status = 2
    for launch in launches(arguments):  # a report after each: what was measured is kept whatever ends the next
        found, failed = start_all([launch], console)
        results += found
        failures += [*failed, *(text for _, task in tasks_in(found) for text in task["left_out"])]
        if results:
            status = report_of(results, failures, arguments).publish(console, quick=arguments.quick)
    return 2 if failures or not results else status


if __name__ == "__main__":
    sys.exit(main())
