"""The options of param groups in words, so that ranks can see whether theirs are the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any

import torch

Groups = Sequence[Mapping[str, Any]]


def option_keys(group: Mapping[str, Any]) -> list[str]:
    return [key for key in group if key not in ("params", "param_names")]


def option_lines(groups: Groups, keys: Sequence[Sequence[str]]) -> Iterator[str]:
    """`keys` of each group."""
    for number, (group, wanted) in enumerate(zip(groups, keys, strict=False)):
        for key in sorted(wanted):
            yield f"param_groups[{number}][{key!r}] = {_in_words(group.get(key))}"


def class_line(optimizer_class: Any) -> str:
    while isinstance(optimizer_class, partial):
        optimizer_class = optimizer_class.func
    return f"optimizer_class {optimizer_class.__module__}.{optimizer_class.__qualname__}"


def _in_words(value: Any) -> str:
    """The same in every process for the same value; a host does not wait for a device to tell what a tensor holds."""
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return f"a tensor of shape {tuple(value.shape)}, {value.dtype}, on an accelerator"
        return f"tensor({value.tolist()})"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {_in_words(member)}" for key, member in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_in_words, value)) + ")"
    if value is None or isinstance(value, bool | str | complex):
        return repr(value)
    if isinstance(value, Real):  # 1 and 1.0 are the same rate, and so is numpy's
        return repr(float(value))
    return f"a {type(value).__name__}"  # a function or an object need not print alike in every process
