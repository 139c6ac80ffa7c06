"""What a caller may pass as parameters: checked once, before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardstep.planning import ParamSpec, read_specs


def read_params(params: Any) -> list[dict[str, Any]]:
    """The param groups that `params` stands for, as new dicts with lists: the caller's own are never written to.

    `params` is an iterable of tensors, of (name, tensor) pairs, or of dicts with "params".
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params must be an iterable of tensors or dicts, got a single {torch.typename(params)}")
    if isinstance(params, set):
        raise TypeError("params must be in an order that is the same on every rank; a set has none")
    try:
        iterator = iter(params)
    except TypeError:
        raise TypeError(f"params must be an iterable of tensors or dicts, got {torch.typename(params)}") from None
    entries = list(iterator)
    if not entries:
        raise ValueError("params is empty: there is nothing to optimize")
    if all(isinstance(entry, dict) for entry in entries):
        return [read_group(entry) for entry in entries]
    if any(isinstance(entry, dict) for entry in entries):
        raise TypeError("params mixes tensors and dicts; give either parameters or param groups")
    return [read_group({"params": entries})]


def read_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """One param group as a new dict whose "params" is a list of tensors; names, if given, lie in "param_names"."""
    if not isinstance(group, dict):
        raise TypeError(f"a param group must be a dict, got {torch.typename(group)}")
    if "params" not in group:
        raise ValueError(f'a param group has no "params"; its keys are {sorted(map(str, group))}')
    given = group["params"]
    if isinstance(given, set):
        raise TypeError("the parameters of a group must be in an order that is the same on every rank; a set has none")
    members = [given] if isinstance(given, torch.Tensor) else list(given)
    pairs = [isinstance(member, tuple) and len(member) == 2 for member in members]
    tensors = [member[1] if pair else member for member, pair in zip(members, pairs, strict=True)]
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"params must be tensors or (name, tensor) pairs; entry {place} is {torch.typename(tensor)}"
            )
    if any(pairs) and not all(pairs):
        raise TypeError("params mixes tensors and (name, tensor) pairs; name all of them or none")
    names = {"param_names": [str(member[0]) for member in members]} if any(pairs) else {}
    return {**group, "params": tensors, **names}


def check_parameters(
    param_groups: Sequence[dict[str, Any]], *, allow_mixed_dtypes: bool, differentiable: bool = False
) -> None:
    """Raise ValueError for what can not be sharded or optimized; the offending parameters are named."""
    named = list(zip(read_specs(param_groups), _tensors(param_groups), strict=True))
    if not named:
        raise ValueError("params is empty: there is nothing to optimize")
    sparse = [spec.name for spec, param in named if param.layout is not torch.strided]
    if sparse:
        raise ValueError(f"parameters must be dense tensors; sparse: {', '.join(sparse)}")
    derived = [spec.name for spec, param in named if not (differentiable or param.is_leaf or param.retains_grad)]
    if derived:
        raise ValueError(
            f"parameters must be leaf tensors; computed from others: {', '.join(derived)}. "
            "Give the tensors they are computed from, or detach them"
        )
    first_place: dict[int, str] = {}
    for spec, param in named:
        if id(param) in first_place:
            raise ValueError(
                f"the same parameter was given twice: {first_place[id(param)]} and {spec.name}; "
                "a tied weight is one parameter and is given once"
            )
        first_place[id(param)] = spec.name
    _check_memory(named)
    dtypes = {spec.dtype: spec.name for spec, _ in reversed(named)}
    if len(dtypes) > 1 and not allow_mixed_dtypes:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(dtypes.items()))
        raise ValueError(f"parameters are of several dtypes: {found}; pass allow_mixed_dtypes=True to shard them all")


def _check_memory(named: Sequence[tuple[ParamSpec, torch.Tensor]]) -> None:
    """Raise if two parameters share memory: two ranks would step the same elements, each its own way."""
    ranges = sorted(
        (str(param.device), param.data_ptr(), param.data_ptr() + param.nbytes, spec.name)
        for spec, param in named
        if param.nbytes and param.is_contiguous() and param.device.type != "meta"
    )
    for (device, _, stop, name), (other_device, start, _, other) in pairwise(ranges):
        if device == other_device and start < stop:
            raise ValueError(f"{name} and {other} share memory; a tied weight is one parameter and is given once")


def _tensors(param_groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [param for group in param_groups for param in group["params"]]
