"""The JSON files of a checkpoint: contents.json describes its tensors, manifest.json lists its files.

Reading them cannot run code. torch's own `.metadata`, a pickle, is written too, for torch's readers; shardstep never
reads it.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

FORMAT, VERSION = "shardstep checkpoint", 1
MANIFEST, CONTENTS, METADATA = "manifest.json", "contents.json", ".metadata"


@dataclass(frozen=True, slots=True)
class Chunk:
    """A block of a tensor, and where its bytes are in a file; torch.save has written them."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, and the blocks in which it is stored."""

    shape: tuple[int, ...]
    dtype: str  # as torch prints it, without "torch."
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of the optimizer."""

    shape: tuple[int, ...]
    dtype: str
    state: tuple[str, ...] = ()  # the names of its state's tensors
    values: str = ""  # its state that is not a tensor, encoded by state/serialization.py


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint contains. `groups` and `extra` are encoded by state/serialization.py, and their tensors are
    among `tensors`."""

    world_size: int  # the number of ranks that wrote it; only `extra_of_ranks` depends on it
    parameters: Mapping[str, Parameter]
    groups: str
    tensors: Mapping[str, StoredTensor]
    model: tuple[str, ...]  # the keys of the model's state_dict that are stored
    extra: str
    extra_of_ranks: tuple[str, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Contents:
        raw: dict[str, Any] = json.loads(text)
        return cls(
            world_size=int(raw["world_size"]),
            parameters={name: _parameter(one) for name, one in raw["parameters"].items()},
            groups=str(raw["groups"]),
            tensors={key: stored_tensor(one) for key, one in raw["tensors"].items()},
            model=_texts(raw["model"]),
            extra=str(raw["extra"]),
            extra_of_ranks=_texts(raw["extra_of_ranks"]),
        )


def _parameter(raw: dict[str, Any]) -> Parameter:
    return Parameter(_numbers(raw["shape"]), str(raw["dtype"]), _texts(raw["state"]), str(raw["values"]))


def stored_tensor(raw: dict[str, Any]) -> StoredTensor:
    chunks = tuple(
        Chunk(_numbers(one["offsets"]), _numbers(one["sizes"]), str(one["file"]), int(one["start"]), int(one["length"]))
        for one in raw["chunks"]
    )
    return StoredTensor(_numbers(raw["shape"]), str(raw["dtype"]), chunks)


def _texts(raw: Any) -> tuple[str, ...]:
    return tuple(str(one) for one in raw)


def _numbers(raw: Any) -> tuple[int, ...]:
    return tuple(int(one) for one in raw)


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """Size and checksum of a file."""

    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """The list of a checkpoint's files. It is written last: a folder without one is not a checkpoint."""

    sequence: int  # higher than that of every checkpoint that was in the same folder
    saved: str  # the time in UTC
    writer: Mapping[str, str]  # versions of the programs that wrote it
    files: Mapping[str, WrittenFile]
    version: int = VERSION
    format: str = field(default=FORMAT)

    def to_json(self) -> str:
        text = json.dumps(asdict(self), indent=1)
        return json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}, indent=1)


def is_ours(folder: Path) -> bool:
    """Whether `save` wrote the folder's manifest.json, damaged or not: other programs write files of that name too.

    Raises OSError if there is none, or if it cannot be read.
    """
    payload = (folder / MANIFEST).read_bytes()
    if FORMAT.encode() in payload:
        return True
    beside = (folder / CONTENTS).is_file() and (folder / METADATA).is_file()
    return beside and not _is_of_another_program(payload)


def _is_of_another_program(payload: bytes) -> bool:
    """Whether it is an intact manifest of another kind. A damaged one of ours is not JSON, or its checksum is wrong."""
    try:
        outer = json.loads(payload)
        return bool(zlib.crc32(outer["manifest"].encode()) == outer["crc32"])
    except (KeyError, TypeError, AttributeError):
        return True
    except (ValueError, RecursionError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """Return a checkpoint's manifest; raise ValueError that names the file if it is damaged or of a later version."""
    path = folder / MANIFEST
    with _raise_as_damaged(path):
        outer = json.loads(path.read_bytes())
        text = outer["manifest"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise ValueError("its checksum does not match its text")
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise ValueError(f"its format is {raw['format']!r} and not {FORMAT!r}")
        version = int(raw["version"])
    if version != VERSION:
        raise ValueError(
            f"{path} has version {version} of the format, and this shardstep reads version {VERSION}: read it with the "
            "shardstep that wrote it, or a later one"
        )
    with _raise_as_damaged(path):
        files = {
            _check_name(name): WrittenFile(int(one["nbytes"]), int(one["crc32"])) for name, one in raw["files"].items()
        }
        if CONTENTS not in files:
            raise ValueError(f"it does not list {CONTENTS}")
        return Manifest(int(raw["sequence"]), str(raw["saved"]), dict(raw["writer"]), files)


def read_contents(folder: Path, manifest: Manifest) -> Contents:
    """Return a checkpoint's contents; raise ValueError that names the file if `save` cannot have written it."""
    path = folder / CONTENTS
    with _raise_as_damaged(path):
        contents = Contents.from_json(path.read_text())
        for problem in contents_problems(contents, manifest.files):
            raise ValueError(problem)
    return contents


@contextmanager
def _raise_as_damaged(path: Path) -> Iterator[None]:
    """Turn errors of reading a damaged file into a ValueError that names the file."""
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged ({what}): this checkpoint cannot be read") from error


def _check_name(name: str) -> str:
    """Return the name of a file in the folder itself; a path would lead readers to another folder."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError(f"it lists {name!r}, which is not the name of a file in this folder")
    return name


def contents_problems(contents: Contents, files: Mapping[str, WrittenFile]) -> Iterator[str]:
    """Yield what would make a reader fail, or read wrong values."""
    for key, tensor in contents.tensors.items():
        yield from _tensor_problems(key, tensor, files)
    named = [f"model.{key}" for key in contents.model]
    named += [f"optim.state.{name}.{key}" for name, one in contents.parameters.items() for key in one.state]
    yield from (f"it has no tensor {key}" for key in named if key not in contents.tensors)
    if len(contents.extra_of_ranks) != contents.world_size:
        yield f"{contents.world_size} ranks wrote it, and it has extra_of_rank of {len(contents.extra_of_ranks)} ranks"


def _tensor_problems(key: str, tensor: StoredTensor, files: Mapping[str, WrittenFile]) -> Iterator[str]:
    stored = 0
    for chunk in tensor.chunks:
        if chunk.file not in files:
            yield f"{key} refers to {chunk.file!r}, which is not a file of this checkpoint"
            return
        if not 0 <= chunk.start <= chunk.start + chunk.length <= files[chunk.file].nbytes:
            yield f"{key} refers to bytes behind the end of {chunk.file}"
        spans = zip_longest(chunk.offsets, chunk.sizes, tensor.shape, fillvalue=-1)
        if not all(0 <= offset <= offset + size <= most for offset, size, most in spans):
            yield f"a block of {key} is outside of its shape {tensor.shape}"
        stored += math.prod(chunk.sizes)
    if stored != math.prod(tensor.shape):
        yield f"{key} has {math.prod(tensor.shape):,} elements, of which {stored:,} are stored"
