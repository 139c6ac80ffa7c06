"""Read folders that torch.distributed.checkpoint (DCP) wrote, as FSDP2 programs do.

DCP joins the nested keys of the program's state dict by dots, and programs choose the keys freely. So model and
optimizer are found by their structure: an optimizer has keys `param_groups.` and `state.`; a model has the parameters
that the optimizer names. All other values are extra.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardstep.convert.source import LazyTensor, Source, SourceError, SourceGroup, TrainedParameter
from shardstep.convert.stored import FileRange, lazy_from_chunks, read_object
from shardstep.convert.unpickling import read_description
from shardstep.state.serialization import encode

_GROUPS, _STATE = "param_groups.", "state."
METADATA = ".metadata"


def read(path: Path, *, with_extra: bool = True) -> Source:
    folder = _Folder(path, read_description(path / METADATA))
    optimizer = _optimizer_prefix(folder.keys, path)
    below = [] if optimizer is None else [key for key in folder.keys if key.startswith(optimizer)]
    source = Source("a folder of torch.distributed.checkpoint", path)
    if optimizer is not None:
        source.groups = _groups(folder, optimizer, below)
    names = [name for group in source.groups for name in group.params]
    model = _model_prefix([key for key in folder.tensors if key not in set(below)], names, path)
    for key in folder.tensors:
        of_model = key.startswith(model) and (optimizer is None or not key.startswith(optimizer))
        if of_model and not _in_extra_state(folder, key):
            source.model[key.removeprefix(model)] = folder.lazy_tensor(key)
    if optimizer is not None:
        _add_state(source, folder, optimizer + _STATE, below)
    rest = [key for key in folder.keys if key not in set(below) and key.removeprefix(model) not in source.model]
    source.others, rest = _others(folder, model, rest)
    if with_extra:
        source.extra = _nest({_path_of(folder, key): folder.value(key) for key in rest})
    return source


class _Folder:
    """The keys of a DCP folder, and their values."""

    def __init__(self, path: Path, description: Metadata) -> None:
        self.path, self.paths = path, description.planner_data
        entries = description.state_dict_metadata
        self.keys = list(entries)
        self.tensors = {key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)}
        self._places: dict[str, list[tuple[Any, FileRange]]] = {}
        for index, info in (description.storage_data or {}).items():
            if getattr(info, "transform_descriptors", None):
                raise SourceError(
                    f"{path} was written with extensions of torch's writer that cannot be read "
                    f"({', '.join(info.transform_descriptors)}): save it without them"
                )
            place = FileRange(str(info.relative_path), info.offset, info.length)
            self._places.setdefault(index.fqn, []).append((index.offset, place))

    def lazy_tensor(self, key: str) -> LazyTensor:
        stored = self.tensors[key]
        places = {None if offset is None else tuple(offset): place for offset, place in self._places.get(key, ())}
        chunks = []
        for chunk in stored.chunks:
            place = places.get(tuple(chunk.offsets)) or (places.get(None) if len(stored.chunks) == 1 else None)
            if place is None:
                raise SourceError(f"{self.path} is damaged: it does not list block {list(chunk.offsets)} of {key}")
            chunks.append((chunk.offsets, chunk.sizes, place))
        return lazy_from_chunks(self.path, key, stored.size, stored.properties.dtype, chunks)

    def value(self, key: str) -> Any:
        if key in self.tensors:
            return self.lazy_tensor(key).read()
        if not self._places.get(key):
            raise SourceError(f"{self.path} is damaged: it does not list where {key} is stored")
        return read_object(self.path, self._places[key][0][1], key)


# -- find model and optimizer ------------------------------------------------------------------------------------------


def _optimizer_prefix(keys: Iterable[str], path: Path) -> str | None:
    """Return the prefix of the optimizer's keys, which end it with `param_groups.`; None if there is no optimizer."""
    found = dict.fromkeys(prefix for key in keys for prefix in _prefixes_before(key, _GROUPS))
    with_state = [prefix for prefix in found if any(key.startswith(prefix + _STATE) for key in keys)]
    candidates = with_state or list(found)
    # Schedulers and wrappers may have param_groups at deeper levels: the outermost ones are the optimizer's.
    outer = [one for one in candidates if not any(one != other and one.startswith(other) for other in candidates)]
    if len(outer) > 1:
        raise SourceError(
            f"{path} has {len(outer)} optimizers, at {', '.join(repr(one.rstrip('.')) for one in outer)}: "
            "only one can be converted. Save each with its model in a folder of its own"
        )
    return outer[0] if outer else None


def _prefixes_before(key: str, part: str) -> Iterator[str]:
    if key.startswith(part):
        yield ""
    place = key.find("." + part)
    if place >= 0:
        yield key[: place + 1]


def _model_prefix(keys: list[str], names: list[str], path: Path) -> str:
    """Return the prefix of the model's keys: that of the optimizer's parameters, or a usual one without optimizer."""
    if not names:
        tops = {key.split(".", 1)[0] for key in keys}
        likely = [one for one in ("model", "state_dict", "module", "app") if one in tops]
        if "model" in tops or len(likely) == 1:
            return _extend_prefix(keys, likely[0] + ".")
        return ""
    there = set(keys)
    candidates = dict.fromkeys(key.removesuffix(names[0]) for key in keys if key.endswith(names[0]))
    complete = [one for one in candidates if (not one or one[-1] == ".") and all(one + name in there for name in names)]
    if len(complete) == 1:
        return complete[0]
    if not complete:
        missing = next((name for name in names if not any(key.endswith(name) for key in keys)), names[0])
        raise SourceError(
            f"{path} has an optimizer of {missing}, and no model with all of its parameters: save model and optimizer "
            "together"
        )
    raise SourceError(
        f"{path} has {len(complete)} models with the optimizer's parameters, at "
        f"{', '.join(repr(one.rstrip('.')) for one in complete)}: save the one that belongs to the optimizer"
    )


