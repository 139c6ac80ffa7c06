"""Folders: a checkpoint that is being written, the moment in which it becomes one, and the older ones beside it.

[Note: commit] Files are written into a folder with a name of its own, and made durable. Then the manifest, which names
all of them; then the folder gets its name, by one rename. Whoever is killed leaves a folder that nobody takes for a
checkpoint. One of the same name is put aside before, and is found there until the new one has the name. What is
removed gets a name of its own first, by one rename as well: no checkpoint ever has only some of its files. Nothing is
replaced or removed that has anything else in it, such as a user's notes, and nothing is saved inside a checkpoint.

    .step-1.partial-<token>    being written, or left by one who was killed
    .step-1.replaced-<token>   a whole checkpoint, as long as there is no step-1
    .step-1.removed-<token>    on its way out
    .step-1.converted-<token>  being written by `shardstep convert`; no save sweeps it away

[Note: who still writes] Whoever writes holds a lock on its folder, which the system takes back when it dies, in any
way. So the next save, under any name, removes what the dead left and nothing that is being written beside it. Where
the file system has no locks, what nobody has written to for an hour is taken for left.
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

MISSING = (FileNotFoundError, NotADirectoryError)  # other errors of files, a mount that is gone, may pass

_BLOCK = 1 << 22
_LEFT_SECONDS = 3600
_PARTIAL, _ASIDE, _REMOVED, _CONVERTED = "partial", "replaced", "removed", "converted"
_FILES = re.compile(
    rf"__\w+\.distcp|{re.escape(MANIFEST)}|{re.escape(CONTENTS)}|{re.escape(METADATA)}"
)  # of a checkpoint
_OURS = re.compile(r"\.(?P<name>.+)\.(?P<use>partial|replaced|removed|converted)-[0-9a-f]{8}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint with a manifest that can be read."""

    path: Path
    manifest: Manifest


def absolute(path: str | Path) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"the path of a checkpoint is a text or a Path, the same on every rank, and not {path!r}")
    return Path(path).absolute()


def partial_of(path: Path, token: str) -> Path:
    return _named(path, _PARTIAL, token)


def converted_of(path: Path, token: str) -> Path:
    return _named(path, _CONVERTED, token)


def _named(path: Path, use: str, token: str) -> Path:
    return path.parent / f".{path.name}.{use}-{token}"


def _ours(folder: Path, *uses: str) -> Iterator[tuple[Path, Path]]:
    """Folders of these uses, each with the path for which it was made."""
    for path in sorted(folder.iterdir()):
        match = _OURS.fullmatch(path.name)
        if match is not None and match["use"] in uses:
            yield path, folder / match["name"]


# -- one that is being written -----------------------------------------------------------------------------------------


class Begun:
    """An empty folder to write to, and the lock that says so ([Note: who still writes])."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = partial_of(path, token)
        self.path.mkdir()
        self._lock: int | None = _locked(self.path)

    def end(self, *, remove: bool) -> None:
        if remove:
            shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def begin(path: Path, token: str) -> Begun:
    """A folder to write to. What those who were killed left beside it is removed."""
    _check_replaceable(path)
    make_folder(path.parent)
    lock = _locked(path.parent)  # or another job, which begins just now, might sweep before we hold our own
    try:
        _sweep(path.parent)
        return Begun(path, token)
    finally:
        os.close(lock)


def _check_replaceable(path: Path) -> None:
    """Raise if a checkpoint may not have this name."""
    check_not_inside(path)
    if path.is_symlink() and not path.exists():
        raise ValueError(f"{path} is a link that leads nowhere: remove it, or give the checkpoint another name")
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(
            f"{path} is a file, and a checkpoint is a folder: give it a name of its own, or remove the file"
        )
    if not is_checkpoint(path):
        if any(path.iterdir()):
            raise ValueError(
                f"{path} is a folder of something else: give a checkpoint a name of its own, {path / 'step-1'}"
            )
    elif not path.is_symlink() and (others := other_files(path)):  # of a link the checkpoint it leads to stays
        more = f" and {len(others) - 4} more" if len(others) > 4 else ""
        raise ValueError(
            f"{path} is a checkpoint and has other files in it, which would be lost when it is replaced: "
            f"{', '.join(others[:4])}{more}. Move them elsewhere, or give this checkpoint another name"
        )


def check_not_inside(path: Path) -> None:
    """Raise if `path` lies inside a checkpoint, or in what is no folder."""
    for folder in path.parents:
        if folder.is_dir():
            break
        if folder.exists() or folder.is_symlink():
            kind = "a file" if folder.exists() else "a link that leads nowhere"
            raise ValueError(f"{folder} is {kind}, so nothing can be written to {path}: give another path")
    real = path.parent.resolve()
    for folder in (real, *real.parents):
        try:
            is_inside = is_checkpoint(folder)
        except OSError:  # a file above that this user may not read
            continue
        if is_inside:
            raise ValueError(
                f"{path} lies inside the checkpoint {folder}, and would be lost when that is replaced or removed: save "
                f"it beside that, for example as {folder.parent / f'{folder.name}-{path.name}'}"
            )


def other_files(checkpoint: Path) -> list[str]:
    """Return the names in a checkpoint's folder that the manifest does not list; if it is damaged, names tell them."""
    names = sorted(one.name for one in checkpoint.iterdir())
    try:
        own = {MANIFEST, *read_manifest(checkpoint).files}
    except ValueError:
        own = {name for name in names if _FILES.fullmatch(name)}
    return [name for name in names if name not in own]


