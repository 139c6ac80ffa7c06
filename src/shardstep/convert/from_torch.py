"""Read files of torch.save: the state_dict of a model, of an optimizer, or a dict that has both under any keys.

An optimizer's state_dict has "state" and "param_groups", and may be in a list, as in files of Lightning. A model's is
a dict of tensors. A state_dict consolidated by torch's or shardstep's ZeroRedundancyOptimizer has the same form.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardstep.convert.names import match_names, use_given_names
from shardstep.convert.source import LazyTensor, Source, SourceError, SourceGroup, TrainedParameter, lazy_tensor
from shardstep.convert.unpickling import load_torch_file
from shardstep.stepping.element_state import COUNT
from shardstep.stepping.masters import AVERAGE, MASTER

OUR_KEY = "shardstep"  # in a file that to_torch.py wrote, this key has all that torch's state_dicts cannot contain
OF_RANKS, CLASSES = "extra_of_ranks", "classes"
OUR_STATE = {MASTER: "masters", AVERAGE: "averages", COUNT: "rounded"}  # shardstep's own state, and its keys in there
_LIKELY = ("model", "model_state_dict", "state_dict", "module", "net", "weights")


def read(path: Path, also: Path | None = None, names: Sequence[str] | None = None) -> Source:
    """Describe a file; `also` is a second one if model and optimizer are in two, and `names` are the parameters'."""
    source = Source("a file of torch.save", path)
    found = _find_contents(load_torch_file(path), path)
    if also is not None:
        found = _merge(found, _find_contents(load_torch_file(also), also), path, also)
    if found.model is None:
        raise SourceError(
            f"{path} has an optimizer and no model, from which the parameters get their names: give the file with the "
            "weights as --also FILE"
        )
    take_model(source, found.model, path)
    if found.optimizer is not None:
        _take_optimizer(source, found.optimizer, found.ours, names)
    elif names is not None:
        raise SourceError(f"{path} has no optimizer, and --names is for an optimizer's parameters: leave it out")
    source.extra = dict(found.rest)
    source.notes += [
        f"{place} looks like an optimizer's state: it is kept in extra" for place in _find_other_optimizers(found.rest)
    ]
    source.extra_of_ranks = tuple(found.ours.get(OF_RANKS, ()))
    return source


class _FileContents:
    """What a file has: a model, an optimizer, other values, and what shardstep has added."""

    def __init__(self, model: Any = None, optimizer: Any = None, rest: Any = None, ours: Any = None) -> None:
        self.model, self.optimizer, self.rest, self.ours = model, optimizer, rest or {}, ours or {}


def _find_contents(loaded: Any, path: Path) -> _FileContents:
    if not isinstance(loaded, Mapping):
        raise SourceError(f"{path} contains a {type(loaded).__name__}: a state_dict is expected, or a dict of them")
    if _is_optimizer(loaded):
        return _FileContents(optimizer=loaded)
    if _is_model(loaded):
        return _FileContents(model=loaded)
    if isinstance(loaded.get(OUR_KEY), Mapping):
        return _FileContents(loaded.get("model"), loaded.get("optimizer"), loaded.get("extra"), loaded[OUR_KEY])
    optimizers = _optimizers(loaded)
    models = [key for key, value in loaded.items() if _is_model(value)]
    if len(optimizers) > 1:
        raise SourceError(
            f"{path} has {len(optimizers)} optimizers ({', '.join(optimizers)}), and only one can be converted: save "
            "each with its part of the model in a file of its own"
        )
    if len(models) > 1:
        models = [key for key in _LIKELY if key in models][:1] or models
    if len(models) > 1:
        raise SourceError(
            f"{path} has {len(models)} models ({', '.join(map(str, models))}), and only one can be converted: save "
            "each in a file of its own"
        )
    if not models and not optimizers:
        raise SourceError(f"{path} has neither a model's state_dict nor an optimizer's: {_describe_values(loaded)}")
    optimizer = next(iter(optimizers.values()), None)
    rest = {key: _without(value, optimizer) for key, value in loaded.items() if key not in models}
    rest = {key: left for key, left in rest.items() if left is loaded[key] or left}
    return _FileContents(loaded[models[0]] if models else None, optimizer, rest)


