"""Parameters as views of flat buffers, one for each dtype and device, in which every bucket of a plan is one range."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardstep.planning import Bucket, Piece, Plan
from shardstep.runtime.buffers import DEVICE_ALIGNMENT_NBYTES as ALIGNMENT_NBYTES
from shardstep.runtime.buffers import dense_view, move_in, storage_order


@dataclass(frozen=True, slots=True)
class BucketMemory:
    """One bucket of a plan, and where its values lie."""

    bucket: Bucket
    ranges: tuple[
        torch.Tensor, ...
    ]  # flat, of each rank; what lies between two parameters is no one's, and travels too
    pieces: tuple[tuple[Piece, ...], ...]  # of each rank
    offsets: tuple[tuple[int, ...], ...]  # where each of those begins in its rank's range
    values: tuple[tuple[torch.Tensor, ...], ...]  # flat, of each of those pieces

    @property
    def device(self) -> torch.device:
        return self.ranges[0].device


class RangeMessage:
    """One rank's range of a bucket, sent and received where it lies; a `collectives.Message`."""

    needs_memory = False

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.nbytes = values.nbytes

    def prepare(self) -> None:
        """Nothing can go wrong here."""

    def outgoing(self) -> torch.Tensor:
        return self._values

    def landing(self) -> torch.Tensor:
        return self._values

    def landed(self, values: torch.Tensor) -> None:
        """The parameters are views of it."""


class FlatMemory:
    """The memory of a plan. A parameter that is cut lies in one run all the same: its buckets are neighbours.

    Every parameter begins at a multiple of 64 bytes, as one of its own would: kernels then round as they do there.
    """

    def __init__(self, plan: Plan, params: Sequence[torch.Tensor]) -> None:
        self.plan = plan
        self.homes: dict[int, torch.Tensor] = {}  # of every parameter that travels: its view
        classes: dict[tuple[str, str], list[Bucket]] = {}
        for bucket in plan.buckets:
            classes.setdefault((bucket.device, bucket.dtype), []).append(bucket)
        memory: dict[int, BucketMemory] = {}
        for members in classes.values():
            sample = params[members[0].pieces[0].param]
            unit = max(ALIGNMENT_NBYTES // sample.element_size(), 1)
            places, total = _places([piece for bucket in members for piece in bucket.pieces], unit)
            values = torch.zeros(total, dtype=sample.dtype, device=sample.device)
            for piece, start in places.items():
                if piece.start == 0:
                    self.homes[piece.param] = dense_view(values, start, params[piece.param])
            for bucket in members:
                memory[id(bucket)] = _bucket_memory(bucket, places, values, plan.world_size)
        self.buckets = [memory[id(bucket)] for bucket in plan.buckets]
        self._params = [params[index] for index in self.homes]
        self._expected = _whereabouts(list(self.homes.values()))
        self.adopt()

    def adopt(self) -> None:
        """Make the parameters views of the buffers; again, if the program has given one other memory since."""
        found = _whereabouts(self._params)
        if found == self._expected:
            return
        for param, view, place, expected in zip(self._params, self.homes.values(), found, self._expected, strict=True):
            if place != expected:
                move_in(param, view, "call shard(...) after model.to(...)")


def _whereabouts(tensors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Where each lies, and in which order."""
    return list(zip(map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors), strict=True))


class ShardMemory:
    """Where this rank's part of the mean gradient lies, in each bucket. `like` are its ranges of the parameters.

    One block for all of a dtype. On the CPU it may be kept from step to step: a dozen megabytes here and there, taken
    and given back in every pass, leave the heap in pieces (250 MB of holes in the process that trains 30 M parameters),
    and every page of a new block costs a fault. An accelerator's allocator keeps memory itself: there it is let go.
    """

    def __init__(self, like: Sequence[torch.Tensor], *, keep: bool) -> None:
        self._like = like
        self._keep = keep and all(values.device.type == "cpu" for values in like)
        self._ranges: list[torch.Tensor] = []

    def of(self, bucket: int) -> torch.Tensor:
        if not self._ranges:
            self._ranges = self._make()
        return self._ranges[bucket]

    def let_go(self) -> None:
        if not self._keep:
            self._ranges = []

    def _make(self) -> list[torch.Tensor]:
        ends: dict[tuple[torch.device, torch.dtype], int] = {}
        starts = []
        for values in self._like:
            key = values.device, values.dtype
            starts.append(ends.get(key, 0))
            unit = max(ALIGNMENT_NBYTES // values.element_size(), 1)
            ends[key] = starts[-1] + -(-values.numel() // unit) * unit
        blocks = {key: torch.zeros(end, device=key[0], dtype=key[1]) for key, end in ends.items()}
        return [
            blocks[values.device, values.dtype][start : start + values.numel()]
            for values, start in zip(self._like, starts, strict=True)
        ]


def _places(pieces: Sequence[Piece], unit: int) -> tuple[dict[Piece, int], int]:
    """Where each piece begins, and where the last ends."""
    places: dict[Piece, int] = {}
    end = 0
    for piece in pieces:
        if piece.start == 0:
            end = -(-end // unit) * unit
        places[piece] = end
        end += piece.numel
    return places, end


def _bucket_memory(bucket: Bucket, places: dict[Piece, int], values: torch.Tensor, world_size: int) -> BucketMemory:
    rows: list[list[Piece]] = [[] for _ in range(world_size)]
    for piece in bucket.pieces:
        rows[piece.rank].append(piece)
    ranges = [values[places[row[0]] : places[row[-1]] + row[-1].numel] if row else values[:0] for row in rows]
    offsets = [tuple(places[piece] - places[row[0]] for piece in row) for row in rows]
    flat = [[values[places[piece] : places[piece] + piece.numel] for piece in row] for row in rows]
    return BucketMemory(bucket, tuple(ranges), tuple(map(tuple, rows)), tuple(offsets), tuple(map(tuple, flat)))


def flat_gradient(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The elements of `gradient` in the order in which those of `param` lie in memory."""
    flat = gradient.detach()
    if param.is_contiguous() and gradient.is_contiguous():  # most are, and there may be thousands of them
        flat = flat.view(-1)
    else:
        flat = flat.permute(storage_order(param)).reshape(-1)
    # A single element may have any stride, and the wire takes bytes that lie side by side.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
