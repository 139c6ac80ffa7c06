"""Reads files of torch.save: a model's state_dict, an optimizer's, or both in a dict, under whatever names.

The optimizer's is known by "state" and "param_groups", and may be in a list, as in a file of Lightning; the model's is
a dict of tensors. The state_dict that torch's or our ZeroRedundancyOptimizer consolidates has the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardstep.convert.names import match_names, names_given
from shardstep.convert.source import Group, Lazy, Source, SourceError, Trained, lazy
from shardstep.convert.unpickling import load_torch_file
from shardstep.stepping.element_state import COUNT
from shardstep.stepping.masters import AVERAGE, MASTER

OURS = "shardstep"  # in a file that we wrote: what torch has no place for
OF_RANKS, CLASSES = "extra_of_ranks", "classes"
BESIDE = {MASTER: "masters", AVERAGE: "averages", COUNT: "rounded"}  # of our state: by what it is called there
_LIKELY = ("model", "model_state_dict", "state_dict", "module", "net", "weights")


def read(path: Path, also: Path | None = None, names: Sequence[str] | None = None) -> Source:
    """`also`: a second file, where model and optimizer are in two."""
    source = Source("a file of torch.save", path)
    found = _parts(load_torch_file(path), path)
    if also is not None:
        found = _joined(found, _parts(load_torch_file(also), also), path, also)
    if found.model is None:
        raise SourceError(
            f"{path} has an optimizer's state and no model's: parameters have their names from it; "
            "give the file with the weights as --also FILE"
        )
    take_model(source, found.model, path)
    if found.optimizer is not None:
        _take_optimizer(source, found.optimizer, found.ours, names)
    elif names is not None:
        raise SourceError(f"{path} has no optimizer's state, for which names were given")
    source.extra = dict(found.rest)
    source.notes += [f"{place} looks like an optimizer's state: it is kept in extra" for place in _left_in(found.rest)]
    source.extra_of_ranks = tuple(found.ours.get(OF_RANKS, ()))
    return source


class _Parts:
    def __init__(self, model: Any = None, optimizer: Any = None, rest: Any = None, ours: Any = None) -> None:
        self.model, self.optimizer, self.rest, self.ours = model, optimizer, rest or {}, ours or {}


def _parts(loaded: Any, path: Path) -> _Parts:
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path} holds a {type(loaded).__name__}: a state_dict is expected, or a dict of them")
    if _is_optimizer(loaded):
        return _Parts(optimizer=loaded)
    if _is_model(loaded):
        return _Parts(model=loaded)
    if isinstance(loaded.get(OURS), Mapping):
        return _Parts(loaded.get("model"), loaded.get("optimizer"), loaded.get("extra"), loaded[OURS])
    optimizers = _optimizers(loaded)
    models = [key for key, value in loaded.items() if _is_model(value)]
    if len(optimizers) > 1:
        raise SourceError(
            f"{path} has {len(optimizers)} optimizers ({', '.join(optimizers)}): one is expected. Save each with its "
            "part of the model in a file of its own"
        )
    if len(models) > 1:
        models = [key for key in _LIKELY if key in models][:1] or models
    if len(models) > 1:
        raise SourceError(
            f"{path} has {len(models)} models ({', '.join(map(str, models))}): which one is meant cannot be seen"
        )
    if not models and not optimizers:
        raise SourceError(f"{path} has neither a model's state_dict nor an optimizer's: {_shown(loaded)}")
    optimizer = next(iter(optimizers.values()), None)
    rest = {key: _without(value, optimizer) for key, value in loaded.items() if key not in models}
    rest = {key: left for key, left in rest.items() if left is loaded[key] or left}
    return _Parts(loaded[models[0]] if models else None, optimizer, rest)


def _joined(one: _Parts, other: _Parts, path: Path, also: Path) -> _Parts:
    for what in ("model", "optimizer"):
        if getattr(one, what) is not None and getattr(other, what) is not None:
            raise SourceError(f"{path} and {also} both have the state_dict of a {what}")
    return _Parts(
        one.model if one.model is not None else other.model,
        one.optimizer if one.optimizer is not None else other.optimizer,
        {**other.rest, **one.rest},
        {**other.ours, **one.ours},
    )


def _is_optimizer(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and isinstance(value.get("state"), Mapping) and _is_list(value.get("param_groups"))
    )


def _optimizers(loaded: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the optimizers in a dict by key; if it has none, those in its lists and dicts (Lightning saves a list)."""
    found = {str(key): value for key, value in loaded.items() if _is_optimizer(value)}
    if found:
        return found
    for key, value in loaded.items():
        inside = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_list(value) else ()
        found |= {f"{key}[{place!r}]": one for place, one in inside if _is_optimizer(one)}
    return found


