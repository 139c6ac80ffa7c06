"""The mean of all ranks' gradients, each rank's own part of it: the default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.call_order import Call, CallOrder
from shardstep.comm.channel import Channel
from shardstep.comm.comm_timing import CommTiming, unwatched
from shardstep.comm.transport import Transport
from shardstep.gradients.hooks import BackwardHooks
from shardstep.gradients.passes import GradientPass, Phase
from shardstep.params.flat import FlatMemory
from shardstep.params.proxy import gradient_of
from shardstep.params.views import quickly
from shardstep.planning import Piece
from shardstep.planning.runs import Run


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What gradients are made of."""

    channel: Channel
    transport: Transport
    call_order: CallOrder
    model: nn.Module
    memory: FlatMemory
    params: Sequence[torch.Tensor]  # in the plan's order
    wire_dtype: torch.dtype | None
    wide: bool  # gradients of fp16 parameters are kept in fp32
    reuse_memory: bool  # nobody looks at a gradient of an earlier step, so the next may lie where it lay


@dataclass(frozen=True, slots=True)
class Kept:
    """Gradients on their way from one plan to the next."""

    phase: Phase
    used: Sequence[int]
    by_piece: Mapping[Piece, torch.Tensor]


class Gradients(Protocol):
    """What the engine knows of gradients: ShardedGradients, or KeptGradients."""

    hooks: BackwardHooks

    def settle(self, turn: Call | None) -> Sequence[int]:
        """Before anything is done with gradients; `turn` says what, if it waits for other ranks.

        If no backward pass has reached a parameter here, it may have on other ranks, which wait for this one: so one is
        made. Returns flags: which gradients came too late to be reduced, on any rank. Raises on all ranks if a backward
        pass failed on one.
        """

    @property
    def rest(self) -> bool:
        """Whether no backward pass was made here since the last step."""

    def make_up_for_a_pass(self) -> None:
        """Other ranks have made one, and wait for this one's part: nothing."""

    def rest_again(self) -> None:
        """No rank had made one: it is as if none had been made up for."""

    def reduce_late(self, late: Sequence[int]) -> None:
        """Reduce those too: flags, of this plan's parameters. Raises on all ranks if one of them cannot."""

    @property
    def used(self) -> Sequence[int]:
        """Flags: whether some rank has a gradient of a parameter."""

    def land(self) -> None:
        """All that was reduced is there for what is done from now on."""

    def of_run(self, bucket: int, run: Run) -> torch.Tensor | None:
        """The mean gradients of neighbours, which all have one or none."""

    def unsent(self) -> list[int]:
        """Parameters whose gradient was never reduced, once all passes are settled."""

    def present(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Every piece of this rank that has a gradient, flat."""

    def stepped(self) -> None:
        """What comes from now on is for the next step."""

    def shards(self) -> list[torch.Tensor]:
        """All that this rank holds of the mean, to be scaled or clamped in place."""

    def scale(self, factor: torch.Tensor, *, later: bool) -> None:
        """Multiply all that this rank holds; `later`: the step does it, if nobody looks at it before."""

    @property
    def factor(self) -> torch.Tensor | None:
        """What `of_run` is still to be multiplied with."""

    def clear(self, *, to_none: bool) -> None: ...

    @property
    def are_zero(self) -> bool:
        """Whether they were made zero, and no pass has added to them since."""

    def hides(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that is not in `param.grad`."""

    def kept(self) -> Kept:
        """What is there for a new plan; it stays here as well."""

    def take_over(self, kept: Kept) -> None:
        """What was reduced under an earlier plan."""

    are_whole: bool  # every rank has all of the mean, and not its part

    @property
    def nbytes(self) -> int:
        """What they take on this rank between a backward pass and the step."""

    @contextmanager
    def watched(self, watch: CommTiming) -> Iterator[None]:
        """Inside, `watch` sees how long it takes to reduce them."""
        yield


class ShardedGradients:
    """`param.grad` is None after backward; this rank's part of the mean lies in `current.shards`."""

    are_whole = False

    def __init__(self, given: Surroundings, after_pass: Callable[[], None] | None = None) -> None:
        self._memory, self._params = given.memory, given.params
        self._channel = given.channel
        self.current = GradientPass(
            given.channel,
            given.transport,
            given.call_order,
            given.memory,
            given.params,
            given.wire_dtype,
            reuse_memory=given.reuse_memory,
            wide=given.wide,
        )
        self._after_pass = after_pass
        self._call_order = given.call_order
        self.used: Sequence[int] = bytes(len(given.params))
        self._place = {param: place for place, param in enumerate(given.params)}
        self.travels = given.memory.homes.keys()
        self._travelling = [given.params[place] for place in sorted(self.travels)]
        self.hooks = BackwardHooks(given.model, given.params, self.current, given.call_order, self._after_pass)

    def settle(self, turn: Call | None) -> Sequence[int]:
        self.hooks.recover()
        all_rest = turn is Call.REPORT and self._call_order.idle.on_all_ranks(self.rest)
        if self.rest and not all_rest and self._channel.world_size > 1:
            self.make_up_for_a_pass()
        if turn is not None:
            self._call_order.prepare(turn)
        return self.read()

    @property
    def rest(self) -> bool:
        return self.current.phase is Phase.RESTING

    def make_up_for_a_pass(self) -> None:
        """What `no_sync` has left in `param.grad` is no part of it: then it is a failed one, and stays where it is.

        Not where gradients are kept: what is there is the mean of an earlier pass, and the same on every rank.
        """
        unsent = self.unsent() if self._after_pass is None else []
        left = {place: gradient_of(self._params[place]) for place in unsent}
        for place in left:
            self._params[place].grad = None
        self.current.end(failed=bool(left))
        for place, gradient in left.items():
            self._params[place].grad = gradient
        if self._after_pass is not None:
            self._after_pass()

    def rest_again(self) -> None:
        self.current.drop_shards()
        self.current.stepped()

    def read(self) -> Sequence[int]:
        """What all ranks had in the passes since the last step."""
        settled = self.current.settle()
        self.used = settled.used
        if settled.failed:
            self.current.drop()
            raise RuntimeError(
                f"the backward pass failed on ranks {list(settled.failed)}, so there is no mean gradient; their own "
                "errors say why. Call zero_grad() on all ranks and go on with the next batch"
            )
        return settled.late

    def reduce_late(self, late: Sequence[int]) -> None:
        failure = self.current.reduce_late(late)
        try:
            agree(self._channel, Claim("reducing gradients that came after their bucket", failure, Facts()))
        except Exception as error:
            self.current.drop()
            raise RuntimeError(f"{error}. Call zero_grad() on all ranks and go on with the next batch") from error
        self.used = bytes(self.current.used)

    def land(self) -> None:
        self.current.land_all()

    def of_run(self, bucket: int, run: Run) -> torch.Tensor | None:
        shard = self.current.land(bucket)
        return shard[run.start : run.stop] if shard is not None and self.used[run.pieces[0].param] else None

    def unsent(self) -> list[int]:
        with quickly():
            return [self._place[param] for param in self._travelling if gradient_of(param) is not None]

    def present(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        self.land()
        self.current.apply_factor()
        for number, bucket in enumerate(self._memory.buckets):
            shard = self.current.land(number)
            if shard is not None:
                for (piece, _), part in zip(bucket.placed, bucket.split(shard), strict=True):
                    if self.used[piece.param]:
                        yield piece, part

    def stepped(self) -> None:
        self.current.stepped()

    def shards(self) -> list[torch.Tensor]:
        landed = [self.current.land(bucket) for bucket in range(len(self._memory.buckets))]
        self.current.apply_factor()
        return [shard for shard in landed if shard is not None and shard.numel()]

    def scale(self, factor: torch.Tensor, *, later: bool) -> None:
        self.current.factor = factor
        if not later:
            self.current.apply_factor()

    @property
    def factor(self) -> torch.Tensor | None:
        return self.current.factor

    @property
    def are_zero(self) -> bool:
        return self.current.are_zero

    def clear(self, *, to_none: bool) -> None:
        self.hooks.recover()
        clear_gradients(self._params, to_none=to_none)
        if to_none:
            self.current.drop()
            self.used = bytes(len(self._params))
        else:
            self.current.zero()

    def hides(self, param: torch.Tensor) -> bool:
        place = self._place.get(param)
        return place in self.travels and gradient_of(param) is None and bool(self.current.used[place])

    def kept(self) -> Kept:
        self.hooks.recover()
        self.read()
        return Kept(self.current.phase, self.used, dict(self.present()))

    @property
    def nbytes(self) -> int:
        return sum(bucket.own.nbytes for bucket in self._memory.buckets)

    @contextmanager
    def watched(self, watch: CommTiming) -> Iterator[None]:
        self.current.replace_reductions(watch.reduction)
        try:
            yield
        finally:
            self.current.replace_reductions(unwatched)

    def take_over(self, kept: Kept) -> None:
        used = self.used = bytes(kept.used).ljust(len(self._params), b"\0")
        shards: list[torch.Tensor | None] = [None] * len(self._memory.buckets)
        if any(used):
            for number, bucket in enumerate(self._memory.buckets):
                shard = shards[number] = torch.zeros_like(bucket.own, dtype=self.current.shard_dtype(number))
                for (piece, _), part in zip(bucket.placed, bucket.split(shard), strict=True):
                    if piece in kept.by_piece:
                        part.copy_(kept.by_piece[piece].reshape(-1))
        self.current.take_over(used, shards, kept.phase)


def clear_gradients(params: Sequence[torch.Tensor], *, to_none: bool) -> None:
    with quickly():  # and of weights that are on their way only the gradient is looked at
        for param in params:
            gradient = gradient_of(param)
            if gradient is not None:
                if to_none:
                    param.grad = None
                else:
                    gradient.detach_().zero_()
