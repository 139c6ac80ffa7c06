"""Convert a range of a flattened tensor into views that are blocks of the tensor's own shape, of bounded size.

A checkpoint stores tensors in their shapes, without ranks, so each rank writes and reads its ranges as such blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardstep.params.views import storage_order
from shardstep.planning.geometry import boxes, reordered, split

MOST_NBYTES = 64 * 1024 * 1024  # of one block: a reader needs that much memory beside its own tensors


class Block(NamedTuple):
    """A block of a tensor at `offsets`; `values` is a view."""

    offsets: tuple[int, ...]
    values: torch.Tensor


def blocks_of_range(like: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> Iterator[Block]:
    """Yield the blocks of elements [start, stop) of a tensor like `like`; `values` has them flat, in memory order."""
    order = storage_order(like)
    back = [order.index(dim) for dim in range(like.dim())]
    for whole in boxes([like.shape[dim] for dim in order], start, stop):
        for box in split(whole, _most(values)):
            inside = values[box.start - start : box.start - start + box.numel]
            yield Block(reordered(box, order)[0], inside.view(box.sizes).permute(back))


def blocks_of_whole(values: torch.Tensor) -> Iterator[Block]:
    """Yield the blocks of all elements of `values`."""
    for whole in boxes(values.shape, 0, values.numel()):
        for box in split(whole, _most(values)):
            block = values
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                block = block.narrow(dim, offset, size)
            yield Block(box.offsets, block)


def _most(values: torch.Tensor) -> int:
    return max(1, MOST_NBYTES // max(1, values.element_size()))
