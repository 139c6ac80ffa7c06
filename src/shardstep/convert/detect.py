"""Detect the format of a path from names and first bytes. Nothing is unpickled, and torch is not imported."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

from shardstep.checkpoint.folder import find_checkpoints, is_checkpoint
from shardstep.checkpoint.manifest import CONTENTS, MANIFEST, METADATA


class Kind(Enum):
    """The formats that can be read."""

    SHARDSTEP = "a checkpoint of shardstep"
    RUN = "a folder of checkpoints of shardstep"
    DCP = "a folder of torch.distributed.checkpoint"
    DEEPSPEED = "a checkpoint of DeepSpeed"
    TORCH = "a file of torch.save"
    SAFETENSORS = "safetensors"

    @property
    def remedy(self) -> str:
        """The command that makes a checkpoint of shardstep from it."""
        if self is Kind.SAFETENSORS:
            return "`shardstep convert {path} DST --to dcp` makes a checkpoint of its weights"
        return "`shardstep convert {path} DST --to dcp` makes a checkpoint of it that shardstep.load reads"


_OUR_FILES = (MANIFEST, CONTENTS, METADATA)
_DEEPSPEED_FILES = ("mp_rank_*_model_states.pt", "zero_pp_rank_*_states.pt", "*_optim_states.pt")


def detect_kind(path: Path) -> Kind:
    """Return the format of a file or folder.

    Raises FileNotFoundError if it does not exist, ValueError if its format is unknown, and RuntimeError if it is an
    incomplete checkpoint.
    """
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        if find_checkpoints(path)[0]:  # a save was killed while it replaced this checkpoint
            return Kind.SHARDSTEP
        raise FileNotFoundError(f"there is nothing at {path}")
    if is_checkpoint(path.parent) and (path.name in _OUR_FILES or path.suffix == ".distcp"):
        raise ValueError(f"{path} is one file of a checkpoint of shardstep: give its folder, {path.parent}")
    with path.open("rb") as file:
        start = file.read(16)
    if start[:4] == b"PK\x03\x04" or start[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04"):
        return Kind.TORCH
    if len(start) > 8 and start[8:9] == b"{" and int.from_bytes(start[:8], "little") < path.stat().st_size:
        return Kind.SAFETENSORS
    if path.suffix == ".safetensors" or path.name.endswith(".safetensors.index.json"):
        return Kind.SAFETENSORS
    raise ValueError(
        f"{path} is neither a file of torch.save nor of safetensors: it begins with {start[:8]!r}. "
        "Give a checkpoint's folder, a folder of checkpoints, or a file of one of these formats"
    )


def _folder(path: Path) -> Kind:
    if is_checkpoint(path):
        return Kind.SHARDSTEP
    if (path / CONTENTS).is_file():
        raise RuntimeError(
            f"{path} is an incomplete checkpoint of shardstep: it has no {MANIFEST}, which is written last. Use "
            "another checkpoint"
        )
    if (path / ".metadata").is_file():
        return Kind.DCP
    if _is_deepspeed(path):
        return Kind.DEEPSPEED
    if any(is_checkpoint(one) for one in path.iterdir() if one.is_dir()):
        return Kind.RUN
    if any(path.glob("*.safetensors")) or any(path.glob("*.safetensors.index.json")):
        return Kind.SAFETENSORS
    files = sorted(one.name for one in path.iterdir())[:6]
    raise ValueError(f"{path} is not a checkpoint of a known format; it contains {', '.join(files) or 'no files'}")


def _is_deepspeed(path: Path) -> bool:
    places = [path]
    latest = path / "latest"
    if latest.is_file():
        places += [one for one in path.iterdir() if one.is_dir()]
    return any(any(place.glob(pattern)) for place in places for pattern in _DEEPSPEED_FILES)


def read_names(file: Path) -> list[str]:
    """Return the names of parameters in a file that the user has written: a JSON list, or one name per line."""
    text = file.read_text()
    if text.lstrip().startswith("["):
        try:
            names = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{file} begins like a JSON list, but is not valid JSON: {error}") from error
        if not all(isinstance(name, str) for name in names):
            raise ValueError(f"{file} must be a JSON list of strings, the names of parameters")
        return list(names)
    return [line.strip() for line in text.splitlines() if line.strip()]
