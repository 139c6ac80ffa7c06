"""Does ShardConfig(wire="bf16") change how far the loss falls? The demo's GPT, with several seeds.

Two Gloo ranks on one machine. With one seed, weights and batches are the same for every contender. Times mean nothing
here, so the machine may do other work.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev

from convergence import LAST_STEPS, final
from convergence_wire_worker import EXACT, EXACT_GRADIENTS, WAYS, WIRE
from convergence_worker import LAST_RATE, LEARNING_RATE, MOST_NORM, WARM_UP_STEPS
from launching import Result, start_all
from report import Grid, Report, Target, make_console

EPILOG = """\
  .venv/bin/python benchmarks/convergence_wire.py           1,000 steps of three contenders, 4 seeds: twenty minutes
  .venv/bin/python benchmarks/convergence_wire.py --quick   a toy: shows that everything runs

Results go to benchmarks/results/convergence_wire.md and .json (--quick: to benchmarks/results/quick/, which git
ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed.
"""

METHOD = """\
The demo's GPT, smaller than there ({layers} layers, width {width}, {heads} heads, {parameters:,} parameters), in fp32,
and its text, one token per character; {ranks} Gloo ranks with one thread each, {batch} sequences of {block} tokens per
rank and step, {steps:,} steps. {warm_up} steps up to a learning rate of {rate:g}, then a cosine down to {last:g} of it;
AdamW; gradients are clipped to a norm of {most_norm:g}. Weights, batches and schedule of one seed are the same for all
contenders.

Final loss: the mean of the last {last_steps} steps, over all ranks; then mean and standard deviation over {seeds}
seeds. A difference is that of two contenders with the same seed."""

WORDS = {
    EXACT: "all travels as it is",
    WIRE: "matrices and their gradients are rounded to bf16 to travel",
    EXACT_GRADIENTS: "only the matrices",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """All contenders, one after the other, in one process group."""

    model: str  # one of the worker's MODELS
    steps: int
    seeds: int
    title: str = "2 ranks"
    ranks: int = 2
    rate: None = None  # on this machine's loopback

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("convergence_wire_worker.py"))
        counts = ["--steps", str(self.steps), "--seeds", str(self.seeds)]
        return [worker, "--model", self.model, *counts, "--out", str(out)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help="of every contender and seed (default: 1,000)")
    parser.add_argument("--seeds", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 60 steps; numbers mean nothing")
    return parser.parse_args()


Finals = Mapping[str, Sequence[float]]  # of each contender, by seed


def losses_grid(finals: Finals) -> Grid:
    rows = []
    for name, found in finals.items():
        apart = [mine - base for mine, base in zip(found, finals[EXACT], strict=True)]
        each = ", ".join(f"{loss:.4f}" for loss in found)
        rows.append((name, WORDS[name], f"{fmean(found):.4f}", f"{stdev(found):.4f}", f"{fmean(apart):+.4f}", each))
    columns = ("contender", "", "final loss", "std. deviation", f"less that of {EXACT}", "of each seed")
    return Grid("Final loss", "Mean and standard deviation over the seeds.", columns, tuple(rows), labels=2)


def targets(finals: Finals) -> tuple[Target, ...]:
    """Off by no more than seeds are among themselves."""
    base, spread = fmean(finals[EXACT]), stdev(finals[EXACT])
    return tuple(
        Target(f"{name}: mean off that of {EXACT}, standard deviation {spread:.4f}", spread, abs(fmean(found) - base))
        for name, found in finals.items()
        if name != EXACT
    )


def make_report(result: Result, launch: Launch) -> Report:
    method = METHOD.format(
        **result["size"],
        parameters=result["parameters"],
        ranks=result["ranks"],
        steps=launch.steps,
        seeds=launch.seeds,
        warm_up=WARM_UP_STEPS,
        rate=LEARNING_RATE,
        last=LAST_RATE,
        most_norm=MOST_NORM,
        last_steps=LAST_STEPS,
    )
    finals = {name: [final(losses) for losses in result["losses"][name]] for name in WAYS}
    return Report(
        name="convergence_wire",
        title='How far the loss falls with wire="bf16"',
        method=method,
        grids=(losses_grid(finals),),
        targets=targets(finals),
        raw={"final": finals, "launch": result},
    )


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    launch = Launch("tiny", 60, 2) if arguments.quick else Launch("convergence", arguments.steps, arguments.seeds)
    results = start_all([launch], console)
    if results is None:
        return 2
    return make_report(results[0], launch).publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
