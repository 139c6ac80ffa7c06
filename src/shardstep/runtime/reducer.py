"""Gradients on their way to the ranks that hold them: filled by autograd, reduced bucket by bucket, kept as shards.

[Note: a pass] One backward pass reduces every bucket exactly once, in the order of the plan, on every rank, whatever
gradients came on which rank: so ranks never wait for a message that another does not send. Gradients that did not come
count as zero; which ones came anywhere is exchanged once per pass, because a parameter that no rank has used is not
stepped. A gradient that comes after its bucket has gone (only reentrant checkpointing of tied weights does that) is
told in the same exchange, and reduced before the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from shardstep.planning import Piece
from shardstep.planning.schedule import LaunchOrder
from shardstep.runtime.collectives import Channel, PendingRecords, gather_records, take_tags
from shardstep.runtime.flat_memory import BucketMemory, FlatMemory, flat_gradient
from shardstep.runtime.reductions import Reduction, start_reduction

# How many buckets may be on the wire before backward waits for the oldest: each needs memory for what arrives.
IN_FLIGHT = 3
SUM_BLOCK = 64 * 1024  # elements: what several ranks sent fits into a core's own cache


class GradientReducer:
    """Made anew with every plan. `params` are in the plan's order."""

    def __init__(
        self,
        channel: Channel,
        memory: FlatMemory,
        params: Sequence[torch.Tensor],
        wire_dtype: torch.dtype | None,
    ) -> None:
        self._channel = channel
        self._params = params
        self._buckets = [bucket.bucket for bucket in memory.buckets]
        self._by_rank = [bucket.pieces for bucket in memory.buckets]
        self._offsets = [bucket.offsets for bucket in memory.buckets]
        self._nothing = [bucket.ranges[0].new_zeros(_widest_gap(bucket)) for bucket in memory.buckets]
        self._members = [{piece.param for piece in bucket.pieces} for bucket in self._buckets]
        self._order = LaunchOrder(self._members)
        self._tags = [take_tags(channel) for _ in self._buckets]
        self._wire_dtype = wire_dtype
        self._buckets_left: Counter[int] = Counter()  # of each parameter in this pass: those still to be launched
        self._taken: dict[int, torch.Tensor] = {}  # gradients that have left `param.grad`, until all is launched
        self._flying: dict[int, Reduction] = {}
        self.shards: list[torch.Tensor | None] = [None] * len(self._buckets)
        self._used = [False] * len(params)
        self._records: PendingRecords | None = None
        self._late: list[bool] = [False] * len(params)
        self.open = False  # whether a pass has begun and not ended
        self._unsettled = False
        self.passed = False  # whether a pass was made since the last step

    # -- a pass -------------------------------------------------------------------------------------------------------

    def ready(self, param: int) -> None:
        """Autograd has added to the gradient of `param`."""
        if not self.open:
            self._begin()
        self._used[param] = True
        for bucket in self._order.ready(param):
            self._launch(bucket)

    def _begin(self) -> None:
        for bucket in list(self._flying):
            self._land(bucket)  # of an earlier pass
        self.open = True
        self._order.begin()
        self._buckets_left = Counter(param for members in self._members for param in members)

    def end(self, *, failed: bool = False) -> None:
        """The pass is over: reduce what is left, and tell the others what came here."""
        if not self.open:
            self._begin()  # nothing came here, but it did elsewhere
        for bucket in self._order.flush():
            self._launch(bucket)
        self.open = False
        self._unsettled = self.passed = True
        self._taken.clear()
        if self._records is not None:
            self._records.read()  # of an earlier pass; what it says is contained in the new one
        self._late = [param.grad is not None and param.requires_grad for param in self._params]
        if self._channel.world_size > 1:
            record = bytes([failed, *self._used, *self._late])
            self._records = gather_records(self._channel, record)

    def _launch(self, bucket: int) -> None:
        chunks = [self._chunk(bucket, rank) for rank in range(self._channel.world_size)]
        for param in self._members[bucket]:
            self._buckets_left[param] -= 1
            if self._buckets_left[param] == 0:
                self._taken.pop(param, None)
        self._flying[bucket] = start_reduction(self._channel, chunks, self._tags[bucket])
        while len(self._flying) > IN_FLIGHT:
            self._land(next(iter(self._flying)))

    def _chunk(self, bucket: int, rank: int) -> torch.Tensor:
        """What this rank computed for a rank's range. One large piece is sent from the gradient's own memory."""
        parts: list[torch.Tensor] = []
        end = 0
        for piece, offset in zip(self._by_rank[bucket][rank], self._offsets[bucket][rank], strict=True):
            if offset > end:  # gradients lie as the parameters do, so that both can be stepped in one go
                parts.append(self._nothing[bucket][: offset - end])
            parts.append(self._part(piece))
            end = offset + piece.numel
        parts = parts or [self._nothing[bucket][:0]]
        chunk = parts[0] if len(parts) == 1 else torch.cat(parts)
        return chunk if self._wire_dtype is None else chunk.to(self._wire_dtype)

    def _part(self, piece: Piece) -> torch.Tensor:
        param = self._params[piece.param]
        flat = self._taken.get(piece.param)
        if flat is None and param.grad is not None and self._buckets_left[piece.param] > 0:
            flat = self._taken[piece.param] = flat_gradient(param, param.grad)
            param.grad = None
            self._used[piece.param] = True  # also where it came in an earlier pass that was not reduced
        if flat is None:
            return torch.zeros(piece.numel, dtype=param.dtype, device=param.device)
        return flat[piece.start : piece.stop]

    def _land(self, bucket: int) -> None:
        arrivals = self._flying.pop(bucket).finish()
        sample = self._params[self._buckets[bucket].pieces[0].param]
        total = _mean(arrivals, self._channel.rank).to(sample.dtype)
        before = self.shards[bucket]
        self.shards[bucket] = total if before is None else before.add_(total)

    # -- between passes -----------------------------------------------------------------------------------------------

    def land(self, bucket: int) -> torch.Tensor | None:
        """This rank's range of a bucket's gradient, once it is there; None if no pass was made since `drop`."""
        if bucket in self._flying:
            for earlier in [other for other in self._flying if other <= bucket]:
                self._land(earlier)
        return self.shards[bucket]

    def settle(self) -> tuple[list[bool], list[bool], list[int]]:
        """(came on some rank, came too late on some rank, ranks whose pass failed); the same on every rank."""
        self._unsettled = False
        if self._records is None:
            return list(self._used), list(self._late), []
        records, self._records = self._records.read(), None
        size = 1 + len(self._params)
        used = _any([record[1:size] for record in records])
        late = _any([record[size:] for record in records])
        self._used = used
        return used, late, [rank for rank, record in enumerate(records) if record[0]]

    def reduce_late(self) -> None:
        """Reduce what came too late; called on every rank if it did on any."""
        self._begin()
        self._late = [False] * len(self._params)
        for bucket in self._order.flush():
            self._launch(bucket)
        self.open = False
        self._taken.clear()

    def take_over(self, used: Sequence[bool]) -> None:
        """What an earlier plan's reducer knew."""
        self._used = list(used)
        self.passed = True

    def unsettled(self) -> bool:
        """Whether a pass has ended since the last `settle`."""
        return self._unsettled

    def has_gradients(self) -> bool:
        """Whether some gradient was left in `param.grad`: of a parameter that was frozen when the plan was made."""
        return any(param.grad is not None and param.requires_grad for param in self._params)

    def holds_anything(self) -> bool:
        return bool(self._flying) or any(shard is not None for shard in self.shards)

    def drop(self) -> None:
        """Forget all gradients."""
        for bucket in list(self._flying):
            self._land(bucket)  # the memory belongs to the transport until then
        if self._records is not None:
            self._records.read()
            self._records = None
        self.shards = [None] * len(self._buckets)
        self._used = [False] * len(self._params)
        self._late = [False] * len(self._params)

    def zero(self) -> None:
        """Make all gradients zero, without forgetting that they were there."""
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
    first, second, *rest = wide if own != 0 else [wide[1], wide[0], *wide[2:]]  # a + b is b + a, to the bit
    block = SUM_BLOCK if first.device.type == "cpu" else max(first.numel(), 1)
    for start in range(0, first.numel(), block):
        total = first[start : start + block]
        for addend in (second, *rest):
            total.add_(addend[start : start + block])
        total.div_(len(arrivals))
    return first


def _widest_gap(memory: BucketMemory) -> int:
    """Between the end of a piece and the beginning of the next, in elements."""
    return max(
        (
            offsets[place + 1] - offset - pieces[place].numel
            for pieces, offsets in zip(memory.pieces, memory.offsets, strict=True)
            for place, offset in enumerate(offsets[:-1])
        ),
        default=0,
    )


def _any(rows: Sequence[bytes]) -> list[bool]:
    return [any(column) for column in zip(*rows, strict=True)]
