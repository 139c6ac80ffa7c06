"""Two pictures: what every rank holds in memory, and what a step costs; without and with shardstep."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from shardstep.cli.demo.report import format_count
from shardstep.cli.demo.result import RankMemory, Result
from shardstep.format import UNITS, format_nbytes

# Paul Tol's "bright" palette, which colour-blind readers can tell apart; with each, the colour of a number on it.
LAYERS = (
    ("parameters", "#4477AA", "white"),
    ("gradients", "#CCBB44", "black"),
    ("optimizer state", "#EE6677", "black"),
)
BAR_WIDTH = 0.26
BAR_STEP = 0.29  # from one bar of a rank to the next
MAX_RANKS_LABELLED = 4  # with more, the bars are too narrow for numbers and level names


def write_pictures(result: Result, folder: Path) -> tuple[Path, Path]:
    """Of memory, and of the cost of a step."""
    paths = folder / "memory.png", folder / "step.png"
    draw_memory(result).savefig(paths[0], dpi=150)
    draw_step(result).savefig(paths[1], dpi=150)
    return paths


def _make_figure(width: float, height: float) -> Figure:
    # Figure and canvas by hand: pyplot would look for a window system, and keep the figure alive.
    figure = Figure(figsize=(width, height))
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.12)
    FigureCanvasAgg(figure)
    return figure


def draw_memory(result: Result) -> Figure:
    figure = _make_figure(max(8.0, 3.0 + 2.6 * min(result.ranks, MAX_RANKS_LABELLED)), 5.2)
    axes = figure.add_subplot()
    factor, unit = _pick_unit(max(memory.total for run in result.runs for memory in run.memory))
    for rank in range(result.ranks):
        for run, offset in zip(result.runs, _offsets(result), strict=True):
            _draw_bar(axes, rank + offset, _heights(run.memory[rank], factor), labelled=_has_room(result))
    _label_axes(axes, result, unit)
    _add_words(figure, axes, result)
    return figure


def draw_step(result: Result) -> Figure:
    """Time, and bytes where they are known; a panel each."""
    panels = [("time per step (ms)", [run.seconds_per_step * 1e3 for run in result.runs])]
    sent = [run.sent_per_rank_and_step for run in result.runs]
    known = [nbytes for nbytes in sent if nbytes is not None]
    if len(known) == len(sent):
        factor, unit = _pick_unit(max(known))
        panels.append((f"sent per rank and step ({unit})", [nbytes / factor for nbytes in known]))
    figure = _make_figure(4.4 * len(panels), 4.2)
    colours = ("#BBBBBB", "#66CCEE", "#228833")
    for axes, (label, heights) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.bar(range(len(heights)), heights, 0.62, color=colours)
        for x, height in enumerate(heights):
            axes.annotate(f"{height:.1f}", (x, height), (0, 3), textcoords="offset points", ha="center", weight="bold")
        axes.set_xticks(range(len(heights)), [run.name.replace(" + ", " +\n") for run in result.runs], fontsize=9)
        axes.set_title(label, loc="left", fontsize=11)
        _tidy(axes)
    title = f"One step: a GPT of {result.numel / 1e6:.1f} M parameters on {format_count(result.ranks, 'rank')}"
    figure.suptitle(title, x=0.02, ha="left", fontsize=13)
    return figure


def _has_room(result: Result) -> bool:
    return result.ranks <= MAX_RANKS_LABELLED


def _offsets(result: Result) -> list[float]:
    """Of a rank's bars, from its middle."""
    return [BAR_STEP * (place - (len(result.runs) - 1) / 2) for place in range(len(result.runs))]


def _pick_unit(highest: float) -> tuple[float, str]:
    """One unit for a whole axis, the largest in which the highest bar is at least 1."""
    return next(((factor, unit) for factor, unit in UNITS if highest >= factor), (1.0, "bytes"))


def _tidy(axes: Axes) -> None:
    axes.tick_params(axis="x", length=0)
    axes.margins(x=0.03, y=0.1)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)


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
        [rank + offset for rank in ranks for offset in _offsets(result)],
        [run.name.replace(" + ", " +\n") for _ in ranks for run in result.runs],
        rotation=0 if _has_room(result) else 90,
        fontsize=8 if _has_room(result) else 6,
    )
    _tidy(axes)
    # A second row under the names of the runs, one entry under the bars of each rank.
    pairs = axes.secondary_xaxis(-0.13 if _has_room(result) else -0.2)
    pairs.set_xticks(
        list(ranks), [f"rank {rank}" for rank in ranks], weight="bold", fontsize=10 if _has_room(result) else 7
    )
    pairs.tick_params(axis="x", length=0)
    pairs.spines["bottom"].set_visible(False)


def _add_words(figure: Figure, axes: Axes, result: Result) -> None:
    model, ranks = f"a GPT of {result.numel / 1e6:.1f} M parameters", format_count(result.ranks, "rank")
    axes.set_title(f"Memory per rank: {model} on {ranks}", loc="left", fontsize=13, pad=26)
    plain, fast = result.runs[0], result.runs[-1]
    most = [format_nbytes(max(memory.total for memory in run.memory)) for run in (plain, fast)]
    finding = f"{most[0]} with {plain.name}, {most[1]} with {fast.name}"
    subtitle = axes.annotate(finding, (0, 1), (0, 9), xycoords="axes fraction", textcoords="offset points", color="0.3")
    subtitle.set_in_layout(False)  # it may run over the legend's column, which is empty up there
    # In the order in which they are stacked, the top one first.
    handles = [Patch(color=colour, label=label) for label, colour, _ in reversed(LAYERS)]
    figure.legend(handles=handles, loc="outside right center", frameon=False)
