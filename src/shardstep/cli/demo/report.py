"""What the command prints: how far the training is, and what it found out as a table and two sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from shardstep.cli.demo.exchange import Result, Run, Tick
from shardstep.format import format_nbytes

LINES_PER_RUN = 4
# Beyond this many ranks the table shows the largest only: one line per rank would fill the screen.
MAX_RANKS_LISTED = 4


@contextmanager
def show_progress(runs: tuple[str, ...], steps: int, console: Console) -> Iterator[Callable[[Tick], None]]:
    """Give the function to call for every tick. It draws bars on a terminal, and elsewhere prints a few lines."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}")
    bars = Progress(*columns, TimeRemainingColumn(), console=console)
    tasks = {run: bars.add_task(run, total=steps, loss="") for run in runs}

    def show(tick: Tick) -> None:
        loss = f"loss of rank 0: {tick.loss:.3f}"
        if tick.step == 1:
            # The clock starts now: the time left must not count the wait for the ranks, or for the other run.
            bars.reset(tasks[tick.run])
        bars.update(tasks[tick.run], completed=tick.step, loss=loss)
        quarters, before = (step * LINES_PER_RUN // steps for step in (tick.step, tick.step - 1))
        if quarters > before and not console.is_terminal:
            console.print(f"{tick.run}: step {tick.step} of {steps}, {loss}", highlight=False, soft_wrap=True)

    with bars if console.is_terminal else nullcontext():
        yield show


def make_table(result: Result) -> Table:
    runs = result.runs
    is_counted = runs[0].sent_per_rank_and_step is not None
    counter = "counted on the loopback interface, with what other programs send"
    caption = f"sent: {counter if is_counted else 'this system has no loopback counter to read'}"
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_row("mean loss, first step", *(f"{run.losses[0]:.6f}" for run in runs))
    table.add_row("mean loss, last step", *(f"{run.losses[-1]:.6f}" for run in runs))
    table.add_row("final parameters", "", *(_describe_equality(run) for run in runs[1:]), end_section=True)
    rows = {f"rank {rank}": slice(rank, rank + 1) for rank in range(result.ranks)}
    if result.ranks > MAX_RANKS_LISTED:
        rows = {f"largest of {result.ranks} ranks": slice(None)}
    for what in ("optimizer_state", "gradients"):
        for label, ranks in rows.items():
            table.add_row(f"{what.replace('_', ' ')}, {label}", *(_format_largest(run, what, ranks) for run in runs))
    sent = [run.sent_per_rank_and_step for run in runs]
    table.add_row("sent per rank and step", *("n/a" if nbytes is None else format_nbytes(nbytes) for nbytes in sent))
    table.add_row("time per step", *(f"{run.seconds_per_step * 1e3:.0f} ms" for run in runs))
    return table


def summarise(result: Result) -> list[str]:
    """The finding as sentences, with the numbers it rests on."""
    plain, fast = result.runs[0], result.runs[-1]
    same = ", ".join(f"{run.name} {_describe_equality(run)}" for run in result.runs[1:])
    equality = f"After {format_count(len(plain.losses), 'step')} the parameters are those of {plain.name}: {same}."
    if any(max(run.differs_by) > 0 for run in result.runs):
        equality += (
            " (Sums of three or more ranks' gradients depend on their order, and on a GPU a step rounds otherwise.)"
        )
    state = [_format_largest(run, "optimizer_state") for run in (plain, fast)]
    gradients = [_format_largest(run, "gradients") for run in (plain, fast)]
    return [
        equality,
        f"Optimizer state per rank: {state[0]} without shardstep, at most {state[1]} with shard(). "
        f"Gradients: {gradients[0]}, {gradients[1]}.",
    ]


def _describe_equality(run: Run) -> str:
    """With the first run's."""
    worst = max(run.differs_by)
    return "equal bits" if worst == 0 else f"within {worst:.0e}"


def _format_largest(run: Run, what: str, ranks: slice = slice(None)) -> str:
    return format_nbytes(max(getattr(memory, what) for memory in run.memory[ranks]))


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
