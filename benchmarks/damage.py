"""Ways to damage a checkpoint, or to make it do harm. Shared by test_checkpoint_faults.py and faults.py.

Each takes a whole checkpoint and a path that appears if code in it is run, and leaves it damaged. An attacker corrects
sizes and checksums (`reseal`); a disk does not.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MANIFEST, CONTENTS, METADATA = "manifest.json", "contents.json", ".metadata"


@dataclass(frozen=True, slots=True)
class Fault:
    title: str
    make: Callable[[Path, Path], None]
    file: str  # that the error has to name; empty: there is none, because nobody reads what is wrong


def part_of(checkpoint: Path) -> Path:
    return sorted(checkpoint.glob("*.distcp"))[-1]


def file_of(checkpoint: Path, name: str) -> Path:
    return part_of(checkpoint) if name == "*.distcp" else checkpoint / name


# -- what an attacker does ---------------------------------------------------------------------------------------------


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.loads((checkpoint / MANIFEST).read_text())["manifest"])
    return found


def write_manifest(checkpoint: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest)
    (checkpoint / MANIFEST).write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}))


def reseal(checkpoint: Path) -> None:
    """All sizes and checksums as if nothing had happened."""
    manifest = read_manifest(checkpoint)
    for name in manifest["files"]:
        payload = (checkpoint / name).read_bytes()
        manifest["files"][name] = {"nbytes": len(payload), "crc32": zlib.crc32(payload)}
    write_manifest(checkpoint, manifest)


class Harm:
    """Makes a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._mark),)


def harmful_tensor(checkpoint: Path, mark: Path, payload: bytes) -> None:
    """Every block of the last part is now said to be in bytes that run code."""
    part = part_of(checkpoint)
    start = part.stat().st_size
    with part.open("ab") as file:
        file.write(payload)
    edit_contents(checkpoint, lambda chunk: chunk.update(start=start, length=len(payload)))
    reseal(checkpoint)


def edit_contents(checkpoint: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Of every block in the last part."""
    contents = json.loads((checkpoint / CONTENTS).read_text())
    for tensor in contents["tensors"].values():
        for chunk in tensor["chunks"]:
            if chunk["file"] == part_of(checkpoint).name:
                change(chunk)
    (checkpoint / CONTENTS).write_text(json.dumps(contents))
    reseal(checkpoint)


def _harm_by_torch(checkpoint: Path, mark: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Harm(mark), buffer)
    harmful_tensor(checkpoint, mark, buffer.getvalue())


def _harm_by_pickle(checkpoint: Path, mark: Path) -> None:
    harmful_tensor(checkpoint, mark, pickle.dumps(Harm(mark)))


def _harm_in_metadata(checkpoint: Path, mark: Path) -> None:
    (checkpoint / METADATA).write_bytes(pickle.dumps(Harm(mark)))
    reseal(checkpoint)


def _pickle_as_contents(checkpoint: Path, mark: Path) -> None:
    (checkpoint / CONTENTS).write_bytes(pickle.dumps(Harm(mark)))
    reseal(checkpoint)


def _lead_outside(path: str) -> Callable[[Path, Path], None]:
    def make(checkpoint: Path, mark: Path) -> None:
        (checkpoint.parent.parent / "x").write_bytes(part_of(checkpoint).read_bytes())
        edit_contents(checkpoint, lambda chunk: chunk.update(file=path))

    return make


def _list_outside(checkpoint: Path, mark: Path) -> None:
    """In both, so that they agree with each other."""
    outside = checkpoint.parent / "x"
    outside.write_bytes(part_of(checkpoint).read_bytes())
    edit_contents(checkpoint, lambda chunk: chunk.update(file="../x"))
    manifest = read_manifest(checkpoint)
    manifest["files"]["../x"] = manifest["files"][part_of(checkpoint).name]
    write_manifest(checkpoint, manifest)


def _drop_a_block(checkpoint: Path, mark: Path) -> None:
    contents = json.loads((checkpoint / CONTENTS).read_text())
    largest = max(contents["tensors"].values(), key=lambda tensor: len(tensor["chunks"]))
    largest["chunks"].pop()
    (checkpoint / CONTENTS).write_text(json.dumps(contents))
    reseal(checkpoint)


def _nest(checkpoint: Path, mark: Path) -> None:
    (checkpoint / CONTENTS).write_text("[" * 100_000)
    reseal(checkpoint)


def _unknown_extra(checkpoint: Path, mark: Path) -> None:
    contents = json.loads((checkpoint / CONTENTS).read_text())
    contents["extra"] = '["object","os.system"]'
    (checkpoint / CONTENTS).write_text(json.dumps(contents))
    reseal(checkpoint)


# -- what a disk does --------------------------------------------------------------------------------------------------


def _truncate(name: str) -> Callable[[Path, Path], None]:
    def make(checkpoint: Path, mark: Path) -> None:
        path = file_of(checkpoint, name)
        os.truncate(path, path.stat().st_size // 2)

    return make


def _flip(name: str) -> Callable[[Path, Path], None]:
    def make(checkpoint: Path, mark: Path) -> None:
        path = file_of(checkpoint, name)
        payload = bytearray(path.read_bytes())
        payload[len(payload) // 2] ^= 1
        path.write_bytes(payload)

    return make


def _miss(name: str) -> Callable[[Path, Path], None]:
    return lambda checkpoint, mark: file_of(checkpoint, name).unlink()


def _later_version(checkpoint: Path, mark: Path) -> None:
    manifest = read_manifest(checkpoint)
    write_manifest(checkpoint, manifest | {"version": manifest["version"] + 1, "files": "in another way"})


def _faults() -> Iterator[Fault]:
    for name in ("*.distcp", CONTENTS, METADATA, MANIFEST):
        yield Fault(f"truncated file: {name}", _truncate(name), name)
        yield Fault(f"flipped byte: {name}", _flip(name), name)
        if name != MANIFEST:  # without it a folder is no checkpoint
            yield Fault(f"missing part: {name}", _miss(name), name)
    yield Fault("a later version of the format", _later_version, MANIFEST)
    yield Fault("made to run code: torch.save of an object as a tensor", _harm_by_torch, "*.distcp")
    yield Fault("made to run code: a pickle as a tensor", _harm_by_pickle, "*.distcp")
    yield Fault("made to run code: a pickle as contents.json", _pickle_as_contents, CONTENTS)
    yield Fault("made to run code: a pickle as .metadata", _harm_in_metadata, "")
    yield Fault("made to run code: an object in extra", _unknown_extra, CONTENTS)
    yield Fault("made to read elsewhere: ../../x in contents.json", _lead_outside("../../x"), CONTENTS)
    yield Fault("made to read elsewhere: /etc/passwd in contents.json", _lead_outside("/etc/passwd"), CONTENTS)
    yield Fault("made to read elsewhere: ../x in both lists", _list_outside, MANIFEST)
    yield Fault("a block that nobody wrote", _drop_a_block, CONTENTS)
    yield Fault("nested without end: contents.json", _nest, CONTENTS)


FAULTS = {fault.title: fault for fault in _faults()}


# -- disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """A file system of its own at `folder`. PermissionError where this process may not mount one."""
    folder.mkdir(exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def make_read_only(folder: Path) -> None:
    """A `small_disk`, from now on."""
    _mount("-o", "remount,ro", str(folder))


def _mount(*arguments: str) -> None:
    try:
        done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        raise PermissionError("there is no mount command") from error
    if done.returncode:
        raise PermissionError(f"mount is not permitted here: {done.stderr.strip()}")
