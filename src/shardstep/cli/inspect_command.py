"""The command `shardstep inspect`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from shardstep.cli.console import FAILED, MISUSED, exit_with_error, show_bytes
from shardstep.cli.demo.report import format_count
from shardstep.format import format_nbytes

if TYPE_CHECKING:
    from shardstep.convert.inspection import Summary


def inspect_path(
    path: Annotated[
        Path, typer.Argument(metavar="PATH", help="A checkpoint, a folder of them, or one of another program.")
    ],
    quick: Annotated[bool, typer.Option("--quick", help="Check sizes only, without reading whole files.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")] = False,
) -> None:
    """Show what is in a checkpoint, what wrote it, and whether it is complete and undamaged.

    For a folder of checkpoints, prints a table, the newest first. For a file or folder of another program, prints its
    format, what is in it, and the command that converts it. The exit status is 1 if a file is damaged, which is named.
    Reading PATH cannot run code.

    \b
        shardstep inspect run
        shardstep inspect run/step-1000 --quick
        shardstep inspect weights.safetensors --json
    """
    from shardstep.convert.detect import Kind, detect_kind

    console = Console(highlight=False, markup=False)
    try:
        kind = detect_kind(path)
    except RuntimeError as error:
        exit_with_error("inspect", FAILED, str(error))
    except (ValueError, OSError) as error:
        exit_with_error("inspect", MISUSED, str(error))
    try:
        summaries = _summaries(path, kind, console, quick=quick)
    except (ValueError, RuntimeError, OSError) as error:
        exit_with_error("inspect", FAILED, f"{path} is {kind.value}.", str(error))
    if as_json:
        rows = [{**asdict(one), "is_whole": one.is_whole} for one in summaries]
        typer.echo(json.dumps(rows if kind is Kind.RUN else rows[0], indent=1))
    elif kind is Kind.RUN:
        console.print(_make_table(summaries))
    else:
        _print_summary(summaries[0], console)
        if kind is not Kind.SHARDSTEP:
            console.print(kind.remedy.format(path=path), soft_wrap=True)
    problems = [problem for one in summaries for problem in one.problems]
    if problems:
        exit_with_error("inspect", FAILED, *problems)


def _summaries(path: Path, kind: Any, console: Console, *, quick: bool) -> list[Summary]:
    # Imported here, so that `--help` does not wait for torch.
    from shardstep.checkpoint.folder import find_checkpoints
    from shardstep.convert.detect import Kind
    from shardstep.convert.inspection import inspect_checkpoint, inspect_folder, inspect_foreign, nbytes_at
    from shardstep.convert.run import ConvertRequest, describe_source

    if kind not in (Kind.SHARDSTEP, Kind.RUN):
        return [inspect_foreign(describe_source(ConvertRequest(path, path, "dcp")))]
    with show_bytes(console) as begin:
        on_bytes = begin("checked", 0 if quick else nbytes_at(path))
        if kind is Kind.RUN:
            return inspect_folder(path, on_bytes, quick=quick)
        return [inspect_checkpoint(find_checkpoints(path)[0][0], on_bytes, quick=quick)]


# -- print as text -----------------------------------------------------------------------------------------------------


def _make_table(summaries: list[Summary]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("checkpoint", "step", "saved", "ranks", "elements", "size", ""):
        table.add_column(heading, overflow="fold")
    for one in summaries:
        table.add_row(
            Path(one.path).name,
            "" if one.step is None else str(one.step),
            _format_time(one.saved),
            one.writer.get("ranks", ""),
            f"{one.elements:,}",
            format_nbytes(sum(one.nbytes.values())),
            "complete" if one.is_whole else "DAMAGED",
        )
    return table


def _format_time(saved: str) -> str:
    return saved.replace("T", " ").replace("+00:00", " UTC")


def _print_summary(one: Summary, console: Console) -> None:
    def say(sentence: str) -> None:
        console.print(sentence, soft_wrap=True)

    say(f"{one.path}: {one.kind}")
    if one.step is not None:
        say(f"step {one.step}")
    if one.saved:
        versions = [f"{name} {version}" for name, version in one.writer.items() if name in ("shardstep", "torch")]
        ranks = format_count(int(one.writer.get("ranks", 1)), "rank")
        converted = f", converted from {one.writer['converted_from']}" if "converted_from" in one.writer else ""
        say(f"saved {_format_time(one.saved)} by {', '.join(versions)}, {ranks}{converted}")
    dtypes = ", ".join(f"{numel:,} {dtype}" for dtype, numel in one.dtypes.items())
    trained = f"; the optimizer has {format_count(one.parameters, 'parameter')}" if one.parameters else ""
    say(f"{format_count(one.tensors, 'tensor')} in the model, {one.elements:,} elements ({dtypes}){trained}")
    if one.extra:
        say(f"extra: {', '.join(one.extra)}")
    console.print(_make_size_table(one))
    for number, group in enumerate(one.groups):
        options = ", ".join(f"{key}={value}" for key, value in group.options.items())
        count = format_count(group.parameters, "parameter")
        say(
            f"group {number}: {group.optimizer or 'optimizer unknown'}, {count}, {group.elements:,} elements: {options}"
        )
    if one.files and one.is_whole:
        say(f"complete: {format_count(one.files, 'file')}, {one.checked} as they were written")


def _make_size_table(one: Summary) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    for kind, nbytes in one.nbytes.items():
        table.add_row(kind, format_nbytes(nbytes))
    table.add_row("total", format_nbytes(sum(one.nbytes.values())))
    return table
