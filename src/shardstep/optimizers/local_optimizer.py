"""Optimizer classes: what is known of one, whether it can be sharded, and how an instance is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch.optim import Optimizer

from shardstep.optimizers.param_groups import CLASS, without_params
from shardstep.planning import ParamSpec, Plan

# Optimizers whose update of one parameter depends on the others, so that stepping on several ranks changes the result.
_COUPLED: tuple[tuple[type[Optimizer], str], ...] = (
    (torch.optim.LBFGS, "one line search and one direction over all parameters together"),
)

_MOST_NAMED = 8  # parameters in one error


def check_optimizer_class(optimizer_class: Any, world_size: int) -> None:
    """Raise if `optimizer_class` is not a class of optimizers, or not one whose work can be divided among ranks."""
    for inner in getattr(optimizer_class, "inner_classes", ()):
        check_optimizer_class(inner, world_size)
    optimizer_class = bare_class(optimizer_class)
    if isinstance(optimizer_class, Optimizer):
        raise TypeError(
            f"optimizer_class must be a class, got an instance of {type(optimizer_class).__name__}; "
            f"pass torch.optim.{type(optimizer_class).__name__} and its options as keyword arguments"
        )
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise TypeError(
            f"optimizer_class must be a subclass of torch.optim.Optimizer, got {optimizer_class!r}; "
            "pass the class itself, as torch.optim.AdamW, and its options as keyword arguments"
        )
    for coupled, reason in _COUPLED:
        if issubclass(optimizer_class, coupled) and world_size > 1:
            raise ValueError(
                f"{optimizer_class.__name__} computes {reason}; sharded over {world_size} ranks it would silently "
                "compute something else. Use it unsharded, or choose an optimizer that treats parameters separately"
            )


def check_takes_no_closure(optimizer_class: Any) -> None:
    """Raise for classes that evaluate the loss several times in a step: ranks step their pieces without it."""
    for inner in getattr(optimizer_class, "inner_classes", ()):
        check_takes_no_closure(inner)
    optimizer_class = bare_class(optimizer_class)
    if issubclass(optimizer_class, torch.optim.LBFGS):
        raise ValueError(
            f"{optimizer_class.__name__} computes the loss several times in a step, and a sharded step computes none, "
            "on one rank as on many. Use it unsharded, or shardstep.ZeroRedundancyOptimizer on one rank"
        )


def is_muon(optimizer_class: Any) -> bool:
    """Whether the class is torch's Muon itself; a subclass may take and compute something else."""
    return bare_class(optimizer_class) is torch.optim.Muon


def class_of(optimizer_class: Any, group: Mapping[str, Any]) -> Any:
    """Return the class that steps a group."""
    return group[CLASS] if getattr(optimizer_class, "inner_classes", ()) else optimizer_class


def check_shapes(optimizer_class: Any, groups: Sequence[Mapping[str, Any]], specs: Iterable[ParamSpec]) -> None:
    """Raise if Muon is to train what is not a matrix. This names all such parameters, on all ranks, before anything has
    moved; Muon's constructor would raise only on the rank that holds one, and later."""
    by_muon = [is_muon(class_of(optimizer_class, group)) for group in groups]
    refused = [
        f"{spec.name} of shape {spec.shape}"
        for spec in specs
        if spec.trainable and by_muon[spec.group] and len(spec.shape) != 2
    ]
    if refused:
        more = f" and {len(refused) - _MOST_NAMED} others" if len(refused) > _MOST_NAMED else ""
        raise ValueError(
            f"Muon refuses {', '.join(refused[:_MOST_NAMED])}{more}: it takes 2-D matrices only. Give "
            'the rest another class: groups=[{"params": "blocks.*.weight", "optimizer": Muon}, {"params": "rest", '
            '"optimizer": AdamW}]'
        )


def is_of_torch(optimizer_class: Any) -> bool:
    """Whether it is a class of torch.optim itself. These keep everything in a parameter's own state, as tensors of its
    shape and counters. Other classes may count in attributes, in their groups, or in lists."""
    optimizer_class = bare_class(optimizer_class)
    if inner := getattr(optimizer_class, "inner_classes", ()):
        return all(map(is_of_torch, inner))
    # Muon says "torch.optim", the others the file that they are in.
    return isinstance(optimizer_class, type) and f"{optimizer_class.__module__}.".startswith("torch.optim.")


def bare_class(optimizer_class: Any) -> Any:
    """Return the class itself; torch also takes a `functools.partial` of one."""
    while isinstance(optimizer_class, partial):
        optimizer_class = optimizer_class.func
    return optimizer_class


def qualified_name(optimizer_class: Any) -> str:
    """Return the module and the name of a class."""
    optimizer_class = bare_class(optimizer_class)
    return f"{optimizer_class.__module__}.{optimizer_class.__qualname__}"


def dealt_to(plan: Plan, rank: int) -> list[int]:
    """Return the parameters that `rank` holds whole: group by group, the largest first."""
    held = {piece.param for piece in plan.pieces_of(rank)}
    return sorted(held, key=lambda i: (plan.params[i].group, -plan.params[i].numel, i))


def build(
    optimizer_class: type[Optimizer],
    groups: Sequence[dict[str, Any]],
    defaults: Mapping[str, Any],
    names: Mapping[torch.Tensor, str],
) -> Optimizer:
    """Build an `optimizer_class` over `groups`; if it refuses a parameter, the error has its name in `names`."""
    make: Callable[..., Optimizer] = optimizer_class
    try:
        return make([dict(group) for group in groups], **defaults)
    except Exception as error:
        refused = _first_refused(make, groups, defaults)
        if refused is None:
            if str(error):
                raise  # not a parameter but an option is wrong
            raise ValueError(
                f"{getattr(optimizer_class, '__name__', optimizer_class)} refuses its options, and does not say why: "
                f"{type(error).__name__} with the groups' keys {[sorted(group) for group in groups]}"
            ) from error
        kind = type(error) if type(error) in (TypeError, ValueError) else RuntimeError
        raise kind(
            f"{getattr(optimizer_class, '__name__', optimizer_class)} refuses {names[refused]}: {error}"
        ) from error


def _first_refused(
    make: Callable[..., Optimizer], groups: Sequence[dict[str, Any]], defaults: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the first parameter that the optimizer refuses even alone; None if it refuses something else."""
    try:
        make(without_params(groups), **defaults)
    except Exception:
        return None
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for param in group["params"]:
            try:
                make([{**options, "params": [param]}], **defaults)
            except Exception:
                return cast(torch.Tensor, param)
    return None


class WatchedClosure:
    """Calls a closure, and notes whether an error came from it or from the optimizer that calls it."""

    def __init__(self, closure: Callable[[], float]) -> None:
        self._closure = closure
        self.raised = False

    def __call__(self) -> float:
        try:
            return self._closure()
        except BaseException:
            self.raised = True
            raise
