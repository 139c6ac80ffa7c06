"""Write and read files in the format of torch.distributed.checkpoint (DCP), with a checksum of every file.

DCP's planning between ranks is not used, because it sends pickles. Which rank writes which block follows from our plan,
and each rank leaves a JSON text in the folder that says what it wrote.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
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

import shardstep
from shardstep.checkpoint.folder import MISSING, name_file_in_errors, write_durably
from shardstep.checkpoint.manifest import (
    CONTENTS,
    MANIFEST,
    METADATA,
    Chunk,
    Contents,
    Manifest,
    StoredTensor,
    WrittenFile,
)
from shardstep.comm.agreement import travels


@travels
class DamagedError(RuntimeError):
    """A checkpoint that has changed since it was written, or that `save` did not write. An older one may be usable."""


@dataclass(frozen=True, slots=True)
class Part:
    """A block of a tensor that this rank writes; `values` may be on any device, and be a view."""

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    values: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A request to read a block of a stored tensor into `target`."""

    key: str
    offsets: tuple[int, ...]
    target: torch.Tensor


# -- writing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredObject:
    """Where the bytes of a value are that torch.save wrote; programs that use torch.distributed.checkpoint read it."""

    file: str
    start: int
    length: int


def write_parts(
    folder: Path, rank: int, parts: Iterable[Part]
) -> tuple[dict[str, StoredTensor], dict[str, WrittenFile]]:
    """Write this rank's file and flush it to disk; return the tensors in it, and its size and checksum.

    torch's own writer would keep a copy of every block until the last is written.
    """
    if not parts:
        return {}, {}
    name = f"__{rank}_0.distcp"
    stored: dict[str, StoredTensor] = {}
    with name_file_in_errors(folder / name), (folder / name).open("wb") as file:
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
        torch.save(_to_own_storage(values), stream)  # type: ignore[arg-type]
    except RuntimeError as error:
        if stream.failure is not None:  # when the disk is full, torch raises "unexpected pos 704 vs 598"
            raise stream.failure from error
        raise


def join_chunks(one: StoredTensor | None, other: StoredTensor) -> StoredTensor:
    """Return a tensor with the blocks of both."""
    if one is None:
        return other
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        raise ValueError(
            f"ranks have different tensors of one name: {one.dtype} {one.shape}, {other.dtype} {other.shape}"
        )
    return StoredTensor(one.shape, one.dtype, (*one.chunks, *other.chunks))


def _to_own_storage(values: torch.Tensor) -> torch.Tensor:
    """Return a contiguous CPU tensor whose storage has only its elements, because torch.save writes whole storages."""
    on_cpu = values.detach().cpu().resolve_conj().resolve_neg().contiguous()
    start = on_cpu.storage_offset() * on_cpu.element_size()
    storage: Any = on_cpu.untyped_storage()[start : start + on_cpu.nbytes]
    return torch.empty(0, dtype=on_cpu.dtype, device="cpu").set_(storage, 0, on_cpu.shape, on_cpu.stride())


class _CheckedStream:
    """Writes to a file, and counts the bytes and computes their checksum."""

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
    """Write a file of values, each with torch.save, and flush it to disk."""
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
    """Return torch's `.metadata` of the files, with which torch.distributed.checkpoint reads them without shardstep.

    `paths` are the nested dict keys of flattened keys.
    """
    metadata = as_metadata(tensors)
    for key, one in (objects or {}).items():
        metadata.state_dict_metadata[key] = BytesStorageMetadata()
        metadata.storage_data[MetadataIndex(key)] = _StorageInfo(one.file, one.start, one.length)
    metadata.planner_data = None if paths is None else dict(paths)
    metadata.version = CURRENT_DCP_VERSION
    buffer = io.BytesIO()
    pickle.dump(metadata, buffer)
    return buffer.getvalue()


