"""Param groups in a checkpoint: by the names of parameters, whole, with what schedulers keep in them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shardstep.stepping.local_optimizer import CLASS, class_of, qualified_name

_NO_OPTIONS = ("params", "param_names", CLASS)


def class_names(optimizer_class: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [qualified_name(class_of(optimizer_class, group)) for group in groups]


def named_groups(
    groups: Sequence[Mapping[str, Any]], names: Sequence[str], classes: Sequence[str]
) -> list[dict[str, Any]]:
    """As they are saved; `names` are of all parameters, in order."""
    left = iter(names)
    return [
        {
            "params": [next(left) for _ in group["params"]],
            "class": kind,
            "options": {key: value for key, value in group.items() if key not in _NO_OPTIONS},
        }
        for group, kind in zip(groups, classes, strict=True)
    ]


def group_problems(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], known: set[str]) -> list[str]:
    """Why saved groups cannot be those of `own`. Parameters that are not `known` to the checkpoint do not count."""
    problems, home = [], _home(saved)
    for number, group in enumerate(own):
        theirs = _group_for(group["params"], home)
        if theirs is None:
            continue
        if theirs["class"] and theirs["class"] != group["class"]:  # a converted one may not know
            problems.append(f"group {number} was trained by {theirs['class']}, and is trained by {group['class']} here")
        apart = [name for name in group["params"] if name in known and home.get(name) is not theirs]
        if apart:
            problems.append(
                f"{apart[0]} and {group['params'][0]} are in one group here, and were not when it was saved"
            )
    return [*problems, *_split_problems(home, own)]


def _split_problems(home: _Home, own: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of groups that were one: if their options are not the same here, they would be after loading."""
    first: dict[int, Mapping[str, Any]] = {}
    for group in own:
        theirs = _group_for(group["params"], home)
        if theirs is None:
            continue
        other = first.setdefault(id(theirs), group)
        keys = sorted(other["options"].keys() | group["options"].keys())
        for key in keys:
            one, two = other["options"].get(key), group["options"].get(key)
            if not _is_same(one, two):
                yield (
                    f"{other['params'][0]} and {group['params'][0]} were in one group when it was saved, and here they "
                    f"are in two with different {key} ({one!r} and {two!r}): loaded, both have "
                    f"{theirs['options'].get(key)!r}"
                )


def _is_same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
        return both and one.shape == two.shape and bool((one.cpu() == two.cpu()).all())
    return bool(one == two)


_Home: TypeAlias = Mapping[str, Mapping[str, Any]]  # of each parameter, the group in which it was saved


def _home(saved: Sequence[Mapping[str, Any]]) -> _Home:
    return {name: group for group in reversed(saved) for name in group["params"]}


def _group_for(names: Sequence[str], home: _Home) -> Mapping[str, Any] | None:
    return next((home[name] for name in names if name in home), None)


def take_options(saved: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Options as they were saved. A tensor stays the one that it was: a scheduler, or a graph, may hold it."""
    left, home = iter(names), _home(saved)
    for group in groups:
        theirs = _group_for([next(left) for _ in group["params"]], home)
        for key, value in (theirs["options"] if theirs else {}).items():
            own = group.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    own.copy_(value)
            else:
                group[key] = copy.deepcopy(value)  # two groups may have been one: neither changes the other's


def warn_of_options(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """One warning of all options that are here and were not saved, or were saved and are not here."""
    new, gone, home = set(), set(), _home(saved)
    for group in own:
        theirs = _group_for(group["params"], home)
        if theirs is not None:
            new |= group["options"].keys() - theirs["options"].keys()
            gone |= theirs["options"].keys() - group["options"].keys()
    if new or gone:
        words = [f"not in the checkpoint, and stay as they are: {', '.join(sorted(new))}"] if new else []
        words += [f"only in the checkpoint, and are kept: {', '.join(sorted(gone))}"] if gone else []
        warnings.warn("options of param groups: " + "; ".join(words), stacklevel=5)
