"""How every rank gets the parameters that the others have stepped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardstep.runtime.collectives import Channel, as_bytes, ring_pieces, take_tags, takes_many_messages

# A message from this size on may go from rank to rank, round the ring, instead of from its holder to everyone.
RING_NBYTES = 256 * 1024


class Message(Protocol):
    """Parameters of one rank that travel together."""

    nbytes: int
    needs_memory: bool  # whether `landing` takes memory that the parameters do not have already

    def prepare(self) -> None:
        """Called on every rank before every step; may raise, the other methods do not."""

    def outgoing(self) -> torch.Tensor:
        """Their values as one flat tensor; called on the rank that holds them."""

    def landing(self) -> torch.Tensor:
        """Where the values may be received."""

    def landed(self, values: torch.Tensor) -> None:
        """The values have arrived in what `landing` returned."""


class Gather(Protocol):
    """Gives every rank the messages of every rank; made once for a plan and used at every step, in this order.

    On one rank there is nothing to do.
    """

    def expect(self) -> None:
        """Other ranks' parameters may be written from now on."""

    def send(self) -> None:
        """This rank's parameters are final."""

    hops: int  # how many ranks a message may pass through

    def pass_on(self, distance: int) -> None:
        """Pass on what comes to this rank for others, from the rank that is so far behind it in the ring."""

    def finish(self) -> None:
        """Return when every message has arrived."""


def make_gathers(
    channel: Channel, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]], *, ring: bool = True
) -> Sequence[Gather]:
    """One gather for each bucket: the device of its parameters, and the messages of each rank.

    Without `ring` every rank sends to all others itself: for gathers that ranks finish when each likes, so that none
    would wait for another to pass something on.
    """
    load = [0] * channel.world_size  # of a whole step: what a rank sends in one bucket it may spare in the next
    for _, rows in buckets:
        for rank, row in enumerate(rows):
            load[rank] += sum(message.nbytes for message in row)
    overloaded = [share * (len(load) - 1) > sum(load) for share in load]
    in_ring = [ring and (heavy or not channel.one_host) for heavy in overloaded]
    return [
        DirectGather(channel, rows, in_ring) if takes_many_messages(channel, device) else BroadcastGather(channel, rows)
        for device, rows in buckets
    ]


def finish_gathers(gathers: Sequence[Gather]) -> None:
    """Return when everything has arrived. Passed on first, and in the order in which it comes: the rank before this one
    sends its own parts of all gathers, then those of the rank before it, and so on."""
    for distance in range(1, max((gather.hops for gather in gathers), default=0) + 1):
        for gather in gathers:
            gather.pass_on(distance)
    for gather in gathers:
        gather.finish()


class BroadcastGather:
    """One broadcast per message. On a GPU nothing here waits: it is all enqueued on the current stream.

    Messages that need memory go one after the other, so that they need it for one of them only.
    """

    def __init__(self, channel: Channel, messages: Sequence[Sequence[Message]]) -> None:
        self._channel = channel
        sendable = [(source, message) for source, row in enumerate(messages) for message in row if message.nbytes]
        self._sendable = sendable if channel.world_size > 1 else []
        self._work: list[Any] = []

    def expect(self) -> None:
        """A broadcast is one call on all ranks."""

    def send(self) -> None:
        for source, message in self._sendable:
            if not message.needs_memory:
                values = as_bytes(message.outgoing())
                self._work.append(dist.broadcast(values, group=self._channel.group, group_src=source, async_op=True))

    hops = 0

    def pass_on(self, distance: int) -> None:
        """The backend does."""

    def finish(self) -> None:
        for work in self._work:
            work.wait()
        self._work = []
        for source, message in self._sendable:
            if message.needs_memory:
                own = source == self._channel.rank
                values = message.outgoing() if own else message.landing()
                dist.broadcast(as_bytes(values), group=self._channel.group, group_src=source)
                if not own:
                    message.landed(values)


class DirectGather:
    """Messages from rank to rank, received while this rank still steps.

    Gloo's broadcasts take 1.5 times as long at two ranks and 2.4 times at four for the same bytes, and start only when
    the slowest rank has stepped. Here a rank that holds less sends while the others still compute.

    A message goes one of two ways. Straight from its holder to every other rank: fastest on one host. Or round the
    ring, in pieces: each rank passes on to the next what it has from the one before. Then every link carries every byte
    once, and no two ranks send to the same one at a time, which on slow links loses a third of their rate. It is also
    the way where whole parameters make uneven shares, and one rank alone would send more than all parameters once.
    """

    def __init__(self, channel: Channel, messages: Sequence[Sequence[Message]], in_ring: Sequence[bool]) -> None:
        """`in_ring[r]`: the messages of rank r go round the ring."""
        self._channel = channel
        self._messages = [[message for message in row if message.nbytes] for row in messages]
        self._in_ring = in_ring
        self._before = (channel.rank - 1) % channel.world_size
        self._next = (channel.rank + 1) % channel.world_size
        self.hops = max(channel.world_size - 2, 0)
        self._tag = take_tags(channel)
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        self._carried: dict[int, list[tuple[torch.Tensor, Any]]] = {}  # by holder: pieces to pass on, when they come
        self._work: list[Any] = []

    def expect(self) -> None:
        if self._work or self._carried:
            raise RuntimeError(
                "an earlier step was interrupted half-way, so the ranks may hold different parameters; "
                "build the optimizer again and load a checkpoint"
            )
        for holder in self._from_nearest():
            for message in self._messages[holder]:
                values = message.landing()
                self._arriving.append((message, values))
                if not self._goes_round(holder, message):
                    self._work.append(self._irecv(as_bytes(values), holder, holder))
                    continue
                for piece in ring_pieces(as_bytes(values)):
                    work = self._irecv(piece, self._before, holder)
                    if self._next == holder:
                        self._work.append(work)
                    else:
                        self._carried.setdefault(holder, []).append((piece, work))

    def send(self) -> None:
        own = self._channel.rank
        for message in self._messages[own]:
            values = message.outgoing()
            if self._goes_round(own, message):
                for piece in ring_pieces(as_bytes(values)):
                    self._isend(piece, self._next, own)
            else:
                for to in reversed(self._from_nearest()):
                    self._isend(as_bytes(values), to, own)

    def pass_on(self, distance: int) -> None:
        holder = (self._channel.rank - distance) % self._channel.world_size
        for piece, work in self._carried.pop(holder, ()):
            work.wait()
            self._isend(piece, self._next, holder)

    def finish(self) -> None:
        for work in self._work:
            work.wait()
        for message, values in self._arriving:
            message.landed(values)
        self._arriving, self._work = [], []

    def _goes_round(self, holder: int, message: Message) -> bool:
        return self._in_ring[holder] and message.nbytes >= RING_NBYTES

    def _from_nearest(self) -> list[int]:
        """The other ranks, the one before this first; so not everybody starts with rank 0."""
        count = self._channel.world_size
        return [(self._channel.rank - distance) % count for distance in range(1, count)]

    def _irecv(self, values: torch.Tensor, source: int, holder: int) -> Any:
        return dist.irecv(values, group=self._channel.group, group_src=source, tag=self._tag + holder)

    def _isend(self, values: torch.Tensor, to: int, holder: int) -> None:
        self._work.append(dist.isend(values, group=self._channel.group, group_dst=to, tag=self._tag + holder))
