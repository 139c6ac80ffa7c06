"""Param groups in a checkpoint: by the names of parameters, whole, with what schedulers keep in them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shardstep.optimizers.local_optimizer import bare_class, class_of, qualified_name
from shardstep.optimizers.param_groups import CLASS

_NO_OPTIONS = ("params", "param_names", CLASS)


def class_names(optimizer_class: Any, groups: Sequence[Mapping[str, Any]]) -> list[str]:
    return [qualified_name(class_of(optimizer_class, group)) for group in groups]


def lineages(optimizer_class: Any, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return for each group the names of its optimizer's class and of its base classes, whose state it can load."""
    kinds = [class_of(optimizer_class, group) for group in groups]
    return [[qualified_name(base) for base in bare_class(kind).__mro__] for kind in kinds]


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


def of_other_classes(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], lineages: Sequence[Sequence[str]]
) -> dict[str, tuple[Mapping[str, Any], str]]:
    """By name, parameters that a class has trained which is neither that of here nor a base of it: the group as it was
    saved, and the class of here."""
    home = _home(saved)
    found = [
        (name, (home[name], group["class"]))
        for group, known in zip(own, lineages, strict=True)
        for name in group["params"]
        if name in home and home[name]["class"] and home[name]["class"] not in known
    ]
    return dict(found)


def without_names(saved: Sequence[Mapping[str, Any]], names: Container[str]) -> list[dict[str, Any]]:
    return [{**group, "params": [name for name in group["params"] if name not in names]} for group in saved]


def warn_of_classes(
    others: Mapping[str, tuple[Mapping[str, Any], str]], state_of: Callable[[str], Iterable[str]]
) -> None:
    """One warning of what `of_other_classes` has found, and is not loaded; `state_of` a parameter what was saved."""
    rows: dict[tuple[int, str], list[str]] = {}
    for name, (group, here) in others.items():
        rows.setdefault((id(group), here), []).append(name)
    told = []
    for (_, here), names in rows.items():
        group = others[names[0]][0]
        state = sorted({key for name in names for key in state_of(name)})
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        told.append(
            f"{', '.join(names[:12])}{more}, trained by {group['class']}, and by {here} here (state: "
            f"{', '.join(state) or 'none'}; options: {', '.join(sorted(group['options'])) or 'none'})"
        )
    if told:
        warnings.warn(
            f"state and options of another class are not loaded, and stay as they are here: {'; '.join(told)}",
            stacklevel=5,
        )


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
