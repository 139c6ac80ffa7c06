"""What a rank takes from a state_dict: the whole state of the plain optimizer, or its own part, by name or by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.params.views import flat_gradient
from shardstep.planning import Layout, ParamSpec, Piece, Plan
from shardstep.state.sharded_state import PartOfState, PartOfTensor
from shardstep.state.state_dict import bare_name, check_saved_groups, check_state_dict
from shardstep.stepping.element_state import Entry, cut_entry
from shardstep.stepping.masters import AVERAGE, MASTER


def read_saved(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layouts: Sequence[Layout],
    plan: Plan,
    rank: int,
    trial: Optimizer,
) -> tuple[dict[str, Any], Plan, dict[Piece, Entry]]:
    """The same with its parameters in our order; what a rank loads of it, and the plan by which ranks held it.

    `trial` has the options of `groups` alone, and afterwards those that were saved, as its class makes them; what does
    not fit is refused with the reason.
    """
    if isinstance(state_dict, Mapping) and "shardstep" in state_dict:
        raise ValueError(
            "this is one rank's part, as an earlier shardstep saved it: load it with that one, on as many ranks as "
            "saved it, and save it there with shardstep.save"
        )
    if isinstance(state_dict, Mapping) and {"state", "param_groups"} <= state_dict.keys():
        state_dict = in_order_of(state_dict, plan.params)
        check_saved_groups(state_dict, plan.params, trial)
    keys = check_state_dict(state_dict, plan.params, [len(group["params"]) for group in groups], type(trial))
    flat = [
        param if layout is Layout.FLAT else None
        for group, layout in zip(groups, layouts, strict=True)
        for param in group["params"]
    ]
    state = state_dict["state"]
    held_by = state.plan if isinstance(state, PartOfState) and state.plan is not None else plan
    if [spec.shape for spec in held_by.params] != [spec.shape for spec in plan.params][: len(held_by.params)]:
        raise ValueError("the state_dict was taken from another optimizer: the shapes of its parameters differ")
    return dict(state_dict), held_by, _cut(state, keys, held_by, rank, flat)


def _cut(
    state: Mapping[Any, Any], keys: Sequence[Any], plan: Plan, rank: int, params: Sequence[torch.Tensor | None]
) -> dict[Piece, Entry]:
    """By the pieces of a rank; `keys[i]` is the saved key of parameter i.

    `params`: tensors in a parameter's shape become flat, in the order of its memory; where None, they keep it.
    """
    found: dict[Piece, Entry] = {}
    for piece in plan.pieces_of(rank):
        entry = state.get(keys[piece.param])
        if entry:
            whole = Piece(piece.param, 0, plan.params[piece.param].numel, rank)
            rest = {key: value for key, value in entry.items() if not isinstance(value, PartOfTensor)}
            param = params[piece.param]
            if param is not None:
                rest = {n: flat_gradient(param, v) if _has_shape_of(v, param) else v for n, v in rest.items()}
            own = cut_entry(rest, whole, piece.start, piece.stop)
            found[piece] = {key: own[key] if key in own else _own(key, entry[key], piece, param) for key in entry}
    return found


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def _own(key: str, part: PartOfTensor, piece: Piece, param: torch.Tensor | None) -> torch.Tensor:
    if not part.is_whole:
        return part.of(piece.start, piece.stop)
    values = part.held[0]  # of a parameter that one rank holds, in whatever shape
    if param is None and values.dim() == 1 and key not in (MASTER, AVERAGE):
        return part.whole()  # it was taken where parameters are cut
    return flat_gradient(param, values) if param is not None and _has_shape_of(values, param) else values


# -- by name -----------------------------------------------------------------------------------------------------------


def in_order_of(state_dict: Mapping[str, Any], specs: Sequence[ParamSpec]) -> Mapping[str, Any]:
    """The same, with groups and parameters in the order of `specs`, if it says how its parameters are called."""
    saved = _names(state_dict["param_groups"])
    if not saved:
        return state_dict
    own = [bare_name(spec.name) for spec in specs]
    _check_names(saved, own)
    groups: list[dict[str, Any]] = []
    for number in range(1 + max((spec.group for spec in specs), default=-1)):
        names = [name for name, spec in zip(own, specs, strict=True) if spec.group == number]
        places = {saved[name][0] for name in names}
        if len(places) > 1:
            first, other = (next(n for n in names if saved[n][0] == place) for place in sorted(places)[:2])
            raise ValueError(f"{first} and {other} are in one group here, and in two in the state_dict")
        group = state_dict["param_groups"][places.pop()]
        groups.append({**group, "params": [saved[name][1] for name in names], "param_names": names})
    return {**state_dict, "param_groups": groups}


def _names(groups: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Any]]:
    """By name: the number of the group, and the key. Empty if it has no names, or not for all."""
    found: dict[str, tuple[int, Any]] = {}
    for number, group in enumerate(groups):
        keys = list(group.get("params", ()))
        names = group.get("param_names") or keys
        if len(names) != len(keys) or not all(isinstance(name, str) for name in names):
            return {}
        for name, key in zip(names, keys, strict=True):
            if bare_name(name) in found:
                raise ValueError(f"the state_dict has two parameters that are called {bare_name(name)}")
            found[bare_name(name)] = (number, key)
    return found


def _check_names(saved: Mapping[str, Any], own: Sequence[str]) -> None:
    known = set(own)
    unknown = [name for name in saved if name not in known]
    missing = [name for name in own if name not in saved]
    if unknown or missing:
        words = [f"it has {_first(unknown)}, unknown here"] if unknown else []
        words += [f"it has not got {_first(missing)}"] if missing else []
        raise ValueError(
            f"the state_dict was saved for other parameters: {', and '.join(words)}. If only names have changed, take "
            "'param_names' out of its param_groups, and key it by number: then it is loaded by position"
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
