"""Take this rank's pieces from a state_dict: the plain optimizer's or this rank's part, matched by name or position."""

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
    """Return the state_dict with its parameters in our order, the plan for which it was saved, and this rank's state.

    `trial` is an optimizer with the options of `groups` and without parameters; afterwards it has the saved options, as
    its class loads them. Raises ValueError with the reason if the state_dict does not fit.
    """
    if isinstance(state_dict, Mapping) and "shardstep" in state_dict:
        raise ValueError(
            "this state_dict is one rank's part, in the format of an earlier shardstep. Load it with that version, on "
            "as many ranks as saved it, and save it there with shardstep.save"
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
    """Return the state of each piece of a rank; `keys[i]` is the saved key of parameter i.

    Where `params[i]` is a tensor, state in its shape is flattened in its memory order; where it is None, state keeps
    its shape.
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
            found[piece] = {key: own[key] if key in own else _take(key, entry[key], piece, param) for key in entry}
    return found


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def _take(key: str, part: PartOfTensor, piece: Piece, param: torch.Tensor | None) -> torch.Tensor:
    """Return the elements of `piece` from this rank's part of a saved tensor."""
    if not part.is_whole:
        return part.values_of(piece.start, piece.stop)
    values = part.range_values[0]
    if param is None and values.dim() == 1 and key not in (MASTER, AVERAGE):
        return part.to_whole()  # saved flat, under Layout.FLAT
    return flat_gradient(param, values) if param is not None and _has_shape_of(values, param) else values


# -- by name -----------------------------------------------------------------------------------------------------------


def in_order_of(state_dict: Mapping[str, Any], specs: Sequence[ParamSpec]) -> Mapping[str, Any]:
    """Return the state_dict with groups and parameters in the order of `specs`; unchanged if it has no names."""
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
            raise ValueError(
                f"{first} and {other} are in one group here, and in two groups in the state_dict: give this optimizer "
                "the groups with which it was saved"
            )
        group = state_dict["param_groups"][places.pop()]
        groups.append({**group, "params": [saved[name][1] for name in names], "param_names": names})
    return {**state_dict, "param_groups": groups}


def _names(groups: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, Any]]:
    """Return (number of the group, key) by name; nothing if any parameter has no name."""
    found: dict[str, tuple[int, Any]] = {}
    for number, group in enumerate(groups):
        keys = list(group.get("params", ()))
        names = group.get("param_names") or keys
        if len(names) != len(keys) or not all(isinstance(name, str) for name in names):
            return {}
        for name, key in zip(names, keys, strict=True):
            if bare_name(name) in found:
                raise ValueError(f"the state_dict has two parameters with the name {bare_name(name)}")
            found[bare_name(name)] = (number, key)
    return found


def _check_names(saved: Mapping[str, Any], own: Sequence[str]) -> None:
    known = set(own)
    unknown = [name for name in saved if name not in known]
    missing = [name for name in own if name not in saved]
    if unknown or missing:
        words = [f"it has {_first_five(unknown)}, which this optimizer does not have"] if unknown else []
        words += [f"it does not have {_first_five(missing)}"] if missing else []
        raise ValueError(
            f"the state_dict was saved for other parameters: {', and '.join(words)}. If only names have changed, "
            "remove 'param_names' from its param_groups and use numbers as keys: then it is loaded by position"
        )


def _first_five(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
