"""Read checkpoints that shardstep.save wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardstep.checkpoint.contents import MODEL, state_key
from shardstep.checkpoint.folder import Checkpoint, checksum_problems, find_checkpoints, size_problems
from shardstep.checkpoint.manifest import Contents, StoredTensor, read_contents
from shardstep.checkpoint.storage import dtype_of
from shardstep.convert.source import LazyTensor, OnBytes, Source, SourceError, SourceGroup, TrainedParameter
from shardstep.convert.stored import FileRange, lazy_from_chunks
from shardstep.state.serialization import Decoder


def read(path: Path, on_bytes: OnBytes = lambda nbytes: None) -> Source:
    """Describe the checkpoint at `path`, or the newest undamaged one in a folder, after checking its files."""
    found, skipped = find_checkpoints(path)
    for one in found:
        problems = list(size_problems(one)) or list(checksum_problems(one, sorted(one.manifest.files), on_bytes))
        if not problems:
            source = describe_checkpoint(one)
            source.notes += [f"skipped a damaged checkpoint: {problem}" for problem in skipped]
            return source
        skipped += problems
    raise SourceError("; ".join(skipped) or f"there is no complete checkpoint at {path}")


def describe_checkpoint(checkpoint: Checkpoint) -> Source:
    """Return what is in a checkpoint, without checking its files."""
    contents = read_contents(checkpoint.path, checkpoint.manifest)
    source = Source("a checkpoint of shardstep", checkpoint.path)
    reader = _Reader(checkpoint.path, contents)
    first: dict[StoredTensor, str] = {}
    for key in contents.model:
        stored = contents.tensors[MODEL + key]
        source.model[key] = reader.lazy_tensor(MODEL + key)
        if stored.chunks and stored in first:  # tied tensors refer to the same bytes
            source.tied[key] = first[stored]
        first.setdefault(stored, key)
    for name, parameter in contents.parameters.items():
        trained = TrainedParameter(parameter.shape, dtype_of(StoredTensor((), parameter.dtype, ())))
        trained.state = {key: reader.lazy_tensor(state_key(name, key)) for key in parameter.state}
        trained.values = dict(Decoder(parameter.values).state) if parameter.values else {}
        source.trained[name] = trained
    groups = reader.text(contents.groups, "optim.options")["groups"]
    source.groups = [SourceGroup(tuple(one["params"]), dict(one["options"]), one["class"]) for one in groups]
    extra_and_model = reader.text(contents.extra, "extra")
    source.extra, source.others = dict(extra_and_model["extra"]), dict(extra_and_model["model"])
    own = [reader.text(text, f"extra_of_rank.{rank}") for rank, text in enumerate(contents.extra_of_ranks)]
    source.extra_of_ranks = tuple(own) if any(own) else ()
    return source


class _Reader:
    """Reads tensors and encoded texts of one checkpoint."""

    def __init__(self, folder: Path, contents: Contents) -> None:
        self._folder, self._contents = folder, contents

    def lazy_tensor(self, key: str) -> LazyTensor:
        stored = self._contents.tensors.get(key)
        if stored is None:
            raise SourceError(f"{self._folder} is damaged: it does not list where {key} is stored")
        chunks = [(one.offsets, one.sizes, FileRange(one.file, one.start, one.length)) for one in stored.chunks]
        return lazy_from_chunks(self._folder, key, stored.shape, dtype_of(stored), chunks)

    def text(self, text: str, prefix: str) -> Any:
        """Return the value that is encoded in `text`, with its tensors <prefix>.<number>."""
        decoder = Decoder(text)
        for number, target in enumerate(decoder.buffers):
            self.lazy_tensor(f"{prefix}.{number}").copy_to(target)
        return decoder.state
