"""Which parameter is number 7 of an optimizer? torch numbers them, and only the model knows their names.

[Note: order] A state_dict has a model's parameters in the order in which `model.parameters()` gives them, with buffers
between, and an optimizer numbers group by group what it was given. So the keys are walked in order, and each is the
next parameter of one of the groups, or of none: a buffer, or frozen. The shapes of the state say which. If exactly one
way fits, it is taken; if two fit, nothing is guessed. A program that gave its parameters in another order than the
model has them is not noticed if all shapes fit, neither here nor by torch: names of its own (`--names`) are for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.convert.source import Lazy, SourceError

_MOST_WAYS = 200_000  # beyond this, shapes say too little
_REMEDY = "give the names with --names FILE, one line each in the optimizer's order"

State = Mapping[Any, Mapping[str, Any]]
Way = tuple[int, ...]  # how many of each group have their key


def match_names(
    groups: Sequence[Sequence[int]], state: State, model: Mapping[str, Lazy], tied: Mapping[str, str]
) -> dict[int, str]:
    """Of every number that `groups` list, the name."""
    keys = [key for key in model if key not in tied and not _is_statistic(key, model)]
    keys = [key for key in keys if model[key].dtype.is_floating_point or model[key].dtype.is_complex]
    wanted = sum(map(len, groups))
    if wanted > len(keys):
        raise SourceError(
            f"the optimizer has {wanted} parameters, and the model's state_dict has {len(keys)} that could be one"
        )
    shapes = {number: shape_of(state.get(number, {})) for group in groups for number in group}
    return _walk(groups, shapes, keys, model)


def names_given(groups: Sequence[Sequence[int]], names: Sequence[str], state: State, model: Mapping[str, Lazy]) -> Any:
    """The same, where a person gave the names."""
    numbers = [number for group in groups for number in group]
    if len(names) != len(numbers):
        raise SourceError(f"the optimizer has {len(numbers)} parameters, and {len(names)} names were given")
    twice = sorted({name for name in names if names.count(name) > 1})
    unknown = [name for name in names if name not in model]
    if twice or unknown:
        raise SourceError(
            "; ".join(
                [f"{name} is named twice" for name in twice] + [f"{name} is not in the model" for name in unknown]
            )
        )
    for number, name in zip(numbers, names, strict=True):
        shape = shape_of(state.get(number, {}))
        if shape is not None and shape != model[name].shape:
            raise SourceError(
                f"parameter {number} has state of shape {shape}, and {name} has shape {model[name].shape}: "
                "the names are in another order than the optimizer's parameters"
            )
    return dict(zip(numbers, names, strict=True))


def shape_of(entry: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The parameter's, as far as its state tells: that of a moment, or of rows and columns together. Else None."""
    shapes = [value.shape for value in entry.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not shapes:
        return None
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _is_statistic(key: str, model: Mapping[str, Lazy]) -> bool:
    """Of a batch norm: it counts batches, and what it keeps beside is no parameter."""
    owner, _, last = key.rpartition(".")
    counter = f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"
    return last in ("running_mean", "running_var") and counter in model


def _walk(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    keys: Sequence[str],
    model: Mapping[str, Lazy],
) -> dict[int, str]:
    """[Note: order] Ways are counted up to two, and of each the step that led to it is kept."""
    lengths = tuple(map(len, groups))
    ways: dict[Way, int] = {(0,) * len(groups): 1}
    steps: list[dict[Way, int | None]] = []  # by key: the way after it, and which group took it
    for place, key in enumerate(keys):
        left = len(keys) - place - 1
        after: dict[Way, int] = {}
        took: dict[Way, int | None] = {}
        for way, count in ways.items():
            for group in (None, *range(len(groups))):
                reached = _reach(way, group, groups, shapes, model[key].shape)
                if reached is None or sum(lengths) - sum(reached) > left:
                    continue
                after[reached] = min(2, after.get(reached, 0) + count)
                took[reached] = group
        if not after:
            raise SourceError(_no_way(groups, shapes, ways, key, model[key].shape))
        if len(after) > _MOST_WAYS:
            raise SourceError(f"shapes alone do not say which parameter is which: {_REMEDY}")
        ways = after
        steps.append(took)
    if ways[lengths] > 1:
        raise SourceError(
            f"the optimizer's {sum(lengths)} parameters fit the model's {len(keys)} in more than one way (shapes that "
            f"are the same, and parameters that are frozen or in several groups): {_REMEDY}"
        )
    return _back(lengths, steps, groups, keys)


def _reach(
    way: Way,
    group: int | None,
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    shape: tuple[int, ...],
) -> Way | None:
    if group is None:
        return way
    if way[group] == len(groups[group]):
        return None
    known = shapes[groups[group][way[group]]]
    if known is not None and known != shape:
        return None
    return (*way[:group], way[group] + 1, *way[group + 1 :])


def _back(
    lengths: Way, steps: Sequence[Mapping[Way, int | None]], groups: Sequence[Sequence[int]], keys: Sequence[str]
) -> dict[int, str]:
    found: dict[int, str] = {}
    way = lengths
    for key, took in zip(reversed(keys), reversed(steps), strict=True):
        group = took[way]
        if group is not None:
            way = (*way[:group], way[group] - 1, *way[group + 1 :])
            found[groups[group][way[group]]] = key
    return found


def _no_way(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    ways: Mapping[Way, int],
    key: str,
    shape: tuple[int, ...],
) -> str:
    furthest = max(ways, key=sum)
    open_ones = [group[done] for group, done in zip(groups, furthest, strict=True) if done < len(group)]
    expected = ", ".join(f"parameter {number} has state of shape {shapes[number]}" for number in open_ones[:3])
    return (
        f"the optimizer's parameters do not fit the model's in its order: at {key} of shape {shape} {expected}; "
        f"{_REMEDY}"
    )