def _merge(one: _FileContents, other: _FileContents, path: Path, also: Path) -> _FileContents:
    for what in ("model", "optimizer"):
        if getattr(one, what) is not None and getattr(other, what) is not None:
            raise SourceError(f"{path} and {also} both have the state_dict of a {what}: give only one that has it")
    return _FileContents(
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
    """Return the optimizers of a dict by key; if it has none, those in its lists and dicts (Lightning saves a list)."""
    found = {str(key): value for key, value in loaded.items() if _is_optimizer(value)}
    if found:
        return found
    for key, value in loaded.items():
        inside = value.items() if isinstance(value, Mapping) else enumerate(value) if _is_list(value) else ()
        found |= {f"{key}[{place!r}]": one for place, one in inside if _is_optimizer(one)}
    return found


def _find_other_optimizers(value: Any, path: str = "") -> Iterator[str]:
    """Yield where other optimizers are in a nested value."""
    if _is_optimizer(value):
        yield path
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _find_other_optimizers(one, f"{path}[{key!r}]" if path else str(key))
    elif _is_list(value):
        for number, one in enumerate(value):
            yield from _find_other_optimizers(one, f"{path}[{number}]")


def _without(value: Any, optimizer: Any) -> Any:
    """Return a value of the file without the optimizer, if that is in it."""
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


def _describe_values(loaded: Mapping[Any, Any]) -> str:
    return ", ".join(f"{key} is a {type(value).__name__}" for key, value in list(loaded.items())[:8])


# -- add to a source ---------------------------------------------------------------------------------------------------


def take_model(source: Source, model: Mapping[str, Any], path: Path) -> None:
    """Add a model's state_dict to the source."""
    first: dict[tuple[Any, ...], str] = {}
    for key, value in model.items():
        if not isinstance(value, torch.Tensor):
            source.others[key] = value
            continue
        source.model[key] = lazy_tensor(check_dense(value, key, path))
        mark = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (key,)
        if mark in first:
            source.tied[key] = first[mark]
        first.setdefault(mark, key)


def check_dense(value: torch.Tensor, what: str, path: Path) -> torch.Tensor:
    """Return the tensor; raise SourceError if it is sparse, quantized or of a subclass."""
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise SourceError(
            f"{path}: {what} is a {type(value).__name__} with layout {value.layout}, and only plain dense tensors can "
            "be converted: save it as one (a DTensor by full_tensor())"
        )
    return value


def _take_optimizer(source: Source, optimizer: Mapping[str, Any], ours: Mapping[str, Any], names: Any) -> None:
    raw, state = list(optimizer["param_groups"]), optimizer["state"]
    named = _names(source, raw, state, names)
    classes = ours.get(CLASSES, [])
    for number, group in enumerate(raw):
        members = tuple(named[one] for one in group["params"])
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        source.groups.append(SourceGroup(members, options, classes[number] if number < len(classes) else ""))
        for one in group["params"]:
            source.trained[named[one]] = _trained(source, named[one], state.get(one, {}))
    for kind, key in OUR_STATE.items():
        for name, tensor in ours.get(key, {}).items():
            if name in source.trained:
                source.trained[name].state[kind] = lazy_tensor(check_dense(tensor, f"{key} of {name}", source.path))


def _trained(source: Source, name: str, entry: Mapping[str, Any]) -> TrainedParameter:
    weight: LazyTensor = source.model[name]
    made = TrainedParameter(weight.shape, weight.dtype)
    for key, value in entry.items():
        if isinstance(value, torch.Tensor):
            made.state[key] = lazy_tensor(check_dense(value, f"{key} of {name}", source.path))
        else:
            made.values[key] = value
    return made


def _names(source: Source, groups: Sequence[Mapping[str, Any]], state: Any, given: Any) -> dict[Any, str]:
    members = [list(group["params"]) for group in groups]
    everyone = [one for group in members for one in group]
    left = set(state) - set(everyone)
    if left:
        raise SourceError(f"{source.path} has state of {sorted(map(str, left))[:4]}, which are not in any param group")
    if given is not None:
        return dict(use_given_names(members, given, state, source.model))
    if all(isinstance(one, str) for one in everyone):
        found = {one: one for one in everyone}
    elif all(len(group.get("param_names") or ()) == len(group["params"]) for group in groups):
        found = {one: name for group in groups for one, name in zip(group["params"], group["param_names"], strict=True)}
    else:
        source.notes.append(
            "the optimizer has numbers in place of its parameters' names: they got the model's names that fit by order "
            "and shape; give others with --names FILE"
        )
        return match_names(members, state, source.model, source.tied)
    unknown = [name for name in found.values() if name not in source.model]
    if unknown:
        raise SourceError(f"{source.path} has an optimizer of {unknown[0]}, which is not in the model")
    return found
