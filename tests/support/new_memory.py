"""What operations take memory: for tests of code that must not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class NewMemory(TorchDispatchMode):
    """Inside, takes note of every tensor that has memory which none of its operation's inputs had."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, tuple[torch.dtype, int]] = {}  # dtype and bytes, by address
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.__name__.partition(".")[0]] += 1
        made, known = func(*args, **(kwargs or {})), set(map(_address, _tensors((args, kwargs))))
        for tensor in _tensors(made):
            if _address(tensor) not in known and tensor.numel():
                self.made[_address(tensor)] = tensor.dtype, tensor.untyped_storage().nbytes()
        return made


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
