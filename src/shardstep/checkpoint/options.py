"""Param groups in a checkpoint: by the names of parameters, whole, with what schedulers keep in them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

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
    problems = []
    for number, group in enumerate(own):
        theirs = _group_for(group["params"], saved)
        if theirs is None:
            continue
        if theirs["class"] and theirs["class"] != group["class"]:  # a converted one may not know
            problems.append(f"group {number} was trained by {theirs['class']}, and is trained by {group['class']} here")
        apart = [name for name in group["params"] if name in known and name not in theirs["params"]]
        if apart:
            problems.append(
                f"{apart[0]} and {group['params'][0]} are in one group here, and were not when it was saved"
            )
    return problems


def _group_for(names: Sequence[str], saved: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    return next((group for name in names for group in saved if name in group["params"]), None)


def take_options(saved: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Options as they were saved. A tensor stays the one that it was: a scheduler, or a graph, may hold it."""
    left = iter(names)
    for group in groups:
        theirs = _group_for([next(left) for _ in group["params"]], saved)
        for key, value in (theirs["options"] if theirs else {}).items():
            own = group.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    own.copy_(value)
            else:
                group[key] = value


def warn_of_options(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """One warning of all options that are here and were not saved, or were saved and are not here."""
    new, gone = set(), set()
    for group in own:
        theirs = _group_for(group["params"], saved)
        if theirs is not None:
            new |= group["options"].keys() - theirs["options"].keys()
            gone |= theirs["options"].keys() - group["options"].keys()
    if new or gone:
        words = [f"not in the checkpoint, and stay as they are: {', '.join(sorted(new))}"] if new else []
        words += [f"only in the checkpoint, and are kept: {', '.join(sorted(gone))}"] if gone else []
        warnings.warn("options of param groups: " + "; ".join(words), stacklevel=5)
