"""What a checkpoint says of itself, in JSON: what is in it (contents.json), and which files it is (manifest.json).

Nothing here can run code when it is read. torch's own `.metadata`, a pickle, is written too, for its readers; we never
read it.
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
    """A block of a tensor, and where its bytes are: a tensor as torch.save writes it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str  # as torch prints it, without "torch."
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One that the optimizer trains; `values` is what its state has beside tensors, encoded."""

    shape: tuple[int, ...]
    dtype: str
    state: tuple[str, ...] = ()  # the names of its state's tensors
    values: str = ""


@dataclass(frozen=True, slots=True)
class Contents:
    """All that a checkpoint holds. Texts are those of state/serialization.py; their tensors are stored ones."""

    world_size: int  # of those who wrote it: only what is a rank's own asks for it
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
    nbytes: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Written last: a folder without one is no checkpoint."""

    sequence: int  # higher than that of every checkpoint that was beside it
    saved: str  # when, in UTC
    writer: Mapping[str, str]  # versions
    files: Mapping[str, WrittenFile]
    version: int = VERSION
    format: str = field(default=FORMAT)

    def to_json(self) -> str:
        text = json.dumps(asdict(self), indent=1)
        return json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}, indent=1)


def is_ours(folder: Path) -> bool:
    """Whether its manifest is one of `save`'s, damaged or not: other programs have a manifest.json too. OSError if
    there is none, or it cannot be read."""
    payload = (folder / MANIFEST).read_bytes()
    if FORMAT.encode() in payload:
        return True
    beside = (folder / CONTENTS).is_file() and (folder / METADATA).is_file()
    return beside and not _says_something_else(payload)


def _says_something_else(payload: bytes) -> bool:
    """An intact manifest of another kind. One of ours that was damaged is no JSON any more, or has another checksum."""
    try:
        outer = json.loads(payload)
        return bool(zlib.crc32(outer["manifest"].encode()) == outer["crc32"])
    except (KeyError, TypeError, AttributeError):
        return True
    except (ValueError, RecursionError):
        return False


def read_manifest(folder: Path) -> Manifest:
    """ValueError that names the file, if it is damaged or of a later version."""
    path = folder / MANIFEST
    with _damaged(path):
        outer = json.loads(path.read_bytes())
        text = outer["manifest"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise ValueError("its checksum is not that of its text")
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise ValueError(f"its format is {raw['format']!r} and not {FORMAT!r}")
        version = int(raw["version"])
    if version != VERSION:
        raise ValueError(
            f"{path} is of version {version} of the format, and this is shardstep for version {VERSION}: read it with "
            "the shardstep that wrote it, or a later one"
        )
    with _damaged(path):
        files = {_plain(name): WrittenFile(int(one["nbytes"]), int(one["crc32"])) for name, one in raw["files"].items()}
        if CONTENTS not in files:
            raise ValueError(f"it does not name {CONTENTS}")
        return Manifest(int(raw["sequence"]), str(raw["saved"]), dict(raw["writer"]), files)


def read_contents(folder: Path, manifest: Manifest) -> Contents:
    """ValueError that names the file, if it cannot be what `save` wrote."""
    path = folder / CONTENTS
    with _damaged(path):
        contents = Contents.from_json(path.read_text())
        for problem in contents_problems(contents, manifest.files):
            raise ValueError(problem)
    return contents


@contextmanager
def _damaged(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"{path} is damaged ({what}): this checkpoint cannot be read") from error


def _plain(name: str) -> str:
    """The name of a file in the folder itself: with a path, a reader would be led elsewhere."""
    if name in ("", ".", "..") or any(sign in name for sign in "/\\\0"):
        raise ValueError(f"it names {name!r}, which is no file of this folder")
    return name


def contents_problems(contents: Contents, files: Mapping[str, WrittenFile]) -> Iterator[str]:
    """Whatever a reader would stumble over, or worse, take for values."""
    for key, tensor in contents.tensors.items():
        yield from _tensor_problems(key, tensor, files)
    named = [f"model.{key}" for key in contents.model]
    named += [f"optim.state.{name}.{key}" for name, one in contents.parameters.items() for key in one.state]
    yield from (f"it has no tensor {key}" for key in named if key not in contents.tensors)
    if len(contents.extra_of_ranks) != contents.world_size:
        yield f"{contents.world_size} ranks wrote it, and it has the extra of {len(contents.extra_of_ranks)}"


def _tensor_problems(key: str, tensor: StoredTensor, files: Mapping[str, WrittenFile]) -> Iterator[str]:
    stored = 0
    for chunk in tensor.chunks:
        if chunk.file not in files:
            yield f"{key} is said to be in {chunk.file!r}, which is no file of this checkpoint"
            return
        if not 0 <= chunk.start <= chunk.start + chunk.length <= files[chunk.file].nbytes:
            yield f"{key} is said to be in bytes of {chunk.file} that it has not"
        spans = zip_longest(chunk.offsets, chunk.sizes, tensor.shape, fillvalue=-1)
        if not all(0 <= offset <= offset + size <= most for offset, size, most in spans):
            yield f"a block of {key} lies outside of its shape {tensor.shape}"
        stored += math.prod(chunk.sizes)
    if stored != math.prod(tensor.shape):
        yield f"{key} has {math.prod(tensor.shape):,} elements, of which {stored:,} are stored"
