"""Save, compare and load param groups, by the names of their parameters and with all options that schedulers add."""

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
    """Return the groups as they are saved; `names` are the names of all parameters, in order."""
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
    """Return why saved groups do not fit the groups `own`; parameters that are not in `known`, those of the checkpoint,
    are ignored."""
    problems, group_of = [], _groups_by_name(saved)
    for number, group in enumerate(own):
        theirs = _group_for(group["params"], group_of)
        if theirs is None:
            continue
        if theirs["class"] and theirs["class"] != group["class"]:  # a converted checkpoint may have no class
            problems.append(f"group {number} was trained by {theirs['class']}, and is trained by {group['class']} here")
        others = [name for name in group["params"] if name in known and group_of.get(name) is not theirs]
        if others:
            problems.append(
                f"{others[0]} and {group['params'][0]} are in one group here, and were not when it was saved"
            )
    return [*problems, *_split_problems(group_of, own)]


def _split_problems(group_of: _GroupsByName, own: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield groups that were saved as one group and have different options here, which loading would make equal."""
    first: dict[int, Mapping[str, Any]] = {}
    for group in own:
        theirs = _group_for(group["params"], group_of)
        if theirs is None:
            continue
        other = first.setdefault(id(theirs), group)
        keys = sorted(other["options"].keys() | group["options"].keys())
        for key in keys:
            one, two = other["options"].get(key), group["options"].get(key)
            if not _are_equal(one, two):
                yield (
                    f"{other['params'][0]} and {group['params'][0]} were in one group when it was saved, and are in "
                    f"two groups with different {key} ({one!r} and {two!r}) here: after loading both would have "
                    f"{theirs['options'].get(key)!r}"
                )


def _are_equal(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(two, torch.Tensor):
        both = isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor)
        return both and one.shape == two.shape and bool((one.cpu() == two.cpu()).all())
    return bool(one == two)


_GroupsByName: TypeAlias = Mapping[str, Mapping[str, Any]]  # name of a parameter -> the group in which it was saved


def _groups_by_name(saved: Sequence[Mapping[str, Any]]) -> _GroupsByName:
    return {name: group for group in reversed(saved) for name in group["params"]}


def _group_for(names: Sequence[str], group_of: _GroupsByName) -> Mapping[str, Any] | None:
    """Return the saved group of the first of these parameters that was saved."""
    return next((group_of[name] for name in names if name in group_of), None)


def find_other_classes(
    saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], lineages: Sequence[Sequence[str]]
) -> dict[str, tuple[Mapping[str, Any], str]]:
    """Return (saved group, class here) by name, for parameters that were trained by a class that is neither the class
    here nor one of its base classes."""
    group_of = _groups_by_name(saved)
    found = [
        (name, (group_of[name], group["class"]))
        for group, known in zip(own, lineages, strict=True)
        for name in group["params"]
        if name in group_of and group_of[name]["class"] and group_of[name]["class"] not in known
    ]
    return dict(found)


def remove_names(saved: Sequence[Mapping[str, Any]], names: Container[str]) -> list[dict[str, Any]]:
    """Return the groups without the parameters `names`."""
    return [{**group, "params": [name for name in group["params"] if name not in names]} for group in saved]


def warn_of_classes(
    others: Mapping[str, tuple[Mapping[str, Any], str]], state_of: Callable[[str], Iterable[str]]
) -> None:
    """Warn once of all that `find_other_classes` has found, which is not loaded; `state_of` returns the names of a
    parameter's saved state."""
    rows: dict[tuple[int, str], list[str]] = {}
    for name, (group, here) in others.items():
        rows.setdefault((id(group), here), []).append(name)
    described = []
    for (_, here), names in rows.items():
        group = others[names[0]][0]
        state = sorted({key for name in names for key in state_of(name)})
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        described.append(
            f"{', '.join(names[:12])}{more}, trained by {group['class']} when it was saved, and by {here} here (state: "
            f"{', '.join(state) or 'none'}; options: {', '.join(sorted(group['options'])) or 'none'})"
        )
    if described:
        warnings.warn(
            f"state and options of another class are not loaded, and stay as they are: {'; '.join(described)}",
            stacklevel=5,
        )


def take_options(saved: Sequence[Mapping[str, Any]], groups: Sequence[dict[str, Any]], names: Sequence[str]) -> None:
    """Set the options of `groups` to the saved ones. A tensor is written in place, because a scheduler or a CUDA graph
    may refer to it."""
    left, group_of = iter(names), _groups_by_name(saved)
    for group in groups:
        theirs = _group_for([next(left) for _ in group["params"]], group_of)
        for key, value in (theirs["options"] if theirs else {}).items():
            own = group.get(key)
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    own.copy_(value)
            else:
                group[key] = copy.deepcopy(value)  # groups that were saved as one must not share their options


def warn_of_options(saved: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
    """Warn once of all options that are only here, or only in the checkpoint."""
    only_here, only_saved, group_of = set(), set(), _groups_by_name(saved)
    for group in own:
        theirs = _group_for(group["params"], group_of)
        if theirs is not None:
            only_here |= group["options"].keys() - theirs["options"].keys()
            only_saved |= theirs["options"].keys() - group["options"].keys()
    if only_here or only_saved:
        words = [f"not in the checkpoint, and stay as they are: {', '.join(sorted(only_here))}"] if only_here else []
        words += [f"only in the checkpoint, and are kept: {', '.join(sorted(only_saved))}"] if only_saved else []
        warnings.warn("options of param groups: " + "; ".join(words), stacklevel=5)