def write_manifest(
    partial: Path,
    contents: Contents,
    files: Mapping[str, WrittenFile],
    metadata: bytes,
    sequence: int,
    **writer: str,
) -> None:
    """Write contents.json, torch's `.metadata`, and last the manifest, which makes the folder a checkpoint.

    `writer` are further entries about the program that writes it.
    """
    text = write_durably(partial / CONTENTS, contents.to_json())
    write_durably(partial / METADATA, metadata)
    described = {CONTENTS: text, METADATA: metadata}
    listed = {**files, **{name: WrittenFile(len(one), zlib.crc32(one)) for name, one in described.items()}}
    who = {"shardstep": shardstep.__version__, "torch": torch.__version__, "ranks": str(contents.world_size), **writer}
    saved = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_durably(partial / MANIFEST, Manifest(sequence, saved, who, listed).to_json())


# -- reading -----------------------------------------------------------------------------------------------------------


def read_blocks(folder: Path, tensors: Mapping[str, StoredTensor], requests: Iterable[ReadRequest]) -> None:
    """Fill the target of every request; only one stored block at a time is in memory beside the targets.

    Raises DamagedError that names the file if a block cannot be read.
    """
    by_file: dict[str, list[ReadItem]] = {}
    planner = _Targets()
    known: dict[str, tuple[Metadata, TensorStorageMetadata]] = {}
    for request in requests:
        if request.key not in known:
            if request.key not in tensors:
                raise DamagedError(f"{folder / CONTENTS} is damaged (it does not list the tensor {request.key})")
            found = as_metadata({request.key: tensors[request.key]})
            known[request.key] = (found, found.state_dict_metadata[request.key])  # type: ignore[assignment]
        metadata, stored = known[request.key]
        items = planner.add_request(request, stored)
        if sum(math.prod(item.lengths) for item in items) != request.target.numel():
            raise DamagedError(f"{folder / CONTENTS} is damaged (only some elements of {request.key} are stored)")
        for item in items:
            by_file.setdefault(metadata.storage_data[item.storage_index].relative_path, []).append(item)
    for name, items in by_file.items():
        reader = FileSystemReader(folder)
        used = {item.storage_index.fqn for item in items}
        reader.storage_data = {k: v for key in used for k, v in known[key][0].storage_data.items()}
        try:
            reader.read_data(LoadPlan(items), planner).wait()
        except pickle.UnpicklingError as error:
            # torch's own error advises to read the file without this check, which would run its code.
            raise DamagedError(
                f"{folder / name} has an object in place of a tensor: it was changed after it was written, perhaps to "
                "run code when it is read; no code was run"
            ) from error
        except Exception as error:
            has_size = not isinstance(error, AssertionError)  # DCP asserts that a block has the size in the contents
            if has_size and (planner.is_placing or not is_damage(error)):
                raise
            raise DamagedError(f"{folder / name} cannot be read: {type(error).__name__}: {error}") from error


def is_damage(error: Exception) -> bool:
    """Whether the cause of an error is a missing or damaged file.

    Errors of this machine are not: they would affect every checkpoint, and an older one must not be loaded instead.
    """
    if isinstance(error, OSError):
        return isinstance(error, MISSING)
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return False
    return "DefaultCPUAllocator" not in str(error)  # torch raises RuntimeError for both: no memory and a damaged file


class _Targets(DefaultLoadPlanner):
    """Tells torch's reader where to copy the blocks that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self._targets: dict[MetadataIndex, torch.Tensor] = {}
        self._count = 0
        self.is_placing = False  # whether a block is being copied to its target: an error is not the file's fault then

    def add_request(self, request: ReadRequest, stored: TensorStorageMetadata) -> list[ReadItem]:
        """Return the read items of a request. Each request gets a name of its own: two may read the same block."""
        self._count += 1
        name = f"{self._count}"
        chunk = ChunkStorageMetadata(torch.Size(request.offsets), request.target.shape)
        self._targets[MetadataIndex(name, chunk.offsets)] = request.target
        made = create_read_items_for_chunk_list(request.key, stored, [chunk])
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
        """Called by torch when the block was copied to its target."""
        self.is_placing = False

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise TypeError(f"{read_item.storage_index.fqn} is a pickled object, and shardstep reads none")


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
            f"the checkpoint has tensors of {tensor.dtype!r}, which torch {torch.__version__} does not have: load it "
            "with the torch that saved it"
        )
    return found
