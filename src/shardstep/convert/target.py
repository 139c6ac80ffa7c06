"""Where a conversion goes: written under a name of its own beside it, and given its name when it is whole."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardstep.checkpoint.folder import check_not_inside, converted_path, sync


@dataclass(frozen=True, slots=True)
class Target:
    """`partial` is written to, a file or a folder; `path` is its name later."""

    path: Path
    partial: Path
    token: str


def check_free(path: Path, *, force: bool) -> None:
    check_not_inside(path)
    if (path.exists() or path.is_symlink()) and not force:
        raise FileExistsError(f"{path} is there already: name another place, or replace it with --force")


@contextmanager
def writing(path: Path, *, force: bool) -> Iterator[Target]:
    """What is written is at `path` after this, or nothing is; what was there before stays until then."""
    check_free(path, force=force)
    made = [folder for folder in path.parents if not folder.exists()]
    path.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    target = Target(path, converted_path(path, token), token)
    try:
        yield target
        check_free(path, force=force)  # conversions take long: somebody else may have written there
        _take_name(target)
    except BaseException:  # an interrupt too leaves nothing behind
        _remove(target.partial)
        for folder in made:
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
        raise


def _take_name(target: Target) -> None:
    if target.partial.is_dir():
        sync(target.partial)
    aside = target.path.parent / f".{target.path.name}.replaced-{target.token}"
    if target.path.exists() or target.path.is_symlink():
        target.path.rename(aside)
    try:
        target.partial.rename(target.path)
    except BaseException:
        if aside.exists() or aside.is_symlink():
            aside.rename(target.path)
        raise
    sync(target.path.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
