"""The command `shardstep convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from shardstep.cli.console import FAILED, INTERRUPTED, MISUSED, complete_from, exit_with_error, show_bytes
from shardstep.format import format_nbytes

_FORMATS = ("torch", "dcp", "safetensors")
_MEGABYTE = 1_000_000


def convert_path(
    src: Annotated[Path, typer.Argument(metavar="SRC", help="What to convert; its format is detected.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The file or folder to write, which must not exist.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="|".join(_FORMATS), autocompletion=complete_from(_FORMATS), help="The format to convert to."
        ),
    ],
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DST, after all is written.")] = False,
    names: Annotated[
        Path | None, typer.Option(help="Names of the parameters in the optimizer's order: lines, or a JSON list.")
    ] = None,
    also: Annotated[Path | None, typer.Option(help="A second torch file, if model and optimizer are in two.")] = None,
    with_state: Annotated[bool, typer.Option("--with-state", help="Write the state to safetensors, too.")] = False,
    shard_mb: Annotated[int, typer.Option(help="The most megabytes in one safetensors file of a folder.")] = 5000,
    no_extra: Annotated[bool, typer.Option("--no-extra", help="Write only the model and the optimizer.")] = False,
) -> None:
    """Convert a checkpoint to another format, tensor by tensor.

    SRC: a checkpoint of shardstep, or a folder of them (the newest complete one is used); a file of torch.save with the
    state_dicts of a model and its optimizer; a folder of torch.distributed.checkpoint, as FSDP2 programs write it; a
    checkpoint of DeepSpeed's ZeRO 1 or 2; safetensors. DST: with `--to dcp` a checkpoint that shardstep.load reads on
    any number of ranks, and torch.distributed.checkpoint too; with `--to torch` one file for plain torch; with
    `--to safetensors` the weights.

    DST appears when it is complete, or not at all. Reading SRC cannot run code.

    \b
        shardstep convert run model.pt --to torch
        shardstep convert run/step-1000 weights.safetensors --to safetensors
        shardstep convert old.pt run/step-0 --to dcp
        shardstep convert fsdp-folder run/step-0 --to dcp
        shardstep convert deepspeed-folder run/step-0 --to dcp
    """
    problems = _find_misuse(to, names, also, with_state=with_state, shard_mb=shard_mb)
    if problems:
        exit_with_error("convert", MISUSED, *problems)
    # Imported here, so that `--help` does not wait for torch.
    from shardstep.convert.run import ConvertRequest, convert

    console = Console(highlight=False, markup=False)
    request = ConvertRequest(src, dst, to, force, names, also, not no_extra, with_state, shard_mb * _MEGABYTE)
    try:
        with show_bytes(console) as progress:
            done = convert(request, progress)
    except (FileExistsError, FileNotFoundError) as error:
        exit_with_error("convert", MISUSED, str(error))
    except (ValueError, RuntimeError, OSError) as error:
        exit_with_error("convert", FAILED, str(error))
    except KeyboardInterrupt:
        exit_with_error("convert", INTERRUPTED, "stopped; nothing was written.")
    for note in done.notes:
        console.print(f"note: {note}", soft_wrap=True)
    console.print(f"{dst}: {to}, from {done.kind}, {format_nbytes(done.nbytes)} of tensors.", soft_wrap=True)


def _find_misuse(to: str, names: Path | None, also: Path | None, *, with_state: bool, shard_mb: int) -> list[str]:
    problems = []
    if to not in _FORMATS:
        problems.append(f"--to must be torch, dcp or safetensors, got {to!r}.")
    if with_state and to != "safetensors":
        problems.append("--with-state is for --to safetensors; the other formats always have the state.")
    if shard_mb < 1:
        problems.append(f"--shard-mb must be at least 1, got {shard_mb}.")
    for option, file in (("--names", names), ("--also", also)):
        if file is not None and not file.is_file():
            problems.append(f"{option} must be a file, and {file} is not a file.")
    return problems
