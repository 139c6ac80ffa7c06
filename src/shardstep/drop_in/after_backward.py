"""The step after the backward pass: the program calls it, on all ranks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, final

import torch
from torch.distributed.algorithms.join import Join, Joinable

from shardstep.comm.agreement import Agreement, Claim
from shardstep.comm.choose import open_transport
from shardstep.comm.control import open_poll
from shardstep.drop_in.local_shard import Groups, params_of, plan_for, travelling
from shardstep.drop_in.parameter_messages import ParameterMessages
from shardstep.drop_in.strategy import Gradients, Setting
from shardstep.drop_in.uneven_inputs import hand_over
from shardstep.optimizers.local_optimizer import WatchedClosure
from shardstep.params.views import move_out, span_of
from shardstep.planning import Plan

logger = logging.getLogger(__name__)


@final
class AfterBackward:
    """Steps this rank's share, and sends it when all of it is stepped. A `Strategy`."""

    def __init__(self, setting: Setting, groups: Groups, *, bucket_view: bool) -> None:
        self._channel, self._shard, self._saved = setting.channel, setting.shard, setting.saved
        self._bucket_view = bucket_view
        self._agreement = Agreement(setting.channel)
        self._away = open_poll(setting.channel, lambda record: "step under Join")
        self.transport = open_transport(setting.channel, params_of(groups))
        self.buffers: list[list[torch.Tensor]] = []
        self._place(groups)

    def _place(self, groups: Groups) -> None:
        """Messages for what the plan sends, and memory of their own for parameters that it no longer sends."""
        params, plan = params_of(groups), self._shard.plan
        left = [span_of(buffer) for row in self.buffers for buffer in row]
        self._messages = ParameterMessages(self.transport, plan, params, bucket_view=self._bucket_view)
        self.buffers = self._messages.buffers
        move_out((params[segment.param] for bucket in plan.parked for segment in bucket.segments), left)

    def step(self, groups: Groups, closure: Any, kwargs: Mapping[str, Any], joinable: Joinable) -> Any:
        Join.notify_join_context(joinable)
        if joinable._join_config.enable:
            hand_over(self._channel, self._away, self._shard.plan, groups, joined=False)
        return self.step_and_send(groups, closure, kwargs)

    def take_part(self, groups: Groups) -> None:
        own = [(param, param.grad) for param in params_of(groups)]
        try:
            hand_over(self._channel, self._away, self._shard.plan, groups, joined=True)
            self.step_and_send(groups, None, {})
        finally:  # under DDP they stay as they are: its next backward pass must not add to those of others
            for param, gradient in own:
                param.grad = gradient

    def step_and_send(self, groups: Groups, closure: Any, kwargs: Mapping[str, Any]) -> Any:
        """What a step is, once every rank has the gradients."""
        watched = WatchedClosure(closure) if callable(closure) else None
        failure = self._why_not_to_send()
        if watched is None:  # a closure reads all parameters; without one, others' may arrive while this rank steps
            self._messages.expect()
            self._agreement.expect()
        loss = None
        try:
            if failure is None:
                loss = self.local_step(groups, None, watched or closure, kwargs)
        except Exception as error:
            if watched is not None and watched.raised:
                # The others are in the middle of their closures, perhaps in a collective of theirs: send nothing now.
                raise
            failure = error
        if watched is not None:
            self._messages.expect()
        self._send(groups, failure)
        return loss

    def local_step(self, groups: Groups, gradients: Gradients | None, closure: Any, kwargs: Mapping[str, Any]) -> Any:
        if gradients is not None:
            raise RuntimeError("_local_step takes gradients only with overlap_with_ddp=True, once DDP has its buckets")
        self._saved.stepped("a step")
        return self._shard.step(groups, closure, kwargs)

    def sync(self, groups: Groups) -> None:
        failure = self._why_not_to_send()
        self._messages.expect()
        self._send(groups, failure)

    def _why_not_to_send(self) -> Exception | None:
        try:
            self._messages.prepare()
        except Exception as error:  # the others wait for what this rank sends; all raise together at the end
            return error
        return None

    def _send(self, groups: Groups, failure: Exception | None) -> None:
        """Send what this rank has stepped, and take what others have; raise on all ranks if one of them failed."""
        travels = travelling(params_of(groups))
        if travels == self._shard.travels:
            self._send_and_agree(Claim("step", failure, self._shard.step_facts(groups, self._shard.plan)))
            return
        plan = plan_for(groups, travels, self._channel.world_size)
        self._send_and_agree(Claim("step", failure, self._shard.step_facts(groups, plan)))
        logger.warning("the set of trainable parameters has changed; what is sent at each step follows")
        self._shard.adopt(plan)
        self._place(groups)
        # Parameters that were frozen until now were stepped, but the messages so far followed the plan before.
        self._messages.expect()
        self._messages.send()
        self._messages.finish()

    def _send_and_agree(self, claim: Claim) -> None:
        self._agreement.claim(claim)
        self._messages.send()
        self._messages.finish()
        self._agreement.finish()

    def check_may_grow(self) -> None:
        """By any group."""

    def grow(self, groups: Groups, plan: Plan) -> None:
        self._shard.adopt(plan)
        self.transport = open_transport(self._channel, params_of(groups))  # the group may lie on another device
        self._place(groups)

    def check_has_state(self) -> None:
        """From the first step on, and an empty one before."""

    def reloaded(self) -> None:
        """The next step finds it."""
