"""Convert a range of a flattened tensor into views that are blocks of the tensor's own shape, of bounded size.

A checkpoint stores tensors in their shapes, without ranks, so each rank writes and reads its ranges as such blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from shardstep.params.views import storage_order
from shardstep.planning.geometry import boxes_of_range, reorder_box, split_box

MOST_NBYTES = 64 * 1024 * 1024  # of one block: a reader needs that much memory beside its own tensors


class Block(NamedTuple):
    """A block of a tensor at `offsets`; `values` is a view."""

    offsets: tuple[int, ...]
    values: torch.Tensor


def blocks_of_range(like: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> Iterator[Block]:
    """Yield the blocks of elements [start, stop) of a tensor like `like`; `values` has them flat, in memory order."""
    order = storage_order(like)
    back = [order.index(dim) for dim in range(like.dim())]
    for large in boxes_of_range([like.shape[dim] for dim in order], start, stop):
        for box in split_box(large, _most(values)):
            inside = values[box.start - start : box.start - start + box.numel]
            yield Block(reorder_box(box, order)[0], inside.view(box.sizes).permute(back))


def blocks_of_whole(values: torch.Tensor) -> Iterator[Block]:
    """Yield the blocks of all elements of `values`."""
    for large in boxes_of_range(values.shape, 0, values.numel()):
        for box in split_box(large, _most(values)):
            yield Block(box.offsets, narrow_to(values, box.offsets, box.sizes))


def narrow_to(tensor: torch.Tensor, offsets: Iterable[int], sizes: Iterable[int]) -> torch.Tensor:
    """Return the block of a tensor at these offsets, as a view."""
    for dim, (start, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dim, start, size)
    return tensor


def _most(values: torch.Tensor) -> int:
    return max(1, MOST_NBYTES // max(1, values.element_size()))
