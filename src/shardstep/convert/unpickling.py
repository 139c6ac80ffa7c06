"""Pickles of others. A pickle can run code when it is read; what is read here can make tensors and plain values only.

torch files: torch.load with weights_only=True, which has a list of its own. `.metadata` of torch.distributed.checkpoint
is a bare pickle, which torch itself reads with all that a pickle can do: here by an unpickler that finds the classes of
that description, and nothing else. Whatever asks for more is refused by its name, and was not run.
"""

from __future__ import annotations

import io
import pickle  # the unpickler is restricted, see find_class
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from shardstep.convert.source import SourceError

_DCP = "torch.distributed.checkpoint."
_DESCRIPTION = {
    *(
        (_DCP + "metadata", name)
        for name in (
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
        )
    ),
    (_DCP + "filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}  # fmt: skip
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}


class _Description(pickle.Unpickler):
    """Of the files of a DCP folder."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _text_of_path  # where it was written; nobody asks for it
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) in _DESCRIPTION:
            return super().find_class(module, name)
        raise SourceError(f"asks for {module}.{name}, which a description of tensors does not need")


def _text_of_path(*parts: str) -> str:
    return "/".join(parts)


def read_description(path: Path) -> Metadata:
    """The `.metadata` of a DCP folder."""
    try:
        found = _Description(io.BytesIO(path.read_bytes())).load()
    except SourceError as error:
        raise SourceError(f"{path} {error}: not read") from None
    except Exception as error:  # whatever damage makes of a pickle
        raise SourceError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata):
        raise SourceError(f"{path} holds a {type(found).__name__} and no description of tensors")
    return found


def load_torch_file(path: Path, allowed: Iterable[tuple[Any, str]] = ()) -> Any:
    """A file of torch.save; its tensors are mapped and take no memory until they are read. `allowed`: harmless classes,
    and the names for which they stand."""
    with torch.serialization.safe_globals(list(allowed)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
        except Exception as error:
            raise SourceError(f"{path} {_reason(error)}") from error


def is_zip(path: Path) -> bool:
    """As torch has written them since 1.6; only these can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def load_torch_bytes(payload: bytes, what: str) -> Any:
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise SourceError(f"{what} {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error)
    asked = re.search(r"(?:GLOBAL|global:?|class|function) ([A-Za-z_][\w]*(?:\.[\w]+)+)", text)
    if isinstance(error, pickle.UnpicklingError) and asked:
        return f"asks for {asked[1]}, which could run code: not read. Save tensors and plain values only"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"cannot be read: {type(error).__name__}: {first[:200]}"
