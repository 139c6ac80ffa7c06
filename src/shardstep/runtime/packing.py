"""What this rank has computed for each rank's range of a bucket: gradients out of `param.grad`, in parts for the wire.

A large gradient is sent from its own memory; small ones are put one behind the other first. What goes together is
decided by sizes alone, so that a receiver knows where each part belongs.

[Note: host work] There may be thousands of parameters, so nothing here is done for one of them that can be done for all
of a part at once: whole parameters, which nearly all are, are read, flattened and joined by one call each. Only what is
cut, or lies in another order than its elements, is looked at alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
from operator import is_
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

from shardstep.planning import Piece
from shardstep.runtime.flat_memory import BucketMemory, FlatMemory, flat_gradient

Parts = list[torch.Tensor]


class GradientPacking:
    """The packing of every bucket of a plan. `params` are in the plan's order."""

    def __init__(self, memory: FlatMemory, params: Sequence[torch.Tensor], in_place_nbytes: Sequence[float]) -> None:
        """`in_place_nbytes`, of each bucket: from this size on, a gradient is a part of its own."""
        self._params = params
        self._homes = memory.homes
        self.used = bytearray(len(params))  # 1 where a gradient was taken since `forget`, here or as others say
        self._taken: dict[int, torch.Tensor] = {}  # of parameters in several buckets: until the last one is packed
        self._rows = [
            [_Row(bucket, rank, params, memory.homes, limit) for rank in range(len(bucket.ranges))]
            for bucket, limit in zip(memory.buckets, in_place_nbytes, strict=True)
        ]
        last = {piece.param: number for number, bucket in enumerate(memory.buckets) for piece in bucket.bucket.pieces}
        self._ends: list[list[int]] = [[] for _ in self._rows]  # of each bucket: parameters that no later one holds
        for param, number in last.items():
            self._ends[number].append(param)

    def places(self, bucket: int, rank: int) -> list[slice]:
        """Where in a rank's range each part lies. What is between two parts is no one's."""
        return [part.place for part in self._rows[bucket][rank].parts]

    @torch.no_grad()
    def pack(self, bucket: int) -> list[Parts]:
        """For each rank the parts of its range; gradients that are not there count as zero."""
        packed = [self._pack_row(row) for row in self._rows[bucket]]
        for param in self._ends[bucket]:
            self._taken.pop(param, None)
        return packed

    def end_pass(self) -> None:
        """Also of a pass that has failed: what is left of it must not be taken for the next one's."""
        self._taken.clear()

    def forget(self) -> None:
        self._taken.clear()
        self.used = bytearray(len(self._params))

    def _pack_row(self, row: _Row) -> Parts:
        gradients: list[Any] = [param.grad for param in row.params]
        for param in row.whole_params:
            param.grad = None
        for place in row.alone:
            gradients[place] = self._take_alone(row.pieces[place])
        if any(map(is_, gradients, repeat(None))):
            present = [gradient is not None for gradient in gradients]
            gradients = [
                self._homes[piece.param].new_zeros(piece.numel) if gradient is None else gradient
                for piece, gradient in zip(row.pieces, gradients, strict=True)
            ]
            places = [piece.param for piece, flag in zip(row.pieces, present, strict=True) if flag]
        else:
            places = row.places
        for place in places:
            self.used[place] = 1
        return [part.join(gradients) for part in row.parts]

    def _take_alone(self, piece: Piece) -> torch.Tensor | None:
        flat, param = self._taken.get(piece.param), self._params[piece.param]
        if flat is None and param.grad is not None:
            flat = self._taken[piece.param] = flat_gradient(self._homes[piece.param], param.grad)
            param.grad = None
        return None if flat is None else flat[piece.start : piece.stop]


class _Row:
    """One rank's range of a bucket."""

    def __init__(
        self,
        memory: BucketMemory,
        rank: int,
        params: Sequence[torch.Tensor],
        homes: dict[int, torch.Tensor],
        in_place_nbytes: float,
    ) -> None:
        self.pieces = memory.pieces[rank]
        self.places = [piece.param for piece in self.pieces]
        self.params = [params[place] for place in self.places]
        whole = [
            piece.numel == homes[piece.param].numel() and homes[piece.param].is_contiguous() for piece in self.pieces
        ]
        self.whole_params = [param for param, flag in zip(self.params, whole, strict=True) if flag]
        self.alone = [place for place, flag in enumerate(whole) if not flag]
        nbytes = [piece.numel * memory.ranges[rank].element_size() for piece in self.pieces]
        groups = _travel_together(nbytes, in_place_nbytes)
        self.parts = [_Part(memory, rank, group) for group in groups if any(nbytes[group])]


def _travel_together(nbytes: Sequence[int], in_place_nbytes: float) -> list[slice]:
    """Large ones alone, and what lies between two of them together."""
    is_large = [size >= in_place_nbytes for size in nbytes]
    starts = [at for at, large in enumerate(is_large) if large or at == 0 or is_large[at - 1]]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(nbytes)])]


class _Part:
    """Neighbours in a range that travel together: pieces `members` of the row."""

    def __init__(self, memory: BucketMemory, rank: int, members: slice) -> None:
        self._members = members
        self._dtype = memory.ranges[rank].dtype
        offsets = memory.offsets[rank][self._members]
        ends = [o + piece.numel for o, piece in zip(offsets, memory.pieces[rank][self._members], strict=True)]
        self.place = slice(offsets[0], ends[-1])
        # Gradients lie as the parameters do, so that both can be stepped in one go: also what lies between two.
        gaps = [start - end for start, end in zip(offsets[1:], ends, strict=False)]
        self._gaps = [memory.ranges[rank].new_zeros(gap) for gap in gaps] if any(gaps) else None

    def join(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the row's gradients those of this part; a single one is not copied."""
        chosen = gradients[self._members]
        if self._gaps is not None:
            spread = [chosen[0]] * (2 * len(chosen) - 1)
            spread[::2], spread[1::2] = chosen, self._gaps
            chosen = spread
        joined: torch.Tensor = _flatten_dense_tensors(chosen)  # type: ignore[no-untyped-call]
        # Without its graph, if it has one; as many bytes as the receiver expects, also if the model was cast meanwhile.
        joined = joined.detach().resolve_conj().to(self._dtype)
        # A single element may have any stride, and the wire takes bytes that lie side by side.
        return joined if joined.stride(0) == 1 else joined.clone(memory_format=torch.contiguous_format)
