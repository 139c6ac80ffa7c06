"""What the commands share: errors with an exit status, progress in bytes, and shell completion of options."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

FAILED, MISUSED, INTERRUPTED = 1, 2, 130  # exit statuses


def exit_with_error(command: str, status: int, *sentences: str) -> NoReturn:
    """Print the sentences to stderr, each after the command's name, and end the program with the status."""
    for sentence in sentences:
        typer.echo(f"shardstep {command}: {sentence}", err=True)
    raise typer.Exit(status)


@contextmanager
def show_bytes(console: Console) -> Iterator[Callable[[str, int], Callable[[int], None]]]:
    """Show progress bars on a terminal, which disappear in the end; elsewhere show nothing.

    Yields a function that begins a bar from a label and a number of bytes. It returns a function that advances the bar.
    """
    if not console.is_terminal:
        yield lambda label, total: lambda nbytes: None
        return
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True) as bars:

        def begin(label: str, total: int) -> Callable[[int], None]:
            task = bars.add_task(label, total=total)
            return lambda nbytes: bars.advance(task, nbytes)

        yield begin


def complete_from(words: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a completion function for an option that takes one of these words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]
