"""The mean of all ranks' gradients, each rank's own part of it: the default."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.call_order import Call
from shardstep.comm.comm_timing import CommTiming, unwatched
from shardstep.gradients.hooks import BackwardHooks
from shardstep.gradients.passes import GradientContext, GradientPass, Phase
from shardstep.params.proxy import gradient_of
from shardstep.params.views import quickly
from shardstep.planning import Piece
from shardstep.planning.runs import Run


@dataclass(frozen=True, slots=True)
class Kept:
    """Gradients on their way from one plan to the next."""

    phase: Phase
    used: Sequence[int]
    by_piece: Mapping[Piece, torch.Tensor]


class ShardedGradients:
    """`param.grad` is None after backward; this rank's part of the mean lies in `current.shards`."""

    are_whole = False  # each rank has its part of the mean

    def __init__(self, given: GradientContext, after_pass: Callable[[], None] | None = None) -> None:
        self._memory, self._params = given.memory, given.params
        self._channel = given.channel
        self.current = GradientPass(given)
        self._after_pass = after_pass
        self._call_order = given.call_order
        self.used: Sequence[int] = bytes(len(given.params))
        self._place = {param: place for place, param in enumerate(given.params)}
        self.travels = given.memory.homes.keys()
        self._travelling = [given.params[place] for place in sorted(self.travels)]
        self.hooks = BackwardHooks(given.model, given.params, self.current, given.call_order, self._after_pass)

    def settle(self, call: Call | None) -> Sequence[int]:
        """Before anything is done with gradients; `call` says what, if it waits for other ranks.

        If no backward pass has reached a parameter here, it may have on other ranks, which wait for this one: so one is
        made. Returns flags: which gradients came too late to be reduced, on any rank. Raises on all ranks if a backward
        pass failed on one.
        """
        self.hooks.recover()
        all_rest = call is Call.REPORT and self._call_order.idle.on_all_ranks(self.rest)
        if self._channel.world_size > 1:
            if self.rest and not all_rest:
                self.make_up_for_a_pass()
            if call is not None:
                self._call_order.prepare(call)
        return self.read()

    @property
    def rest(self) -> bool:
        """Whether no backward pass was made here since the last step."""
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
        """No rank has made a pass: forget the one that was made up for."""
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
        """Reduce these too: flags, of this plan's parameters. Raises on all ranks if one of them cannot."""
        failure = self.current.reduce_late(late)
        try:
            agree(self._channel, Claim("reducing gradients that came after their bucket", failure, Facts()))
        except Exception as error:
            self.current.drop()
            raise RuntimeError(f"{error}. Call zero_grad() on all ranks and go on with the next batch") from error
        self.used = bytes(self.current.used)

    def land(self) -> None:
        """Wait until all that was reduced is there for what is done from now on."""
        self.current.land_all()

    def of_run(self, bucket: int, run: Run) -> torch.Tensor | None:
        """Return the mean gradients of neighbours, which all have one or none."""
        shard = self.current.land(bucket)
        return shard[run.start : run.stop] if shard is not None and self.used[run.pieces[0].param] else None

    def unsent(self) -> list[int]:
        """Return the parameters whose gradient was never reduced, once all passes are settled."""
        with quickly():
            return [self._place[param] for param in self._travelling if gradient_of(param) is not None]

    def present(self) -> Iterator[tuple[Piece, torch.Tensor]]:
        """Yield every piece of this rank that has a gradient, flat."""
        self.land()
        self.current.apply_factor()
        for number, bucket in enumerate(self._memory.buckets):
            shard = self.current.land(number)
            if shard is not None:
                for (piece, _), part in zip(bucket.placed, bucket.split(shard), strict=True):
                    if self.used[piece.param]:
                        yield piece, part

    def stepped(self) -> None:
        """Mark the gradients as consumed: what comes from now on is for the next step."""
        self.current.stepped()

    def shards(self) -> list[torch.Tensor]:
        """Return all that this rank holds of the mean, to be scaled or clamped in place."""
        landed = [self.current.land(bucket) for bucket in range(len(self._memory.buckets))]
        self.current.apply_factor()
        return [shard for shard in landed if shard is not None and shard.numel()]

    def scale(self, factor: torch.Tensor, *, later: bool) -> None:
        """Multiply all that this rank holds; `later`: the step does it, if nobody looks at it before."""
        self.current.factor = factor
        if not later:
            self.current.apply_factor()

    @property
    def factor(self) -> torch.Tensor | None:
        """What `of_run` is still to be multiplied with."""
        return self.current.factor

    @property
    def are_zero(self) -> bool:
        """Whether they were made zero, and no pass has added to them since."""
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
        """Whether `param` has a gradient that is not in `param.grad`."""
        place = self._place.get(param)
        return place in self.travels and gradient_of(param) is None and bool(self.current.used[place])

    def kept(self) -> Kept:
        """Return what is there for a new plan; it stays here as well."""
        self.hooks.recover()
        self.read()
        return Kept(self.current.phase, self.used, dict(self.present()))

    @property
    def nbytes(self) -> int:
        """Bytes that they take on this rank between a backward pass and the step."""
        return sum(bucket.own.nbytes for bucket in self._memory.buckets)

    @contextmanager
    def watched(self, watch: CommTiming) -> Iterator[None]:
        """Inside, `watch` sees how long it takes to reduce them."""
        self.current.replace_reductions(watch.reduction)
        try:
            yield
        finally:
            self.current.replace_reductions(unwatched)

    def take_over(self, kept: Kept) -> None:
        """Take what was reduced under an earlier plan."""
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
