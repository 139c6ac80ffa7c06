"""Blocks of a tensor: how a range of its elements looks in its own shape, in pieces of bounded size.

A checkpoint knows shapes and nothing of ranks, so what a rank holds is written, and read, as such blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from shardstep.params.views import storage_order
from shardstep.planning.geometry import boxes, reordered, split

MOST_NBYTES = 64 * 1024 * 1024  # of one block, which is what a reader holds beside its own


class Block(NamedTuple):
    offsets: tuple[int, ...]
    values: torch.Tensor  # a view


def blocks_of_range(like: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> Iterator[Block]:
    """Elements [start, stop) of a tensor like `like`, given flat and in the order of its memory."""
    order = storage_order(like)
    back = [order.index(dim) for dim in range(like.dim())]
    for whole in boxes([like.shape[dim] for dim in order], start, stop):
        for box in split(whole, _most(values)):
            inside = values[box.start - start : box.start - start + box.numel]
            yield Block(reordered(box, order)[0], inside.view(box.sizes).permute(back))


def blocks_of_whole(values: torch.Tensor) -> Iterator[Block]:
    for whole in boxes(values.shape, 0, values.numel()):
        for box in split(whole, _most(values)):
            block = values
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                block = block.narrow(dim, offset, size)
            yield Block(box.offsets, block)


def _most(values: torch.Tensor) -> int:
    return max(1, MOST_NBYTES // max(1, values.element_size()))
