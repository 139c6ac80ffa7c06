"""Parameters and sums that go from rank to rank by messages: straight to everyone, or round the ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.channel import Channel, take_tags
from shardstep.comm.in_flight import MessagesInFlight
from shardstep.comm.tensors import as_bytes
from shardstep.comm.transport import Check, Message
from shardstep.planning.schedule import ring_hops

# A message from this size on may go from rank to rank, round the ring, instead of from its holder to everyone.
RING_NBYTES = 256 * 1024
# What goes round the ring goes in pieces of this size: a rank passes on the first while the next are still coming.
RING_PIECE_NBYTES = 2 * 1024 * 1024


@dataclass(slots=True)
class _Posted:
    """Receives that are posted. Nothing arrives before all ranks step, so they may be dropped with what holds them."""

    arriving: list[tuple[Message, torch.Tensor]] = field(default_factory=list)
    work: list[Any] = field(default_factory=list)
    carried: dict[int, list[tuple[torch.Tensor, Any]]] = field(default_factory=dict)  # by holder: to be passed on


class DirectGather:
    """Messages from rank to rank, received while this rank still steps.

    A message goes one of two ways. Straight from its holder to every other rank: fastest on one host, and a rank that
    holds less sends while the others still compute. Or round the ring, in pieces: each rank passes on to the next what
    it has from the one before. Then every link carries every byte once, and no two ranks send to the same one at a
    time, which on slow links loses a third of their rate. It is also the way where whole parameters make uneven shares,
    and one rank alone would send more than all parameters once.
    """

    def __init__(
        self, channel: Channel, messages: Sequence[Sequence[Message]], in_ring: Sequence[bool], check: Check
    ) -> None:
        """`in_ring[r]`: the messages of rank r go round the ring."""
        self._channel = channel
        self._check = check
        self._messages = [[message for message in row if message.nbytes] for row in messages]
        self._in_ring = in_ring
        self._before = (channel.rank - 1) % channel.world_size
        self._next = (channel.rank + 1) % channel.world_size
        self.hops = max(channel.world_size - 2, 0)
        self._tag = take_tags(channel)
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        self._leaving: Sequence[Message] = ()
        self._carried: dict[int, list[tuple[torch.Tensor, Any]]] = {}  # by holder: pieces to pass on, when they come
        self._posted: _Posted | None = None  # receives of the next `expect`
        self._in_flight = MessagesInFlight()

    def post_receives(self) -> None:
        """Post the receives of what `expect` waits for, if they are not posted yet.

        The other ranks may send when all have announced a step. If they do not, receives stay posted for the next step.
        """
        self._channel.check_process()
        if self._posted is not None or self._in_flight.work or self._carried:
            return
        self._posted = posted = _Posted()
        try:
            self._post(posted)
        except BaseException:  # half of them may be posted: `expect` then says that a step was interrupted
            self._in_flight.work.extend(posted.work)
            self._posted = None
            raise

    def _post(self, posted: _Posted) -> None:
        for holder in self._from_nearest():
            for message in self._messages[holder]:
                values = message.landing()
                posted.arriving.append((message, values))
                if not self._goes_round(holder, message):
                    posted.work.append(self._irecv(as_bytes(values), holder, holder))
                    continue
                for piece in ring_pieces(as_bytes(values)):
                    work = self._irecv(piece, self._before, holder)
                    if self._next == holder:
                        posted.work.append(work)
                    else:
                        posted.carried.setdefault(holder, []).append((piece, work))

    def expect(self) -> None:
        self._channel.check_process()
        if self._in_flight.work or self._carried:
            raise RuntimeError(
                "an earlier step was interrupted half-way, so the ranks may hold different parameters; "
                "build the optimizer again and load a checkpoint"
            )
        self.post_receives()
        posted, self._posted = self._posted, None
        assert posted is not None, "they were posted just now"
        self._in_flight.hold(*(values for _, values in posted.arriving))
        self._in_flight.work.extend(posted.work)
        self._arriving, self._carried = posted.arriving, posted.carried

    def send(self) -> None:
        own = self._channel.rank
        self._leaving = self._messages[own]
        for message in self._leaving:
            values = message.outgoing()
            self._in_flight.hold(values)
            if self._goes_round(own, message):
                for piece in ring_pieces(as_bytes(values)):
                    self._isend(piece, self._next, own)
            else:
                for to in reversed(self._from_nearest()):
                    self._isend(as_bytes(values), to, own)

    def pass_on(self, distance: int) -> None:
        holder = (self._channel.rank - distance) % self._channel.world_size
        carried = self._carried.pop(holder, ())
        if carried:
            self._check()
        for piece, work in carried:
            work.wait()
            self._isend(piece, self._next, holder)

    def finish(self) -> None:
        self._check()
        self._in_flight.wait()
        for message, values in self._arriving:
            message.landed(values)
        for message in self._leaving:
            message.sent()
        self._arriving, self._leaving = [], ()

    def _goes_round(self, holder: int, message: Message) -> bool:
        return self._in_ring[holder] and message.nbytes >= RING_NBYTES

    def _from_nearest(self) -> list[int]:
        """The other ranks, the one before this first; so not everybody starts with rank 0."""
        count = self._channel.world_size
        return [(self._channel.rank - distance) % count for distance in range(1, count)]

    def _irecv(self, values: torch.Tensor, source: int, holder: int) -> Any:
        return dist.irecv(values, group=self._channel.group, group_src=source, tag=self._tag + holder)

    def _isend(self, values: torch.Tensor, to: int, holder: int) -> None:
        self._in_flight.work.append(dist.isend(values, group=self._channel.group, group_dst=to, tag=self._tag + holder))


class RingReduction:
    """DDP's buckets on their way to their holders, each a hop further with every bucket that goes out.

    Gloo's own reduce brings a bucket to its holder in as many bytes as an all-reduce brings it to everyone.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.hops = channel.world_size - 1
        self._chains: dict[int, ChainedReduction] = {}
        self._waiting: dict[int, tuple[torch.futures.Future[Any], Sequence[torch.Tensor]]] = {}

    def begin(self, bucket: int, parts: Sequence[torch.Tensor], last: bool) -> torch.futures.Future[Any]:
        if bucket not in self._chains:  # in the first pass, in the order of the buckets: the same on every rank
            self._chains[bucket] = ChainedReduction(self._channel)
        self._chains[bucket].begin(parts)
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._waiting[bucket] = (future, parts)
        self._advance(bucket, last=last)
        return future

    def _advance(self, newest: int, *, last: bool) -> None:
        """All that has come goes one rank further; at the end of the pass, all the way."""
        for index, distance in ring_hops(newest, self.hops):
            if index in self._waiting:  # the first bucket of the first such pass was all-reduced
                self._chains[index].pass_on(distance)
        if last:
            for distance in range(1, self.hops + 1):
                for index in self._waiting:
                    self._chains[index].pass_on(distance)
        for index in list(self._waiting):
            if last or newest - index >= self.hops:
                self._chains[index].finish()
                future, parts = self._waiting.pop(index)
                future.set_result(parts)


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


def ring_pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """What goes round the ring, in pieces; none of nothing."""
    return torch.tensor_split(flat, -(-flat.nbytes // RING_PIECE_NBYTES)) if flat.nbytes else ()
