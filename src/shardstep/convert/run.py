"""One conversion: recognise, describe, write."""

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
from shardstep.convert.detect import Kind, names_in, recognise
from shardstep.convert.source import Source
from shardstep.convert.target import check_free, writing

FORMATS = ("torch", "dcp", "safetensors")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person asked for."""

    src: Path
    dst: Path
    to: str
    force: bool = False
    names: Path | None = None  # of the parameters, where an optimizer numbers them
    also: Path | None = None  # a second file, where model and optimizer are in two
    with_extra: bool = True
    with_state: bool = False  # into safetensors
    shard_nbytes: int = 5_000_000_000


# Begins with so many bytes of something; what it gives is told how many are done.
Progress = Callable[[str, int], Callable[[int], None]]


@dataclass(frozen=True, slots=True)
class Done:
    kind: str  # of the source, in words
    nbytes: int  # of tensors
    notes: list[str]  # what a person should know


def silent(what: str, total: int) -> Callable[[int], None]:
    return lambda nbytes: None


def convert(wanted: Wanted, progress: Progress = silent) -> Done:
    check_free(wanted.dst, force=wanted.force)
    source = describe(wanted, progress)
    if wanted.to == "safetensors":
        missing = to_safetensors.left_out(source, with_state=wanted.with_state)
        source.notes += [f"safetensors has no place for {one}" for one in missing]
    kinds = sorted({group.kind for group in source.groups if group.kind})
    if wanted.to == "torch" and len(kinds) > 1:
        source.notes.append(
            f"the groups were trained by {' and '.join(kinds)}: one optimizer of torch has one class, so load each "
            "group into its own"
        )
    with writing(wanted.dst.absolute(), force=wanted.force) as target:
        is_whole = wanted.to != "safetensors" or wanted.with_state
        nbytes = source.nbytes if is_whole else sum(one.nbytes for _, one in source.weights())
        told = progress("written", nbytes)
        if wanted.to == "torch":
            to_torch.write(source, target, told)
        elif wanted.to == "dcp":
            to_dcp.write(source, target, told)
        else:
            to_safetensors.write(source, target, told, with_state=wanted.with_state, shard_nbytes=wanted.shard_nbytes)
    return Done(source.kind, nbytes, source.notes)


def describe(wanted: Wanted, progress: Progress = silent) -> Source:
    """What is in the source; of its tensors nothing is read yet."""
    src, kind = wanted.src, recognise(wanted.src)
    only_torch = {"--names": wanted.names, "--also": wanted.also}
    given = [option for option, value in only_torch.items() if value is not None]
    if given and kind is not Kind.TORCH:
        raise ValueError(f"{' and '.join(given)} is for files of torch.save, and {src} is {kind.value}")
    if kind in (Kind.SHARDSTEP, Kind.RUN):
        source = from_shardstep.read(src, progress("checked", _total(src)))
    elif kind is Kind.DCP:
        source = from_dcp.read(src, with_extra=wanted.with_extra)
    elif kind is Kind.DEEPSPEED:
        source = from_deepspeed.read(src)
    elif kind is Kind.SAFETENSORS:
        source = from_safetensors.read(src)
    else:
        names = None if wanted.names is None else names_in(wanted.names)
        source = from_torch.read(src, wanted.also, names)
    if not wanted.with_extra:
        source.extra, source.extra_of_ranks = {}, ()
    return source


def _total(src: Path) -> int:
    found = find_checkpoints(src)[0]
    return sum(file.nbytes for file in found[0].manifest.files.values()) if found else 0
