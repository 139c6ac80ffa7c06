"""Read pickles of other programs safely: a pickle can run code, and here it can only make tensors and plain values.

Files of torch.save are read by torch.load with weights_only=True. `.metadata` of torch.distributed.checkpoint is a
pickle that torch reads without any restriction; here an unpickler reads it that knows only the classes of such a
description. A pickle that refers to anything else is refused by an error that names it, and none of its code is run.
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
    """Unpickles the `.metadata` of a DCP folder."""

    def find_class(self, module: str, name: str) -> Any:
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _text_of_path  # the path to which it was written, which is not used
        found = getattr(torch, name, None) if module == "torch" and "." not in name else None
        if isinstance(found, torch.dtype):
            return found
        if (module, name) in _DESCRIPTION:
            return super().find_class(module, name)
        raise SourceError(f"asks for {module}.{name}, which a description of tensors does not need")


def _text_of_path(*parts: str) -> str:
    return "/".join(parts)


def read_description(path: Path) -> Metadata:
    """Return the `.metadata` of a DCP folder."""
    try:
        found = _Description(io.BytesIO(path.read_bytes())).load()
    except SourceError as error:
        raise SourceError(f"{path} {error}: it is not read") from None
    except Exception as error:  # a damaged pickle can raise anything
        raise SourceError(f"{path} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata):
        raise SourceError(f"{path} contains a {type(found).__name__} and no description of tensors")
    return found


def load_torch_file(path: Path, allowed: Iterable[tuple[Any, str]] = ()) -> Any:
    """Return what is in a file of torch.save; tensors are mapped, and take no memory until they are read.

    `allowed` are harmless classes, with the names of the classes whose place they take.
    """
    with torch.serialization.safe_globals(list(allowed)):
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip(path))
        except Exception as error:
            raise SourceError(f"{path} {_reason(error)}") from error


def is_zip(path: Path) -> bool:
    """Whether a file has the zip format that torch has written since 1.6; only that can be mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def load_torch_bytes(payload: bytes, what: str) -> Any:
    """Return what torch.save wrote into `payload`; `what` describes it in errors."""
    try:
        return torch.load(io.BytesIO(payload), map_location="cpu", weights_only=True)
    except Exception as error:
        raise SourceError(f"{what} {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error)
    asked = re.search(r"(?:GLOBAL|global:?|class|function) ([A-Za-z_][\w]*(?:\.[\w]+)+)", text)
    if isinstance(error, pickle.UnpicklingError) and asked:
        return f"asks for {asked[1]}, which could run code, and is not read: save tensors and plain values only"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return f"cannot be read: {type(error).__name__}: {first[:200]}"
