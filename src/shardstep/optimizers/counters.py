"""What an optimizer keeps on itself, in attributes: numbers that go along to another instance, and what cannot."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

_COMMON = frozenset(vars(Optimizer([torch.zeros(1, device="cpu")], {})))  # attributes that every optimizer has


class Counters:
    """Of one instance, from its construction on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._at_first = {name: (_is_number(value), _look(value)) for name, value in self._own().items()}

    def _own(self) -> dict[str, Any]:
        return {
            f"{prefix}{name}": value
            for prefix, optimizer in _with_inner(self._optimizer).items()
            for name, value in vars(optimizer).items()
            if name not in _COMMON and name[:2] != "__"
        }

    def advanced(self) -> dict[str, Any]:
        """Numbers that have changed since, such as a count of steps. What stayed belongs to the instance alone."""
        return {name: copy.deepcopy(value) for name, value in self._changed().items() if _is_number(value)}

    def left_behind(self) -> list[str]:
        """Attributes that have changed and are no numbers: nobody can say what they would be in another instance."""
        return [name for name, value in self._changed().items() if not _is_number(value)]

    def _changed(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in sorted(self._own().items())
            if self._at_first.get(name) != (_is_number(value), _look(value))
        }


def resume(optimizer: Optimizer, advanced: Mapping[str, Any]) -> None:
    """Let `optimizer` go on where another instance has stopped."""
    for prefix, target in _with_inner(optimizer).items():
        for name, value in advanced.items():
            if name.startswith(prefix) and "." not in name.removeprefix(prefix):
                setattr(target, name.removeprefix(prefix), copy.deepcopy(value))


def _with_inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """It and those that it is made of (several.py), by what stands before their attributes."""
    return {"": optimizer, **{f"{type(inner).__name__}.": inner for inner in getattr(optimizer, "inner", ())}}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _look(value: Any) -> Any:
    """What can be told of a value later: numbers by what they are, containers by how much they hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().item() if value.numel() == 1 else (value.shape, value._version)
    if _is_number(value):
        return value
    if isinstance(value, dict | list | set | tuple):
        return type(value), len(value)
    return None