def _extend_prefix(keys: list[str], prefix: str) -> str:
    """Return 'app.model.' for 'app.' if a program has saved one object app that contains the model."""
    below = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    return prefix + "model." if below and all(one.startswith("model.") for one in below) else prefix


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _groups(folder: _Folder, optimizer: str, below: Iterable[str]) -> list[SourceGroup]:
    prefix = optimizer + _GROUPS
    options = {key.removeprefix(prefix): key for key in below if key.startswith(prefix)}
    if any(key.endswith(".params") and key.split(".", 1)[0].isdigit() for key in options):
        return _nested_groups(folder, options)
    return _flattened_groups(folder, options)


def _nested_groups(folder: _Folder, options: Mapping[str, str]) -> list[SourceGroup]:
    """Return groups that were saved as <number>.<option> and <number>.params."""
    nested = _nest({tuple(_steps(short)): folder.value(key) for short, key in options.items()})
    groups = []
    for number in sorted(nested):
        group = dict(nested[number])
        names = group.pop("params", [])
        group.pop("param_names", None)
        if not all(isinstance(name, str) for name in names):
            raise SourceError(
                f"{folder.path} has numbers in place of the parameters' names: save the optimizer's state that "
                "get_optimizer_state_dict(model, optimizer) returns"
            )
        groups.append(SourceGroup(tuple(names), group))
    return groups


def _flattened_groups(folder: _Folder, options: Mapping[str, str]) -> list[SourceGroup]:
    """Return groups that were saved as <parameter>.<option>; parameters with equal options make one group."""
    found: dict[str, dict[tuple[Any, ...], Any]] = {}
    for short, key in options.items():
        steps = list(_steps(short))
        last = max(number for number, step in enumerate(steps) if isinstance(step, str))  # numbers after it are indices
        name = ".".join(map(str, steps[:last]))
        found.setdefault(name, {})[tuple(steps[last:])] = folder.value(key)
    by_name = {name: _nest(values) for name, values in found.items()}
    together: dict[str, list[str]] = {}
    for name, own in by_name.items():
        text, tensors = encode(dict(sorted(own.items())))
        mark = text + json.dumps([tensor.tolist() for tensor in tensors])
        together.setdefault(mark, []).append(name)
    return [SourceGroup(tuple(names), by_name[names[0]]) for names in together.values()]


def _add_state(source: Source, folder: _Folder, prefix: str, below: Iterable[str]) -> None:
    for group in source.groups:
        for name in group.params:
            source.trained[name] = TrainedParameter(source.model[name].shape, source.model[name].dtype)
    for full in below:
        if not full.startswith(prefix):
            continue
        name, key = _split_state_key(full.removeprefix(prefix), source.trained, folder.path)
        if full in folder.tensors:
            source.trained[name].state[key] = folder.lazy_tensor(full)
        else:
            source.trained[name].values[key] = folder.value(full)


def _split_state_key(short: str, trained: Mapping[str, TrainedParameter], path: Path) -> tuple[str, str]:
    """Split <parameter>.<key>, where both may have dots, after the longest name of a parameter."""
    parts = short.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in trained:
            return name, ".".join(parts[count:])
    raise SourceError(f"{path} has state {short}, which belongs to no parameter of a param group")


# -- the rest ----------------------------------------------------------------------------------------------------------


def _others(folder: _Folder, model: str, rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the model's state_dict that are not tensors, and the keys that are not the model's."""
    inside: dict[tuple[Any, ...], Any] = {}
    for key in rest:
        path = _in_extra_state(folder, key) or ((key,) if model else ())
        if path and key.startswith(model):
            inside[(path[0].removeprefix(model), *path[1:])] = key
    left = set(rest) - set(inside.values())
    values = {path: folder.value(key) for path, key in inside.items()}
    return _nest(values), [key for key in rest if key in left]


def _in_extra_state(folder: _Folder, key: str) -> tuple[Any, ...]:
    """Return where a value is in the result of a module's get_extra_state(), which DCP stores item by item.

    This is the key of the state_dict, followed by dict keys and list indices; () for all other keys.
    """
    path = _path_of(folder, key)
    for number, step in enumerate(path):
        if str(step).endswith("_extra_state"):
            return ".".join(map(str, path[: number + 1])), *path[number + 1 :]
    return ()


def _path_of(folder: _Folder, key: str) -> tuple[Any, ...]:
    paths = folder.paths if isinstance(folder.paths, Mapping) else {}
    found = paths.get(key, (key,))
    return found if isinstance(found, tuple) and found else (key,)


def _steps(short: str) -> Iterator[Any]:
    for part in short.split("."):
        yield int(part) if part.isdigit() else part


def _nest(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Return nested dicts of values by paths; a dict with keys 0, 1, 2 ... in any order becomes a list."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        inner = root
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise SourceError(f"the source is damaged: {'.'.join(map(str, path))} is below a key that has a value")
        if path[-1] in inner:
            raise SourceError(f"the source is damaged: {'.'.join(map(str, path))} has a value, and keys below it")
        inner[path[-1]] = value
    return {key: _to_lists(value) for key, value in root.items()}


def _to_lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _to_lists(item) for key, item in value.items()}
    # Items that several ranks have written are in the order of the ranks, not of the indices.
    if inner and inner.keys() == set(range(len(inner))):
        return [inner[place] for place in range(len(inner))]
    return inner
