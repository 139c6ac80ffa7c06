"""The picture of `convergence.py`: how the loss falls, and how far the 16-bit ones are from fp32's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl
from convergence_worker import BY_CHANCE, FLOAT32, LEARNING_RATE, MASTERS, MUON, MUON_RATE, NO_MASTERS, OTHER_RATES
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

Losses = Mapping[str, Sequence[float]]

# Paul Tol's "bright" palette, which colour-blind readers can tell apart; dashes tell them apart in grey.
LINES = {
    FLOAT32: ("#4477AA", "-"),
    **dict(zip(OTHER_RATES, (("#66CCEE", "-"), ("#66CCEE", "--"), ("#66CCEE", ":")), strict=True)),
    MUON: ("#EE6677", "-"),
    MASTERS: ("#228833", "-"),
    BY_CHANCE: ("#AA3377", "--"),
    NO_MASTERS: ("#CCBB44", "-"),
}
MEAN_OF = 25  # steps: single ones differ by their batches
WITHIN = 1.0  # percent, the target


def write_picture(losses: Losses, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date, and with the same names for its parts in every run: the same losses give the same file.
    with mpl.rc_context({"svg.hashsalt": "shardstep"}):
        draw_figure(losses).savefig(path, metadata={"Date": None})


def draw_figure(losses: Losses) -> Figure:
    # Figure and canvas by hand: pyplot would look for a window system, and keep the figure alive.
    figure = Figure(figsize=(10.5, 4.4))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    draw_optimizers(left, losses)
    draw_precisions(right, losses)
    for axes in (left, right):
        axes.set_xlabel("step")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="0.9")
        axes.set_axisbelow(True)
    return figure


def draw_optimizers(axes: Axes, losses: Losses) -> None:
    labels = {
        FLOAT32: f"AdamW, lr {LEARNING_RATE:g}",
        **{name: f"AdamW, lr {rate:g}" for name, rate in OTHER_RATES.items()},
        MUON: f"Muon for matrices, lr {MUON_RATE:g}, and AdamW, lr {LEARNING_RATE:g}",
    }
    for name, label in labels.items():
        colour, _ = LINES[name]
        axes.plot(range(1, len(losses[name]) + 1), losses[name], color=colour, alpha=0.25, linewidth=0.8)
        draw_line(axes, name, label, running_mean(losses[name]))
    axes.set_title("AdamW against Muon + AdamW, fp32: training loss", loc="left", fontsize=12)
    axes.set_ylabel(f"nats per character; bold: mean of {MEAN_OF} steps")
    axes.legend(frameon=False)


def draw_precisions(axes: Axes, losses: Losses) -> None:
    """As differences: the curves themselves would lie upon each other."""
    base = running_mean(losses[FLOAT32])
    axes.axhspan(-WITHIN, WITHIN, color="0.93", label=f"within {WITHIN:g} %")
    axes.axhline(0, color=LINES[FLOAT32][0], linewidth=1.8, label=FLOAT32)
    for name in (MASTERS, BY_CHANCE, NO_MASTERS):
        if name in losses:
            pairs = zip(running_mean(losses[name]), base, strict=True)
            draw_line(axes, name, name, [100 * (mine / theirs - 1) for mine, theirs in pairs])
    axes.set_title("bf16 against fp32, AdamW: difference of the loss", loc="left", fontsize=12)
    axes.set_ylabel(f"percent of fp32's, mean of {MEAN_OF} steps")
    axes.legend(frameon=False)


def draw_line(axes: Axes, name: str, label: str, values: Sequence[float]) -> None:
    """Means, each drawn at its last step."""
    colour, dashes = LINES[name]
    axes.plot(range(MEAN_OF, MEAN_OF + len(values)), values, color=colour, linestyle=dashes, linewidth=1.8, label=label)


def running_mean(values: Sequence[float]) -> list[float]:
    sums = [0.0, *accumulate(values)]
    return [(stop - start) / MEAN_OF for start, stop in zip(sums, sums[MEAN_OF:], strict=False)]
