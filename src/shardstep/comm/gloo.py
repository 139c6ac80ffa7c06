"""Gloo on the CPU: messages from rank to rank, told apart by tags, summed where they arrive.

Gloo's own reduce_scatter is an all-reduce inside, and its broadcasts take 1.5 to 2.4 times as long as messages for the
same bytes. A message costs less than a copy of a quarter of a megabyte, so large gradients go from their own memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist

from shardstep.comm.channel import Channel, take_tags, this_host
from shardstep.comm.control import open_poll
from shardstep.comm.encoding import make_scratch
from shardstep.comm.gloo_gathers import DirectGather, RingReduction
from shardstep.comm.in_flight import MessagesInFlight
from shardstep.comm.range_messages import range_message
from shardstep.comm.tensors import IN_PLACE_NBYTES, as_bytes, broadcast_tensors
from shardstep.comm.transport import (
    BucketSizes,
    Check,
    Gather,
    Memory,
    Message,
    Parts,
    Reduction,
    finish_gathers,
    in_order,
    send_each,
)
from shardstep.planning import Bucket

BUCKET_MB = 25.0
BUCKET_MB_BETWEEN_HOSTS = 8.0  # links are slow there, and the first bytes should go early
PART_NBYTES = 256 * 1024
# How much may be on the wire before backward waits for the oldest bucket: it needs memory for what arrives.
IN_FLIGHT_NBYTES = 105_000_000
# Of a pass: so many bytes of other ranks find receives that are posted when it begins. Their memory is taken while
# backward runs, so it is little: of what is larger, the bytes take longer than the crossing that is saved.
EARLY_NBYTES = 256_000
SUM_BLOCK = 64 * 1024  # elements: what several ranks sent fits into a core's own cache


class GlooMessages:
    """The transport of Gloo. Messages are told apart by tags: ranks may be at different places of a pass."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._check: Check = _nothing_to_check
        poll = open_poll(channel)
        poll.ask(this_host())
        self._one_host = poll.answer().equal

    @property
    def part_nbytes(self) -> float:
        return PART_NBYTES

    @property
    def in_flight_nbytes(self) -> float:
        return IN_FLIGHT_NBYTES

    def before_waiting(self, check: Check) -> None:
        self._check = check

    def _before_wait(self) -> None:
        self._check()

    def packs_by_rank(self, bucket: Bucket) -> bool:
        del bucket
        return True

    def waiting_nbytes(self, largest: int) -> float:
        return IN_FLIGHT_NBYTES + largest

    def post_receives(self, gathers: Sequence[Gather]) -> None:
        for gather in gathers:
            assert isinstance(gather, DirectGather), "made here"
            gather.post_receives()

    def send(self, gathers: Sequence[Gather]) -> None:
        send_each(gathers)

    def finish(self, gathers: Sequence[Gather]) -> None:
        finish_gathers(gathers)

    def reductions(self, memory: Sequence[Memory], shard_of: Callable[[int], torch.Tensor]) -> Sequence[Reduction]:
        ends = accumulate(bucket.own.nbytes * (self._channel.world_size - 1) for bucket in memory)
        return [
            DirectReduction(self._channel, number, shard_of, self._before_wait, is_early=end <= EARLY_NBYTES)
            for number, end in enumerate(ends)
        ]

    def add_up(self, values: torch.Tensor, *, highest: bool = False) -> torch.Tensor:
        self._check()
        poll = open_poll(self._channel)
        poll.ask(values.cpu().numpy().tobytes())
        rows = [torch.frombuffer(bytearray(row), dtype=values.dtype) for row in poll.answer().rows()]
        together = torch.stack(rows)
        return (together.amax(0) if highest else together.sum(0)).view(values.shape).to(values.device)

    def bucket_sizes(self, total: int) -> BucketSizes:
        del total
        return BucketSizes((BUCKET_MB if self._one_host else BUCKET_MB_BETWEEN_HOSTS) * 1e6)

    def in_place_nbytes(self, device: torch.device) -> float:
        del device
        return IN_PLACE_NBYTES

    def step_order(self, buckets: int) -> list[list[int]]:
        return in_order(buckets)

    def range_gathers(self, memory: Sequence[Memory], *, ring: bool) -> Sequence[Gather]:
        ranks = range(self._channel.world_size)
        scratch = make_scratch(memory)
        rows = [[[range_message(bucket, rank, scratch)] for rank in ranks] for bucket in memory]
        return self._gathers(rows, ring=ring)

    def message_gathers(self, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]]) -> Sequence[Gather]:
        return self._gathers([rows for _, rows in buckets], ring=True)

    def _gathers(self, buckets: Sequence[Sequence[Sequence[Message]]], *, ring: bool) -> list[Gather]:
        load = [
            0
        ] * self._channel.world_size  # of a whole step: what a rank sends in one bucket it may spare in the next
        for rows in buckets:
            for rank, row in enumerate(rows):
                load[rank] += sum(message.nbytes for message in row)
        overloaded = [share * (len(load) - 1) > sum(load) for share in load]
        ring = ring and self._channel.world_size > 2  # of two ranks the next one is the only one
        in_ring = [ring and (heavy or not self._one_host) for heavy in overloaded]
        return [DirectGather(self._channel, rows, in_ring, self._before_wait) for rows in buckets]

    def holder_reduction(self, device: torch.device) -> RingReduction:
        del device
        return RingReduction(self._channel)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        self._check()
        broadcast_tensors(self._channel, tensors, source=0)


