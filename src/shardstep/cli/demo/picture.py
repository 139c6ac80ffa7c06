"""Two pictures: what every rank holds in memory, and what a step costs; without and with shardstep."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shardstep.cli.demo.exchange import RankMemory, Result
from shardstep.cli.demo.report import format_count
from shardstep.format import UNITS, format_nbytes

# Paul Tol's "bright" palette, which colour-blind readers can tell apart; with each, the colour of a number on it.
LAYERS = {
    "parameters": ("#4477AA", "white"),
    "gradients": ("#CCBB44", "black"),
    "optimizer_state": ("#EE6677", "black"),
}
BAR_WIDTH = 0.26
BAR_STEP = 0.29  # from one bar of a rank to the next
MAX_RANKS_LABELLED = 4  # with more, the bars are too narrow for numbers and level names


def write_pictures(result: Result, folder: Path) -> tuple[Path, Path]:
    """Of memory, and of the cost of a step."""
    paths = folder / "memory.png", folder / "step.png"
    draw_memory(result).savefig(paths[0], dpi=150)
    draw_step(result).savefig(paths[1], dpi=150)
    return paths


def draw_memory(result: Result) -> Figure:
    """A stacked bar for each rank and run."""
    ranks, runs, has_room = range(result.ranks), result.runs, result.ranks <= MAX_RANKS_LABELLED
    figure = _make_figure(max(8.0, 3.0 + 2.6 * min(result.ranks, MAX_RANKS_LABELLED)), 5.2)
    axes = figure.add_subplot()
    # Of a rank's bars, from the middle of them.
    offsets = [BAR_STEP * (place - (len(runs) - 1) / 2) for place in range(len(runs))]
    places = [rank + offset for rank in ranks for offset in offsets]
    factor, unit = _pick_unit(max(memory.total for run in runs for memory in run.memory))
    _draw_layers(axes, places, [run.memory[rank] for rank in ranks for run in runs], factor, labelled=has_room)
    axes.set_ylabel(f"memory per rank ({unit})")
    axes.set_xticks(places, _names(result) * len(ranks), rotation=0 if has_room else 90, fontsize=8 if has_room else 6)
    _tidy(axes)
    # A second row under the names of the runs, one entry under the bars of each rank.
    below = axes.secondary_xaxis(-0.13 if has_room else -0.2)
    below.set_xticks(list(ranks), [f"rank {rank}" for rank in ranks], weight="bold", fontsize=10 if has_room else 7)
    below.tick_params(axis="x", length=0)
    below.spines["bottom"].set_visible(False)
    model = f"a GPT of {result.numel / 1e6:.1f} M parameters on {format_count(result.ranks, 'rank')}"
    axes.set_title(f"Memory per rank: {model}", loc="left", fontsize=13, pad=26)
    most = [format_nbytes(max(held.total for held in run.memory)) for run in runs]
    finding = f"{most[0]} with {runs[0].name}, {most[-1]} with {runs[-1].name}"
    subtitle = axes.annotate(finding, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", color="0.3")
    subtitle.set_in_layout(False)  # it may run over the legend's column, which is empty up there
    figure.legend(loc="outside right center", frameon=False, reverse=True)  # the top layer first
    return figure


def _draw_layers(axes: Axes, places: list[float], bars: list[RankMemory], factor: float, *, labelled: bool) -> None:
    """Draw one layer of all bars after the other, from the bottom."""
    bottoms = [0.0] * len(bars)
    for layer, (colour, ink) in LAYERS.items():
        heights = [getattr(held, layer) / factor for held in bars]
        label = layer.replace("_", " ")
        drawn = axes.bar(places, heights, BAR_WIDTH, bottoms, label=label, color=colour, edgecolor="white", linewidth=1)
        bottoms = [bottom + height for bottom, height in zip(bottoms, heights, strict=True)]
        if labelled:
            inside = [
                f"{height:.1f}" if height > 0.05 * held.total / factor else ""
                for height, held in zip(heights, bars, strict=True)
            ]
            axes.bar_label(drawn, inside, label_type="center", color=ink, fontsize=9)
    if labelled:
        axes.bar_label(drawn, [f"{top:.1f}" for top in bottoms], weight="bold", fontsize=10)


def draw_step(result: Result) -> Figure:
    """Time, and bytes where they are known; a panel each."""
    panels = {"time per step (ms)": [run.seconds_per_step * 1e3 for run in result.runs]}
    sent = [run.sent_per_rank_and_step for run in result.runs if run.sent_per_rank_and_step is not None]
    if len(sent) == len(result.runs):
        factor, unit = _pick_unit(max(sent))
        panels[f"sent per rank and step ({unit})"] = [nbytes / factor for nbytes in sent]
    figure = _make_figure(4.4 * len(panels), 4.2)
    for axes, (label, heights) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        bars = axes.bar(range(len(heights)), heights, 0.62, color=("#BBBBBB", "#66CCEE", "#228833"))
        axes.bar_label(bars, fmt="%.1f", weight="bold")
        axes.set_xticks(range(len(heights)), _names(result), fontsize=9)
        axes.set_title(label, loc="left", fontsize=11)
        _tidy(axes)
    title = f"One step: a GPT of {result.numel / 1e6:.1f} M parameters on {format_count(result.ranks, 'rank')}"
    figure.suptitle(title, x=0.02, ha="left", fontsize=13)
    return figure


def _make_figure(width: float, height: float) -> Figure:
    # Not by pyplot, which would look for a window system, and keep the figure alive.
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    return figure


def _names(result: Result) -> list[str]:
    return [run.name.replace(" + ", " +\n") for run in result.runs]


def _pick_unit(highest: float) -> tuple[float, str]:
    """One unit for a whole axis, the largest in which the highest bar is at least 1."""
    return next(((factor, unit) for factor, unit in UNITS if highest >= factor), (1.0, "bytes"))


def _tidy(axes: Axes) -> None:
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.03, y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
