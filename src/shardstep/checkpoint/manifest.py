"""What a checkpoint says of itself, in JSON: what is in it (contents.json), and which files it is (manifest.json).

Nothing here can run code when it is read. torch's own `.metadata`, a pickle, is written too, for its readers; we never
read it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT, VERSION = "shardstep checkpoint", 1
MANIFEST, CONTENTS = "manifest.json", "contents.json"


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
    """All that a checkpoint holds. Texts are those of state/wire_format.py; their tensors are stored ones."""

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
            model=tuple(raw["model"]),
            extra=str(raw["extra"]),
            extra_of_ranks=tuple(raw["extra_of_ranks"]),
        )


def _parameter(raw: dict[str, Any]) -> Parameter:
    return Parameter(tuple(raw["shape"]), raw["dtype"], tuple(raw["state"]), raw["values"])


def stored_tensor(raw: dict[str, Any]) -> StoredTensor:
    chunks = tuple(
        Chunk(tuple(one["offsets"]), tuple(one["sizes"]), one["file"], one["start"], one["length"])
        for one in raw["chunks"]
    )
    return StoredTensor(tuple(raw["shape"]), raw["dtype"], chunks)


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


def read_manifest(folder: Path) -> Manifest:
    """ValueError that names the file, if it is damaged or of a later version."""
    path = folder / MANIFEST
    try:
        outer = json.loads(path.read_bytes())
        text = outer["manifest"]
        if zlib.crc32(text.encode()) != outer["crc32"]:
            raise ValueError("its checksum is not that of its text")
        raw = json.loads(text)
        version = raw["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged ({error}): this checkpoint cannot be read") from error
    if version != VERSION:
        raise ValueError(
            f"{path} is of version {version} of the format, and this is shardstep for version {VERSION}: read it with "
            "the shardstep that wrote it, or a later one"
        )
    files = {name: WrittenFile(one["nbytes"], one["crc32"]) for name, one in raw["files"].items()}
    return Manifest(raw["sequence"], raw["saved"], raw["writer"], files)


def read_contents(folder: Path) -> Contents:
    path = folder / CONTENTS
    try:
        return Contents.from_json(path.read_text())
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): this checkpoint cannot be read") from error
