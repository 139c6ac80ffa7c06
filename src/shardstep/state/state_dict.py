"""torch's state_dict: checked before anything is loaded from it, and cut down to one rank's part."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from shardstep.optimizers.local_optimizer import is_of_torch, qualified_name
from shardstep.optimizers.optimizer_copy import beside_state
from shardstep.optimizers.param_groups import CLASS
from shardstep.planning import ParamSpec, Piece
from shardstep.stepping.element_state import Entry, join_entries


def pack_groups(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Param groups as a state_dict holds them: parameters replaced by their indices."""
    packed: list[dict[str, Any]] = []
    start = 0
    # A class cannot be in a file that is read without running what it brings along: its name is.
    for group in param_groups:
        stop = start + len(group["params"])
        options = {key: qualified_name(value) if key == CLASS else value for key, value in group.items()}
        packed.append({**options, "params": list(range(start, stop))})
        start = stop
    return packed


def check_state_dict(
    state_dict: Any, specs: Sequence[ParamSpec], group_sizes: Sequence[int], optimizer_class: type[Optimizer]
) -> list[Any]:
    """The saved keys of the parameters in index order; ValueError that names every entry that does not fit."""
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state_dict must be a dict, got {torch.typename(state_dict)}")
    absent = [key for key in ("state", "param_groups") if key not in state_dict]
    if absent:
        raise ValueError(f"the state_dict has no {' and no '.join(map(repr, absent))}; its keys are {list(state_dict)}")
    problems = list(_group_problems(state_dict["param_groups"], group_sizes))
    if not problems:
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        problems = list(_entry_problems(state_dict["state"], dict(zip(keys, specs, strict=True)), optimizer_class))
    if problems:
        raise ValueError("the state_dict does not fit this optimizer:\n  " + "\n  ".join(problems))
    return keys


def _group_problems(groups: Sequence[Mapping[str, Any]], expected: Sequence[int]) -> Iterator[str]:
    if len(groups) != len(expected):
        yield f"it has {len(groups)} param groups, the optimizer has {len(expected)}"
        return
    for number, (group, count) in enumerate(zip(groups, expected, strict=True)):
        if "params" not in group:
            yield f"param_groups[{number}] has no 'params'"
        elif len(group["params"]) != count:
            yield f"param_groups[{number}] has {len(group['params'])} parameters, the optimizer has {count}"


def _entry_problems(
    state: Mapping[Any, Any], spec_of: Mapping[Any, ParamSpec], optimizer_class: type[Optimizer]
) -> Iterator[str]:
    for key, entry in state.items():
        spec = spec_of.get(key)
        if spec is None:
            if isinstance(key, int):  # entries under other keys belong to no parameter; the optimizer knows them
                yield f"state[{key}] belongs to no parameter; there are {len(spec_of)}"
        elif not isinstance(entry, Mapping):
            yield f"state[{key}] ({spec.name}) is {torch.typename(entry)}, not a dict"
        else:
            for name, value in entry.items():
                if not _fits(value, spec, optimizer_class):
                    yield f"state[{key}][{name!r}] has shape {tuple(value.shape)}, {spec.name} has {spec.shape}"
    if is_of_torch(optimizer_class):
        yield from _missing_entries(state, spec_of)


def _fits(value: Any, spec: ParamSpec, optimizer_class: type[Optimizer]) -> bool:
    """Whether a value can be state of the parameter. Of a class that is not torch's we cannot know."""
    if inner := getattr(optimizer_class, "inner_classes", ()):
        return any(_fits(value, spec, kind) for kind in inner)
    if not isinstance(value, torch.Tensor) or value.dim() == 0 or not is_of_torch(optimizer_class):
        return True
    if issubclass(optimizer_class, torch.optim.LBFGS):  # keeps vectors over all parameters
        return True
    shape = tuple(value.shape)
    if optimizer_class is torch.optim.Adafactor:  # keeps sums over rows and over columns
        return len(shape) == len(spec.shape) and all(
            have in (1, want) for have, want in zip(shape, spec.shape, strict=True)
        )
    return shape == spec.shape


def _missing_entries(state: Mapping[Any, Any], spec_of: Mapping[Any, ParamSpec]) -> Iterator[str]:
    """torch's classes make all state of a parameter at once, and the same for parameters alike: find what lacks some.

    A parameter without any state is no problem: it has not been stepped yet. Nor is state that an option switches on.
    """
    optional = {"max_exp_avg_sq", "momentum_buffer", "grad_avg"}
    alike: dict[tuple[int, int], dict[Any, set[str]]] = {}
    for key, entry in state.items():
        if key in spec_of and isinstance(entry, Mapping) and entry:
            spec = spec_of[key]
            names = {
                name for name in entry if not str(name).startswith("shardstep.")
            }  # a master is there before a step
            if names:
                alike.setdefault((spec.group, len(spec.shape)), {})[key] = names
    for entries in alike.values():
        complete = set().union(*entries.values())
        for key, names in entries.items():
            for name in sorted(complete - names - optional):
                yield f"state[{key}] ({spec_of[key].name}) has no {name!r}, which other parameters of its group have"


