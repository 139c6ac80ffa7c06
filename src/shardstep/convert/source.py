"""Describe a source in any format: names, shapes and options, with tensors that are read later, block by block.

A model and its state may be larger than memory. So a reader returns a description, and a writer reads one tensor after
the other. Only one block of one tensor is in memory at a time, or one tensor where the target's format needs that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardstep.state.blocks import Block, blocks_of_whole, narrow_to

OnBytes = Callable[[int], None]  # called with the bytes of each block that was read or written


class SourceError(ValueError):
    """A source that cannot be read, is not safe to read, or is ambiguous."""


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is not read yet; `blocks` reads it, as blocks that together are the whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterable[Block]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def copy_to(self, target: torch.Tensor, on_bytes: OnBytes = lambda nbytes: None) -> None:
        for offsets, block in self.blocks():
            narrow_to(target, offsets, block.shape).copy_(block)
            on_bytes(block.nbytes)

    def read(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(whole)
        return whole


def lazy_tensor(tensor: torch.Tensor) -> LazyTensor:
    """Return a LazyTensor of an existing tensor; if that is mapped from a file, it takes no memory."""
    values = tensor.detach()
    return LazyTensor(tuple(values.shape), values.dtype, lambda: blocks_of_whole(values))


# -- a whole source ----------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class TrainedParameter:
    """A parameter of the optimizer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    state: dict[str, LazyTensor] = field(default_factory=dict)  # tensors of its state
    values: dict[str, Any] = field(default_factory=dict)  # its state that is not a tensor


@dataclass(frozen=True, slots=True)
class SourceGroup:
    """A param group. `kind` is the name of the optimizer's class, or empty, as most formats do not have it."""

    params: tuple[str, ...]
    options: dict[str, Any]
    kind: str = ""


@dataclass(slots=True)
class Source:
    """All that is in a source."""

    kind: str  # a description of its format
    path: Path
    model: dict[str, LazyTensor] = field(default_factory=dict)  # the model's state_dict, in order
    tied: dict[str, str] = field(default_factory=dict)  # key of a tied tensor -> the first key of the same tensor
    others: dict[str, Any] = field(default_factory=dict)  # values of the model's state_dict that are not tensors
    trained: dict[str, TrainedParameter] = field(default_factory=dict)
    groups: list[SourceGroup] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_of_ranks: tuple[dict[str, Any], ...] = ()
    notes: list[str] = field(default_factory=list)  # sentences for the user

    def weights(self) -> Iterator[tuple[str, LazyTensor]]:
        """Yield the model's tensors, tied ones once."""
        return ((key, tensor) for key, tensor in self.model.items() if key not in self.tied)

    def state(self) -> Iterator[tuple[str, str, LazyTensor]]:
        """Yield (parameter, key, tensor) of the optimizer's state."""
        for name, trained in self.trained.items():
            for key, tensor in trained.state.items():
                yield name, key, tensor

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for _, one in self.weights()) + sum(one.nbytes for _, _, one in self.state())
