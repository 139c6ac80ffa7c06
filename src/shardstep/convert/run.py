"""Run a conversion: detect the source's format, describe the source, write the target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shardstep.checkpoint.folder import find_checkpoints
from shardstep.convert import (
    from_dcp,
    from_deepspeed,
    from_safetensors,
    from_shardstep,
    from_torch,
    to_dcp,
    to_safetensors,
    to_torch,
)
from shardstep.convert.detect import Kind, detect_kind, read_names
from shardstep.convert.source import Source
from shardstep.convert.target import check_free, write_target


@dataclass(frozen=True, slots=True)
class ConvertRequest:
    """The arguments of `shardstep convert`."""

    src: Path
    dst: Path
    to: str
    force: bool = False
    names: Path | None = None  # a file with the names of parameters that the optimizer numbers
    also: Path | None = None  # a second file, if model and optimizer are in two
    with_extra: bool = True
    with_state: bool = False  # for safetensors only
    shard_nbytes: int = 5_000_000_000


# Called with a label and a number of bytes; returns a function that is called with the bytes of each block.
Progress = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True)
class ConvertResult:
    """What was converted."""

    kind: str  # a description of the source's format
    nbytes: int  # of tensors
    notes: list[str]  # sentences for the user


def no_progress(what: str, total: int) -> Callable[[int], None]:
    return lambda nbytes: None


def convert(request: ConvertRequest, progress: Progress = no_progress) -> ConvertResult:
    check_free(request.dst, force=request.force)
    source = describe_source(request, progress)
    if request.to == "safetensors":
        missing = to_safetensors.list_omissions(source, with_state=request.with_state)
        source.notes += [f"safetensors cannot contain {one}" for one in missing]
    kinds = sorted({group.kind for group in source.groups if group.kind})
    if request.to == "torch" and len(kinds) > 1:
        source.notes.append(
            f"the groups were trained by {' and '.join(kinds)}: load each group into an optimizer of its class, as one "
            "optimizer of torch has one class"
        )
    with write_target(request.dst.absolute(), force=request.force) as target:
        is_whole = request.to != "safetensors" or request.with_state
        nbytes = source.nbytes if is_whole else sum(one.nbytes for _, one in source.weights())
        on_bytes = progress("written", nbytes)
        if request.to == "torch":
            to_torch.write(source, target, on_bytes)
        elif request.to == "dcp":
            to_dcp.write(source, target, on_bytes)
        else:
            to_safetensors.write(
                source, target, on_bytes, with_state=request.with_state, shard_nbytes=request.shard_nbytes
            )
    return ConvertResult(source.kind, nbytes, source.notes)


def describe_source(request: ConvertRequest, progress: Progress = no_progress) -> Source:
    """Return what is in the source, without reading its tensors."""
    src, kind = request.src, detect_kind(request.src)
    only_torch = {"--names": request.names, "--also": request.also}
    given = [option for option, value in only_torch.items() if value is not None]
    if given and kind is not Kind.TORCH:
        raise ValueError(f"{' and '.join(given)} can only be used with a file of torch.save, and {src} is {kind.value}")
    if kind in (Kind.SHARDSTEP, Kind.RUN):
        source = from_shardstep.read(src, progress("checked", _total(src)))
    elif kind is Kind.DCP:
        source = from_dcp.read(src, with_extra=request.with_extra)
    elif kind is Kind.DEEPSPEED:
        source = from_deepspeed.read(src)
    elif kind is Kind.SAFETENSORS:
        source = from_safetensors.read(src)
    else:
        names = None if request.names is None else read_names(request.names)
        source = from_torch.read(src, request.also, names)
    if not request.with_extra:
        source.extra, source.extra_of_ranks = {}, ()
    return source


def _total(src: Path) -> int:
    found = find_checkpoints(src)[0]
    return sum(file.nbytes for file in found[0].manifest.files.values()) if found else 0