def _nothing_to_check() -> None:
    """Nobody has said that ranks could go apart."""


class DirectReduction:
    """Every rank sends to every other: half the bytes of Gloo's own reduce_scatter."""

    def __init__(
        self,
        channel: Channel,
        bucket: int,
        shard_of: Callable[[int], torch.Tensor],
        check: Check,
        *,
        is_early: bool,
    ) -> None:
        """`is_early`: its receives may be posted before a pass."""
        self._channel, self._bucket, self._shard_of = channel, bucket, shard_of
        self._check, self._is_early = check, is_early
        count = channel.world_size
        self._around = [((channel.rank - shift) % count, (channel.rank + shift) % count) for shift in range(1, count)]
        self.tag = take_tags(channel)
        self._in_flight = MessagesInFlight()
        self._posted: dict[int, Parts] = {}  # by source: receives are posted, and nothing is sent yet
        self._arrivals: list[Parts] = []
        self._places: Sequence[slice] = ()
        self._into: tuple[torch.Tensor, bool] | None = None  # where the mean goes, and whether it is added

    def expect(self, places: Sequence[slice], dtype: torch.dtype) -> None:
        if self._is_early and places and not self._posted and self._into is None:
            self._post(dtype, places, None)

    def _post(self, dtype: torch.dtype, places: Sequence[slice], memory: torch.Tensor | None) -> None:
        """Post all receives; of the first other rank into `memory`, if there is one. All memory is taken first."""
        first = _first_other(self._channel.rank)
        posted: dict[int, Parts] = {}
        for source, _ in self._around:
            posted[source] = _landing(dtype, places, memory if source == first else None)
        self._in_flight.hold(posted)
        self._posted = posted
        for source, _ in self._around:
            for row in posted[source]:
                self._in_flight.work.append(
                    dist.irecv(as_bytes(row), group=self._channel.group, group_src=source, tag=self.tag)
                )

    def start(self, parts: Sequence[Parts], places: Sequence[slice], earlier: torch.Tensor | None) -> torch.Tensor:
        shard = earlier
        if shard is None:
            shard = self._shard_of(self._bucket)
            _zero_between(shard, places)
        own, group = self._channel.rank, self._channel.group
        if places and not self._posted:  # before the first message is sent: memory may run out
            self._post(parts[own][0].dtype, places, shard if earlier is None else None)
        posted, self._posted = self._posted, {}
        self._in_flight.hold(parts, shard)
        for _, to in self._around:
            for part in parts[to]:
                self._in_flight.work.append(dist.isend(as_bytes(part), group=group, group_dst=to, tag=self.tag))
        self._arrivals = [posted.get(rank, row) for rank, row in enumerate(parts)] if places else []
        self._places = places
        self._into = (shard, earlier is not None)
        return shard

    @torch.no_grad()
    def land(self) -> None:
        if self._into is None:
            return
        self._check()
        self._in_flight.wait()
        (shard, adds), arrivals = self._into, self._arrivals
        self._arrivals, self._into = [], None  # if a sum fails, there is no second try
        for place, parts in zip(self._places, zip(*arrivals, strict=True), strict=True):
            total, values = _mean(parts, self._channel.rank), shard[place]
            if adds:
                values.add_(total.to(shard.dtype))
            elif values.data_ptr() != total.data_ptr():
                values.copy_(total)


def _zero_between(shard: torch.Tensor, places: Sequence[slice]) -> None:
    """What lies between parts is no one's, and is not sent; but norms are taken of it, and it may be scaled by nan."""
    ends = [0, *(place.stop for place in places)]
    starts = [*(place.start for place in places), len(shard)]
    for end, start in zip(ends, starts, strict=True):
        if end < start:
            shard[end:start].zero_()


def _first_other(own: int) -> int:
    """The first rank that is not this one."""
    return 0 if own else 1


def _landing(dtype: torch.dtype, places: Sequence[slice], memory: torch.Tensor | None) -> list[torch.Tensor]:
    """Memory for one rank's parts: in `memory` if they fit there as they are."""
    if memory is None or memory.dtype != dtype:
        memory = torch.empty(places[-1].stop, dtype=dtype, device="cpu")
    return [memory[place] for place in places]


def _mean(arrivals: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """Summed in rank order, in float32 at least: the result does not depend on who came first.

    In memory that arrived, and block by block, so that the division finds what the sum has just written in the cache.
    """
    wide = [arrival.to(torch.promote_types(arrival.dtype, torch.float32)) for arrival in arrivals]
    # The sum is taken in memory that arrived: this rank's own part is a gradient, and is still being sent.
    first = wide[_first_other(own)]
    second, *rest = [part for part in wide if part is not first]  # a + b is b + a, to the bit
    for start in range(0, first.numel(), SUM_BLOCK):
        total = first[start : start + SUM_BLOCK]
        for addend in (second, *rest):
            total.add_(addend[start : start + SUM_BLOCK])
        total.div_(len(arrivals))
    return first
