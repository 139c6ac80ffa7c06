"""torch.distributed.checkpoint underneath: its file format and its reader; with a checksum of every file.

Its planning between ranks is not used: it sends pickles. Who holds which block follows from our plan, and what each
rank wrote, from a text that it leaves in the folder.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardstep.checkpoint.folder import MISSING, naming
from shardstep.checkpoint.manifest import CONTENTS, Chunk, StoredTensor, WrittenFile
from shardstep.comm.agreement import travels


@travels
class DamagedError(RuntimeError):
    """A checkpoint that is not what was written, or was not written by `save`. Another may do."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor that this rank writes; `values` may lie on any device, and be a view."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class Wish:
    """A block of a stored tensor, and where it is to go."""

    key: str
    offsets: tuple[int, ...]
    target: torch.Tensor


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where a value lies that torch.save wrote, for programs that read with torch.distributed.checkpoint."""

    file: str
    start: int
    length: int


def write_parts(
    folder: Path, rank: int, parts: Iterable[Part]
) -> tuple[dict[str, StoredTensor], dict[str, WrittenFile]]:
    """One file of this rank's, durable when this returns: what is in it, and its size and checksum.

    torch's own writer would keep a copy of every block until the last is written.
    """
    if not parts:
        return {}, {}
    name = f"__{rank}_0.distcp"
    stored: dict[str, StoredTensor] = {}
    with naming(folder / name), (folder / name).open("wb") as file:
        stream = _CheckedStream(file)
        for part in parts:
            start = stream.nbytes
            _save(part.values, stream)
            chunk = Chunk(part.offsets, tuple(part.values.shape), name, start, stream.nbytes - start)
            tensor = StoredTensor(part.shape, str(part.values.dtype).removeprefix("torch."), (chunk,))
            stored[part.key] = join_chunks(stored.get(part.key), tensor)
        file.flush()
        os.fsync(file.fileno())
    return stored, {name: WrittenFile(stream.nbytes, stream.crc32)}


def _save(values: torch.Tensor, stream: _CheckedStream) -> None:
    try:
        torch.save(_by_itself(values), stream)  # type: ignore[arg-type]
    except RuntimeError as error:
        if stream.failure is not None:  # of a full disk torch says "unexpected pos 704 vs 598"
            raise stream.failure from error
        raise


def join_chunks(one: StoredTensor | None, other: StoredTensor) -> StoredTensor:
    if one is None:
        return other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise ValueError(f"ranks hold parts of different tensors: {one.dtype} {one.shape}, {other.dtype} {other.shape}")
    return StoredTensor(one.shape, one.dtype, (*one.chunks, *other.chunks))


def _by_itself(values: torch.Tensor) -> torch.Tensor:
    """On the CPU, in one piece, with a storage of its own size: torch.save writes all of it."""
    near = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    start = near.storage_offset() * near.element_size()
    storage: Any = near.untyped_storage()[start : start + near.nbytes]
    return torch.empty(0, dtype=near.dtype, device="cpu").set_(storage, 0, near.shape, near.stride())


class _CheckedStream:
    """Sums up what goes through it."""

    def __init__(self, file: Any) -> None:
        self._file, self.nbytes, self.crc32 = file, 0, 0
        self.failure: OSError | None = None

    def write(self, block: Any) -> int:
        self.crc32 = zlib.crc32(block, self.crc32)
        try:
            self._file.write(block)
        except OSError as error:
            self.failure = self.failure or error
            raise
        self.nbytes += len(block)
        return len(block)

    def flush(self) -> None:
        self._file.flush()


def write_objects(folder: Path, name: str, values: Sequence[Any]) -> tuple[list[StoredObject], WrittenFile]:
    """One file of values, durable when this returns."""
    stored = []
    with (folder / name).open("wb") as file:
        stream = _CheckedStream(file)
        for value in values:
            start = stream.nbytes
            torch.save(value, stream)  # type: ignore[arg-type]
            stored.append(StoredObject(name, start, stream.nbytes - start))
        file.flush()
        os.fsync(file.fileno())
    return stored, WrittenFile(stream.nbytes, stream.crc32)


def metadata_bytes(
    tensors: Mapping[str, StoredTensor],
    objects: Mapping[str, StoredObject] | None = None,
    paths: Mapping[str, tuple[Any, ...]] | None = None,
) -> bytes:
    """torch's own description of the files, so that torch.distributed.checkpoint reads them without us. `paths`: of
    keys, how they were nested."""
    metadata = as_metadata(tensors)
    for key, one in (objects or {}).items():
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(one.file, one.start, one.length)
    metadata.planner_data = None if paths is None else dict(paths)
    metadata.version = CURRENT_DCP_VERSION
    buffer = io.BytesIO()
    pickle.dump(metadata, buffer)
    return buffer.getvalue()


# -- reading -----------------------------------------------------------------------------------------------------------


def read_wishes(folder: Path, tensors: Mapping[str, StoredTensor], wishes: Iterable[Wish]) -> None:
    """Fill every target; at most one stored block is in memory beside them. DamagedError that names the file."""
    by_file: dict[str, list[ReadItem]] = {}
    planner = _Targets()
    known: dict[str, tuple[Metadata, TensorStorageMetadata]] = {}
    for wish in wishes:
        if wish.key not in known:
            if wish.key not in tensors:
                raise DamagedError(f"{folder / CONTENTS} is damaged (it has no tensor {wish.key})")
            found = as_metadata({wish.key: tensors[wish.key]})
            known[wish.key] = (found, found.state_dict_metadata[wish.key])  # type: ignore[assignment]
        metadata, stored = known[wish.key]
        items = planner.items_for(wish, stored)
        if sum(math.prod(item.lengths) for item in items) != wish.target.numel():
            raise DamagedError(f"{folder / CONTENTS} is damaged (of {wish.key} only some elements are stored)")
        for item in items:
            by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for name, items in by_file.items():
        reader = FileSystemReader(folder)
        used = {item.storage_index.fqn for item in items}
        reader.storage_data = {k: v for key in used for k, v in known[key][0].storage_data.items()}
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except pickle.UnpicklingError as error:
            # torch's own words advise to read it all the same.
            raise DamagedError(
                f"{folder / name} has an object where a tensor was written: it was changed, perhaps to run code when "
                "it is read; none was run"
            ) from error
        except Exception as error:
            has_size = not isinstance(error, AssertionError)  # or the block is not as large as the contents say
            if has_size and (planner.is_placing or not is_of_contents(error)):
                raise
            raise DamagedError(f"{folder / name} cannot be read: {type(error).__name__}: {error}") from error


def is_of_contents(error: Exception) -> bool:
    """Whether what a file holds, or that it is missing, is the cause; and not this machine: then every other
    checkpoint would fail too, and an older one that does not is the wrong one."""
    if isinstance(error, OSError):
        return isinstance(error, MISSING)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    return "DefaultCPUAllocator" not in str(error)  # torch says it by a RuntimeError, as it does of a damaged file


class _Targets(DefaultLoadPlanner):
    """Where blocks go."""

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[MetadataIndex, torch.Tensor] = {}
        self._count = 0
        self.is_placing = False  # a block was read, and is on its way to its target: no fault of the file's

    def items_for(self, wish: Wish, stored: TensorStorageMetadata) -> list[ReadItem]:
        """Every wish under a name of its own: two may ask for the same block."""
        self._count += 1
        name = f"{self._count}"
        chunk = ChunkStorageMetadata(torch.Size(wish.offsets), wish.target.shape)
        self._targets[MetadataIndex(name, chunk.offsets)] = wish.target
        made = create_read_items_for_chunk_list(wish.key, stored, [chunk])
        return [
            ReadItem(
                item.type,
                MetadataIndex(name, item.dest_index.offset),
                item.dest_offsets,
                item.storage_index,
                item.storage_offsets,
                item.lengths,
            )
            for item in made
        ]

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[read_item.dest_index].detach()
        self.is_placing = True
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """It was copied where it belongs."""
        self.is_placing = False

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(f"{read_item.storage_index.fqn} is a pickled object, which is never read")


def as_metadata(tensors: Mapping[str, StoredTensor]) -> Metadata:
    storage = {
        MetadataIndex(key, chunk.offsets): _StorageInfo(chunk.file, chunk.start, chunk.length)
        for key, tensor in tensors.items()
        for chunk in tensor.chunks
    }
    return Metadata({key: _stored(tensor) for key, tensor in tensors.items()}, storage_data=storage)


def _stored(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [ChunkStorageMetadata(torch.Size(one.offsets), torch.Size(one.sizes)) for one in tensor.chunks]
    return TensorStorageMetadata(TensorProperties(dtype=dtype_of(tensor)), torch.Size(tensor.shape), chunks)


def dtype_of(tensor: StoredTensor) -> torch.dtype:
    found = getattr(torch, tensor.dtype, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"the checkpoint has tensors of {tensor.dtype!r}, which torch {torch.__version__} does not know"
        )
    return found
