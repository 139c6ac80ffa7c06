"""`shardstep convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardstep.cli.byte_progress import show_bytes
from shardstep.cli.exit_codes import FAILED, INTERRUPTED, MISUSED, leave
from shardstep.cli.shell_completion import one_of
from shardstep.format import format_nbytes

_FORMATS = ("torch", "dcp", "safetensors")
_MEGABYTE = 1_000_000


def convert_path(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="What to convert; its format is recognised.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Where it goes: a file or a folder, not there yet.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="|".join(_FORMATS), autocompletion=one_of(_FORMATS), help="The format that is wanted."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DST, when all is written.")] = False,
    names: Annotated[
        Path | None, typer.Option(help="Names of the parameters in the optimizer's order: lines, or a JSON list.")
    ] = None,
    also: Annotated[Path | None, typer.Option(help="A second torch file, if model and optimizer are in two.")] = None,
    with_state: Annotated[bool, typer.Option("--with-state", help="Into safetensors: the state too.")] = False,
    shard_mb: Annotated[int, typer.Option(help="The most megabytes in one safetensors file of a folder.")] = 5000,
    no_extra: Annotated[bool, typer.Option("--no-extra", help="Leave out all but model and optimizer.")] = False,
) -> None:
    """Make a checkpoint of another format, tensor by tensor.

    SRC: a checkpoint of shardstep, or a folder of them (the newest that is whole); a file of torch.save with the
    state_dicts of a model and its optimizer; a folder of torch.distributed.checkpoint, as FSDP2 programs write it; a
    checkpoint of DeepSpeed's ZeRO 1 or 2; safetensors. DST: with `--to dcp` a checkpoint that shardstep.load reads on
    any number of ranks, and torch.distributed.checkpoint too; with `--to torch` one file for plain torch; with
    `--to safetensors` the weights.

    DST is there when all of it is written, or not at all. Nothing that is read can run code.

    \b
        shardstep convert run model.pt --to torch
        shardstep convert run/step-1000 weights.safetensors --to safetensors
        shardstep convert old.pt run/step-0 --to dcp
        shardstep convert fsdp-folder run/step-0 --to dcp
        shardstep convert deepspeed-folder run/step-0 --to dcp
    """
    problems = _misuse(to, names, also, with_state=with_state, shard_mb=shard_mb)
    if problems:
        leave("convert", MISUSED, *problems)
    # Only now: `--help` need not wait for torch.
    from shardstep.convert.run import ConvertRequest, convert

    console = Console(highlight=False, markup=False)
    wanted = ConvertRequest(src, dst, to, force, names, also, not no_extra, with_state, shard_mb * _MEGABYTE)
    try:
        with show_bytes(console) as progress:
            done = convert(wanted, progress)
    except (FileExistsError, FileNotFoundError) as error:
        leave("convert", MISUSED, str(error))
    except (ValueError, RuntimeError, OSError) as error:
        leave("convert", FAILED, str(error))
    except KeyboardInterrupt:
        leave("convert", INTERRUPTED, "stopped; nothing was written.")
    for note in done.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{dst}: {to}, from {done.kind}, {format_nbytes(done.nbytes)} of tensors.", soft_wrap=True)


def _misuse(to: str, names: Path | None, also: Path | None, *, with_state: bool, shard_mb: int) -> list[str]:
    problems = []
    if to not in _FORMATS:
        problems.append(f"--to must be torch, dcp or safetensors, got {to!r}.")
    if with_state and to != "safetensors":
        problems.append("--with-state is for --to safetensors; the other formats have the state in any case.")
    if shard_mb < 1:
        problems.append(f"--shard-mb must be at least 1, got {shard_mb}.")
    for option, file in (("--names", names), ("--also", also)):
        if file is not None and not file.is_file():
            problems.append(f"{option} must be a file, and {file} is none.")
    return problems
