"""Parameters back to everyone, by collectives: of one bucket, or of messages of whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardstep.wire.lane import Lane, Trip
from shardstep.wire.tensors import as_bytes
from shardstep.wire.transport import Memory, Message

# The name of 2.13, which warns about that which 2.11 has.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EqualRangeGather:
    """One bucket, gathered where it lies; by itself, or with others in one launch."""

    hops = 0

    def __init__(self, lane: Lane, memory: Memory, group: Any) -> None:
        self._lane, self._group = lane, group
        self.whole, self.own = as_bytes(memory.values), as_bytes(memory.own)
        self.trip: Trip | None = None

    def expect(self) -> None:
        """A collective is one call on all ranks."""

    def send(self) -> None:
        with self._lane.trip() as self.trip:
            if self.whole.numel():
                _all_gather(self.whole, self.own, group=self._group)

    def pass_on(self, distance: int) -> None:
        """The backend does."""

    def finish(self) -> None:
        if self.trip is not None:
            self.trip.join()
            self.trip = None


class WholeRangeGather:
    """One bucket of which every rank has a range of its own size."""

    hops = 0

    def __init__(self, lane: Lane, memory: Memory, gather: Callable[[Memory], None]) -> None:
        self._lane, self._memory, self._gather = lane, memory, gather
        self._trip: Trip | None = None

    def expect(self) -> None:
        """A collective is one call on all ranks."""

    def send(self) -> None:
        with self._lane.trip() as self._trip:
            self._gather(self._memory)

    def pass_on(self, distance: int) -> None:
        """The backend does."""

    def finish(self) -> None:
        if self._trip is not None:
            self._trip.join()
            self._trip = None


class MessageGather:
    """Messages of whole parameters: all that lie where they are received in one launch, and the packed ones behind."""

    hops = 0

    def __init__(
        self,
        lane: Lane,
        messages: Sequence[Sequence[Message]],
        rank: int,
        broadcast_each: Callable[[Sequence[tuple[int, torch.Tensor]]], None],
    ) -> None:
        self._lane, self._rank, self._broadcast_each = lane, rank, broadcast_each
        self._messages = [(source, message) for source, row in enumerate(messages) for message in row if message.nbytes]
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        self._trip: Trip | None = None

    def expect(self) -> None:
        """A collective is one call on all ranks."""

    def send(self) -> None:
        values: list[tuple[int, torch.Tensor]] = []
        for source, message in self._messages:
            own = source == self._rank
            values.append((source, message.outgoing() if own else message.landing()))
            if not own:
                self._arriving.append((message, values[-1][1]))
        with self._lane.trip(*(tensor for _, tensor in values)) as self._trip:
            self._broadcast_each(values)

    def pass_on(self, distance: int) -> None:
        """The backend does."""

    def finish(self) -> None:
        if self._trip is not None:
            self._trip.join()
            self._trip = None
        for message, values in self._arriving:
            message.landed(values)
        self._arriving = []
