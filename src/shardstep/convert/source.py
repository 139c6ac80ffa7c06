"""What is in a source, whatever its format: names, shapes and options at once, the tensors block by block.

A model and its state may be larger than memory. So a reader says what there is, and a writer asks for one tensor after
the other; what is in memory meanwhile is one block of one tensor, or one tensor where a format must have it whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardstep.planning.geometry import boxes, split
from shardstep.state.blocks import MOST_NBYTES

Block = tuple[tuple[int, ...], torch.Tensor]  # where it begins in each dim, and its values


class SourceError(ValueError):
    """A source that cannot be read, or not safely, or not without guessing."""


@dataclass(frozen=True, slots=True)
class Lazy:
    """A tensor that is somewhere else; `blocks` reads it, in parts that cover it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    blocks: Callable[[], Iterable[Block]]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def copy_to(self, target: torch.Tensor, told: Callable[[int], None] = lambda nbytes: None) -> None:
        for offsets, block in self.blocks():
            narrowed(target, offsets, block.shape).copy_(block)
            told(block.nbytes)

    def read(self) -> torch.Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        self.copy_to(whole)
        return whole


def narrowed(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def cut(tensor: torch.Tensor) -> Iterator[Block]:
    """Blocks of a size that a checkpoint stores, as views."""
    shape = tuple(tensor.shape)
    for whole in boxes(shape, 0, tensor.numel()):
        for box in split(whole, max(1, MOST_NBYTES // tensor.element_size())):
            yield box.offsets, narrowed(tensor, box.offsets, box.sizes)


def lazy(tensor: torch.Tensor) -> Lazy:
    """Of a tensor that is there already; one that is mapped from a file takes no memory by it."""
    near = tensor.detach()
    return Lazy(tuple(near.shape), near.dtype, lambda: cut(near))


# -- all of it ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trained:
    """A parameter that the optimizer has; `values` is what its state has beside tensors."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    state: dict[str, Lazy] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Group:
    """A param group. Most formats do not say of which class the optimizer was: then `kind` is empty."""

    params: tuple[str, ...]
    options: dict[str, Any]
    kind: str = ""


@dataclass(slots=True)
class Source:
    kind: str  # what it is, in words
    path: Path
    model: dict[str, Lazy] = field(default_factory=dict)  # the keys of its state_dict, in order
    tied: dict[str, str] = field(default_factory=dict)  # keys that are another name of an earlier key
    others: dict[str, Any] = field(default_factory=dict)  # what is no tensor in the model's state_dict
    trained: dict[str, Trained] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    extra_of_ranks: tuple[dict[str, Any], ...] = ()
    notes: list[str] = field(default_factory=list)  # what a person who converts it should know

    def weights(self) -> Iterator[tuple[str, Lazy]]:
        """Of the model, every tensor once."""
        return ((key, tensor) for key, tensor in self.model.items() if key not in self.tied)

    def state(self) -> Iterator[tuple[str, str, Lazy]]:
        for name, trained in self.trained.items():
            for key, tensor in trained.state.items():
                yield name, key, tensor

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for _, one in self.weights()) + sum(one.nbytes for _, _, one in self.state())