def local_part(
    state_dict: Mapping[str, Any], keys: Sequence[Any], mine: Sequence[int], specs: Sequence[ParamSpec]
) -> dict[str, Any]:
    """What the local optimizer loads: copies for the parameters `mine` only; a step must not write to the caller's."""
    wanted = {keys[index] for index in mine}
    known = set(keys)
    state = {key: entry for key, entry in state_dict["state"].items() if key in wanted or key not in known}
    groups: list[dict[str, Any]] = []
    for number, saved in enumerate(state_dict["param_groups"]):
        own = [index for index in mine if specs[index].group == number]
        group = {name: value for name, value in saved.items() if name not in ("params", "param_names")}
        group["params"] = [keys[index] for index in own]
        if "param_names" in saved:
            names = dict(zip(saved["params"], saved["param_names"], strict=True))
            group["param_names"] = [names[keys[index]] for index in own]
        groups.append(group)
    return copy.deepcopy({**beside_state(state_dict), "state": state, "param_groups": groups})


def describe(state_dict: Mapping[str, Any]) -> Iterator[str]:
    """What ranks that load the same state_dict have in common: options, and the shapes and scalars of the state."""
    for number, group in enumerate(state_dict["param_groups"]):
        for name, value in group.items():
            yield f"param_groups[{number}][{name!r}] = {_brief(value)}"
    for key, entry in state_dict["state"].items():
        for name, value in entry.items() if isinstance(entry, Mapping) else [("", entry)]:
            yield f"state[{key!r}][{name!r}] = {_brief(value)}"


def _brief(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_brief, value))}]"
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if not isinstance(value, torch.Tensor):  # a set, or an object, need not print alike in every process
        return f"a {type(value).__name__}"
    return repr(value.item()) if value.dim() == 0 else f"a tensor of shape {tuple(value.shape)}, {value.dtype}"


def check_options(local: Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise if a loaded group lacks an option that the optimizer had: the state_dict is another optimizer's."""
    for number, (group, had) in enumerate(zip(local.param_groups, before, strict=True)):
        absent = [name for name in local.defaults if name in had and name not in group]
        if absent:
            raise ValueError(
                f"param_groups[{number}] of the state_dict has no {', '.join(map(repr, absent))}, which "
                f"{type(local).__name__} needs; it was saved by another optimizer"
            )


def check_saved_groups(state_dict: Mapping[str, Any], specs: Sequence[ParamSpec], trial: Optimizer) -> None:
    """Raise if saved groups are another optimizer's or another model's. `trial` has this one's options alone.

    It loads them, so that options which are newer than the state_dict get their defaults, and has them then.
    """
    groups, before = state_dict["param_groups"], [dict(group) for group in trial.param_groups]
    problems = list(
        _group_problems(groups, [sum(spec.group == number for spec in specs) for number in range(len(before))])
    )
    if problems:
        raise ValueError("the state_dict does not fit this optimizer:\n  " + "\n  ".join(problems))
    for number, (group, had) in enumerate(zip(groups, before, strict=True)):
        ours, theirs = had.get(CLASS), group.get(CLASS)
        if ours is not None and theirs is not None and qualified_name(ours) != theirs:
            raise ValueError(
                f"param_groups[{number}] of the state_dict is of {theirs}, and here of {qualified_name(ours)}"
            )
    options = [
        {**{key: value for key, value in group.items() if key not in ("param_names", CLASS)}, "params": []}
        for group in groups
    ]
    for group, had in zip(options, before, strict=True):
        group.update({key: had[key] for key in (CLASS,) if key in had})  # itself, where its name is saved
    others = {**beside_state(trial.state_dict()), **beside_state(state_dict)}
    trial.load_state_dict(copy.deepcopy({**others, "state": {}, "param_groups": options}))
    check_options(trial, before)


def bare_name(name: str) -> str:
    """Without what DistributedDataParallel and torch.compile put before it."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def shown_state(entries: Mapping[Piece, Entry], params: Sequence[torch.Tensor]) -> ShownState:
    """State by parameter, from that of the pieces of one rank: flat, the elements that it holds, in order."""
    found: dict[torch.Tensor, list[tuple[Piece, Entry]]] = {}
    for piece, entry in sorted(entries.items(), key=lambda item: (item[0].param, item[0].start)):
        found.setdefault(params[piece.param], []).append((piece, entry))
    return ShownState(
        (param, join_entries([entry for _, entry in rows], [piece.numel for piece, _ in rows]))
        for param, rows in found.items()
    )


class ShownState(dict[Any, Any]):
    """State to look at. It is made when somebody asks, so what is taken out of it would still be there: that raises.

    Setting an entry does not: trainers write back what they have moved to another device, and mean nothing else by it.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "this only shows the state of a sharded optimizer, which would stay as it is: to begin anew call "
            "load_state_dict() on all ranks with an empty 'state' and the param_groups of state_dict()"
        )

    def __missing__(self, key: Any) -> dict[str, Any]:
        return {}  # as torch's own, which has an entry for whoever asks

    __delitem__ = clear = pop = popitem = update = __ior__ = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is anybody's
