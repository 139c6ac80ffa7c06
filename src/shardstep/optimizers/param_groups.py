"""Param groups: their options in words, and copied from one optimizer to another."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from operator import is_
from typing import Any

import torch

from shardstep.planning import ParamSpec

CLASS = "optimizer"  # of a group, where groups have optimizers of several classes
_NO_OPTIONS = ("params", "param_names", CLASS)


def without_params(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the options alone, for a trial. Names are left out, because some classes check that they know all keys."""
    return [{**{key: group[key] for key in group if key != "param_names"}, "params": []} for group in groups]


def local_groups(
    param_groups: Sequence[Mapping[str, Any]], specs: Sequence[ParamSpec], mine: Sequence[int]
) -> list[dict[str, Any]]:
    """Return `param_groups` with the parameters `mine` only, in that order. A group may be empty."""
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
    """Copy everything in the groups but the parameters: what was loaded stays the caller's.

    Values are copied into existing tensors where shapes allow it, because a scheduler or a graph may refer to them.
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


def copy_groups(groups: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return copies of the groups, into which options can be loaded without changing the optimizer's own."""
    return [
        {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in group.items()}
        for group in groups
    ]


Groups = Sequence[Mapping[str, Any]]


def option_keys(group: Mapping[str, Any]) -> list[str]:
    """Return the keys of a group that are options."""
    return [key for key in group if key not in ("params", "param_names")]


def option_lines(groups: Groups, keys: Sequence[Sequence[str]], *, waits: bool = True) -> Iterator[str]:
    """Yield a line for each of the `keys` of each group. Values on a device are read only if `waits`."""
    for number, (group, wanted) in enumerate(zip(groups, keys, strict=False)):
        for key in sorted(wanted):
            yield f"param_groups[{number}][{key!r}] = {_in_words(group.get(key), waits)}"


class WatchedOptions:
    """The options that groups had when they were first seen, as lines that ranks can compare.

    Keys that come later are not compared: they are a scheduler's (`initial_lr`), or a counter of the optimizer's own,
    which does not advance on a rank that holds nothing of a group.
    """

    def __init__(self, among: Container[str] | None = None) -> None:
        self._among = among  # only these keys are compared; None: all
        self._keys: list[list[str]] = []
        self._values: list[Any] = []
        self._lines: list[str] = []

    def add_new(self, groups: Groups) -> None:
        """Take in groups that have been added since the last call."""
        for group in groups[len(self._keys) :]:
            keys = option_keys(group)
            self._keys.append(keys if self._among is None else [key for key in keys if key in self._among])

    def lines(self, groups: Groups) -> list[str]:
        """Return a line for each option. They are made anew if an option was set, or if there are tensors."""
        values = [group.get(key) for group, keys in zip(groups, self._keys, strict=False) for key in keys]
        same = len(values) == len(self._values) and all(map(is_, values, self._values))
        if not same or any(isinstance(value, torch.Tensor) for value in values):
            self._values, self._lines = values, list(option_lines(groups, self._keys, waits=False))
        return self._lines

    def all_lines(self, groups: Groups) -> list[str]:
        """Return a line for each option; the host waits for values on a device."""
        return list(option_lines(groups, self._keys))


def _in_words(value: Any, waits: bool) -> str:
    """Return text that is equal in all processes for equal values."""
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
