"""Reads folders that torch.distributed.checkpoint wrote, as FSDP2 programs do.

Its keys are what the program's state dict had, joined by dots, and programs name the parts as they like. So the parts
are found by their form: below an optimizer are `param_groups.` and `state.`; a model is where the parameters are that
the optimizer names. All the rest is what the program added.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from shardstep.convert.source import Group, Lazy, Source, SourceError, Trained
from shardstep.convert.stored import Place, read_place, stored_lazily
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
            source.model[key.removeprefix(model)] = folder.lazy(key)
    if optimizer is not None:
        _take_state(source, folder, optimizer + _STATE, below)
    rest = [key for key in folder.keys if key not in set(below) and key.removeprefix(model) not in source.model]
    source.others, rest = _others(folder, model, rest)
    if with_extra:
        source.extra = _nested({_path_of(folder, key): folder.value(key) for key in rest})
    return source


class _Folder:
    """Keys, and what is under them."""

    def __init__(self, path: Path, description: Metadata) -> None:
        self.path, self.paths = path, description.planner_data
        entries = description.state_dict_metadata
        self.keys = list(entries)
        self.tensors = {key: one for key, one in entries.items() if isinstance(one, TensorStorageMetadata)}
        self._places: dict[str, list[tuple[Any, Place]]] = {}
        for index, info in (description.storage_data or {}).items():
            if getattr(info, "transform_descriptors", None):
                raise SourceError(
                    f"{path} was written with {', '.join(info.transform_descriptors)} (extensions of torch's writer), "
                    "which is not read here: save it without"
                )
            place = Place(str(info.relative_path), info.offset, info.length)
            self._places.setdefault(index.fqn, []).append((index.offset, place))

    def lazy(self, key: str) -> Lazy:
        stored = self.tensors[key]
        places = {None if offset is None else tuple(offset): place for offset, place in self._places.get(key, ())}
        chunks = []
        for chunk in stored.chunks:
            place = places.get(tuple(chunk.offsets)) or (places.get(None) if len(stored.chunks) == 1 else None)
            if place is None:
                raise SourceError(f"{self.path} does not say where the block of {key} at {list(chunk.offsets)} is")
            chunks.append((chunk.offsets, chunk.sizes, place))
        return stored_lazily(self.path, key, stored.size, stored.properties.dtype, chunks)

    def value(self, key: str) -> Any:
        if key in self.tensors:
            return self.lazy(key).read()
        if not self._places.get(key):
            raise SourceError(f"{self.path} does not say where {key} is")
        return read_place(self.path, self._places[key][0][1], key)


# -- where the parts are -----------------------------------------------------------------------------------------------


def _optimizer_prefix(keys: Iterable[str], path: Path) -> str | None:
    """What comes before `param_groups.`, or `state.` in a program without options; None without an optimizer."""
    found = dict.fromkeys(prefix for key in keys for prefix in _before(key, _GROUPS))
    with_state = [prefix for prefix in found if any(key.startswith(prefix + _STATE) for key in keys)]
    candidates = with_state or list(found)
    # A scheduler or a wrapper may keep options of its own further down: the outermost is the optimizer's.
    outer = [one for one in candidates if not any(one != other and one.startswith(other) for other in candidates)]
    if len(outer) > 1:
        raise SourceError(
            f"{path} has {len(outer)} optimizers, at {', '.join(repr(one.rstrip('.')) for one in outer)}: "
            "a checkpoint of shardstep has one. Save each with its model by itself"
        )
    return outer[0] if outer else None


def _before(key: str, part: str) -> Iterator[str]:
    if key.startswith(part):
        yield ""
    place = key.find("." + part)
    if place >= 0:
        yield key[: place + 1]


def _model_prefix(keys: list[str], names: list[str], path: Path) -> str:
    """What comes before the parameters that the optimizer has; without one, what all tensors have in common."""
    if not names:
        tops = {key.split(".", 1)[0] for key in keys}
        likely = [one for one in ("model", "state_dict", "module", "app") if one in tops]
        if "model" in tops or len(likely) == 1:
            return _deeper(keys, likely[0] + ".")
        return ""
    there = set(keys)
    candidates = dict.fromkeys(key.removesuffix(names[0]) for key in keys if key.endswith(names[0]))
    whole = [one for one in candidates if (not one or one[-1] == ".") and all(one + name in there for name in names)]
    if len(whole) == 1:
        return whole[0]
    if not whole:
        missing = next((name for name in names if not any(key.endswith(name) for key in keys)), names[0])
        raise SourceError(f"{path} has an optimizer for {missing}, and no model that has all its parameters")
    raise SourceError(
        f"{path} has {len(whole)} models with the optimizer's parameters, at "
        f"{', '.join(repr(one.rstrip('.')) for one in whole)}: which one is meant cannot be seen"
    )


def _deeper(keys: list[str], prefix: str) -> str:
    """'app.model.' of a program that saves one object called app, with the model in it."""
    below = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    return prefix + "model." if below and all(one.startswith("model.") for one in below) else prefix


# -- the optimizer -----------------------------------------------------------------------------------------------------


def _groups(folder: _Folder, optimizer: str, below: Iterable[str]) -> list[Group]:
    prefix = optimizer + _GROUPS
    options = {key.removeprefix(prefix): key for key in below if key.startswith(prefix)}
    if any(key.endswith(".params") and key.split(".", 1)[0].isdigit() for key in options):
        return _nested_groups(folder, options)
    return _flattened_groups(folder, options)


def _nested_groups(folder: _Folder, options: Mapping[str, str]) -> list[Group]:
    """<number>.<option>, and <number>.params"""
    nested = _nested({tuple(_steps(short)): folder.value(key) for short, key in options.items()})
    groups = []
    for number in sorted(nested):
        group = dict(nested[number])
        names = group.pop("params", [])
        group.pop("param_names", None)
        if not all(isinstance(name, str) for name in names):
            raise SourceError(
                f"{folder.path} numbers its parameters: get_optimizer_state_dict(model, optimizer) has names"
            )
        groups.append(Group(tuple(names), group))
    return groups


def _flattened_groups(folder: _Folder, options: Mapping[str, str]) -> list[Group]:
    """<parameter>.<option>: parameters whose options are the same were one group, or might have been."""
    found: dict[str, dict[tuple[Any, ...], Any]] = {}
    for short, key in options.items():
        steps = list(_steps(short))
        place = max(number for number, step in enumerate(steps) if isinstance(step, str))  # behind it: places in a list
        name = ".".join(map(str, steps[:place]))
        found.setdefault(name, {})[tuple(steps[place:])] = folder.value(key)
    by_name = {name: _nested(values) for name, values in found.items()}
    together: dict[str, list[str]] = {}
    for name, own in by_name.items():
        text, tensors = encode(dict(sorted(own.items())))
        mark = text + json.dumps([tensor.tolist() for tensor in tensors])
        together.setdefault(mark, []).append(name)
    return [Group(tuple(names), by_name[names[0]]) for names in together.values()]


def _take_state(source: Source, folder: _Folder, prefix: str, below: Iterable[str]) -> None:
    for group in source.groups:
        for name in group.params:
            source.trained[name] = Trained(source.model[name].shape, source.model[name].dtype)
    for full in below:
        if not full.startswith(prefix):
            continue
        name, key = _owner(full.removeprefix(prefix), source.trained, folder.path)
        if full in folder.tensors:
            source.trained[name].state[key] = folder.lazy(full)
        else:
            source.trained[name].values[key] = folder.value(full)


def _owner(short: str, trained: Mapping[str, Trained], path: Path) -> tuple[str, str]:
    """<parameter>.<key>, where both may have dots: the longest parameter that there is."""
    parts = short.split(".")
    for count in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:count])
        if name in trained:
            return name, ".".join(parts[count:])
    raise SourceError(f"{path} has state {short}, of no parameter that is in a group")


# -- the rest ----------------------------------------------------------------------------------------------------------


def _others(folder: _Folder, model: str, rest: list[str]) -> tuple[dict[str, Any], list[str]]:
    """What is no tensor in the model's state_dict, and what is none of the model's."""
    inside: dict[tuple[Any, ...], Any] = {}
    for key in rest:
        place = _in_extra_state(folder, key) or ((key,) if model else ())
        if place and key.startswith(model):
            inside[(place[0].removeprefix(model), *place[1:])] = key
    left = set(rest) - set(inside.values())
    values = {place: folder.value(key) for place, key in inside.items()}
    return _nested(values), [key for key in rest if key in left]


def _in_extra_state(folder: _Folder, key: str) -> tuple[Any, ...]:
    """Where a value lies in what a module's get_extra_state() gave, whose dicts and lists torch stores item by item.

    The key of the state_dict, and the steps from there; nothing for all other keys.
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


def _nested(values: Mapping[tuple[Any, ...], Any]) -> dict[Any, Any]:
    """Dicts within dicts, by paths; one whose keys are the numbers 0, 1, 2 ..., in any order, was a list."""
    root: dict[Any, Any] = {}
    for path, value in values.items():
        inner = root
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
            if not isinstance(inner, dict):
                raise SourceError(f"{'.'.join(map(str, path))} lies within something that is no dict")
        if path[-1] in inner:
            raise SourceError(f"{'.'.join(map(str, path))} is a value, and other values lie within it")
        inner[path[-1]] = value
    return {key: _listed(value) for key, value in root.items()}


def _listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    inner = {key: _listed(item) for key, item in value.items()}
    # Several ranks may have written it: then its items come in the order of the ranks.
    if inner and inner.keys() == set(range(len(inner))):
        return [inner[place] for place in range(len(inner))]
    return inner
