"""What this rank has computed of a bucket: gradients out of `param.grad`, in parts for the wire.

Where parts go to each rank by messages, a large gradient is sent from its own memory, and small ones are put one behind
the other first; what goes together is decided by sizes alone, so that a receiver knows where each part belongs. Where a
collective cuts the bucket itself, it is one part, with zeros in what lies between parameters and behind the last.

[Note: host work] There may be thousands of parameters, so nothing here is done for one of them that can be done for all
of a part at once: whole parameters, which nearly all are, are read, flattened and joined by one call each. Only what is
cut, or lies in another order than its elements, is looked at alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, repeat
from operator import is_, ne
from typing import Any

import torch
from torch._utils import _flatten_dense_tensors

from shardstep.comm.transport import Transport
from shardstep.params.flat import BucketMemory, FlatMemory
from shardstep.params.proxy import gradient_of
from shardstep.params.views import flat_gradient, quickly
from shardstep.planning import Piece

Parts = list[torch.Tensor]


class GradientPacking:
    """The packing of every bucket of a plan. `params` are in the plan's order."""

    def __init__(
        self,
        memory: FlatMemory,
        params: Sequence[torch.Tensor],
        transport: Transport,
        dtypes: Sequence[torch.dtype],
    ) -> None:
        """`dtypes`: of each bucket, in which its gradients are sent."""
        self._params = params
        self._plan, self._homes = memory.plan, memory.homes
        self._failed = False  # a gradient of this pass could not be sent
        self.used = bytearray(len(params))  # 1 where a gradient was taken since `forget`, here or as others say
        self._taken: dict[int, torch.Tensor] = {}  # of parameters in several buckets: until the last one is packed
        rows = zip(memory.buckets, dtypes, strict=True)
        self._rows = [self._make_rows(bucket, transport, dtype) for bucket, dtype in rows]
        self._places = [_own_places(rows, bucket) for rows, bucket in zip(self._rows, memory.buckets, strict=True)]
        alone = [{row.places[place] for row in rows for place in row.alone} for rows in self._rows]
        last = {param: number for number, params in enumerate(alone) for param in params}
        # Of each bucket: what it takes alone, and no later bucket holds.
        self._ends = [[param for param in params if last[param] == number] for number, params in enumerate(alone)]

    def _make_rows(self, memory: BucketMemory, transport: Transport, dtype: torch.dtype) -> list[_Row]:
        bucket = memory.bucket
        if transport.packs_by_rank(bucket):
            ranks = range(bucket.ranges.count)
            return [_Row(memory, bucket.placed(r), None, self._params, self._homes, transport, dtype) for r in ranks]
        whole = [(Piece(s.param, s.start, s.stop, memory.rank), s.offset) for s in bucket.segments]
        return [_Row(memory, whole, bucket.numel, self._params, self._homes, transport, dtype)]

    def places(self, bucket: int) -> list[slice]:
        """Where in this rank's range each of its own parts lies. What is between two parts is no one's."""
        return self._places[bucket]

    @torch.no_grad()
    def pack(self, bucket: int) -> list[Parts]:
        """The parts for each rank, or the one for all; gradients that are not there count as zero."""
        with quickly():
            packed = [self._pack_row(row) for row in self._rows[bucket]]
        for param in self._ends[bucket]:
            self._taken.pop(param, None)
        return packed

    def end_pass(self) -> None:
        """Also of a pass that has failed: what is left of it must not be taken for the next one's."""
        self._taken.clear()
        self._failed = False

    def forget(self) -> None:
        self.end_pass()
        self.used = bytearray(len(self._params))

    def _pack_row(self, row: _Row) -> Parts:
        gradients: list[Any] = list(map(gradient_of, row.params))
        for param in row.whole_params:
            param.grad = None
        if self._failed:  # what is left of the pass is sent, and nobody looks at it
            gradients = [None] * len(gradients)
            for param in row.params:
                param.grad = None
        for place in row.alone:
            gradients[place] = self._take_alone(row.pieces[place])
        if any(map(is_, gradients, repeat(None))):
            present = [gradient is not None for gradient in gradients]
            gradients = [
                self._homes[piece.param].new_zeros(piece.numel, dtype=row.dtype) if gradient is None else gradient
                for piece, gradient in zip(row.pieces, gradients, strict=True)
            ]
            places = [piece.param for piece, flag in zip(row.pieces, present, strict=True) if flag]
        else:
            places = row.places
        for place in places:
            self.used[place] = 1
        try:
            packed = [part.join(gradients) for part in row.parts]
        except Exception as error:
            raise self._find_misfit(row, gradients) or error from error
        if any(map(ne, map(len, packed), row.numels)):
            raise self._find_misfit(row, gradients) or AssertionError("every gradient fits, and all together do not")
        return packed

    def _take_alone(self, piece: Piece) -> torch.Tensor | None:
        flat, param = self._taken.get(piece.param), self._params[piece.param]
        if flat is None and (gradient := gradient_of(param)) is not None:
            param.grad = None
            misfit = self._why_unfit(piece.param, gradient)
            if misfit is not None:
                raise misfit
            flat = self._taken[piece.param] = flat_gradient(self._homes[piece.param], gradient)
        return None if flat is None else flat[piece.start : piece.stop]

    def _find_misfit(self, row: _Row, gradients: Sequence[torch.Tensor]) -> Exception | None:
        whole = [place for place in range(len(row.pieces)) if place not in row.alone]
        found = (self._why_unfit(row.places[place], gradients[place]) for place in whole)
        return next((misfit for misfit in found if misfit is not None), None)

    def _why_unfit(self, place: int, gradient: torch.Tensor) -> Exception | None:
        """Why a gradient cannot be sent. If it cannot, the pass has failed, and its other messages are empty."""
        name, home = self._plan.params[place].name, self._homes[place]
        self._failed = True
        if gradient.layout is not torch.strided:
            return TypeError(
                f"{name} has a sparse gradient, and what is sent is dense: build its module with sparse=False "
                "(nn.Embedding, nn.EmbeddingBag), or keep it out of the model that is sharded"
            )
        if gradient.numel() != home.numel():
            return RuntimeError(
                f"{name} has a gradient of shape {tuple(gradient.shape)}, and had shape {tuple(home.shape)} when the "
                "model was sharded: change its size before shard(...), or call shard(...) again"
            )
        self._failed = False
        return None


