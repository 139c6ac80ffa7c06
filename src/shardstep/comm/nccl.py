"""NCCL and every other backend of collectives: one reduce-scatter and one all-gather for a bucket, at any number of
ranks.

Everything is enqueued on a stream of its own (lane.py); no host ever waits for a device here. Collectives are told
apart by their order alone, so two optimizers of one group must not share a communicator: in one backward pass ranks may
fill their buckets in different orders, and the gradients of one would land in the other (choose.py).

[Note: buckets] A call costs the host 45 to 60 microseconds, and links are used best by tens of megabytes. So a bucket
has 64 MB; of a small model less, so that there are about five, and of a large one more, so that there are not many more
than fifty: the two buckets that may be in memory beside the model are then a twenty-fifth of it. Where the next forward
waits for one bucket after the other there are twice as many of a small model, each sent by itself: what computes next
waits for less. More do not pay: reduce-scatter and all-gather of a GPT of 124 M in bf16 take 73 ms in 8 buckets, 80 in
16 and 95 in 32, and a step of it 88 ms in 9 buckets and 91 in 18.

[Note: uneven ranges] Whole matrices cannot be cut into equal ranges, and padded to equal ones a GPT over 8 ranks would
send four times its bytes. Where each rank has as many of every size (planning/balance.py), ranges are equal all the
same. Other buckets go by one broadcast, or one reduction, from or to each rank that holds something, all in one launch
of the backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from shardstep.comm.channel import Channel
from shardstep.comm.comm_stream import CommStream, Pending
from shardstep.comm.encoding import make_scratch
from shardstep.comm.nccl_gathers import EqualRangeGather, MessageGather, WholeRangeGather
from shardstep.comm.tensors import IN_PLACE_NBYTES, as_bytes, broadcast_tensors
from shardstep.comm.transport import (
    FEW,
    FEW_AWAITED,
    BucketSizes,
    Check,
    Gather,
    HolderReduction,
    Memory,
    Message,
    Parts,
    Reduction,
    few_large_buckets,
    send_each,
)
from shardstep.planning import Bucket

FEW_BUCKETS = 6  # so many are stepped one by one
STEPPED_TOGETHER = (1 / 8, 9 / 16, 1)  # more, in groups that end here: the first is soon on its way
_COALESCING = {"nccl", "gloo"}  # backends that take several gathers in one call
SLOTS = 1  # buckets being reduced while the next one fills

# The name of 2.13, which warns about that which 2.11 has.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The transport of NCCL. `group` is a communicator that no other optimizer uses."""

    part_nbytes = math.inf

    def __init__(
        self,
        channel: Channel,
        group: Any,
        device: torch.device,
        others: Callable[[], bool],
        *,
        ordered_sums: bool,
        awaited_singly: bool,
    ) -> None:
        """`others`: whether another optimizer of this group is alive. `awaited_singly`: a forward waits for buckets."""
        self._channel, self._group, self._others, self._ordered = channel, group, others, ordered_sums
        self._awaited_singly = awaited_singly
        self._lane = CommStream(device)
        self._largest = 0
        self._trips: list[Pending] = []

    @property
    def in_flight_nbytes(self) -> float:
        """One bucket, while the next one fills: then the computing stream waits for it.

        The link is idle only while a bucket is packed, and memory for a third one is saved.

        Not where another optimizer may be in the same backward pass. There ranks may send their buckets in different
        orders: this one would wait for a bucket of the first, the next one for a bucket of the second, each before it
        computes what the other waits for. Then only what has been sent already makes room.
        """
        return math.inf if self._others() else SLOTS * self._largest

    def before_waiting(self, check: Check) -> None:
        """Nothing here makes a host wait: all that could was checked before it was enqueued."""

    def packs_by_rank(self, bucket: Bucket) -> bool:
        del bucket
        return False

    def waiting_nbytes(self, largest: int) -> float:
        return (SLOTS + 1) * largest

    def reductions(self, memory: Sequence[Memory], shard_of: Callable[[int], torch.Tensor]) -> Sequence[Reduction]:
        self._largest = max((bucket.values.nbytes for bucket in memory), default=0)
        reduce = self._ordered_mean if self._ordered else self._mean
        return [
            CollectiveReduction(
                self._lane,
                self._trips,
                bucket,
                number,
                shard_of,
                reduce,
                widens=self._ordered,
            )
            for number, bucket in enumerate(memory)
        ]

    def _mean(self, mean: torch.Tensor, packed: torch.Tensor, bucket: Bucket) -> None:
        """Into `mean` the mean of this rank's range; the sum is the backend's own."""
        mean, packed = _real(mean), _real(packed)
        if bucket.ranges.are_even:
            _reduce_scatter(mean, packed, op=dist.ReduceOp.AVG, group=self._group)
            return
        scale = len(packed) // max(bucket.numel, 1)
        bounds = [bucket.ranges.bounds(rank) for rank in range(self._channel.world_size)]
        parts = [packed[low * scale : high * scale] for low, high in bounds]
        with self._one_launch(packed.device):
            for rank, part in enumerate(parts):
                if part.numel():
                    dist.reduce(part, group=self._group, group_dst=rank, op=dist.ReduceOp.AVG)
        mean.copy_(parts[self._channel.rank])

    def _ordered_mean(self, mean: torch.Tensor, packed: torch.Tensor, bucket: Bucket) -> None:
        """The same, summed in rank order and in float32 at least: the bits depend on the ranks' gradients alone."""
        count, own = self._channel.world_size, len(mean)
        bounds = [bucket.ranges.bounds(rank) for rank in range(count)]
        landing = packed.new_empty(count * own)
        # Before anything is sent: if memory runs out, the bucket is still to be sent.
        total = packed.new_zeros(own, dtype=torch.promote_types(packed.dtype, torch.float32))
        dist.all_to_all_single(
            as_bytes(landing),
            as_bytes(packed),
            [own * packed.element_size()] * count,
            [(high - low) * packed.element_size() for low, high in bounds],
            group=self._group,
        )
        for rank in range(count):
            total += landing[rank * own : (rank + 1) * own]
        mean.copy_(total.div_(count))

    def _one_launch(self, device: torch.device) -> Any:
        """Calls inside go to the backend together."""
        together = getattr(dist.distributed_c10d, "_coalescing_manager", None)
        if together is None or self._channel.backends.get(device.type) != "nccl":  # Gloo knows no coalesced reductions
            return nullcontext()
        return together(self._group, device)

    def add_up(self, values: torch.Tensor, *, highest: bool = False) -> torch.Tensor:
        total = values.clone()
        with self._lane.trip(total) as trip:
            dist.all_reduce(total, op=dist.ReduceOp.MAX if highest else dist.ReduceOp.SUM, group=self._group)
        trip.join()
        return total

    def bucket_sizes(self, total: int) -> BucketSizes:
        return few_large_buckets(total, FEW_AWAITED if self._awaited_singly else FEW)

    def in_place_nbytes(self, device: torch.device) -> float:
        del device
        return IN_PLACE_NBYTES

    def step_order(self, buckets: int) -> list[list[int]]:
        """From the last to the first, which the next forward needs first; of many a few at a time, for few launches."""
        order = list(range(buckets))[::-1]
        if buckets <= FEW_BUCKETS:
            return [[bucket] for bucket in order]
        cuts = [0, *(round(part * buckets) for part in STEPPED_TOGETHER)]
        return [order[start:stop] for start, stop in pairwise(cuts)]

    def range_gathers(self, memory: Sequence[Memory], *, ring: bool) -> Sequence[Gather]:
        del ring
        scratch = make_scratch(memory)
        return [
            EqualRangeGather(self._lane, bucket, self._channel.rank, self._group, scratch)
            if bucket.bucket.ranges.are_even
            else WholeRangeGather(self._lane, bucket, self._channel, self._broadcast_each, scratch)
            for bucket in memory
        ]

    def post_receives(self, gathers: Sequence[Gather]) -> None:
        """Collectives have none."""

    def send(self, gathers: Sequence[Gather]) -> None:
        """In one launch, which costs the host a fraction of as many, if nobody waits for one of them alone."""
        ranges = [gather for gather in gathers if isinstance(gather, EqualRangeGather) and gather.whole.numel()]
        alone = self._awaited_singly or len(ranges) < 2 or len(ranges) != len(gathers)
        if alone or not self._coalesces(ranges[0].whole.device):
            send_each(gathers)
            return
        with self._lane.trip(*(gather.whole for gather in ranges)) as trip:
            self._gather_together([gather.whole for gather in ranges], [gather.outgoing() for gather in ranges])
            for gather in ranges:
                gather.decode()
        for gather in ranges:
            gather.trip = trip

    def finish(self, gathers: Sequence[Gather]) -> None:
        """Those that were sent together share a trip, and it takes one join."""
        ranges = [gather for gather in gathers if isinstance(gather, EqualRangeGather)]
        for trip in dict.fromkeys(gather.trip for gather in ranges if gather.trip is not None):  # in order, each once
            trip.join()
        for gather in ranges:
            gather.trip = None
        for other in gathers:
            other.finish()

    def _coalesces(self, device: torch.device) -> bool:
        return self._channel.backends.get(device.type, "").lower() in _COALESCING

    def _gather_together(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
        """torch's own way to coalesce comes down to this call, by a wrapper round every tensor."""
        group: Any = self._group
        together = getattr(group, "all_gather_single_coalesced", None) or group.allgather_into_tensor_coalesced
        options: Any = AllgatherOptions()
        options.asyncOp = False  # on the stream that is current
        work = together(outputs, inputs, options)
        if work is not None:
            work.wait()

    def _broadcast_each(self, values: Sequence[tuple[int, torch.Tensor]]) -> None:
        """From each rank what it holds, in one launch."""
        if values:
            with self._one_launch(values[0][1].device):
                for source, tensor in values:
                    dist.broadcast(as_bytes(tensor), group=self._group, group_src=source)

    def message_gathers(self, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]]) -> Sequence[Gather]:
        return [MessageGather(self._lane, rows, self._channel.rank, self._broadcast_each) for _, rows in buckets]

    def holder_reduction(self, device: torch.device) -> HolderReduction:
        in_order = self._channel.backends.get(device.type) == "nccl"
        return OrderedReduction(self._group) if in_order else UnorderedReduction(self._group)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        broadcast_tensors(self._channel, tensors, source=0)


