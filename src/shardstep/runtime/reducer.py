"""Gradients on their way to the ranks that hold them: filled by autograd, reduced bucket by bucket, kept as shards.

[Note: a pass] One backward pass reduces every bucket exactly once, in the order of the plan, on every rank, whatever
gradients came on which rank: so ranks never wait for a message that another does not send. Gradients that did not come
count as zero; which ones came anywhere is exchanged once per pass, because a parameter that no rank has used is not
stepped. A gradient that comes after its bucket has gone (only reentrant checkpointing of tied weights does that) is
told in the same exchange, and reduced before the step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from operator import or_
from threading import Lock

import torch

from shardstep.planning.schedule import LaunchOrder
from shardstep.runtime.collectives import (
    Channel,
    DirectRecords,
    Records,
    gather_records,
    take_tags,
    takes_many_messages,
)
from shardstep.runtime.flat_memory import FlatMemory, ShardMemory
from shardstep.runtime.packing import GradientPacking, Parts
from shardstep.runtime.reductions import Reduction, first_other, start_reduction
from shardstep.runtime.turns import Turn, Turns

# How much may be on the wire before backward waits for the oldest bucket: it needs memory for what arrives.
IN_FLIGHT_NBYTES = 80_000_000
IN_PLACE_NBYTES = 256 * 1024  # a message costs less than a copy of this size
SUM_BLOCK = 64 * 1024  # elements: what several ranks sent fits into a core's own cache


class GradientReducer:
    """Made anew with every plan. `params` are in the plan's order."""

    def __init__(
        self,
        channel: Channel,
        memory: FlatMemory,
        params: Sequence[torch.Tensor],
        wire_dtype: torch.dtype | None,
        turns: Turns,
        *,
        reuse_memory: bool,
    ) -> None:
        """`reuse_memory`: nobody looks at a gradient of an earlier step, so the next may lie where it lay."""
        self._channel = channel
        self._params = params
        self._turns = turns
        alone = channel.world_size == 1
        # Where parts are sent one by one, large gradients are not copied together first.
        self._direct = [not alone and takes_many_messages(channel, bucket.device) for bucket in memory.buckets]
        in_place = [IN_PLACE_NBYTES if direct else math.inf for direct in self._direct]
        self._packing = GradientPacking(memory, params, in_place)
        self._members = [{piece.param for piece in bucket.bucket.pieces} for bucket in memory.buckets]
        self._nbytes = [sum(values.nbytes for values in bucket.ranges) for bucket in memory.buckets]
        self.order = LaunchOrder(self._members)
        self._tags = [take_tags(channel) for _ in self._members]
        self._lock = Lock()  # autograd calls from one thread for each device
        self._packed: dict[int, list[Parts]] = {}  # at the end of a pass: what is still to be sent
        self._told = False  # whether the others know which gradients came here
        self._wire_dtype = None if alone else wire_dtype
        self._flying: dict[int, Reduction] = {}
        self._lost: set[int] = set()  # buckets that arrived and could not be taken in
        self._memory = ShardMemory([bucket.ranges[channel.rank] for bucket in memory.buckets], keep=reuse_memory)
        self.shards: list[torch.Tensor | None] = [None] * len(self._members)
        self._records: Records | None = None
        self._tells_first = bool(self._direct) and all(self._direct)
        self._record_tag = take_tags(channel)
        self._late = bytearray(len(params))
        self._unsettled = False
        self.passed = False  # whether a pass was made since the last step

    # -- a pass -------------------------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self.order.running

    def ready(self, param: int) -> None:
        """Autograd has added to the gradient of `param`, and `order.note` says that there is something to do."""
        with self._lock:
            if not self.open:
                self._begin_pass()
            self.order.note(param)
            if self._tells_first and self.order.all_came():
                return  # `end` comes next, and has something to say before it sends the last buckets
            while (bucket := self.order.due()) is not None:
                self._launch(bucket, self._pack(bucket))

    def _begin_pass(self) -> None:
        if self.passed:
            self._turns.announce(Turn.PASS)
        self._begin()

    def _begin(self) -> None:
        for bucket in list(self._flying):
            self._land(bucket)  # of an earlier pass
        self.order.begin()
        self._packed = {}
        self._told = False

    def end(self, *, failed: bool = False) -> None:
        """The pass is over: reduce what is left, and tell the others what came here."""
        self._turns.raise_if_apart()
        if not self.open:
            self._begin_pass()  # nothing came here, but it did elsewhere
        # All of them before anything is sent: if memory runs out here, the pass is still to end, as a failed one. If it
        # runs out later, what was packed and told holds, and this is called again for the rest.
        for bucket in self.order.left():
            if bucket not in self._packed:
                self._packed[bucket] = self._pack(bucket)
        self._packing.end_pass()
        self._late = bytearray(param.grad is not None and param.requires_grad for param in self._params)
        if self._tells_first:
            self._tell(failed=failed)
        for bucket in self.order.left():
            self._launch(bucket, self._packed[bucket])
            del self._packed[bucket]
        if not self._tells_first:
            self._tell(failed=failed)
        self.order.end()
        self._unsettled = self.passed = True

    def _tell(self, *, failed: bool) -> None:
        """All other ranks, which gradients came here.

        Where messages are told apart by tags, before the last buckets are sent: a step begins when all ranks have told,
        and behind megabytes of gradients on the same connections that would be when all of them have arrived. Where
        collectives are told apart by their order alone, after them, as every rank does.
        """
        if self._told:
            return
        if self._records is not None:
            self._records.read()  # of an earlier pass; what it says is contained in the new one
        record = bytes([failed]) + self._packing.used + self._late
        if self._tells_first:
            self._records = DirectRecords(self._channel, record, self._record_tag)
        elif self._channel.world_size > 1:
            self._records = gather_records(self._channel, record)
        self._told = True

    def _pack(self, bucket: int) -> list[Parts]:
        parts = self._packing.pack(bucket)
        if self._wire_dtype is not None:
            parts = [[part.to(self._wire_dtype) for part in row] for row in parts]
        return parts

    def _launch(self, bucket: int, parts: list[Parts]) -> None:
        landing = self._memory.of(bucket) if self._direct[bucket] and self.shards[bucket] is None else None
        places = self._packing.places(bucket, self._channel.rank)
        self._flying[bucket] = start_reduction(self._channel, parts, places, self._tags[bucket], landing)
        self.order.launched()
        while len(self._flying) > 1 and sum(self._nbytes[flying] for flying in self._flying) > IN_FLIGHT_NBYTES:
            self._turns.check()
            self._land(next(iter(self._flying)))

    def _land(self, bucket: int) -> None:
        self._lost.add(bucket)  # if anything raises here, there is no second try
        self._take_mean(bucket, self._flying.pop(bucket))
        self._lost.discard(bucket)

    @torch.no_grad()
    def _take_mean(self, bucket: int, reduction: Reduction) -> None:
        arrivals = reduction.finish()
        totals = [_mean(parts, self._channel.rank) for parts in zip(*arrivals, strict=True)]
        shard, first = self.shards[bucket], self.shards[bucket] is None
        if shard is None:
            # Not the memory in which all ranks' parts have arrived: it would live as long as the shard.
            alone = self._channel.world_size == 1
            shard = self.shards[bucket] = totals[0] if alone and totals else self._memory.of(bucket)
        for place, total in zip(self._packing.places(bucket, self._channel.rank), totals, strict=True):
            values = shard[place]
            if not first:
                values.add_(total.to(shard.dtype))
            elif values.data_ptr() != total.data_ptr():
                values.copy_(total)

    # -- between passes -----------------------------------------------------------------------------------------------

    def land(self, bucket: int) -> torch.Tensor | None:
        """This rank's range of a bucket's gradient, once it is there; None if no pass was made since `drop`."""
        if bucket in self._lost:
            raise RuntimeError("gradients were lost when an earlier call raised: call zero_grad() on all ranks")
        if bucket in self._flying:
            for earlier in [other for other in self._flying if other <= bucket]:
                self._land(earlier)
        return self.shards[bucket]

    def settle(self) -> tuple[bytes, bytes, list[int]]:
        """(came on some rank, came too late on some rank, ranks whose pass failed); the same on every rank."""
        self._unsettled = False
        if self._records is None:
            return bytes(self._packing.used), bytes(self._late), []
        records, self._records = self._records.read(), None
        size = 1 + len(self._params)
        used = _any([record[1:size] for record in records])
        late = _any([record[size:] for record in records])
        self._packing.used = bytearray(used)
        return used, late, [rank for rank, record in enumerate(records) if record[0]]

    def reduce_late(self) -> None:
        """Reduce what came too late; called on every rank if it did on any."""
        self._begin()
        self._late = bytearray(len(self._params))
        for bucket in self.order.left():
            self._launch(bucket, self._pack(bucket))
        self.order.end()
        self._packing.end_pass()

    def take_over(self, used: Sequence[int], *, passed: bool) -> None:
        """What an earlier plan's reducer knew."""
        self._packing.used = bytearray(used)
        self.passed = passed

    def unsettled(self) -> bool:
        """Whether a pass has ended since the last `settle`."""
        return self._unsettled

    def has_gradients(self) -> bool:
        """Whether some gradient was left in `param.grad`: of a parameter that was frozen when the plan was made."""
        return any(param.grad is not None and param.requires_grad for param in self._params)

    def has_gradient_of(self, param: int) -> bool:
        """Whether one was taken into shards; of other ranks' gradients it is known after `settle`."""
        return bool(self._packing.used[param])

    def drop(self) -> None:
        """Forget all gradients."""
        self._turns.check()
        for bucket in list(self._flying):
            self._land(bucket)  # the memory belongs to the transport until then
        if self._records is not None:
            self._records.read()
            self._records = None
        self.drop_shards()
        self._packing.forget()
        self._late = bytearray(len(self._params))

    def drop_shards(self) -> None:
        self._lost.clear()
        self.shards = [None] * len(self._members)
        self._memory.let_go()

    def zero(self) -> None:
        """Make all gradients zero, without forgetting that they were there."""
        self._turns.check()
        for bucket in list(self._flying):
            self._land(bucket)
        for shard in self.shards:
            if shard is not None:
                shard.zero_()


def _mean(arrivals: Sequence[torch.Tensor], own: int) -> torch.Tensor:
    """Summed in rank order, in float32 at least: the result does not depend on who came first.

    In memory that arrived, and block by block, so that the division finds what the sum has just written in the cache.
    """
    if len(arrivals) == 1:
        return arrivals[0]
    wide = [arrival.to(torch.promote_types(arrival.dtype, torch.float32)) for arrival in arrivals]
    # The sum is taken in memory that arrived: this rank's own part is a gradient, and is still being sent.
    first = wide[first_other(own)]
    second, *rest = [part for part in wide if part is not first]  # a + b is b + a, to the bit
    block = SUM_BLOCK if first.device.type == "cpu" else max(first.numel(), 1)
    for start in range(0, first.numel(), block):
        total = first[start : start + block]
        for addend in (second, *rest):
            total.add_(addend[start : start + block])
        total.div_(len(arrivals))
    return first


def _any(flags: Sequence[bytes]) -> bytes:
    """Byte for byte, whether one is set; as whole numbers, because there may be thousands."""
    return reduce(or_, (int.from_bytes(row, "big") for row in flags)).to_bytes(len(flags[0]), "big")
