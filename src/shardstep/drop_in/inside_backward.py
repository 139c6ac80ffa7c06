"""The step inside DistributedDataParallel's backward pass. The hooks of ddp_zero_hook.py drive it, or torch's own."""

from __future__ import annotations

import logging
from collections.abc import Container, Mapping, Sequence
from typing import Any, final

import torch
from torch.distributed.algorithms.join import Joinable

from shardstep.comm.agreement import Agreement, Claim, Facts
from shardstep.comm.control import open_poll
from shardstep.comm.transport import Transport
from shardstep.drop_in.after_backward import AfterBackward
from shardstep.drop_in.buckets import (
    OverlappedStep,
    _DDPBucketAssignment,
    _OverlapInfo,
    _OverlapStatus,
    agree_on_buckets,
)
from shardstep.drop_in.local_shard import Groups, params_of
from shardstep.drop_in.strategy import Gradients, Setting
from shardstep.planning import Layout, Plan, make_plan
from shardstep.state.consolidation import move_state

logger = logging.getLogger(__name__)


@final
class InsideBackward:
    """Has two lives, and `overlapped` says which. A `Strategy`.

    None: DDP's buckets are not final, so there is nothing to step by. The first passes update nothing; or, with
    `trains_at_once`, they are stepped as after a backward pass, when it ends.
    Otherwise it has what steps and sends the buckets, one at a time, while the pass is still running.
    """

    def __init__(self, setting: Setting, groups: Groups, info: _OverlapInfo, *, trains_at_once: bool) -> None:
        self._channel, self._shard, self._saved = setting.channel, setting.shard, setting.saved
        self._info = info
        self.trains_at_once = trains_at_once
        self._first = AfterBackward(setting, groups, bucket_view=False)
        self._agreement = Agreement(setting.channel)
        self._used = open_poll(setting.channel, lambda record: "are in a backward pass")
        self.buffers: list[list[torch.Tensor]] = []  # parameters live in DDP's buckets
        self.overlapped: OverlappedStep | None = None
        self._facts = Facts()  # of the pass that runs

    # -- what programs call -------------------------------------------------------------------------------------------

    def step(self, groups: Groups, closure: Any, kwargs: Mapping[str, Any], joinable: Joinable) -> None:
        del groups, closure, kwargs, joinable
        logger.warning("step() does nothing with overlap_with_ddp=True: the backward pass has stepped already")

    def local_step(self, groups: Groups, gradients: Gradients | None, closure: Any, kwargs: Mapping[str, Any]) -> Any:
        if gradients is None or self.overlapped is None:
            return self._first.local_step(groups, gradients, closure, kwargs)
        self._saved.lose("was consolidated before the last backward pass")
        self.overlapped.step_given(gradients, groups)
        return None

    def sync(self, groups: Groups) -> None:
        if self.overlapped is None:
            self._first.sync(groups)
        else:
            self.overlapped.exchange()

    def take_part(self, groups: Groups) -> None:
        """DDP's own hook for such a rank runs the communication hook, which steps."""

    def check_may_grow(self) -> None:
        raise RuntimeError(
            "with overlap_with_ddp=True parameters live in DDP's buckets, which are fixed; give all param groups "
            "to the constructor, or build DDP and the optimizer again"
        )

    def grow(self, groups: Groups, plan: Plan) -> None:
        del groups, plan
        self.check_may_grow()

    def check_has_state(self) -> None:
        if self.overlapped is None and not self.trains_at_once:
            raise RuntimeError(
                "with overlap_with_ddp=True there is no state before DDP has fixed its buckets, in the third backward "
                "pass (the fourth with a static graph); pass train_from_first_step=True to have it from the start"
            )

    def reloaded(self) -> None:
        if self.overlapped is not None:
            self.overlapped.reload()

    @property
    def assignments_per_rank(self) -> list[dict[int, _DDPBucketAssignment]]:
        """Who steps which part of DDP's buckets."""
        if self.overlapped is None:
            raise RuntimeError("DDP's buckets are not known yet; they are after the first backward passes")
        return self.overlapped.assignments_per_rank

    # -- what hooks call ----------------------------------------------------------------------------------------------

    @property
    def transport(self) -> Transport:
        return self._first.transport

    @property
    def world_size(self) -> int:
        return self._channel.world_size

    def cut_buckets(self, shard: bool) -> None:
        """Whether a bucket may be cut between ranks; said before the first pass."""
        self._info.shard_buckets = shard

    def learn(self, groups: Groups, bucket: int, params: list[torch.Tensor]) -> None:
        """DDP has final buckets, and this is one of them. When they begin again, all are known: share out by them."""
        if self.overlapped is not None:
            return
        self._info.status = _OverlapStatus.DDP_HAS_REBUILT_BUCKETS
        if bucket == 0 and self._info.params_per_bucket:
            self.share_out(groups)
        else:
            self._info.params_per_bucket.append(params)

    def share_out(self, groups: Groups) -> None:
        """Share out the parameters by DDP's buckets, and move their state. Called on all ranks."""
        shard, params, rank = self._shard, params_of(groups), self._channel.rank
        old = shard.plan.holders()
        layout = agree_on_buckets(self._channel, self._info, shard.plan, params)
        entries = shard.entries()
        moves: dict[Any, tuple[int, int]] = dict.fromkeys(entries, (rank, rank))  # what belongs to no parameter stays
        moves.update(enumerate(zip(old, layout.holders, strict=True)))
        entries = move_state(self._channel, entries, moves, "sharing out parameters by DDP's buckets")
        specs = shard.plan.params
        plan = make_plan(specs, Layout.WHOLE, world_size=self._channel.world_size, holders=layout.holders)
        shard.share_out(groups, plan, entries)
        self.overlapped = OverlappedStep(self._channel, self.transport, self._info, layout, shard)
        self.overlapped.reload()
        if any(param.is_cuda for param in params):
            # torch's interleaved hook steps on a stream of its own, which waits for the reduction but not for the
            # copies into the buffers that were just enqueued here. This happens once.
            torch.cuda.synchronize()
        self._info.status = _OverlapStatus.INITIALIZED

    def begin(self, groups: Groups, reduced: Container[torch.Tensor]) -> Exception | None:
        """A backward pass begins. Returns what is wrong; all ranks raise it at the end: they wait for each other."""
        self._saved.stepped("a backward pass")
        self._facts = self._shard.step_facts(groups, self._shard.plan)
        for spec, param in zip(self._shard.plan.params, params_of(groups), strict=True):
            if param.requires_grad and param not in reduced:
                return RuntimeError(
                    f"{spec.name} was frozen when DDP was built, so DDP does not reduce its gradient; "
                    "unfreeze it before, or build DDP and the optimizer again"
                )
        return None

    def finish(self, overlapped: OverlappedStep, failure: Exception | None) -> None:
        """A backward pass ends: everything has been sent. Raises on all ranks if one of them failed."""
        self._agreement.claim(Claim("the backward pass", failure, self._facts))
        overlapped.finish()
        self._agreement.finish()

    def step_at_the_end(self, groups: Groups, gradients: Mapping[torch.Tensor, torch.Tensor | None]) -> None:
        """In the first life: a pass has ended, and these are what it reduced."""
        before = {param: param.grad for param in gradients}
        try:
            for param, gradient in gradients.items():
                param.grad = gradient
            self._first.step_and_send(groups, None, {})
        finally:
            for param, gradient in before.items():
                param.grad = gradient

    def used_somewhere(self, used: Sequence[bool]) -> list[bool]:
        """Of some parameters: whether any rank has used them. All ranks ask for the same ones."""
        self._used.ask(bytes(used))
        return [bool(flag) for flag in self._used.answer().any]
