"""The mean of all ranks' gradients in `param.grad` on every rank: as under DDP, for programs that read it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from shardstep.comm.call_order import Call
from shardstep.comm.comm_timing import CommTiming, EachByItself, Sender
from shardstep.gradients.sharded import Kept, ShardedGradients, Surroundings
from shardstep.params.flat import FlatMemory
from shardstep.params.proxy import gradient_of
from shardstep.params.views import flat_gradient
from shardstep.planning import Piece
from shardstep.planning.runs import Run


class ReplicatedGradients:
    """Reduced to shards and gathered when a pass ends; `step` takes what is in `param.grad` when it is called."""

    are_whole = True

    def __init__(self, given: Surroundings) -> None:
        self._memory, self._params, self._rank = given.memory, given.params, given.channel.rank
        self._means = [
            torch.empty_like(param.detach()) if place in given.memory.homes else param.new_empty(0)
            for place, param in enumerate(given.params)
        ]
        plan = given.memory.plan
        # Asked for another dtype, gradients are reduced in that, and their mean travels as it is. One rank sends none.
        if given.wire_dtype is not None or given.channel.world_size == 1:
            plan = replace(plan, buckets=tuple(replace(bucket, wire="") for bucket in plan.buckets))
        self._mean_memory = FlatMemory(plan, self._means, given.channel.rank)
        self._gathers = given.transport.range_gathers(self._mean_memory.buckets, ring=True)
        self._sender: Sender = EachByItself()
        after_pass = weakref.WeakMethod(self._after_pass)  # a cycle would keep the hooks alive when this is dropped
        self._inner = ShardedGradients(given, lambda: (after_pass() or _nothing)())
        self._late: Sequence[int] = bytes(len(given.params))
        self.hooks = self._inner.hooks

    def _after_pass(self) -> None:
        self._late = self._inner.read()
        if any(place in self._inner.travels for place, flag in enumerate(self._late) if flag):
            self._inner.reduce_late(self._late)
        self._spread()

    def _spread(self) -> None:
        """Give every rank the mean of every gradient."""
        # Nothing may be received into memory that is still being sent: all reductions end before the first gather.
        shards = [self._inner.current.land(bucket) for bucket in range(len(self._mean_memory.buckets))]
        for gather in self._gathers:
            gather.expect()
        shard = None
        for number, bucket in enumerate(self._mean_memory.buckets):
            shard = shards[number]
            assert shard is not None, "a pass reduces every bucket"
            for values, part in zip(bucket.split(bucket.own), bucket.split(shard), strict=True):
                values.copy_(part)
            if self._gathers:
                self._sender.send([self._gathers[number]])
        del shards, shard
        self._inner.current.drop_shards()
        self._sender.finish(self._gathers)
        for place in self._inner.travels:
            if self.used[place]:
                self._params[place].grad = self._means[place]

    def settle(self, turn: Call | None) -> Sequence[int]:
        """A pass settles at its own end; what is left are gradients of parameters that have no place in the plan."""
        self._inner.settle(turn)
        return [flag if place not in self._inner.travels else 0 for place, flag in enumerate(self._late)]

    @property
    def rest(self) -> bool:
        return self._inner.rest

    def make_up_for_a_pass(self) -> None:
        self._inner.make_up_for_a_pass()

    def rest_again(self) -> None:
        self._inner.rest_again()

    def reduce_late(self, late: Sequence[int]) -> None:
        """Every gradient is reduced again with those that were left out: the mean of equal means is that mean."""
        self._inner.reduce_late(late)
        self._late = bytes(len(self._params))
        self._spread()

    @property
    def used(self) -> Sequence[int]:
        return self._inner.used

    def land(self) -> None:
        """It did when the pass ended."""

    def of_run(self, bucket: int, run: Run) -> torch.Tensor | None:
        """What is in `param.grad` lies nowhere side by side: every run is one piece."""
        del bucket
        (piece,) = run.pieces
        return self._of_piece(piece)

    def _of_piece(self, piece: Piece) -> torch.Tensor | None:
        param = self._params[piece.param]
        gradient = gradient_of(param)
        return None if gradient is None else flat_gradient(param, gradient)[piece.start : piece.stop]

    def unsent(self) -> list[int]:
        return []

    def present(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        for bucket in self._memory.buckets:
            for piece, _ in bucket.placed:
                gradient = self._of_piece(piece)
                if gradient is not None:
                    yield piece, gradient

    def stepped(self) -> None:
        self._inner.stepped()

    def shards(self) -> list[torch.Tensor]:
        raise AssertionError("the whole mean is in param.grad: torch's own functions scale it")

    def scale(self, factor: torch.Tensor, *, later: bool) -> None:
        raise AssertionError("the whole mean is in param.grad: torch's own functions scale it")

    factor = None

    @property
    def are_zero(self) -> bool:
        return self._inner.are_zero

    def clear(self, *, to_none: bool) -> None:
        self._inner.clear(to_none=to_none)

    def hides(self, param: torch.Tensor) -> bool:
        del param
        return False

    def kept(self) -> Kept:
        kept = self._inner.kept()
        return Kept(kept.phase, kept.used, {})  # the gradients themselves are in `param.grad`

    @property
    def nbytes(self) -> int:
        return sum(bucket.values.nbytes for bucket in self._mean_memory.buckets)

    @contextmanager
    def watched(self, watch: CommTiming) -> Iterator[None]:
        sender, self._sender = self._sender, watch.gradient_sender(self._sender)
        try:
            with self._inner.watched(watch):
                yield
        finally:
            self._sender = sender

    def take_over(self, kept: Kept) -> None:
        self._inner.take_over(kept)
        self._inner.current.drop_shards()


def _nothing() -> None:
    """The gradients are nobody's any more."""
