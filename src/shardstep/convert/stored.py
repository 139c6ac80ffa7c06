"""Tensors in files of torch.distributed.checkpoint, which shardstep.save writes too: one stored block at a time."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from shardstep.convert.source import Lazy, SourceError
from shardstep.convert.unpickling import load_torch_bytes


@dataclass(frozen=True, slots=True)
class Place:
    """Where a block or an object lies."""

    file: str
    start: int
    length: int


def read_place(folder: Path, place: Place, what: str) -> Any:
    """What torch.save wrote there."""
    name = PurePosixPath(place.file)
    if name.is_absolute() or ".." in name.parts:
        raise SourceError(f"{folder} has {what} in {place.file}, which is not in the folder: not read")
    path = folder / place.file
    try:
        with path.open("rb") as file:
            file.seek(place.start)
            payload = file.read(place.length)
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error}") from error
    if len(payload) != place.length:
        raise SourceError(f"{path} ends before {what}: it was cut off, or has another size than when it was written")
    return load_torch_bytes(payload, f"{what} in {path}")


def stored_lazily(
    folder: Path, key: str, shape: Iterable[int], dtype: torch.dtype, chunks: Iterable[tuple[Any, Any, Place]]
) -> Lazy:
    """`chunks`: where each begins in the tensor, its sizes, and where it is in the files."""
    whole, rows = tuple(shape), [(tuple(offsets), tuple(sizes), place) for offsets, sizes, place in chunks]
    covered = sum(torch.Size(sizes).numel() for _, sizes, _ in rows)
    if covered != torch.Size(whole).numel():
        raise SourceError(
            f"{folder}: of the {torch.Size(whole).numel():,} elements of {key} {covered:,} are stored: incomplete"
        )

    def blocks() -> Any:
        for offsets, sizes, place in rows:
            block = read_place(folder, place, key)
            if not isinstance(block, torch.Tensor) or tuple(block.shape) != sizes or block.dtype is not dtype:
                raise SourceError(f"{folder / place.file} has something else where {key} should be")
            yield offsets, block

    return Lazy(whole, dtype, blocks)
