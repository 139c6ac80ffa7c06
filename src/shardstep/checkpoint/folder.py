"""Folders of checkpoints: write a new one, make it complete by one rename, find older ones, remove and check them.

[Note: commit] Files are written into a folder with a temporary name and flushed to disk, the manifest, which lists all
of them, last. Then one rename gives the folder its name. A process that is killed leaves a folder that is not taken for
a checkpoint. A checkpoint of the same name is renamed before, and is found under that temporary name until the new one
has its name. A checkpoint that is removed is renamed first too, so no checkpoint ever has only some of its files.
A folder with other files in it, such as a user's notes, is not replaced or removed, and nothing is saved inside a
checkpoint.

    .step-1.partial-<token>    is being written, or was left by a process that was killed
    .step-1.replaced-<token>   is a complete checkpoint, as long as there is no step-1
    .step-1.removed-<token>    is being removed
    .step-1.converted-<token>  is being written by `shardstep convert`; a save does not remove it

[Note: locks] A process that writes holds a lock on its folder, which the system releases when the process ends, however
it ends. So the next save, under any name, removes the folders of processes that were killed, and none that is still
being written. On a file system without locks, a folder without a write for an hour counts as left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shardstep.checkpoint.manifest import CONTENTS, MANIFEST, METADATA, Manifest, is_ours, read_manifest

MISSING = (FileNotFoundError, NotADirectoryError)  # errors of a file that is missing; others may be temporary

_BLOCK = 1 << 22
_LEFT_SECONDS = 3600
PARTIAL, REPLACED, REMOVED, CONVERTED = "partial", "replaced", "removed", "converted"  # uses of temporary folders
_FILES = re.compile(  # names of the files of a checkpoint
    rf"__\w+\.distcp|{re.escape(MANIFEST)}|{re.escape(CONTENTS)}|{re.escape(METADATA)}"
)
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.(?P<use>partial|replaced|removed|converted)-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint whose manifest was read; its other files are not checked yet."""

    path: Path
    manifest: Manifest


def to_absolute(path: str | Path) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path of a checkpoint must be a str or a Path, the same on every rank, and not {path!r}")
    return Path(path).absolute()


def temporary_path(path: Path, use: str, token: str) -> Path:
    """Return the path of a temporary folder beside the checkpoint `path`; `use` is PARTIAL, REPLACED, ..."""
    return path.parent / f".{path.name}.{use}-{token}"


