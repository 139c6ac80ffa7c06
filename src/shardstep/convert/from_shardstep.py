"""Reads what shardstep.save wrote."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardstep.checkpoint.contents import MODEL, state_key
from shardstep.checkpoint.folder import Checkpoint, checksum_problems, find_checkpoints, size_problems
from shardstep.checkpoint.manifest import Contents, StoredTensor, read_contents
from shardstep.checkpoint.storage import dtype_of
from shardstep.convert.source import Group, Lazy, Source, SourceError, Trained
from shardstep.convert.stored import Place, stored_lazily
from shardstep.state.serialization import Decoder

Told = Callable[[int], None]


def choose(path: Path, told: Told = lambda nbytes: None) -> tuple[Checkpoint, list[str]]:
    """The checkpoint itself, or the newest whole one of a folder; and why newer ones were passed over."""
    found, passed_over = find_checkpoints(path)
    for one in found:
        problems = list(size_problems(one)) or list(checksum_problems(one, sorted(one.manifest.files), told))
        if not problems:
            return one, passed_over
        passed_over += problems
    raise SourceError("; ".join(passed_over) or f"there is no complete checkpoint at {path}")


def read(path: Path, told: Told = lambda nbytes: None) -> Source:
    found, passed_over = choose(path, told)
    source = describe(found)
    source.notes += [f"passed over: {one}" for one in passed_over]
    return source


def describe(found: Checkpoint) -> Source:
    """Whether its files are whole is not asked."""
    contents = read_contents(found.path, found.manifest)
    source = Source("a checkpoint of shardstep", found.path)
    reader = _Reader(found.path, contents)
    first: dict[StoredTensor, str] = {}
    for key in contents.model:
        stored = contents.tensors[MODEL + key]
        source.model[key] = reader.lazy(MODEL + key)
        if stored.chunks and stored in first:  # both names, the same bytes
            source.tied[key] = first[stored]
        first.setdefault(stored, key)
    for name, parameter in contents.parameters.items():
        trained = Trained(parameter.shape, dtype_of(StoredTensor((), parameter.dtype, ())))
        trained.state = {key: reader.lazy(state_key(name, key)) for key in parameter.state}
        trained.values = dict(Decoder(parameter.values).state) if parameter.values else {}
        source.trained[name] = trained
    groups = reader.text(contents.groups, "optim.options")["groups"]
    source.groups = [Group(tuple(one["params"]), dict(one["options"]), one["class"]) for one in groups]
    told_extra = reader.text(contents.extra, "extra")
    source.extra, source.others = dict(told_extra["extra"]), dict(told_extra["model"])
    own = [reader.text(text, f"extra_of_rank.{rank}") for rank, text in enumerate(contents.extra_of_ranks)]
    source.extra_of_ranks = tuple(own) if any(own) else ()
    return source


class _Reader:
    def __init__(self, folder: Path, contents: Contents) -> None:
        self._folder, self._contents = folder, contents

    def lazy(self, key: str) -> Lazy:
        stored = self._contents.tensors.get(key)
        if stored is None:
            raise SourceError(f"{self._folder} does not say where {key} is")
        chunks = [(one.offsets, one.sizes, Place(one.file, one.start, one.length)) for one in stored.chunks]
        return stored_lazily(self._folder, key, stored.shape, dtype_of(stored), chunks)

    def text(self, text: str, prefix: str) -> Any:
        decoder = Decoder(text)
        for number, target in enumerate(decoder.buffers):
            self.lazy(f"{prefix}.{number}").copy_to(target)
        return decoder.state
