"""How far the loss falls: fp32 against three ways to train in bf16, and AdamW against Muon + AdamW.

The demo's GPT and text, two Gloo ranks on one machine, the same weights and batches for every contender. Times mean
nothing here, so the machine may do other work.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from convergence_picture import write_picture
from convergence_worker import (
    BY_CHANCE,
    CONTROL,
    FLOAT32,
    LAST_RATE,
    LEARNING_RATE,
    MASTERS,
    MOST_NORM,
    MUON,
    MUON_RATE,
    NO_MASTERS,
    OTHER_RATES,
    WARM_UP_STEPS,
    WAYS,
)
from launching import Result, start_all
from report import RESULTS, Grid, Report, Target, make_console

EPILOG = """\
  .venv/bin/python benchmarks/convergence.py           500 steps of nine contenders: seven minutes on two cores
  .venv/bin/python benchmarks/convergence.py --quick   a toy: shows that everything runs

Results go to benchmarks/results/convergence.md and .json, the picture to docs/loss_curves.svg (--quick: all three to
benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed.
"""

METHOD = """\
The demo's GPT, smaller than there ({layers} layers, width {width}, {heads} heads, {parameters:,} parameters), and its
text, one token per character; {ranks} Gloo ranks with one thread each, {batch} sequences of {block} tokens per rank
and step, {steps} steps. Weights, batches and schedule are the same for all: {warm_up} steps up to the learning rate,
then a cosine down to {last:g} of it; gradients are clipped to a norm of {most_norm:g}. AdamW: {rate:g}, and higher
rates in rows of their own. Muon: {muon_rate:g}, no other was tried, for the matrices of the blocks; AdamW for the
embeddings and norms. All else is as torch has it, so that weight decay is 0.01 for AdamW and 0.1 for Muon.

In bf16 parameters, activations and gradients are bf16, without autocast; logits become fp32 before the loss.

Final loss: the mean of the last {last_steps} steps, over all ranks. One seed. How much is chance: "rounded start" is
fp32 AdamW from weights that were rounded to bf16 once. Precisions are compared at a rate at which that is little; the
note in convergence_worker.py tells of one at which it is not.{left_out}"""

PICTURE = "loss_curves.svg"
DOCS = Path(__file__).parents[1] / "docs"
LAST_STEPS = 25
WITHIN = 1.0  # percent of fp32's final loss
WORDS = {
    FLOAT32: f"AdamW, {LEARNING_RATE:g}",
    MASTERS: '`master="fp32"`, the default',
    BY_CHANCE: '`master="stochastic"`: rounded by chance, without a master',
    NO_MASTERS: '`master="none"`: rounded to nearest, without a master',
    MUON: "two classes in one sharded optimizer",
    **{name: f"AdamW, {rate:g}" for name, rate in OTHER_RATES.items()},
    CONTROL: "as the first row, from weights rounded to bf16",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """All contenders, one after the other, in one process group."""

    model: str  # one of the worker's MODELS
    steps: int
    title: str = "2 ranks"
    ranks: int = 2
    rate: None = None  # on this machine's loopback

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("convergence_worker.py"))
        return [worker, "--model", self.model, "--steps", str(self.steps), "--out", str(out)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="of every contender (default: 500)")
    parser.add_argument("--draw", action="store_true", help="only the picture, again, from the results that are there")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 60 steps; numbers mean nothing")
    return parser.parse_args()


def final(losses: Sequence[float]) -> float:
    return fmean(losses[-LAST_STEPS:])


def first_step_at(losses: Sequence[float], level: float) -> int | None:
    """The first at whose end the mean of the last steps is as low as `level`."""
    ends = range(LAST_STEPS, len(losses) + 1)
    return next((end for end in ends if fmean(losses[end - LAST_STEPS : end]) <= level), None)


def losses_grid(losses: Mapping[str, Sequence[float]]) -> Grid:
    base = final(losses[FLOAT32])
    rows = []
    for name, found in losses.items():
        reached = first_step_at(found, base)
        share = f"{100 * (final(found) / base - 1):+.2f} %"
        rows.append((name, WORDS[name], f"{final(found):.4f}", share, "-" if reached is None else str(reached)))
    note = f"The last column: after how many steps the mean of {LAST_STEPS} is as low as fp32 AdamW's in the end."
    columns = ("contender", "", "final loss", "against fp32 AdamW", "there after steps")
    return Grid("Final loss", note, columns, tuple(rows), labels=2)


def targets(losses: Mapping[str, Sequence[float]]) -> tuple[Target, ...]:
    base = final(losses[FLOAT32])
    return tuple(
        Target(f"{name}: final loss off that of {FLOAT32}", WITHIN, 100 * abs(final(losses[name]) / base - 1), " %")
        for name in (MASTERS, BY_CHANCE)
        if name in losses
    )


def make_report(result: Result, steps: int) -> Report:
    left_out = f" Left out, not in this version: {', '.join(result['left_out'])}." if result["left_out"] else ""
    method = METHOD.format(
        **result["size"],
        parameters=result["parameters"],
        ranks=result["ranks"],
        steps=steps,
        warm_up=WARM_UP_STEPS,
        last=LAST_RATE,
        rate=LEARNING_RATE,
        muon_rate=MUON_RATE,
        most_norm=MOST_NORM,
        last_steps=LAST_STEPS,
        left_out=left_out,
    )
    losses = {name: result["losses"][name] for name in WAYS if name in result["losses"]}
    return Report(
        name="convergence",
        title="How far the loss falls",
        method=method,
        grids=(losses_grid(losses),),
        targets=targets(losses),
        raw={"final": {name: final(found) for name, found in losses.items()}, "launch": result},
    )


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    if arguments.draw:
        kept = json.loads((RESULTS / "convergence.json").read_text())
        write_picture(kept["launch"]["losses"], DOCS / PICTURE)
        return 0
    launch = Launch("tiny", 60) if arguments.quick else Launch("convergence", arguments.steps)
    results = start_all([launch], console)
    if results is None:
        return 2
    (result,) = results
    picture = (RESULTS / "quick" if arguments.quick else DOCS) / PICTURE
    write_picture(result["losses"], picture)
    status = make_report(result, launch.steps).publish(console, quick=arguments.quick)
    console.print(f"The picture: {picture.relative_to(DOCS.parent)}")
    return status


if __name__ == "__main__":
    sys.exit(main())
