"""How many bytes are done: a bar on a terminal, which goes when it is full; nothing elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


@contextmanager
def show_bytes(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Gives a function that begins a bar, which gives one to tell of bytes."""
    if not console.is_terminal:
        yield lambda what, total: lambda nbytes: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bars:

        def begin(what: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(what, total=total)
            return lambda nbytes: bars.advance(task, nbytes)

        yield begin
