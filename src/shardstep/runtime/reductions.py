"""How the gradients of all ranks come to the rank that holds the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardstep.runtime.collectives import Channel, as_bytes, ring_pieces, take_tags, takes_many_messages


class Reduction(Protocol):
    """A bucket of gradients on its way to the ranks that hold it."""

    def finish(self) -> list[torch.Tensor]:
        """This rank's range as every rank computed it, in rank order. Sums are taken by the caller, always alike."""


def start_reduction(channel: Channel, chunks: Sequence[torch.Tensor], tag: int) -> Reduction:
    """Send `chunks[r]` to rank r; they must not change before `finish`. `tag` is from `take_tags`."""
    if takes_many_messages(channel, chunks[0].device):
        return DirectReduction(channel, chunks, tag)
    return ExchangedReduction(channel, chunks)


class DirectReduction:
    """Every rank sends to every other: half the bytes of Gloo's own reduce_scatter, which is an all-reduce inside."""

    def __init__(self, channel: Channel, chunks: Sequence[torch.Tensor], tag: int) -> None:
        own, count = channel.rank, channel.world_size
        self._arrivals = [chunks[own] if rank == own else torch.empty_like(chunks[own]) for rank in range(count)]
        self._work: list[Any] = []
        for shift in range(1, count):
            source, to = (own - shift) % count, (own + shift) % count
            if chunks[own].numel():
                landing = as_bytes(self._arrivals[source])
                self._work.append(dist.irecv(landing, group=channel.group, group_src=source, tag=tag))
            if chunks[to].numel():
                self._work.append(dist.isend(as_bytes(chunks[to]), group=channel.group, group_dst=to, tag=tag))
        self._chunks = chunks  # what is being sent must live

    def finish(self) -> list[torch.Tensor]:
        for work in self._work:
            work.wait()
        return self._arrivals


class ExchangedReduction:
    """One all-to-all: what NCCL's reduce-scatter moves, and it takes uneven ranges."""

    def __init__(self, channel: Channel, chunks: Sequence[torch.Tensor]) -> None:
        count, own = channel.world_size, chunks[channel.rank]
        self._outgoing = torch.cat(list(chunks))
        self._landing = own.new_empty(count * own.numel())
        self._count = count
        splits = [chunk.numel() for chunk in chunks]
        self._work = dist.all_to_all_single(
            self._landing, self._outgoing, [own.numel()] * count, splits, group=channel.group, async_op=True
        )

    def finish(self) -> list[torch.Tensor]:
        self._work.wait()
        return list(self._landing.chunk(self._count)) if self._landing.numel() else [self._landing] * self._count


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
