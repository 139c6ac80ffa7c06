"""How the gradients of all ranks come to the rank that holds the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardstep.runtime.collectives import Channel, as_bytes, ring_pieces, take_tags, takes_many_messages

Parts = Sequence[torch.Tensor]


class Reduction(Protocol):
    """A bucket of gradients on its way to the ranks that hold it."""

    def finish(self) -> Sequence[Parts]:
        """The parts of this rank's range as every rank computed them, in rank order. Sums are taken by the caller."""


def start_reduction(
    channel: Channel, parts: Sequence[Parts], places: Sequence[slice], tag: int, landing: torch.Tensor | None
) -> Reduction:
    """Send `parts[r]` to rank r; they must not change before `finish`. `tag` is from `take_tags`.

    `places` are those of this rank's own parts in its range. `landing` has the size of that range; what one other rank
    sends may be received there.
    """
    sample = next((part for row in parts for part in row), None)
    if channel.world_size == 1 or sample is None:
        return NoReduction(parts)
    if takes_many_messages(channel, sample.device):
        return DirectReduction(channel, parts, places, tag, landing)
    return ExchangedReduction(channel, [row[0] if row else sample.new_empty(0) for row in parts])


def first_other(own: int) -> int:
    """The first rank that is not this one."""
    return 0 if own else 1


class NoReduction:
    """There is one rank, or nothing to send."""

    def __init__(self, parts: Sequence[Parts]) -> None:
        self._parts = parts

    def finish(self) -> Sequence[Parts]:
        return self._parts


class DirectReduction:
    """Every rank sends to every other: half the bytes of Gloo's own reduce_scatter, which is an all-reduce inside."""

    def __init__(
        self,
        channel: Channel,
        parts: Sequence[Parts],
        places: Sequence[slice],
        tag: int,
        landing: torch.Tensor | None,
    ) -> None:
        own, count = channel.rank, channel.world_size
        self._parts = list(parts)  # what is being sent must live
        self._arrivals = list(parts)
        self._work: list[Any] = []
        around = [((own - shift) % count, (own + shift) % count) for shift in range(1, count)]
        for source, _ in around if places else ():  # before the first message: memory may run out
            memory = landing if source == first_other(own) else None
            self._arrivals[source] = _landing(parts[own][0].dtype, places, memory)
        for source, to in around:
            for row in self._arrivals[source] if places else ():
                self._work.append(dist.irecv(as_bytes(row), group=channel.group, group_src=source, tag=tag))
            for part in parts[to]:
                self._work.append(dist.isend(as_bytes(part), group=channel.group, group_dst=to, tag=tag))
        if not places:
            self._arrivals = [()] * count

    def finish(self) -> Sequence[Parts]:
        for work in self._work:
            work.wait()
        self._parts = []
        return self._arrivals


def _landing(dtype: torch.dtype, places: Sequence[slice], memory: torch.Tensor | None) -> list[torch.Tensor]:
    """Memory for one rank's parts: in `memory` if they fit there as they are."""
    if memory is None or memory.dtype != dtype:
        memory = torch.empty(places[-1].stop, dtype=dtype)
    return [memory[place] for place in places]


class ExchangedReduction:
    """One all-to-all: what NCCL's reduce-scatter moves, and it takes uneven ranges. A range is one part."""

    def __init__(self, channel: Channel, ranges: Sequence[torch.Tensor]) -> None:
        count, own = channel.world_size, ranges[channel.rank]
        self._outgoing = torch.cat(list(ranges))
        self._landing = own.new_empty(count * own.numel())
        self._count = count
        splits = [values.numel() for values in ranges]
        self._work = dist.all_to_all_single(
            self._landing, self._outgoing, [own.numel()] * count, splits, group=channel.group, async_op=True
        )

    def finish(self) -> Sequence[Parts]:
        self._work.wait()
        if not self._landing.numel():
            return [()] * self._count
        return [[values] for values in self._landing.chunk(self._count)]


def reduce_parts(channel: Channel, parts: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    """Sum `parts[r]` of all ranks on rank r, with NCCL: its reductions run in order, so that the last one ends last."""
    works = [
        dist.reduce(part, group=channel.group, group_dst=rank, async_op=True)
        for rank, part in enumerate(parts)
        if part.numel()
    ]
    future: torch.futures.Future[Any] = works[-1].get_future()
    return future


class ChainedReduction:
    """A bucket whose parts go round the ring, each from the rank after its holder to the holder; all add to them.

    Every link carries every part once. An all-reduce carries it one and a half times at four ranks, towards twice at
    many, because it ends on every rank and not on one. A rank adds to what has come and passes it on in `pass_on`; so
    the sum is taken in one order, that of the ring, whoever is late.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._before = (channel.rank - 1) % channel.world_size
        self._next = (channel.rank + 1) % channel.world_size
        self._tag = take_tags(channel)
        self._arriving: dict[int, list[tuple[torch.Tensor, torch.Tensor, Any]]] = {}  # by holder: landing, own, work
        self._work: list[Any] = []

    def begin(self, parts: Sequence[torch.Tensor]) -> None:
        """`parts[r]` is what this rank adds for rank r: flat, and overwritten with the sum where r is this rank."""
        for holder, part in enumerate(parts):
            for piece in ring_pieces(part):
                if holder == self._before:
                    self._isend(piece, holder)
                    continue
                landing = torch.empty_like(piece)
                work = dist.irecv(
                    as_bytes(landing), group=self._channel.group, group_src=self._before, tag=self._tag + holder
                )
                self._arriving.setdefault(holder, []).append((landing, piece, work))

    def pass_on(self, distance: int) -> None:
        """Add to what has come by way of so many ranks, and pass it on; or keep it, if it has come home."""
        holder = (self._channel.rank - 1 - distance) % self._channel.world_size
        for landing, own, work in self._arriving.pop(holder, ()):
            work.wait()
            if holder == self._channel.rank:
                own.add_(landing)
            else:
                self._isend(landing.add_(own), holder)

    def finish(self) -> None:
        """Return when what is being sent may be overwritten."""
        for work in self._work:
            work.wait()
        self._work = []

    def _isend(self, piece: torch.Tensor, holder: int) -> None:
        self._work.append(
            dist.isend(as_bytes(piece), group=self._channel.group, group_dst=self._next, tag=self._tag + holder)
        )