def _list_temporary(folder: Path, *uses: str) -> Iterator[tuple[Path, Path]]:
    """Yield the temporary folders of these uses, each with the path of the checkpoint for which it was made."""
    for path in sorted(folder.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match is not None and match["use"] in uses:
            yield path, folder / match["name"]


# -- writing a checkpoint ----------------------------------------------------------------------------------------------


class PartialFolder:
    """An empty folder to write a checkpoint to, with a lock that other processes see ([Note: locks])."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = temporary_path(path, PARTIAL, token)
        self.path.mkdir()
        self._lock: int | None = _lock(self.path)

    def close(self, *, remove: bool) -> None:
        """Release the lock, after removing the folder if `remove` says so."""
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def create_partial(path: Path, token: str) -> PartialFolder:
    """Return a folder to write checkpoint `path` to, after removing what killed processes left beside it."""
    _check_replaceable(path)
    make_folder(path.parent)
    lock = _lock(path.parent)  # else another job could remove our folder before we have locked it
    try:
        _remove_leftovers(path.parent)
        return PartialFolder(path, token)
    finally:
        os.close(lock)


def _check_replaceable(path: Path) -> None:
    """Raise ValueError if a checkpoint may not have this path."""
    check_not_inside(path)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a broken link: remove it, or give the checkpoint another name")
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(
            f"{path} is a file, and a checkpoint is a folder: give the checkpoint another name, or remove the file"
        )
    if not is_checkpoint(path):
        if any(path.iterdir()):
            raise ValueError(
                f"{path} is a folder with other files and no checkpoint: give the checkpoint a folder of its own, such "
                f"as {path / 'step-1'}"
            )
    elif not path.is_symlink() and (others := other_files(path)):  # replacing a link keeps the folder it refers to
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        raise ValueError(
            f"{path} is a checkpoint with other files in it, which would be lost when it is replaced: "
            f"{', '.join(others[:4])}{more}. Move them elsewhere, or give this checkpoint another name"
        )


def check_not_inside(path: Path) -> None:
    """Raise ValueError if `path` is inside a checkpoint, or if a folder above it is a file or a broken link."""
    for folder in path.parents:
        if folder.is_dir():
            break
        if folder.exists() or folder.is_symlink():
            kind = "a file" if folder.exists() else "a broken link"
            raise ValueError(f"{folder} is {kind}, so nothing can be written to {path}: give another path")
    real = path.parent.resolve()
    for folder in (real, *real.parents):
        try:
            is_inside = is_checkpoint(folder)
        except OSError:  # this user may not read a manifest in a folder above
            continue
        if is_inside:
            raise ValueError(
                f"{path} is inside the checkpoint {folder}, and would be lost when that one is replaced or removed: "
                f"save to a path beside it, such as {folder.parent / f'{folder.name}-{path.name}'}"
            )


def other_files(checkpoint: Path) -> list[str]:
    """Return the files in a checkpoint's folder that are not its own: the manifest lists those, or their names tell
    them if the manifest is damaged."""
    names = sorted(one.name for one in checkpoint.iterdir())
    try:
        own = {MANIFEST, *read_manifest(checkpoint).files}
    except ValueError:
        own = {name for name in names if _FILES.fullmatch(name)}
    return [name for name in names if name not in own]


def _lock(folder: Path) -> int:
    """Return a file handle that holds a lock on the folder until it is closed."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, and flush them to disk: a checkpoint would be lost with its folder."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def _remove_leftovers(folder: Path) -> None:
    """Remove the temporary folders that killed processes have left."""
    for left, _ in _list_temporary(folder, PARTIAL):
        if not _is_being_written(left):
            shutil.rmtree(left, ignore_errors=True)
    for left, name in _list_temporary(folder, REPLACED):
        if is_checkpoint(name):
            remove(left, name)
    for left, _ in _list_temporary(folder, REMOVED):
        _delete(left)


def _is_being_written(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY)
    except OSError:
        return False  # it was removed meanwhile
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return _was_written_lately(partial)
    finally:
        os.close(handle)
    return False


def _was_written_lately(partial: Path) -> bool:
    touched = [path.stat().st_mtime for path in (partial, *partial.iterdir()) if path.exists()]
    return max(touched, default=0.0) > time.time() - _LEFT_SECONDS


def commit(partial: Path, path: Path, token: str) -> None:
    """Make the folder `partial`, in which all files are written, the checkpoint `path`."""
    sync(partial)
    _check_replaceable(path)  # checked again: files may have appeared there during the writing
    replaced = temporary_path(path, REPLACED, token)
    if path.exists():
        path.rename(replaced)
    try:
        partial.rename(path)
    except BaseException:
        if replaced.exists():
            replaced.rename(path)
        raise
    sync(path.parent)
    for old, name in _list_temporary(path.parent, REPLACED):
        if name == path:
            remove(old, path)


def sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, content: str | bytes) -> bytes:
    """Write a file and flush it to disk; return the bytes that were written."""
    payload = content.encode() if isinstance(content, str) else content
    with name_file_in_errors(path), path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    return payload


@contextlib.contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Add the file's name to an OSError without one, such as that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise type(error)(error.errno, error.strerror, str(path)) from error


# -- finding and removing checkpoints ----------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Whether `save` wrote this folder, complete or damaged. Raises OSError if its manifest cannot be read."""
    try:
        return is_ours(path)
    except (*MISSING, IsADirectoryError):
        return False


