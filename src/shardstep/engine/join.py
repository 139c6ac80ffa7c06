"""torch's Join round the fast lane: ranks that have run out of inputs do what the others do, until nobody has any.

[Note: one call, one hook] Before a rank with inputs does anything that others take part in (the first backward pass
after a step, and whatever it announces as its turn), it says so by `Join.notify_join_context`. A rank without inputs
hears that, runs its main hook once, and there does one thing: a pass without gradients, if none was made since the last
step; or it asks what the others turn to, and does that. So it may leave its loop anywhere, also between two backward
passes of a step. It steps its own share with what the others have, and with their options: no scheduler runs here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed.algorithms.join import Join, JoinHook, _JoinConfig

from shardstep.comm.call_order import Call
from shardstep.comm.control import open_poll
from shardstep.engine.gradient_calls import clamp, clip, norms
from shardstep.engine.planned import ParamGroups, params_of
from shardstep.engine.step import Engine
from shardstep.state.join_sync import hand_over
from shardstep.torch_internals import variables_of_join

_CALLS: dict[Call, Callable[..., Any]] = {Call.NORMS: norms, Call.CLIP_NORM: clip, Call.CLIP_VALUE: clamp}


class FastLaneJoinHook(JoinHook):
    """Of one Join context. `optimizer` is a ShardedOptimizer."""

    def __init__(self, optimizer: Any, engine: Engine, options: dict[str, Any]) -> None:
        self._optimizer, self._engine, self.is_over = optimizer, engine, False
        if engine.keeps_gradients:
            raise ValueError(
                'Join does not go with ShardConfig(gradients="keep"): what a program does to param.grad is not done '
                'on ranks without inputs, which step a part of the model. Use gradients="shard"'
            )
        if not options.get("divide_by_initial_world_size", True):
            raise ValueError(
                "divide_by_initial_world_size=False is not supported: gradients are divided by the number of all ranks "
                "of the group, which is also the default of DistributedDataParallel"
            )
        call = variables_of_join()
        if len(call["joinables"]) != 1:
            raise ValueError(
                "Join([optimizer]) takes a sharded optimizer by itself: others that join with it would be asked to "
                "take part in its clipping and in each of its backward passes"
            )
        if call["enable"] and engine.channel.world_size > 1:
            engine.call_order.join(self._notify, engine.channel.world_size)
            # Join has no hook for an error that ends its block: but then it is gone, and nothing of it is left.
            weakref.finalize(call["self"], _end_join, weakref.ref(self)).atexit = False

    @property
    def _groups(self) -> ParamGroups:
        groups: ParamGroups = self._optimizer.param_groups
        return groups

    def _notify(self) -> None:
        Join.notify_join_context(self._optimizer)

    def main_hook(self) -> None:
        """Do one thing that the ranks with inputs do."""
        call_order = self._engine.call_order
        call_order.following = True
        try:
            _follow(self._engine, self._groups)
        finally:
            call_order.following = False

    def post_hook(self, is_last_joiner: bool) -> None:
        """Nobody has inputs any more: all ranks hold the same weights and options, and gradients of the same passes."""
        self.leave()
        self._engine.synchronize()
        poll = open_poll(self._engine.channel, lambda record: "leave Join")
        poll.ask(bytes([is_last_joiner]))
        last = [row == b"\1" for row in poll.answer().rows()]
        away = [rank for rank, is_last in enumerate(last) if not is_last]
        gradients = self._engine.gradients
        are_held = any(gradients.hides(param) for param in params_of(self._groups))
        own = {"are_held": are_held, "are_zero": gradients.are_zero}
        told = hand_over(self._engine.channel, last.index(True), away, self._groups, own)
        if not is_last_joiner and (told["are_zero"] or not told["are_held"]):
            # The last loop to end did so after its step, where nothing tells it to those that followed.
            gradients.clear(to_none=not told["are_held"])

    def leave(self) -> None:
        """The block is over: what the optimizer does is not told to ranks that have no inputs."""
        self.is_over = True
        self._engine.call_order.leave_join()
        self._optimizer._join_config = _JoinConfig(False, False, False)


def _end_join(hook: weakref.ref[FastLaneJoinHook]) -> None:
    ended = hook()
    if ended is not None and not ended.is_over:
        ended.leave()


def _follow(engine: Engine, groups: ParamGroups) -> None:
    gradients, call_order = engine.gradients, engine.call_order
    if gradients.rest:
        engine.synchronize()
        gradients.clear(to_none=True)  # of the last step: the others drop theirs before they go on
        gradients.make_up_for_a_pass()
        return
    late = gradients.settle(Call.FOLLOW)
    call_order.announce(Call.FOLLOW)
    turn, dropped = Call(call_order.others[0]), call_order.others[1]
    if dropped:
        gradients.clear(to_none=True)
    if turn is Call.PASS:
        gradients.make_up_for_a_pass()
        return
    told = engine.hand_over_for(turn, groups, {})
    if any(late):
        engine.take_in(late, groups)
    if turn is Call.STEP:
        engine.step_together(groups, None, engine.look(groups))
    else:
        _CALLS[turn](engine, groups, **told)
