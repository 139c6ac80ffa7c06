"""Write a conversion's result under a temporary name beside its path, and rename it when it is complete."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardstep.checkpoint.folder import CONVERTED, REPLACED, check_not_inside, sync, temporary_path


@dataclass(frozen=True, slots=True)
class Target:
    """The file or folder to write, `partial`, and the path to which it is renamed."""

    path: Path
    partial: Path


def check_free(path: Path, *, force: bool) -> None:
    """Raise FileExistsError if there is something at `path` and `force` is not set."""
    check_not_inside(path)
    if (path.exists() or path.is_symlink()) and not force:
        raise FileExistsError(f"{path} exists already: give another path, or replace it with --force")


@contextmanager
def write_target(path: Path, *, force: bool) -> Iterator[Target]:
    """Rename what was written to `path` after the with block, or remove it if the block raises.

    What was at `path` before stays until then.
    """
    check_free(path, force=force)
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    target = Target(path, temporary_path(path, CONVERTED, token))
    try:
        yield target
        check_free(path, force=force)  # checked again: another program may have written there meanwhile
        _rename(target.partial, path, temporary_path(path, REPLACED, token))
    except BaseException:  # a KeyboardInterrupt too leaves no files behind
        _remove(target.partial)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _rename(partial: Path, path: Path, replaced: Path) -> None:
    """Rename `partial` to `path`; what was there is called `replaced` meanwhile, and removed in the end."""
    if partial.is_dir():
        sync(partial)
    if path.exists() or path.is_symlink():
        path.rename(replaced)
    try:
        partial.rename(path)
    except BaseException:
        if replaced.exists() or replaced.is_symlink():
            replaced.rename(path)
        raise
    sync(path.parent)
    _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
