"""The last of what is written: what is in a checkpoint, and which files it is."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path

import torch

import shardstep
from shardstep.checkpoint.folder import write_durably
from shardstep.checkpoint.manifest import CONTENTS, MANIFEST, METADATA, Contents, Manifest, WrittenFile


def seal(
    partial: Path,
    contents: Contents,
    files: Mapping[str, WrittenFile],
    metadata: bytes,
    sequence: int,
    **writer: str,
) -> None:
    """contents.json, torch's `.metadata`, and the manifest last: with it the folder is a checkpoint. `writer`: what
    more it says of who wrote it."""
    text = write_durably(partial / CONTENTS, contents.to_json())
    write_durably(partial / METADATA, metadata)
    named = {**files, CONTENTS: _written(text), METADATA: _written(metadata)}
    who = {"shardstep": shardstep.__version__, "torch": torch.__version__, "ranks": str(contents.world_size), **writer}
    saved = datetime.now(timezone.utc).isoformat(timespec="seconds")
    write_durably(partial / MANIFEST, Manifest(sequence, saved, who, named).to_json())


def _written(payload: bytes) -> WrittenFile:
    return WrittenFile(len(payload), zlib.crc32(payload))
