"""Find the names of an optimizer's parameters: torch's optimizers number them, and only the model has their names.

[Note: order] A model's state_dict has its parameters in the order of `model.parameters()`, with buffers between them,
and an optimizer numbers the parameters that it was given group by group. So the keys are visited in order, and each is
the next parameter of one of the groups, or of none (a buffer, or a frozen parameter), as the shapes of the state allow.
If there is exactly one possible assignment, it is used; if there are several, an error is raised. A program that gave
its parameters in another order than the model's is not detected if all shapes fit, neither here nor by torch: it needs
`--names`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.convert.source import LazyTensor, SourceError

_MOST_REACHABLE = 200_000  # more would take too long, and be ambiguous anyway
_REMEDY = "give the names with --names FILE, one per line in the optimizer's order"

State = Mapping[Any, Mapping[str, Any]]
Counts = tuple[int, ...]  # for each group, how many of its parameters have a key


def match_names(
    groups: Sequence[Sequence[int]], state: State, model: Mapping[str, LazyTensor], tied: Mapping[str, str]
) -> dict[int, str]:
    """Return the name of each of the numbers in `groups`."""
    keys = [key for key in model if key not in tied and not _is_statistic(key, model)]
    keys = [key for key in keys if model[key].dtype.is_floating_point or model[key].dtype.is_complex]
    wanted = sum(map(len, groups))
    if wanted > len(keys):
        raise SourceError(
            f"the optimizer has {wanted} parameters, and the model's state_dict has {len(keys)} tensors that could be "
            "one: give the model with which it was saved"
        )
    shapes = {number: shape_of(state.get(number, {})) for group in groups for number in group}
    return _match_in_order(groups, shapes, keys, model)


def use_given_names(
    groups: Sequence[Sequence[int]], names: Sequence[str], state: State, model: Mapping[str, LazyTensor]
) -> Any:
    """Return the name of each of the numbers in `groups`; `names` were given by the user, and are checked."""
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
    """Return the parameter's shape if its state tells: from a moment, or from rows and columns; else None."""
    shapes = [value.shape for value in entry.values() if isinstance(value, torch.Tensor) and value.dim()]
    if not shapes:
        return None
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        return None


def _is_statistic(key: str, model: Mapping[str, LazyTensor]) -> bool:
    """Whether a key is a running statistic of a batch norm, which has `num_batches_tracked` beside it."""
    owner, _, last = key.rpartition(".")
    counter = f"{owner}.num_batches_tracked" if owner else "num_batches_tracked"
    return last in ("running_mean", "running_var") and counter in model


def _match_in_order(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    keys: Sequence[str],
    model: Mapping[str, LazyTensor],
) -> dict[int, str]:
    """Assign keys to parameters: see [Note: order].

    `reachable` has, for each `Counts` that the keys so far can lead to, in how many ways, counted up to two.
    """
    lengths = tuple(map(len, groups))
    reachable: dict[Counts, int] = {(0,) * len(groups): 1}
    steps: list[dict[Counts, int | None]] = []  # for each key: counts after it -> the group that got it
    for place, key in enumerate(keys):
        left = len(keys) - place - 1
        after: dict[Counts, int] = {}
        took: dict[Counts, int | None] = {}
        for counts, count in reachable.items():
            for group in (None, *range(len(groups))):
                reached = _advance(counts, group, groups, shapes, model[key].shape)
                if reached is None or sum(lengths) - sum(reached) > left:
                    continue
                after[reached] = min(2, after.get(reached, 0) + count)
                took[reached] = group
        if not after:
            raise SourceError(_describe_mismatch(groups, shapes, reachable, key, model[key].shape))
        if len(after) > _MOST_REACHABLE:
            raise SourceError(f"the names of the parameters cannot be found from shapes alone: {_REMEDY}")
        reachable = after
        steps.append(took)
    if reachable[lengths] > 1:
        raise SourceError(
            f"the optimizer's {sum(lengths)} parameters fit the model's {len(keys)} in more than one way (equal shapes "
            f"of parameters that are frozen or in several groups): {_REMEDY}"
        )
    return _trace_back(lengths, steps, groups, keys)


def _advance(
    counts: Counts,
    group: int | None,
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    shape: tuple[int, ...],
) -> Counts | None:
    if group is None:
        return counts
    if counts[group] == len(groups[group]):
        return None
    known = shapes[groups[group][counts[group]]]
    if known is not None and known != shape:
        return None
    return (*counts[:group], counts[group] + 1, *counts[group + 1 :])


def _trace_back(
    lengths: Counts, steps: Sequence[Mapping[Counts, int | None]], groups: Sequence[Sequence[int]], keys: Sequence[str]
) -> dict[int, str]:
    found: dict[int, str] = {}
    counts = lengths
    for key, took in zip(reversed(keys), reversed(steps), strict=True):
        group = took[counts]
        if group is not None:
            counts = (*counts[:group], counts[group] - 1, *counts[group + 1 :])
            found[groups[group][counts[group]]] = key
    return found


def _describe_mismatch(
    groups: Sequence[Sequence[int]],
    shapes: Mapping[int, tuple[int, ...] | None],
    reachable: Mapping[Counts, int],
    key: str,
    shape: tuple[int, ...],
) -> str:
    furthest = max(reachable, key=sum)
    open_ones = [group[done] for group, done in zip(groups, furthest, strict=True) if done < len(group)]
    expected = ", ".join(f"parameter {number} has state of shape {shapes[number]}" for number in open_ones[:3])
    return (
        f"the optimizer's parameters do not fit the model's in its order: at {key} of shape {shape} {expected}; "
        f"{_REMEDY}"
    )