def _real(values: torch.Tensor) -> torch.Tensor:
    """Complex numbers as pairs: a sum of pairs is a pair of sums, and backends know no complex numbers."""
    return torch.view_as_real(values).view(-1) if values.is_complex() else values


Reduce = Callable[[torch.Tensor, torch.Tensor, Bucket], None]


class CollectiveReduction:
    """One bucket: packed by the computing stream, reduced beside it."""

    def __init__(
        self,
        lane: CommStream,
        trips: list[Pending],
        memory: Memory,
        number: int,
        shard_of: Callable[[int], torch.Tensor],
        reduce: Reduce,
        *,
        widens: bool,
    ) -> None:
        """`widens`: `reduce` gives the mean in the shard's dtype, whatever was sent."""
        self._lane, self._trips, self._memory, self._number = lane, trips, memory, number
        self._shard_of, self._reduce, self._widens = shard_of, reduce, widens
        self._trip: Pending | None = None

    def expect(self, places: Sequence[slice], dtype: torch.dtype) -> None:
        """Collectives have no receives."""

    @torch.no_grad()
    def start(self, parts: Sequence[Parts], places: Sequence[slice], earlier: torch.Tensor | None) -> torch.Tensor:
        del places  # the whole bucket is one part
        shard = self._shard_of(self._number) if earlier is None else earlier
        if not parts[0]:
            return shard
        packed = parts[0][0]
        dtype = shard.dtype if self._widens else packed.dtype
        straight = earlier is None and dtype is shard.dtype
        mean = shard if straight else packed.new_empty(len(shard), dtype=dtype)
        with self._lane.trip(packed, mean) as self._trip:
            self._reduce(mean, packed, self._memory.bucket)
            if earlier is not None:
                shard.add_(mean)
            elif not straight:
                shard.copy_(mean)
        self._trips[:] = [trip for trip in self._trips if not trip.sweep()]
        self._trips.append(self._trip)
        return shard

    def land(self) -> None:
        if self._trip is not None:
            self._trip.join()
            self._trip = None


class OrderedReduction:
    """DDP's buckets with a backend that runs reductions in the order in which they are issued: the last ends last."""

    hops = None

    def __init__(self, group: Any) -> None:
        self._group = group

    def begin(self, bucket: int, parts: Sequence[torch.Tensor], last: bool) -> torch.futures.Future[Any]:
        del bucket, last
        futures = _reduce_to_holders(parts, self._group)
        return futures[-1] if futures else torch.futures.collect_all([])


class UnorderedReduction:
    """The same with any other backend: Gloo runs several reductions at a time, and the last may end first."""

    hops = None

    def __init__(self, group: Any) -> None:
        self._group = group

    def begin(self, bucket: int, parts: Sequence[torch.Tensor], last: bool) -> torch.futures.Future[Any]:
        del bucket, last
        return torch.futures.collect_all(_reduce_to_holders(parts, self._group))


def _reduce_to_holders(parts: Sequence[torch.Tensor], group: Any) -> list[torch.futures.Future[Any]]:
    return [
        dist.reduce(part, group=group, group_dst=rank, async_op=True).get_future()
        for rank, part in enumerate(parts)
        if part.numel()
    ]
