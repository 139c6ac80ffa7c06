"""How a command ends that could not do its work: sentences that name it, and a status."""

from __future__ import annotations

from typing import NoReturn

import typer

FAILED, MISUSED, INTERRUPTED = 1, 2, 130  # exit statuses


def leave(command: str, status: int, *sentences: str) -> NoReturn:
    for sentence in sentences:
        typer.echo(f"shardstep {command}: {sentence}", err=True)
    raise typer.Exit(status)
