"""The picture: what every rank holds in memory, DDP + AdamW beside shardstep."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shardstep.cli.demo.report import UNITS, format_count, format_nbytes, largest_state
from shardstep.cli.demo.result import RankMemory, Result

# Paul Tol's "bright" palette, which colour-blind readers can tell apart; with each, the colour of a number on it.
LAYERS = (
    ("parameters", "#4477AA", "white"),
    ("gradients", "#CCBB44", "black"),
    ("optimizer state", "#EE6677", "black"),
)
BAR_WIDTH = 0.36
BAR_OFFSET = 0.2  # from the middle of a rank's pair of bars
MAX_RANKS_LABELLED = 6  # with more, the bars are too narrow for numbers and level names


def write_picture(result: Result, path: Path) -> None:
    draw_figure(result).savefig(path, dpi=150)


def draw_figure(result: Result) -> Figure:
    # Figure and canvas by hand: pyplot would look for a window system, and keep the figure alive.
    figure = Figure(figsize=(max(7.5, 3.0 + 1.6 * min(result.ranks, MAX_RANKS_LABELLED)), 5.2))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    factor, unit = _pick_unit(result)
    for rank in range(result.ranks):
        for run, offset in ((result.plain, -BAR_OFFSET), (result.sharded, BAR_OFFSET)):
            _draw_bar(axes, rank + offset, _heights(run.memory[rank], factor), labelled=_has_room(result))
    _label_axes(axes, result, unit)
    _add_words(figure, axes, result)
    return figure


def _has_room(result: Result) -> bool:
    return result.ranks <= MAX_RANKS_LABELLED


def _pick_unit(result: Result) -> tuple[float, str]:
    """One unit for the whole axis, the largest in which the highest bar is at least 1."""
    highest = max(sum(_heights(memory, 1)) for run in (result.plain, result.sharded) for memory in run.memory)
    return next(((factor, unit) for factor, unit in UNITS if highest >= factor), (1.0, "bytes"))


def _heights(memory: RankMemory, factor: float) -> tuple[float, float, float]:
    """In the order of LAYERS."""
    return memory.parameters / factor, memory.gradients / factor, memory.optimizer_state / factor


def _draw_bar(axes: Axes, x: float, heights: tuple[float, float, float], *, labelled: bool) -> None:
    bottom = 0.0
    for height, (_, colour, ink) in zip(heights, LAYERS, strict=True):
        axes.bar(x, height, BAR_WIDTH, bottom, color=colour, edgecolor="white", linewidth=1)
        if labelled and height > 0.05 * sum(heights):
            axes.text(x, bottom + height / 2, f"{height:.1f}", color=ink, ha="center", va="center", fontsize=9)
        bottom += height
    if labelled:
        axes.annotate(
            f"{bottom:.1f}", (x, bottom), (0, 3), textcoords="offset points", ha="center", weight="bold", fontsize=10
        )


def _label_axes(axes: Axes, result: Result, unit: str) -> None:
    ranks = range(result.ranks)
    axes.set_ylabel(f"memory per rank ({unit})")
    axes.set_xticks(
        [rank + offset for rank in ranks for offset in (-BAR_OFFSET, BAR_OFFSET)],
        [run.name.replace(" + ", " +\n") for _ in ranks for run in (result.plain, result.sharded)],
        rotation=0 if _has_room(result) else 90,
        fontsize=9 if _has_room(result) else 7,
    )
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.03, y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
    # A second row under the names of the runs, one entry under each pair of bars.
    pairs = axes.secondary_xaxis(-0.13 if _has_room(result) else -0.2)
    pairs.set_xticks(
        list(ranks), [f"rank {rank}" for rank in ranks], weight="bold", fontsize=10 if _has_room(result) else 7
    )
    pairs.tick_params(axis="x", length=0)
    pairs.spines["bottom"].set_visible(False)


def _add_words(figure: Figure, axes: Axes, result: Result) -> None:
    model, ranks = f"a GPT of {result.numel / 1e6:.1f} M parameters", format_count(result.ranks, "rank")
    axes.set_title(f"Memory per rank: {model} on {ranks}", loc="left", fontsize=13, pad=26)
    plain, sharded = format_nbytes(largest_state(result.plain)), format_nbytes(largest_state(result.sharded))
    finding = f"optimizer state: {plain} with {result.plain.name}, at most {sharded} with {result.sharded.name}"
    subtitle = axes.annotate(finding, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", color="0.3")
    subtitle.set_in_layout(False)  # it may run over the legend's column, which is empty up there
    # In the order in which they are stacked, the top one first.
    handles = [Patch(color=colour, label=label) for label, colour, _ in reversed(LAYERS)]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
