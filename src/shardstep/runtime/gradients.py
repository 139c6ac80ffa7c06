"""The mean of all ranks' gradients: each rank's own part of it, or all of it in `param.grad` as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardstep.planning import Piece
from shardstep.planning.runs import Run
from shardstep.runtime.collectives import Channel
from shardstep.runtime.flat_memory import FlatMemory, RangeMessage, flat_gradient
from shardstep.runtime.gathers import finish_gathers, make_gathers
from shardstep.runtime.hooks import BackwardHooks
from shardstep.runtime.reducer import GradientReducer
from shardstep.runtime.turns import Turns


class ShardedGradients:
    """`param.grad` is None after backward; this rank's part of the mean lies in `reducer.shards`."""

    def __init__(
        self,
        channel: Channel,
        memory: FlatMemory,
        params: Sequence[torch.Tensor],
        model: nn.Module,
        wire_dtype: torch.dtype | None,
        syncs: Callable[[], bool],
        turns: Turns,
        *,
        reuse_memory: bool,
    ) -> None:
        self._channel, self._memory, self._params, self._turns = channel, memory, params, turns
        self.reducer = GradientReducer(channel, memory, params, wire_dtype, turns, reuse_memory=reuse_memory)
        self._place = {param: place for place, param in enumerate(params)}
        self._travels = memory.homes.keys()
        self._travelling = [params[place] for place in sorted(self._travels)]
        self._own = [bucket.pieces[channel.rank] for bucket in memory.buckets]
        self._offsets = [bucket.offsets[channel.rank] for bucket in memory.buckets]
        self._used: Sequence[int] = bytes(len(params))  # flags: whether some rank has a gradient
        self._hooks = BackwardHooks(model, params, self.reducer, syncs, self._after_pass)

    def _after_pass(self) -> None:
        """A backward pass has ended on this rank; its reductions may still run."""

    def remove_hooks(self) -> None:
        self._hooks.remove()

    def make_up_for_a_pass(self) -> None:
        """If no backward pass has reached a parameter here, it may have on other ranks, which wait for this one.

        What `no_sync` has left in `param.grad` is no part of it: then it is a failed one, and stays where it is.
        """
        self._hooks.recover()
        if self.reducer.passed:
            return
        left = {place: self._params[place].grad for place in self.unsent()}
        for place in left:
            self._params[place].grad = None
        self.reducer.end(failed=bool(left))
        for place, gradient in left.items():
            self._params[place].grad = gradient
        self._after_pass()

    def stepped(self) -> None:
        """What comes from now on is for the next step."""
        self.reducer.passed = False

    def settle(self) -> Sequence[int]:
        """Which gradients came too late to be reduced, on any rank; raises on all if a backward pass failed on one."""
        self._hooks.recover()
        self._used, late, failed = self.reducer.settle()
        if failed:
            self.reducer.drop()
            raise RuntimeError(
                f"the backward pass failed on ranks {failed}, so there is no mean gradient; their own errors say why. "
                "Call zero_grad() on all ranks and go on with the next batch"
            )
        return late

    def reduce_late(self, late: Sequence[int]) -> None:
        self.reducer.reduce_late()
        self._used = bytes(used or more for used, more in zip(self._used, late, strict=True))
        self.reducer.take_over(self._used, passed=True)

    def of_bucket(self, bucket: int) -> list[torch.Tensor | None]:
        """The mean gradients of this rank's pieces, flat; None where no rank has used the parameter."""
        shard = self.reducer.land(bucket)
        pieces = self._own[bucket]
        if shard is None:
            return [None] * len(pieces)
        parts = self._split(shard, bucket)
        return [part if self._used[piece.param] else None for piece, part in zip(pieces, parts, strict=True)]

    def of_run(self, bucket: int, run: Run) -> torch.Tensor | None:
        """The mean gradients of neighbours, which all have one or none."""
        shard = self.reducer.land(bucket)
        return shard[run.start : run.stop] if shard is not None and self._used[run.pieces[0].param] else None

    def _split(self, values: torch.Tensor, bucket: int) -> list[torch.Tensor]:
        """By pieces, what lies in this rank's range of a bucket."""
        places = zip(self._own[bucket], self._offsets[bucket], strict=True)
        return [values[offset : offset + piece.numel] for piece, offset in places]

    def unsent(self) -> list[int]:
        """Parameters whose gradient was never reduced, once all passes are settled."""
        return [self._place[param] for param in self._travelling if param.grad is not None]

    def present(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every piece of this rank that has a gradient."""
        for bucket, pieces in enumerate(self._own):
            for piece, gradient in zip(pieces, self.of_bucket(bucket), strict=True):
                if gradient is not None:
                    yield piece, gradient

    def take_over(self, gradients: dict[Piece, torch.Tensor], used: Sequence[int], *, passed: bool) -> None:
        """Shards that were reduced under an earlier plan; `passed`: since the last step."""
        self._used = bytes(used).ljust(len(self._params), b"\0")
        self.reducer.take_over(self._used, passed=passed)
        if any(self._used):
            for bucket, (memory, pieces) in enumerate(zip(self._memory.buckets, self._own, strict=True)):
                shard = torch.zeros_like(memory.ranges[self._channel.rank])
                for piece, part in zip(pieces, self._split(shard, bucket), strict=True):
                    if piece in gradients:
                        part.copy_(gradients[piece].reshape(-1))
                self.reducer.shards[bucket] = shard

    @property
    def used(self) -> Sequence[int]:
        return self._used

    def scale(self, factor: float) -> None:
        shards = [shard for shard in self.reducer.shards if shard is not None and shard.numel()]
        if shards:
            torch._foreach_mul_(shards, factor)

    def clamp(self, limit: float) -> None:
        for bucket in range(len(self._own)):
            shard = self.reducer.land(bucket)
            if shard is not None:
                shard.clamp_(-limit, limit)

    def clear(self, *, to_none: bool) -> None:
        self._hooks.recover()
        for param in self._params:
            if param.grad is not None:
                if to_none:
                    param.grad = None
                else:
                    param.grad.detach_().zero_()
        if to_none:
            self.reducer.drop()
            self._used = bytes(len(self._params))
        else:
            self.reducer.zero()

    def hides(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that is not in `param.grad`."""
        place = self._place.get(param)
        return place in self._travels and param.grad is None and self.reducer.has_gradient_of(place)


class KeptGradients(ShardedGradients):
    """The mean stays in `param.grad` on every rank, as under DDP; what is there when `step` is called is stepped."""

    def __init__(
        self, channel: Channel, memory: FlatMemory, params: Sequence[torch.Tensor], *others: Any, **options: Any
    ) -> None:
        super().__init__(channel, memory, params, *others, **options)
        self._means = [
            torch.empty_like(param.detach()) if place in memory.homes else param.new_empty(0)
            for place, param in enumerate(params)
        ]
        self._late: Sequence[int] = bytes(len(params))
        self._mean_memory = FlatMemory(memory.plan, self._means)
        self._gathers = make_gathers(
            channel,
            [
                (bucket.device, [[RangeMessage(values)] for values in bucket.ranges])
                for bucket in self._mean_memory.buckets
            ],
        )

    def _after_pass(self) -> None:
        self._turns.check()
        self._late = ShardedGradients.settle(self)
        if any(place in self._travels for place, flag in enumerate(self._late) if flag):
            super().reduce_late(self._late)
        self._spread()

    def reduce_late(self, late: Sequence[int]) -> None:
        """Every gradient is reduced again with those that were left out: the mean of equal means is that mean."""
        super().reduce_late(late)
        self._late = bytes(len(self._params))
        self._spread()

    def _spread(self) -> None:
        """Give every rank the mean of every gradient."""
        # Nothing may be received into memory that is still being sent: all reductions end before the first gather.
        for bucket in range(len(self._own)):
            self.reducer.land(bucket)
        for gather in self._gathers:
            gather.expect()
        for bucket, gather in enumerate(self._gathers):
            shard = self.reducer.shards[bucket]
            assert shard is not None, "a pass reduces every bucket"
            own = self._mean_memory.buckets[bucket].values[self._channel.rank]
            for values, part in zip(own, self._split(shard, bucket), strict=True):
                values.copy_(part)
            gather.send()
        self.reducer.drop_shards()
        finish_gathers(self._gathers)
        for place in self._travels:
            if self._used[place]:
                self._params[place].grad = self._means[place]

    def settle(self) -> Sequence[int]:
        """A pass settles at its own end; what is left are gradients of parameters that have no place in the plan."""
        self._hooks.recover()
        if self.reducer.unsettled():  # it failed
            self._late = super().settle()
        return [flag if place not in self._travels else 0 for place, flag in enumerate(self._late)]

    def of_bucket(self, bucket: int) -> list[torch.Tensor | None]:
        return [self._of_piece(piece) for piece in self._own[bucket]]

    def of_run(self, bucket: int, run: Run) -> torch.Tensor | None:
        """What is in `param.grad` lies nowhere side by side: every run is one piece."""
        (piece,) = run.pieces
        return self._of_piece(piece)

    def _of_piece(self, piece: Piece) -> torch.Tensor | None:
        param = self._params[piece.param]
        return None if param.grad is None else flat_gradient(param, param.grad)[piece.start : piece.stop]

    def unsent(self) -> list[int]:
        return []

    def take_over(self, gradients: dict[Piece, torch.Tensor], used: Sequence[int], *, passed: bool) -> None:
        """The gradients themselves are in `param.grad`."""
        super().take_over({}, used, passed=passed)
        self.reducer.drop_shards()

    def hides(self, param: torch.Tensor) -> bool:
        del param
        return False
