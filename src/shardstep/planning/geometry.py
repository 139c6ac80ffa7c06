"""Convert a range of a flattened tensor into boxes of the tensor's own shape.

A checkpoint stores tensors in their shapes, without ranks. A rank holds a range of the flattened parameter, and writes
it as boxes of that parameter: at most 2n - 1 of them for n dimensions, each contiguous in the range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular block of a tensor whose elements are contiguous in the flattened tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int  # index of its first element in the flattened tensor

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


def boxes_of_range(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes that elements [start, stop) of a tensor of this shape form, in order. A tensor without elements
    is one box."""
    if not math.prod(shape):
        yield Box((0,) * len(shape), tuple(shape), 0)
    elif start < stop:
        yield from _boxes(tuple(shape), start, stop, (), 0)


def _boxes(shape: tuple[int, ...], start: int, stop: int, row: tuple[int, ...], origin: int) -> Iterator[Box]:
    """`row` are the indices in the dims before those of `shape`; `origin` is the index of the row's first element."""
    ones = (1,) * len(row)
    if not shape:
        yield Box(row, ones, origin)
        return
    inner = math.prod(shape[1:])
    first, head = divmod(start, inner)
    last, tail = divmod(stop, inner)
    if first == last:  # within one row
        yield from _boxes(shape[1:], head, tail, (*row, first), origin + first * inner)
        return
    if head:
        yield from _boxes(shape[1:], head, inner, (*row, first), origin + first * inner)
        first += 1
    if first < last:
        offsets = (*row, first, *(0,) * (len(shape) - 1))
        yield Box(offsets, (*ones, last - first, *shape[1:]), origin + first * inner)
    if tail:
        yield from _boxes(shape[1:], 0, tail, (*row, last), origin + last * inner)


def split_box(box: Box, most: int) -> Iterator[Box]:
    """Yield the same elements in boxes of at most `most` elements, or of one row where a row is larger."""
    wide = next((dim for dim, size in enumerate(box.sizes) if size > 1), None)
    if box.numel <= most or wide is None:
        yield box
        return
    inner = math.prod(box.sizes[wide + 1 :])
    rows = max(1, most // inner)
    for begin in range(0, box.sizes[wide], rows):
        count = min(rows, box.sizes[wide] - begin)
        part = Box(
            (*box.offsets[:wide], box.offsets[wide] + begin, *box.offsets[wide + 1 :]),
            (*box.sizes[:wide], count, *box.sizes[wide + 1 :]),
            box.start + begin * inner,
        )
        yield from split_box(part, most) if part.numel > most else [part]


def reorder_box(box: Box, order: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of a box in the tensor's own order of dims; dim i of the box is dim `order[i]`."""
    places = [order.index(dim) for dim in range(len(order))]
    return tuple(box.offsets[place] for place in places), tuple(box.sizes[place] for place in places)
