"""How far the training is: bars on a terminal, a few plain lines elsewhere (a CI log, a file)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardstep.cli.demo.exchange import Tick

LINES_PER_RUN = 4


@contextmanager
def show_progress(runs: tuple[str, ...], steps: int, console: Console) -> Iterator[Callable[[Tick], None]]:
    """Gives the function to call for every tick."""
    if not console.is_terminal:
        yield PlainLines(steps, console)
        return
    with _make_bars(console) as bars:
        tasks = {run: bars.add_task(run, total=steps, loss="") for run in runs}

        def draw(tick: Tick) -> None:
            if tick.step == 1:
                # The clock starts now: the time left must not count the wait for the ranks, or for the other run.
                bars.reset(tasks[tick.run])
            bars.update(tasks[tick.run], completed=tick.step, loss=f"loss of rank 0: {tick.loss:.3f}")

        yield draw


def _make_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
    )


class PlainLines:
    """One line for every quarter of a run."""

    def __init__(self, steps: int, console: Console) -> None:
        self._steps = steps
        self._console = console

    def __call__(self, tick: Tick) -> None:
        done, done_before = (step * LINES_PER_RUN // self._steps for step in (tick.step, tick.step - 1))
        if done > done_before:
            self._console.print(
                f"{tick.run}: step {tick.step} of {self._steps}, loss of rank 0: {tick.loss:.3f}",
                highlight=False,
                soft_wrap=True,
            )