def _own_places(rows: Sequence[_Row], memory: BucketMemory) -> list[slice]:
    return [part.place for part in (rows[memory.rank] if len(rows) > 1 else rows[0]).parts]


class _Row:
    """What is packed together: pieces, and where each begins. `numel`: of all of it, if it is one part."""

    def __init__(
        self,
        memory: BucketMemory,
        placed: Sequence[tuple[Piece, int]],
        numel: int | None,
        params: Sequence[torch.Tensor],
        homes: Mapping[int, torch.Tensor],
        transport: Transport,
        dtype: torch.dtype,
    ) -> None:
        self.dtype = dtype
        self.pieces = [piece for piece, _ in placed]
        self.places = [piece.param for piece in self.pieces]
        self.params = [params[place] for place in self.places]
        whole = [
            piece.numel == homes[piece.param].numel() and homes[piece.param].is_contiguous() for piece in self.pieces
        ]
        self.whole_params = [param for param, flag in zip(self.params, whole, strict=True) if flag]
        self.alone = [place for place, flag in enumerate(whole) if not flag]
        nbytes = [piece.numel * memory.values.element_size() for piece in self.pieces]
        if numel is None:
            groups = [g for g in _travel_together(nbytes, transport.part_nbytes) if any(nbytes[g])]
            self.parts = [_Part(memory, placed, dtype, group) for group in groups]
        else:
            self.parts = [_Part(memory, placed, dtype, slice(0, len(placed)), numel)] if numel else []
        self.numels = [part.place.stop - part.place.start for part in self.parts]


def _travel_together(nbytes: Sequence[int], part_nbytes: float) -> list[slice]:
    """Large ones alone, and what lies between two of them together."""
    is_large = [size >= part_nbytes for size in nbytes]
    starts = [at for at, large in enumerate(is_large) if large or at == 0 or is_large[at - 1]]
    return [slice(start, stop) for start, stop in pairwise([*starts, len(nbytes)])]


class _Part:
    """Neighbours that travel together: `members` of `placed`, and zeros behind them up to `numel`, if it is given."""

    def __init__(
        self,
        memory: BucketMemory,
        placed: Sequence[tuple[Piece, int]],
        dtype: torch.dtype,
        members: slice,
        numel: int | None = None,
    ) -> None:
        self._members = members
        self._dtype, self._casts = dtype, dtype is not memory.values.dtype
        chosen = placed[members]
        starts = [offset for _, offset in chosen]
        ends = [offset + piece.numel for piece, offset in chosen]
        stop = ends[-1] if numel is None else numel
        self.place = slice(starts[0], stop)
        # Gradients lie as the parameters do, so that both can be stepped in one go: also what lies between two.
        gaps = [after - end for after, end in zip([*starts[1:], stop], ends, strict=True)]
        self._template: list[Any] = []
        self._slots: list[int] = []
        self._sizes: list[int] = []  # of what the template stands for
        for (piece, _), gap in zip(chosen, gaps, strict=True):
            self._slots.append(len(self._template))
            self._template.append(None)
            self._sizes.append(piece.numel)
            if gap:
                self._template.append(memory.values.new_zeros(gap, dtype=dtype))
                self._sizes.append(gap)

    def join(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Of the row's gradients those of this part; a single one is not copied."""
        chosen = list(gradients[self._members])
        if len(self._template) > len(self._slots):
            spread = self._template.copy()
            for slot, gradient in zip(self._slots, chosen, strict=True):
                spread[slot] = gradient
            chosen = spread
        if self._casts and len(chosen) > 1:
            return self._cast(chosen)
        joined: torch.Tensor = _flatten_dense_tensors(chosen)  # type: ignore[no-untyped-call]
        # Without its graph, if it has one; as many bytes as the receiver expects, also if the model was cast meanwhile.
        joined = joined.detach().resolve_conj().to(self._dtype)
        # A single element may have any stride, and the wire takes bytes that lie side by side.
        return joined if joined.stride(0) == 1 else joined.clone(memory_format=torch.contiguous_format)

    def _cast(self, chosen: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join and round at once: joined as they are they would take twice the memory of what is sent."""
        joined = torch.empty(sum(self._sizes), dtype=self._dtype, device=chosen[0].device)
        flat = torch.split_with_sizes(joined, self._sizes)
        places = [place.view(each.shape) for place, each in zip(flat, chosen, strict=True)]
        torch._foreach_copy_(places, list(chosen))
        return joined
