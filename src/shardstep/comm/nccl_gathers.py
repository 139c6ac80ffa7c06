"""Parameters back to everyone, by collectives: of one bucket, or of messages of whole parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.channel import Channel
from shardstep.comm.comm_stream import CommStream, Pending
from shardstep.comm.encoding import Scratch, encoding_of
from shardstep.comm.range_messages import range_message
from shardstep.comm.tensors import as_bytes
from shardstep.comm.transport import Memory, Message

# The name of 2.13, which warns about that which 2.11 has.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class EqualRangeGather:
    """One bucket, gathered where it lies; by itself, or with others in one launch."""

    hops = 0

    def __init__(self, lane: CommStream, memory: Memory, rank: int, group: Any, scratch: Scratch) -> None:
        """`scratch` was made for buckets with this one among them."""
        self._lane, self._memory, self._group = lane, memory, group
        self._encoding = encoding_of(memory.bucket)
        travels = memory.values if self._encoding is None else self._encoding.front(memory.values)
        low, high = memory.bucket.ranges.bounds(rank)
        self.whole, self._own = as_bytes(travels), travels[low:high]
        self._scratch = scratch.get(memory.values.device)
        self.trip: Pending | None = None

    def expect(self) -> None:
        """A collective is one call on all ranks."""

    def outgoing(self) -> torch.Tensor:
        """What this rank sends, where it is to be in `whole`. Called inside the trip: all of them share the scratch."""
        if self._encoding is not None:
            assert self._scratch is not None, "made for all that is encoded"
            if self._own.data_ptr() == self._memory.own.data_ptr():  # the first rank's is written over itself
                self._encoding.encode_front(self._memory.own, self._scratch)
            else:
                self._own.copy_(self._memory.own)
        return as_bytes(self._own)

    def send(self) -> None:
        with self._lane.trip(self.whole) as self.trip:
            if self.whole.numel():
                _all_gather(self.whole, self.outgoing(), group=self._group)
                self.decode()

    def decode(self) -> None:
        """It has arrived, this rank's own range with the others."""
        if self._encoding is not None:
            assert self._scratch is not None, "made for all that is encoded"
            self._encoding.decode_front(self._memory.values, self._scratch)

    def pass_on(self, distance: int) -> None:
        """The backend does."""

    def finish(self) -> None:
        if self.trip is not None:
            self.trip.join()
            self.trip = None


BroadcastEach = Callable[[Sequence[tuple[int, torch.Tensor]]], None]


class WholeRangeGather:
    """One bucket of which every rank has a range of its own size."""

    hops = 0

    def __init__(
        self, lane: CommStream, memory: Memory, channel: Channel, broadcast_each: BroadcastEach, scratch: Scratch
    ) -> None:
        self._lane, self._rank, self._broadcast_each = lane, channel.rank, broadcast_each
        messages = [range_message(memory, rank, scratch) for rank in range(channel.world_size)]
        self._messages = [(rank, message) for rank, message in enumerate(messages) if message.nbytes]
        self._trip: Pending | None = None

    def expect(self) -> None:
        """A collective is one call on all ranks."""

    def send(self) -> None:
        with self._lane.trip(*(message.landing() for _, message in self._messages)) as self._trip:
            # Encoded inside, where others are decoded: they share the scratch.
            values = [
                (rank, message.outgoing() if rank == self._rank else message.landing())
                for rank, message in self._messages
            ]
            self._broadcast_each(values)
            for (rank, message), (_, tensor) in zip(self._messages, values, strict=True):
                if rank == self._rank:
                    message.sent()
                else:
                    message.landed(tensor)

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
        lane: CommStream,
        messages: Sequence[Sequence[Message]],
        rank: int,
        broadcast_each: BroadcastEach,
    ) -> None:
        self._lane, self._rank, self._broadcast_each = lane, rank, broadcast_each
        self._messages = [(source, message) for source, row in enumerate(messages) for message in row if message.nbytes]
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        self._trip: Pending | None = None

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