def checkpoints_in(folder: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints in a folder, newest first, and the problems of those with a damaged manifest.

    Raises OSError if a manifest cannot be read.
    """
    found, errors = _list_checkpoints(folder)
    for error in errors:
        if isinstance(error, OSError) and not isinstance(error, MISSING):
            raise error
    return found, [str(error) for error in errors]


def _list_checkpoints(folder: Path) -> tuple[list[Checkpoint], list[Exception]]:
    """Return the checkpoints in a folder, newest first, and the errors of those whose manifest could not be read."""
    found: list[Checkpoint] = []
    errors: list[Exception] = []
    for path in sorted(folder.iterdir()):
        try:
            if _is_candidate(path):
                found.append(Checkpoint(path, read_manifest(path)))
        except (ValueError, OSError) as error:
            errors.append(error)
    return _newest_first(found), errors


def _newest_first(found: list[Checkpoint]) -> list[Checkpoint]:
    """Sort by sequence number, and by time where two jobs that save to one folder have used the same number."""
    return sorted(found, key=lambda one: (one.manifest.sequence, one.manifest.saved), reverse=True)


def _is_candidate(path: Path) -> bool:
    """Whether a folder counts as a checkpoint of the folder it is in.

    A link does not count: its checkpoint would count twice, and might be pruned in place of another.
    """
    if path.is_symlink() or not is_checkpoint(path):
        return False
    temporary = _TEMPORARY.fullmatch(path.name)
    if temporary is None:
        return True
    return temporary["use"] == REPLACED and not is_checkpoint(path.parent / temporary["name"])


def find_checkpoints(path: Path) -> tuple[list[Checkpoint], list[str]]:
    """Return the checkpoints that `path` may refer to, newest first, and problems as `checkpoints_in` does.

    These are `path` itself; the checkpoint that was being replaced at `path`; or all in the folder `path`.
    """
    if is_checkpoint(path):
        return [Checkpoint(path, read_manifest(path))], []
    if path.is_dir():
        return checkpoints_in(path)
    if not path.parent.is_dir():
        return [], []
    replaced = [old for old, name in _list_temporary(path.parent, REPLACED) if name == path and is_checkpoint(old)]
    return _newest_first([Checkpoint(old, read_manifest(old)) for old in replaced]), []


def next_sequence(folder: Path) -> int:
    """Return a sequence number that is higher than those of all checkpoints in the folder."""
    return 1 + max((one.manifest.sequence for one in _list_checkpoints(folder)[0]), default=0)


def prune(folder: Path, keep: int) -> None:
    """Remove all complete checkpoints but the newest `keep`; damaged ones, and those that cannot be removed, stay."""
    complete = [one for one in _list_checkpoints(folder)[0] if _is_complete(one)]
    for old in complete[keep:]:
        remove(old.path, old.path)


def _is_complete(checkpoint: Checkpoint) -> bool:
    try:
        return not any(size_problems(checkpoint))
    except OSError:
        return False


def remove(checkpoint: Path, name: Path) -> None:
    """Rename a checkpoint, so that it is none any more, and then delete its files.

    A checkpoint that cannot be renamed, or that has other files in it, stays complete.
    """
    renamed = temporary_path(name, REMOVED, secrets.token_hex(4))
    with contextlib.suppress(OSError):
        if checkpoint.is_symlink() or not other_files(checkpoint):
            checkpoint.rename(renamed)
            _delete(renamed)


def _delete(folder: Path) -> None:
    if folder.is_symlink():  # the folder it refers to stays
        folder.unlink(missing_ok=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


# -- checking files ----------------------------------------------------------------------------------------------------


def size_problems(checkpoint: Checkpoint) -> Iterator[str]:
    """Yield the files that are missing or do not have the size with which they were written.

    Raises OSError if a size cannot be read.
    """
    for name, written in checkpoint.manifest.files.items():
        path = checkpoint.path / name
        try:
            size = path.stat().st_size
        except MISSING:
            yield f"{path} is missing"
            continue
        if size != written.nbytes:
            yield f"{path} has {size:,} bytes and was written with {written.nbytes:,}"


def checksum_problems(
    checkpoint: Checkpoint, names: Iterable[str], on_read: Callable[[int], None] = lambda nbytes: None
) -> Iterator[str]:
    """Read these files and yield those with a wrong checksum; `on_read` is called with the bytes of each block read."""
    for name in names:
        path = checkpoint.path / name
        crc = 0
        with name_file_in_errors(path), path.open("rb") as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
                on_read(len(block))
        if crc != checkpoint.manifest.files[name].crc32:
            yield f"{path} is damaged: its checksum is not the one it was written with"
