"""Write a checkpoint that shardstep.load reads on any number of ranks, and torch.distributed.checkpoint (DCP) too.

[Note: stock programs] An FSDP2 program loads {"model": ..., "optim": ...} with dcp.load, which reads a key for each
value that it has: `optim.state.<parameter>.<key>`, which is how shardstep names them, and
`optim.param_groups.<n>.<option>`, or `optim.param_groups.<parameter>.<option>` if the program flattens options.
shardstep saves options as JSON. So each option is written a second time, as torch writes it, in a file that
shardstep does not read; both keys refer to the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.contents import MODEL, STATE, numbered_parts, state_key
from shardstep.checkpoint.folder import next_sequence
from shardstep.checkpoint.manifest import Contents, Parameter, StoredTensor, WrittenFile
from shardstep.checkpoint.storage import Part, StoredObject, metadata_bytes, write_manifest, write_objects, write_parts
from shardstep.convert.source import LazyTensor, OnBytes, Source, SourceError
from shardstep.convert.target import Target
from shardstep.state.blocks import blocks_of_whole
from shardstep.state.serialization import encode

_MOST_FILE = 2 << 30  # bytes: with several files, several ranks can check and read them at the same time
_OBJECTS = "__options_0.distcp"


@dataclass
class _Written:
    """The tensors and files that were written so far."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, WrittenFile] = field(default_factory=dict)

    def add(self, folder: Path, parts: Iterator[Part]) -> None:
        found, files = write_parts(folder, len(self.files), parts)
        self.tensors |= found
        self.files |= files


def write(source: Source, target: Target, on_bytes: OnBytes) -> None:
    folder = target.partial
    folder.mkdir()
    written = _Written()
    rows = [{"params": list(one.params), "class": one.kind, "options": one.options} for one in source.groups]
    groups, among_groups = encode({"groups": rows})
    extra, among_extra, own = _encoded_extra(source)
    small = {"optim.options": among_groups, "extra": among_extra}
    small |= {f"extra_of_rank.{rank}": tensors for rank, (_, tensors) in enumerate(own)}
    if any(small.values()):
        written.add(folder, (part for prefix, tensors in small.items() for part in numbered_parts(prefix, tensors)))
    for keys in _files(_tensors(source)):
        written.add(folder, (part for key, tensor in keys for part in _find_contents(key, tensor, on_bytes)))
    for key, first in source.tied.items():
        written.tensors[MODEL + key] = written.tensors[MODEL + first]
    objects = _write_objects(source, folder, written)
    contents = Contents(
        len(own),
        _parameters(source),
        groups,
        written.tensors,
        tuple(source.model),
        extra,
        tuple(text for text, _ in own),
    )
    described = metadata_bytes(written.tensors, objects, _paths(source, written, objects))
    write_manifest(
        folder, contents, written.files, described, next_sequence(target.path.parent), converted_from=source.kind
    )


def _encoded_extra(source: Source) -> tuple[str, list[torch.Tensor], list[tuple[str, list[torch.Tensor]]]]:
    try:
        extra, among_extra = encode({"extra": source.extra, "model": source.others})
        return extra, among_extra, [encode(one) for one in source.extra_of_ranks or ({},)]
    except TypeError as error:
        raise SourceError(f"{source.path}: {error}; or leave extra out with --no-extra") from error


def _parameters(source: Source) -> dict[str, Parameter]:
    return {
        name: Parameter(
            one.shape,
            str(one.dtype).removeprefix("torch."),
            tuple(sorted(one.state)),
            encode(one.values)[0] if one.values else "",
        )
        for name, one in source.trained.items()
    }


# -- tensors -----------------------------------------------------------------------------------------------------------


def _tensors(source: Source) -> Iterator[tuple[str, LazyTensor]]:
    for key, tensor in source.weights():
        yield MODEL + key, tensor
    for name, key, tensor in source.state():
        yield state_key(name, key), tensor


def _files(tensors: Iterator[tuple[str, LazyTensor]]) -> Iterator[list[tuple[str, LazyTensor]]]:
    """Yield the tensors of each file: whole tensors, up to _MOST_FILE bytes."""
    keys: list[tuple[str, LazyTensor]] = []
    for row in tensors:
        if keys and sum(one.nbytes for _, one in keys) + row[1].nbytes > _MOST_FILE:
            yield keys
            keys = []
        keys.append(row)
    if keys:
        yield keys


def _find_contents(key: str, tensor: LazyTensor, on_bytes: OnBytes) -> Iterator[Part]:
    for offsets, block in tensor.blocks():
        for inner, values in blocks_of_whole(block):
            yield Part(key, tensor.shape, tuple(a + b for a, b in zip(offsets, inner, strict=True)), values)
            on_bytes(values.nbytes)


# -- [Note: stock programs] --------------------------------------------------------------------------------------------


def _write_objects(source: Source, folder: Path, written: _Written) -> dict[str, StoredObject]:
    rows: list[tuple[tuple[str, ...], Any]] = []  # keys of a value, and the value
    for number, group in enumerate(source.groups):
        rows.append(((f"optim.param_groups.{number}.params",), list(group.params)))
        for option, value in group.options.items():
            flattened = [f"optim.param_groups.{name}.{option}" for name in group.params]
            rows.append(((f"optim.param_groups.{number}.{option}", *flattened), value))
    for name, one in source.trained.items():
        rows += [((f"{STATE}{name}.{key}",), value) for key, value in one.values.items()]
    if not rows:
        return {}
    places, file = write_objects(folder, _OBJECTS, [value for _, value in rows])
    written.files[_OBJECTS] = file
    return {name: place for (names, _), place in zip(rows, places, strict=True) for name in names}


def _paths(source: Source, written: _Written, objects: dict[str, StoredObject]) -> dict[str, tuple[Any, ...]]:
    """Return the nested keys of each flattened key, for torch's tools that make a state dict of the whole folder.

    Options under the names of parameters are left out, because they are there under the numbers of groups too.
    """
    paths: dict[str, tuple[Any, ...]] = {key: (key,) for key in (*written.tensors, *objects)}
    paths |= {MODEL + key: ("model", key) for key in source.model}
    paths |= {state_key(name, key): ("optim", "state", name, key) for name, key, _ in source.state()}
    for name, one in source.trained.items():
        paths |= {state_key(name, key): ("optim", "state", name, key) for key in one.values}
    for number, group in enumerate(source.groups):
        for option in ("params", *group.options):
            paths[f"optim.param_groups.{number}.{option}"] = ("optim", "param_groups", number, option)
    return paths
