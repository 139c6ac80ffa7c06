"""Param groups: their options in words, and copied from one optimizer to another."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from operator import is_
from typing import Any

import torch

from shardstep.planning import ParamSpec

CLASS = "optimizer"  # of a group, where groups have optimizers of several classes
_NO_OPTIONS = ("params", "param_names", CLASS)


def without_params(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For a trial: the options alone. Names are none of a class's options, and some check that they know all keys."""
    return [{**{key: group[key] for key in group if key != "param_names"}, "params": []} for group in groups]


def local_groups(
    param_groups: Sequence[Mapping[str, Any]], specs: Sequence[ParamSpec], mine: Sequence[int]
) -> list[dict[str, Any]]:
    """`param_groups` with the parameters `mine` only, in that order. A group may be empty."""
    params = [param for group in param_groups for param in group["params"]]
    names = [name for group in param_groups for name in group.get("param_names", ())]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in param_groups]
    for index, group in enumerate(groups):
        own = [i for i in mine if specs[i].group == index]
        group["params"] = [params[i] for i in own]
        if names:
            group["param_names"] = [names[i] for i in own]
    return groups


def copy_options(source: Iterable[Mapping[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Copy everything in the groups but the parameters: learning rates that a scheduler set, keys that a step added."""
    for theirs, ours in zip(source, target, strict=True):
        ours.update({key: value for key, value in theirs.items() if key not in _NO_OPTIONS})


def load_options(source: Iterable[Mapping[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Everything in the groups but the parameters, as copies: what was loaded stays the caller's.

    A tensor stays the one that it was, if it can: a scheduler, or a graph, may hold it.
    """
    for theirs, ours in zip(source, target, strict=True):
        for key, value in theirs.items():
            own = ours.get(key)
            if key in _NO_OPTIONS or value is own:
                continue
            if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
                with torch.no_grad():
                    own.copy_(value)
            else:
                ours[key] = copy.deepcopy(value)


def apart(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same groups, with options that can be loaded into while the optimizer keeps its own."""
    return [
        {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]


Groups = Sequence[Mapping[str, Any]]


def option_keys(group: Mapping[str, Any]) -> list[str]:
    return [key for key in group if key not in ("params", "param_names")]


def option_lines(groups: Groups, keys: Sequence[Sequence[str]], *, waits: bool = True) -> Iterator[str]:
    """`keys` of each group. Unless it `waits`, the host does not ask a device what a tensor holds."""
    for number, (group, wanted) in enumerate(zip(groups, keys, strict=False)):
        for key in sorted(wanted):
            yield f"param_groups[{number}][{key!r}] = {_in_words(group.get(key), waits)}"


class WatchedOptions:
    """Those options that the groups had when they were first seen.

    What comes later is a scheduler's notes (`initial_lr`) or a counter of the optimizer's own, which a rank that holds
    nothing of a group may not advance.
    """

    def __init__(self, among: Container[str] | None = None) -> None:
        self._among = among  # others do not count; None: all do
        self._keys: list[list[str]] = []
        self._values: list[Any] = []
        self._lines: list[str] = []

    def know(self, groups: Groups) -> None:
        """Groups may have been added."""
        for group in groups[len(self._keys) :]:
            keys = option_keys(group)
            self._keys.append(keys if self._among is None else [key for key in keys if key in self._among])

    def lines(self, groups: Groups) -> list[str]:
        """One for each option; made anew only if one was set since. What a tensor says can change without that."""
        values = [group.get(key) for group, keys in zip(groups, self._keys, strict=False) for key in keys]
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if not same or any(isinstance(value, torch.Tensor) for value in values):
            self._values, self._lines = values, list(option_lines(groups, self._keys, waits=False))
        return self._lines

    def all_lines(self, groups: Groups) -> list[str]:
        """The host waits for what lies on a device."""
        return list(option_lines(groups, self._keys))


def class_line(optimizer_class: Any) -> str:
    while isinstance(optimizer_class, partial):
        optimizer_class = optimizer_class.func
    return f"optimizer_class {optimizer_class.__module__}.{optimizer_class.__qualname__}"


def _in_words(value: Any, waits: bool) -> str:
    """The same in every process for the same value."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu" and not waits:
            return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, on an accelerator"
        return f"tensor({value.tolist()})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_in_words(member, waits)}" for key, member in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(_in_words(member, waits) for member in value) + ")"
    if value is None or isinstance(value, bool | str | complex):
        return repr(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, Real):  # 1 and 1.0 are the same rate, and so is numpy's
        return repr(float(value))
    return f"a {type(value).__name__}"  # a function or an object need not print alike in every process
