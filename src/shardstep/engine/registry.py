"""Which sharded optimizer a parameter belongs to: one at a time, or each would take away the other's gradients."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from shardstep.planning import read_specs


class Owner(Protocol):
    param_groups: list[dict[str, Any]]
    model: nn.Module

    @property
    def is_closed(self) -> bool: ...

    def close(self) -> None: ...

    def leave_peers(self) -> None:
        """This is a forked process."""


_owners: weakref.WeakSet[Any] = weakref.WeakSet()  # of all optimizers that live, also of those that are closed


def take(owner: Owner) -> None:
    """From now on the parameters of `owner` are its own, until it is closed or garbage."""
    _owners.add(owner)


def close_earlier(model: nn.Module, groups: Sequence[Mapping[str, Any]]) -> None:
    """Whoever has sharded these parameters of this very module before lets go of it."""
    params = _by_id(groups)
    for owner in _open_owners():
        if owner.model is model and not params.keys().isdisjoint(_by_id(owner.param_groups)):
            owner.close()


def owned_in(model: nn.Module) -> set[torch.Tensor]:
    """Parameters of this module that an optimizer has."""
    owners = [owner for owner in _open_owners() if owner.model is model]
    return {param for owner in owners for group in owner.param_groups for param in group["params"]}


def check_stepped(model: nn.Module, left_out: Sequence[str]) -> None:
    """Raise if no optimizer of this module has one of these parameters, and it trains."""
    named, owned = dict(model.named_parameters()), owned_in(model)
    left = [name for name in left_out if named[name] not in owned and named[name].requires_grad]
    if left:
        raise ValueError(
            f"no group has {', '.join(left[:5])}{' and others' if len(left) > 5 else ''}: add a group "
            '{"params": "rest"}, shard them with another optimizer, or freeze them with requires_grad_(False)'
        )


def check_unowned(groups: Sequence[Mapping[str, Any]], model: nn.Module) -> None:
    """Raise if a trainable parameter belongs to the optimizer of another module than `model`.

    Frozen ones have no gradients to take away: two models may share a backbone that neither trains.
    """
    params = _by_id(groups)
    if _find_other(params, model) is None:
        return
    gc.collect()  # an optimizer that nobody refers to may still be there: it is part of a cycle
    found = _find_other(params, model)
    if found is not None:
        place, name, owner = found
        raise ValueError(
            f"{params[place][0]} of this {type(model).__name__} is {name} of a {type(owner.model).__name__} that is "
            "sharded already: each optimizer would take away the other's gradients. Put both models into one "
            "nn.ModuleDict and shard that, or close() the earlier optimizer first"
        )


def _find_other(params: Mapping[int, tuple[str, torch.Tensor]], model: nn.Module) -> tuple[int, str, Owner] | None:
    for owner in _open_owners():
        if owner.model is not model:
            for place, (name, param) in _by_id(owner.param_groups).items():
                if place in params and param.requires_grad:
                    return place, name, owner
    return None


def _leave_peers() -> None:
    """In a forked process the model is a copy, which computes by itself: what it sent would come between the messages
    of the process that trains, on the same connections."""
    for owner in _open_owners():
        owner.leave_peers()


os.register_at_fork(after_in_child=_leave_peers)


def _open_owners() -> Iterable[Owner]:
    return [owner for owner in list(_owners) if not owner.is_closed]


def _by_id(groups: Sequence[Mapping[str, Any]]) -> dict[int, tuple[str, torch.Tensor]]:
    params = [param for group in groups for param in group["params"]]
    return {id(param): (spec.name, param) for spec, param in zip(read_specs(groups), params, strict=True)}
