"""Folders: a checkpoint that is being written, the moment in which it becomes one, and the older ones beside it.

[Note: commit] Files are written into a folder with a name of its own, and made durable. Then the manifest, which names
all of them; then the folder gets its name, by one rename. Whoever is killed leaves a folder that nobody takes for a
checkpoint. One of the same name is put aside before, and is found there until the new one has the name.
"""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardstep.checkpoint.manifest import MANIFEST, Manifest, read_manifest

_PARTIAL, _ASIDE = ".partial-", ".replaced-"
_BLOCK = 1 << 22


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint with a manifest that can be read."""

    path: Path
    manifest: Manifest


def partial_of(path: Path, token: str) -> Path:
    return path.parent / f".{path.name}{_PARTIAL}{token}"


def begin(path: Path, token: str, *, sweep: bool) -> Path:
    """An empty folder to write to. What earlier attempts left is removed: of this name, or with `sweep` of any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not (path / MANIFEST).is_file() and any(path.iterdir()):
        raise ValueError(
            f"{path} is a folder of something else: give a checkpoint a name of its own, {path / 'step-1'}"
        )
    for left in path.parent.glob(f".*{_PARTIAL}*" if sweep else f".{path.name}{_PARTIAL}*"):
        shutil.rmtree(left, ignore_errors=True)
    made = partial_of(path, token)
    made.mkdir()
    return made


def commit(partial: Path, path: Path, token: str) -> None:
    """Everything is written: give it its name."""
    sync_folder(partial)
    aside = path.parent / f".{path.name}{_ASIDE}{token}"
    if path.exists():
        path.rename(aside)
    partial.rename(path)
    sync_folder(path.parent)
    for old in path.parent.glob(f".{path.name}{_ASIDE}*"):
        shutil.rmtree(old, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Names are durable when their folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, text: str) -> bytes:
    payload = text.encode()
    with path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    return payload


# -- those that are there ----------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file()


def checkpoints_in(folder: Path) -> tuple[list[Found], list[str]]:
    """The newest first; and what is wrong with folders whose manifest cannot be read."""
    found, problems = [], []
    for path in _candidates(folder):
        try:
            found.append(Found(path, read_manifest(path)))
        except (ValueError, OSError) as error:
            problems.append(str(error))
    return sorted(found, key=lambda one: one.manifest.sequence, reverse=True), problems


def _candidates(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if _PARTIAL not in path.name and path.is_dir() and is_checkpoint(path):
            yield path


def find(path: Path) -> tuple[list[Found], list[str]]:
    """What `path` may mean, the best first: a checkpoint, one that was put aside for it, or a folder of them."""
    if is_checkpoint(path):
        return [Found(path, read_manifest(path))], []
    if path.is_dir():
        return checkpoints_in(path)
    aside = [Found(old, read_manifest(old)) for old in path.parent.glob(f".{path.name}{_ASIDE}*") if is_checkpoint(old)]
    return sorted(aside, key=lambda one: one.manifest.sequence, reverse=True), []


def next_sequence(folder: Path) -> int:
    return 1 + max((one.manifest.sequence for one in checkpoints_in(folder)[0]), default=0)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`. What cannot be removed stays, and what is damaged counts for nothing."""
    whole = [one for one in checkpoints_in(folder)[0] if not any(size_problems(one))]
    for old in whole[keep:]:
        # First it ceases to be a checkpoint, so that one of which files are missing is never taken for one.
        (old.path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(old.path, ignore_errors=True)


# -- whether they are whole --------------------------------------------------------------------------------------------


def size_problems(found: Found) -> Iterator[str]:
    """Of files that are missing or have another size than they were written with."""
    for name, written in found.manifest.files.items():
        path = found.path / name
        try:
            size = path.stat().st_size
        except OSError:
            yield f"{path} is missing"
            continue
        if size != written.nbytes:
            yield f"{path} has {size:,} bytes and was written with {written.nbytes:,}"


def checksum_problems(
    found: Found, names: Iterable[str], told: Callable[[int], None] = lambda nbytes: None
) -> Iterator[str]:
    """Of these files; all of their bytes are read, and `told` gets how many were."""
    for name in names:
        path = found.path / name
        crc = 0
        with path.open("rb") as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
                told(len(block))
        if crc != found.manifest.files[name].crc32:
            yield f"{path} is damaged: its checksum is not the one it was written with"
