"""Read tensors from files in DCP's format, which shardstep.save writes too, one stored block at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from shardstep.convert.source import LazyTensor, SourceError
from shardstep.convert.unpickling import load_torch_bytes
from shardstep.state.blocks import Block


@dataclass(frozen=True, slots=True)
class FileRange:
    """The bytes of a file in which a block or an object is stored."""

    file: str
    start: int
    length: int


def read_object(folder: Path, place: FileRange, what: str) -> Any:
    """Return what torch.save wrote at `place`; `what` describes it in errors."""
    name = PurePosixPath(place.file)
    if name.is_absolute() or ".." in name.parts:
        raise SourceError(f"{folder} refers to {place.file} for {what}, which is not in the folder and is not read")
    path = folder / place.file
    try:
        with path.open("rb") as file:
            file.seek(place.start)
            payload = file.read(place.length)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    if len(payload) != place.length:
        raise SourceError(f"{path} is truncated: it ends before {what}")
    return load_torch_bytes(payload, f"{what} in {path}")


def lazy_from_chunks(
    folder: Path, key: str, shape: Iterable[int], dtype: torch.dtype, chunks: Iterable[tuple[Any, Any, FileRange]]
) -> LazyTensor:
    """Return a tensor that is stored in chunks, each with its offsets, its sizes and its place in the files."""
    whole, rows = tuple(shape), [(tuple(offsets), tuple(sizes), place) for offsets, sizes, place in chunks]
    covered = sum(torch.Size(sizes).numel() for _, sizes, _ in rows)
    if covered != torch.Size(whole).numel():
        raise SourceError(
            f"{folder} is incomplete: {covered:,} of the {torch.Size(whole).numel():,} elements of {key} are stored"
        )

    def blocks() -> Any:
        for offsets, sizes, place in rows:
            block = read_object(folder, place, key)
            if not isinstance(block, torch.Tensor) or tuple(block.shape) != sizes or block.dtype is not dtype:
                raise SourceError(f"{folder / place.file} is damaged: another object is stored in place of {key}")
            yield Block(offsets, block)

    return LazyTensor(whole, dtype, blocks)