def _locked(folder: Path) -> int:
    """A handle that holds a lock on a folder until it is closed."""
    handle = os.open(folder, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def make_folder(folder: Path) -> None:
    """With those above it, and durable: a checkpoint in a folder that is lost is lost."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def _sweep(folder: Path) -> None:
    for left, _ in _ours(folder, _PARTIAL):
        if not _is_being_written(left):
            shutil.rmtree(left, ignore_errors=True)
    for left, name in _ours(folder, _ASIDE):
        if is_checkpoint(name):
            remove(left, name)
    for left, _ in _ours(folder, _REMOVED):
        _delete(left)


def _is_being_written(partial: Path) -> bool:
    try:
        handle = os.open(partial, os.O_RDONLY)
    except OSError:
        return False  # it is gone
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
    """Everything is written: give it its name."""
    sync(partial)
    _check_replaceable(path)  # again: writing takes a while
    aside = _named(path, _ASIDE, token)
    if path.exists():
        path.rename(aside)
    try:
        partial.rename(path)
    except BaseException:
        if aside.exists():
            aside.rename(path)
        raise
    sync(path.parent)
    for old, name in _ours(path.parent, _ASIDE):
        if name == path:
            remove(old, path)


def sync(path: Path) -> None:
    """Make a file durable, or the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_durably(path: Path, content: str | bytes) -> bytes:
    payload = content.encode() if isinstance(content, str) else content
    with naming(path), path.open("wb") as file:
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())
    return payload


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An error of writing to a file that is open, such as a full disk, does not say which file; this one does."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        if error.errno is None:
            raise OSError(f"{path}: {error}") from error
        raise type(error)(error.errno, error.strerror, str(path)) from error


# -- those that are there ----------------------------------------------------------------------------------------------


def is_checkpoint(path: Path) -> bool:
    """Written by us, whole or damaged. OSError if it has a manifest that cannot be read."""
    try:
        return is_ours(path)
    except (*MISSING, IsADirectoryError):
        return False


def checkpoints_in(folder: Path) -> tuple[list[Found], list[str]]:
    """The newest first; and what is wrong with those whose manifest is damaged. OSError if one cannot be read."""
    found, errors = _listed(folder)
    for error in errors:
        if isinstance(error, OSError) and not isinstance(error, MISSING):
            raise error
    return found, [str(error) for error in errors]


def _listed(folder: Path) -> tuple[list[Found], list[Exception]]:
    """The newest first; and the errors of the others."""
    found: list[Found] = []
    errors: list[Exception] = []
    for path in sorted(folder.iterdir()):
        try:
            if _is_candidate(path):
                found.append(Found(path, read_manifest(path)))
        except (ValueError, OSError) as error:
            errors.append(error)
    return _newest_first(found), errors


def _newest_first(found: list[Found]) -> list[Found]:
    """Two jobs that save to one folder may count alike; then the time decides."""
    return sorted(found, key=lambda one: (one.manifest.sequence, one.manifest.saved), reverse=True)


def _is_candidate(path: Path) -> bool:
    """A link is none: with the checkpoint it leads to, that would count twice, and might be pruned in its place."""
    if path.is_symlink() or not is_checkpoint(path):
        return False
    ours = _OURS.fullmatch(path.name)
    return ours is None or (ours["use"] == _ASIDE and not is_checkpoint(path.parent / ours["name"]))


def find(path: Path) -> tuple[list[Found], list[str]]:
    """What `path` may mean, the best first: a checkpoint, one that was put aside for it, or a folder of them."""
    if is_checkpoint(path):
        return [Found(path, read_manifest(path))], []
    if path.is_dir():
        return checkpoints_in(path)
    if not path.parent.is_dir():
        return [], []
    aside = [old for old, name in _ours(path.parent, _ASIDE) if name == path and is_checkpoint(old)]
    return _newest_first([Found(old, read_manifest(old)) for old in aside]), []


def next_sequence(folder: Path) -> int:
    return 1 + max((one.manifest.sequence for one in _listed(folder)[0]), default=0)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest `keep`. What cannot be removed stays, and what is damaged counts for nothing."""
    whole = [one for one in _listed(folder)[0] if _has_its_files(one)]
    for old in whole[keep:]:
        remove(old.path, old.path)


def _has_its_files(found: Found) -> bool:
    try:
        return not any(size_problems(found))
    except OSError:
        return False


def remove(checkpoint: Path, name: Path) -> None:
    """At once it is no checkpoint any more; then its files go. One that cannot be removed stays whole, and so does one
    with other files in it."""
    doomed = _named(name, _REMOVED, secrets.token_hex(4))
    with contextlib.suppress(OSError):
        if checkpoint.is_symlink() or not other_files(checkpoint):
            checkpoint.rename(doomed)
            _delete(doomed)


def _delete(doomed: Path) -> None:
    if doomed.is_symlink():  # one that had the name of a checkpoint: what it leads to stays
        doomed.unlink(missing_ok=True)
    else:
        shutil.rmtree(doomed, ignore_errors=True)


# -- whether they are whole --------------------------------------------------------------------------------------------


def size_problems(found: Found) -> Iterator[str]:
    """Of files that are missing or have another size than they were written with. OSError if that cannot be told."""
    for name, written in found.manifest.files.items():
        path = found.path / name
        try:
            size = path.stat().st_size
        except MISSING:
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
        with naming(path), path.open("rb") as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
                told(len(block))
        if crc != found.manifest.files[name].crc32:
            yield f"{path} is damaged: its checksum is not the one it was written with"