def _left_in(value: Any, path: str = "") -> Iterator[str]:
    """Where else there are any."""
    if _is_optimizer(value):
        yield path
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _left_in(one, f"{path}[{key!r}]" if path else str(key))
    elif _is_list(value):
        for number, one in enumerate(value):
            yield from _left_in(one, f"{path}[{number}]")


def _without(value: Any, optimizer: Any) -> Any:
    """A part of the file without the optimizer, if that is in it."""
    if optimizer is None:
        return value
    if value is optimizer:
        return None
    if _is_list(value) and any(one is optimizer for one in value):
        return [one for one in value if one is not optimizer]
    if isinstance(value, Mapping) and any(one is optimizer for one in value.values()):
        return {key: one for key, one in value.items() if one is not optimizer}
    return value


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def _is_model(value: Any) -> bool:
    if not isinstance(value, Mapping) or not value or not all(isinstance(key, str) for key in value):
        return False
    tensors = sum(isinstance(one, torch.Tensor) for one in value.values())
    others = [key for key, one in value.items() if not isinstance(one, torch.Tensor)]
    return tensors > 0 and all(key.endswith("_extra_state") for key in others)


def _shown(loaded: Mapping[Any, Any]) -> str:
    return ", ".join(f"{key} is a {type(value).__name__}" for key, value in list(loaded.items())[:8])


# -- into a source -----------------------------------------------------------------------------------------------------


def take_model(source: Source, model: Mapping[str, Any], path: Path) -> None:
    first: dict[tuple[Any, ...], str] = {}
    for key, value in model.items():
        if not isinstance(value, torch.Tensor):
            source.others[key] = value
            continue
        source.model[key] = lazy(checked(value, key, path))
        mark = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (key,)
        if mark in first:
            source.tied[key] = first[mark]
        first.setdefault(mark, key)


def checked(value: torch.Tensor, what: str, path: Path) -> torch.Tensor:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise SourceError(
            f"{path}: {what} is a {type(value).__name__} with layout {value.layout}; only plain dense tensors are "
            "converted (a DTensor has full_tensor())"
        )
    return value


def _take_optimizer(source: Source, optimizer: Mapping[str, Any], ours: Mapping[str, Any], names: Any) -> None:
    raw, state = list(optimizer["param_groups"]), optimizer["state"]
    named = _names(source, raw, state, names)
    classes = ours.get(CLASSES, [])
    for number, group in enumerate(raw):
        members = tuple(named[one] for one in group["params"])
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        source.groups.append(Group(members, options, classes[number] if number < len(classes) else ""))
        for one in group["params"]:
            source.trained[named[one]] = _trained(source, named[one], state.get(one, {}))
    for kind, key in BESIDE.items():
        for name, tensor in ours.get(key, {}).items():
            if name in source.trained:
                source.trained[name].state[kind] = lazy(checked(tensor, f"{key} of {name}", source.path))


def _trained(source: Source, name: str, entry: Mapping[str, Any]) -> Trained:
    weight: Lazy = source.model[name]
    made = Trained(weight.shape, weight.dtype)
    for key, value in entry.items():
        if isinstance(value, torch.Tensor):
            made.state[key] = lazy(checked(value, f"{key} of {name}", source.path))
        else:
            made.values[key] = value
    return made


def _names(source: Source, groups: Sequence[Mapping[str, Any]], state: Any, given: Any) -> dict[Any, str]:
    members = [list(group["params"]) for group in groups]
    everyone = [one for group in members for one in group]
    left = set(state) - set(everyone)
    if left:
        raise SourceError(f"{source.path} has state of {sorted(map(str, left))[:4]}, which are in no param group")
    if given is not None:
        return dict(names_given(members, given, state, source.model))
    if all(isinstance(one, str) for one in everyone):
        found = {one: one for one in everyone}
    elif all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        found = {one: name for group in groups for one, name in zip(group["params"], group["param_names"], strict=True)}
    else:
        source.notes.append(
            "the optimizer numbers its parameters: they have the names that fit by order and shape; "
            "--names FILE gives others"
        )
        return match_names(members, state, source.model, source.tied)
    unknown = [name for name in found.values() if name not in source.model]
    if unknown:
        raise SourceError(f"{source.path} has an optimizer for {unknown[0]}, which is not in the model")
    return found
