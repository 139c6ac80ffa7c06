"""Write and check torch's state_dict: check all of it before anything is loaded, and select one rank's part."""

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
    """Return param groups as a state_dict has them, with the parameters' indices in place of the parameters."""
    packed: list[dict[str, Any]] = []
    start = 0
    # A file that is read with weights_only=True cannot contain a class, so the class is saved by its name.
    for group in param_groups:
        stop = start + len(group["params"])
        options = {key: qualified_name(value) if key == CLASS else value for key, value in group.items()}
        packed.append({**options, "params": list(range(start, stop))})
        start = stop
    return packed


def check_state_dict(
    state_dict: Any, specs: Sequence[ParamSpec], group_sizes: Sequence[int], optimizer_class: type[Optimizer]
) -> list[Any]:
    """Return the saved keys of the parameters in index order; raise ValueError with all entries that do not fit."""
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
            if isinstance(key, int):  # entries with other keys belong to the optimizer as a whole
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
    """Whether a value can be state of the parameter. For classes that are not torch's, anything can."""
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
    """Yield the parameters that lack state which other parameters of their group have.

    torch's classes make all state of a parameter at once, with equal names for similar parameters. A parameter without
    any state is no problem: it was never stepped. Nor is state that an option switches on.
    """
    optional = {"max_exp_avg_sq", "momentum_buffer", "grad_avg"}
    alike: dict[tuple[int, int], dict[Any, set[str]]] = {}
    for key, entry in state.items():
        if key in spec_of and isinstance(entry, Mapping) and entry:
            spec = spec_of[key]
            # Masters exist before the first step, so they do not count.
            names = {name for name in entry if not str(name).startswith("shardstep.")}
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
    """Return what the local optimizer loads: a copy of the state_dict with only the parameters `mine`.

    It is a copy because a step must not write to the caller's tensors.
    """
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
    """Yield lines that are equal on ranks that load equal state_dicts: options, and shapes and scalars of the state."""
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
    if not isinstance(value, torch.Tensor):  # a set, or an object, may print differently in every process
        return f"a {type(value).__name__}"
    return repr(value.item()) if value.dim() == 0 else f"a tensor of shape {tuple(value.shape)}, {value.dtype}"


def check_options(local: Optimizer, before: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a loaded group lacks an option that the optimizer had before loading."""
    for number, (group, had) in enumerate(zip(local.param_groups, before, strict=True)):
        absent = [name for name in local.defaults if name in had and name not in group]
        if absent:
            raise ValueError(
                f"param_groups[{number}] of the state_dict has no {', '.join(map(repr, absent))}, which "
                f"{type(local).__name__} needs: it was saved by an optimizer of another class"
            )


def check_saved_groups(state_dict: Mapping[str, Any], specs: Sequence[ParamSpec], trial: Optimizer) -> None:
    """Raise ValueError if the saved groups do not fit this model and this optimizer's class.

    `trial` is an optimizer with this one's options and without parameters. It loads the saved options, so that options
    which are newer than the state_dict get their defaults.
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
                f"param_groups[{number}] was saved by {theirs}, and is {qualified_name(ours)} here: use the class "
                "with which it was saved"
            )
    options = [
        {**{key: value for key, value in group.items() if key not in ("param_names", CLASS)}, "params": []}
        for group in groups
    ]
    for group, had in zip(options, before, strict=True):
        group.update({key: had[key] for key in (CLASS,) if key in had})  # the class itself, not its saved name
    others = {**beside_state(trial.state_dict()), **beside_state(state_dict)}
    trial.load_state_dict(copy.deepcopy({**others, "state": {}, "param_groups": options}))
    check_options(trial, before)


def bare_name(name: str) -> str:
    """Return a parameter's name without the prefixes of DistributedDataParallel and torch.compile."""
    return name.removeprefix("module.").replace("_orig_mod.", "")


def shown_state(entries: Mapping[Piece, Entry], params: Sequence[torch.Tensor]) -> ShownState:
    """Return this rank's state by parameter; tensors are flat and have the elements that this rank holds, in order."""
    found: dict[torch.Tensor, list[tuple[Piece, Entry]]] = {}
    for piece, entry in sorted(entries.items(), key=lambda item: (item[0].param, item[0].start)):
        found.setdefault(params[piece.param], []).append((piece, entry))
    return ShownState(
        (param, join_entries([entry for _, entry in rows], [piece.numel for piece, _ in rows]))
        for param, rows in found.items()
    )


class ShownState(dict[Any, Any]):
    """Read-only state. It is built anew at each access, so removing an entry would have no effect: that raises.

    Setting an entry does not raise: trainers write back entries that they have moved to another device.
    """

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            "opt.state of a sharded optimizer is read-only. To reset the state, call load_state_dict() on all ranks "
            "with an empty 'state' and the param_groups of state_dict()"
        )

    def __missing__(self, key: Any) -> dict[str, Any]:
        return {}  # as torch's own state, a defaultdict

    __delitem__ = clear = pop = popitem = update = __ior__ = _refuse

    def __reduce__(self) -> Any:
        return dict, (dict(self),)  # a copy is a plain dict that may be changed
