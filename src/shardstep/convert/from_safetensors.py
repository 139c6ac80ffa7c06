"""Read weights from safetensors: one file, or a folder with an index. Files are memory-mapped, and read when needed."""

from __future__ import annotations

import json
import math
import mmap
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.contents import STATE
from shardstep.convert.source import LazyTensor, Source, SourceError, lazy_tensor
from shardstep.convert.to_safetensors import DTYPES, INDEX, SUFFIX
from shardstep.state.blocks import blocks_of_whole

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
_MOST_HEADER = 100_000_000  # bytes: the limit of the safetensors package


def read(path: Path) -> Source:
    source = Source("safetensors", path)
    metadata: dict[str, str] = {}
    for file in files_of(path):
        tensors, header = read_file(file)
        twice = next((key for key in tensors if key in source.model), None)
        if twice is not None:
            raise SourceError(f"{file} has {twice}, which another file of the index has too: remove one of the files")
        source.model |= tensors
        metadata |= header
    state = [key for key in source.model if key.startswith(STATE)]
    for key in state:
        del source.model[key]
    if state:
        source.notes.append(
            f"{len(state)} tensors of an optimizer's state are left out, because its options are not in the file"
        )
    for key, first in metadata.items():
        if key not in source.model and first in source.model:
            source.model[key] = source.model[first]
            source.tied[key] = first
    return source


def files_of(path: Path) -> list[Path]:
    """Return the files that an index lists, or that are in a folder without an index."""
    if path.is_dir():
        index = path / INDEX
        if not index.is_file():
            return sorted(path.glob(f"*{SUFFIX}"))
    elif path.name.endswith(".index.json"):
        index = path
    else:
        return [path]
    try:
        names = dict.fromkeys(json.loads(index.read_text())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{index} is damaged ({type(error).__name__}: {error})") from error
    files = [index.parent / str(name) for name in names]
    for name, file in zip(names, files, strict=True):
        if Path(str(name)).name != name:
            raise SourceError(f"{index} lists {name}, which is not in its folder, and is therefore not read")
        if not file.is_file():
            raise SourceError(f"{file} is missing: {index.name} lists it")
    return files


def read_file(path: Path) -> tuple[dict[str, LazyTensor], dict[str, str]]:
    """Return the tensors and the metadata of one file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER):
            raise SourceError(f"{path} is damaged: it has a header of {length:,} bytes in a file of {size:,} bytes")
        try:
            header = json.loads(file.read(length))
            metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        except (ValueError, TypeError, AttributeError) as error:
            raise SourceError(f"{path} is damaged: its header cannot be read ({error})") from error
        # Copy on write: torch needs writable memory, and the file must not change.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return {key: _tensor(path, memory, 8 + length, key, entry) for key, entry in header.items()}, metadata


def _tensor(path: Path, memory: Any, base: int, key: str, entry: Any) -> LazyTensor:
    try:
        shape, (start, stop) = tuple(map(int, entry["shape"])), entry["data_offsets"]
        dtype = _BY_NAME[entry["dtype"]]
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"{path} is damaged: {key} is described as {entry!r}") from error
    count = math.prod(shape)
    if min(shape, default=0) < 0 or start < 0 or stop - start != count * dtype.itemsize or base + stop > len(memory):
        raise SourceError(f"{path} is damaged: {key} has {count:,} elements, and bytes {start:,} to {stop:,}")
    if not count:
        return lazy_tensor(torch.empty(shape, dtype=dtype))
    if (base + start) % dtype.itemsize:  # unaligned tensors are valid in the format, but torch cannot view them
        return LazyTensor(
            shape,
            dtype,
            lambda: blocks_of_whole(
                torch.frombuffer(bytearray(memory[base + start : base + stop]), dtype=dtype).view(shape)
            ),
        )
    return lazy_tensor(torch.frombuffer(memory, dtype=dtype, count=count, offset=base + start).view(shape))
