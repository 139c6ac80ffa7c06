"""One plan, and everything that is made from it: memory, this rank's share, gradients, messages.

When the facts change (a parameter is frozen, a group is added) a new plan is made, and what changes its holder moves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from shardstep.config import ShardConfig
from shardstep.gradients.kept import KeptGradients
from shardstep.gradients.sharded import Gradients, Kept, ShardedGradients, Surroundings
from shardstep.make_share import Recipe, make_share
from shardstep.memory.flat import FlatMemory
from shardstep.memory.views import ALIGNMENT_NBYTES, move_out, quickly, span_of
from shardstep.planning import Layout, Piece, Plan, make_plan, read_specs
from shardstep.state.resharding import reshard
from shardstep.step_in_backward import HALF_STEPPED, StepInBackward
from shardstep.stepping.costs import StepCosts
from shardstep.stepping.entries import Entry
from shardstep.stepping.local_optimizer import is_of_torch
from shardstep.stepping.premises import Premises
from shardstep.wire.agreement import Claim, Facts, agree
from shardstep.wire.channel import Channel
from shardstep.wire.choose import open_transport
from shardstep.wire.transport import BucketSizes
from shardstep.wire.turns import Turns

ParamGroups = Sequence[dict[str, Any]]

_GRADIENT = "shardstep.gradient"  # a gradient that moves with the state of its piece


class Planned:
    """What an Engine is made of. `groups` are passed in: a program may change them between any two calls."""

    def __init__(self, model: nn.Module, channel: Channel, recipe: Recipe, config: ShardConfig) -> None:
        self._model, self.channel, self._recipe, self._config = model, channel, recipe, config
        params = list(model.parameters())
        self.transport = open_transport(
            channel, params, self, ordered_sums=config.ordered_sums, awaited_singly=config.gather == "overlap"
        )
        self.turns = Turns(channel)
        self.transport.before_waiting(self.turns.check)
        self._costs = StepCosts(channel, recipe.optimizer_class, recipe.defaults)
        self._premises = Premises(model, has_buffers=config.sync_buffers)
        self._counted: Mapping[str, Any] = {}  # what the optimizer's class has counted on itself under earlier plans
        self.keeps_gradients = config.gradients == "keep"
        with torch.no_grad():
            self.transport.broadcast([*params, *model.buffers()])

    # -- the plan, and everything that is made from it ----------------------------------------------------------------

    def plan_for(self, groups: ParamGroups, trainable: Sequence[bool]) -> Plan:
        """The same on all ranks, and called on all: what a step costs may have to be tried on one of them."""
        specs, params = read_specs(groups, trainable), params_of(groups)
        wanted = self._config.bucket_mb
        total = sum(param.nbytes for param, moves in zip(params, trainable, strict=True) if moves)
        sizes = self.transport.bucket_sizes(total) if wanted is None else BucketSizes(wanted * 1e6)
        itemsize = max((param.element_size() for param in params), default=4)
        is_dealt = Layout.WHOLE in self._recipe.layouts and self.channel.world_size > 1
        # Gradients come from the last layer to the first, and so lie the buckets.
        return make_plan(
            specs,
            self._recipe.layouts,
            world_size=self.channel.world_size,
            bucket_numel=max(int(sizes.usual / itemsize), 1),
            end_numel=int(sizes.ends / itemsize) if sizes.ends else None,
            alignment=ALIGNMENT_NBYTES // min((param.element_size() for param in params), default=4),
            order=range(len(specs))[::-1],
            costs=self._costs.of(specs, groups, self._recipe.elementwise) if is_dealt else None,
        )

    def build(self, groups: ParamGroups, plan: Plan, entries: Mapping[Piece, Entry], action: str) -> None:
        """Build on all ranks, or raise on all: a rank may be refused a parameter that others do not hold."""
        failure = None
        try:
            self._build_local(groups, plan, entries)
        except Exception as error:
            failure = error
        agree(self.channel, Claim(action, failure, Facts()))
        self._connect(groups, plan)

    def _build_local(self, groups: ParamGroups, plan: Plan, entries: Mapping[Piece, Entry]) -> None:
        """Memory and local optimizers for a plan; `entries` are the state of its pieces."""
        self.plan, self._facts = plan, Facts(map(str, plan.params))
        self._trainable = [spec.trainable for spec in plan.params]
        self._memory = FlatMemory(plan, params_of(groups), self.channel.rank)
        self._together = self.transport.step_order(len(plan.buckets))
        made = make_share(self._recipe, self._config, plan, self._memory, self._together, groups)
        self.share, self._streams, self._together = made.share, made.streams, made.together
        self.share.build(groups, dict(entries), self._counted)

    def _connect(self, groups: ParamGroups, plan: Plan) -> None:
        """What talks to other ranks. Its messages are told apart by counting, so all ranks get here, or none."""
        params = params_of(groups)
        self._premises.watch(groups)
        overlap = self._config.gather == "overlap"
        self._gathers = self.transport.range_gathers(self._memory.buckets, ring=not overlap)
        sharded = not self.keeps_gradients
        given = Surroundings(
            self.channel,
            self.transport,
            self.turns,
            self._model,
            self._memory,
            params,
            self._config.reduce_dtype,
            wide=sharded and self.share.masters is not None,
            # What a class of somebody else's keeps of a gradient cannot be known; and "keep" needs shards for a moment.
            reuse_memory=sharded and is_of_torch(self._recipe.optimizer_class),
        )
        self.gradients: Gradients = ShardedGradients(given) if sharded else KeptGradients(given)
        self._in_backward = self._step_in_backward(groups) if self._config.step == "backward" else None
        self._connected(params)

    def _connected(self, params: Sequence[torch.Tensor]) -> None:
        """For what is built on it: everything of a new plan is there."""

    def _disconnect(self) -> None:
        """The same: a new plan is made."""

    def _step_in_backward(self, groups: ParamGroups) -> StepInBackward:
        assert isinstance(self.gradients, ShardedGradients), "checked by ShardConfig"
        number_of = {bucket: number for number, (bucket,) in enumerate(self._together)}
        planned = self._trainable
        return StepInBackward(
            self.share, self.gradients.current, self._memory, groups, number_of, lambda: trainable_of(groups) == planned
        )

    def check_not_stepped(self, what: str) -> None:
        """Raise if backward has stepped, and `step` has not given everyone the parameters."""
        if self._in_backward is not None and self._in_backward.stepped:
            raise RuntimeError(
                f'{what}: with ShardConfig(step="backward") the last backward pass has stepped already, and ranks hold '
                f"different parameters until step() was called. {HALF_STEPPED}"
            )

    def take_layouts(self, layouts: Sequence[Layout], elementwise: Sequence[bool]) -> None:
        """Of all groups; some were added."""
        self._recipe = replace(self._recipe, layouts=layouts, elementwise=elementwise)

    def replan(self, groups: ParamGroups, trainable: Sequence[bool]) -> None:
        """Make a new plan and move what changes its holder. Called on all ranks, which have agreed on `trainable`."""
        self._check_may_move()
        kept = self.gradients.give_up()
        self._counted = self.share.counted()
        old, entries = self.plan, self.share.entries()
        for piece, gradient in kept.by_piece.items():
            entries[piece] = {**entries.get(piece, {}), _GRADIENT: gradient}
        plan = self.plan_for(groups, trainable)
        moved = reshard(self.channel, old, plan, entries)
        gradients = {piece: entry.pop(_GRADIENT) for piece, entry in moved.items() if _GRADIENT in entry}
        self._disconnect()
        self._in_backward = None
        buffers = [span_of(bucket.values) for bucket in self._memory.buckets]
        # Nothing holds on to the old buffers but the parameters that have not moved yet: one is free when all of its
        # parameters have left it, so that a new plan takes no second model.
        del entries, self._memory, self.share, self._gathers, self.gradients
        self.build(groups, plan, {piece: entry for piece, entry in moved.items() if entry}, "a new plan")
        frozen = [param for param, moves in zip(params_of(groups), trainable, strict=True) if not moves]
        move_out(frozen, buffers)
        self.gradients.take_over(Kept(kept.phase, kept.used, gradients))

    def _check_may_move(self) -> None:
        """Raise on all ranks if the class of one of them keeps what a new plan would lose."""
        if is_of_torch(self._recipe.optimizer_class):
            return
        failure = None
        try:
            self.share.check_may_move()
        except RuntimeError as error:
            failure = error
        agree(self.channel, Claim("a new plan", failure, Facts()))

    def load(self, groups: ParamGroups, plan: Plan, entries: Mapping[Piece, Entry]) -> None:
        """State that was saved under `plan`. Called on all ranks."""
        self.take_state(groups, reshard(self.channel, plan, self.plan, entries))

    def take_state(self, groups: ParamGroups, entries: dict[Piece, Entry]) -> None:
        """State of this rank's pieces under the plan that is; `entries` is emptied, so that nothing is held twice.

        `groups` are as they will be. Taken on all ranks, or on none: a class may refuse what is loaded.
        """
        made, failure = None, None
        try:
            self._memory.adopt()
            made = self.share.prepare(groups, entries)
        except Exception as error:
            failure = error
        agree(self.channel, Claim("load", failure, Facts()))
        assert made is not None, "agreed"
        if self._in_backward is not None:
            self._in_backward.stepped.clear()  # what a pass that failed had stepped, what is loaded replaces
        self.share.take(made, groups)

    # -- what it takes ------------------------------------------------------------------------------------------------

    def bucket_nbytes(self) -> list[int]:
        return [bucket.values.nbytes for bucket in self._memory.buckets]

    def predicted_nbytes(self) -> int:
        """What this rank needs at most between two steps, beside activations: by the plan, not by what was measured."""
        gradients = self._gradient_nbytes()
        waiting = self.transport.waiting_nbytes(max(self.bucket_nbytes(), default=0))
        state = self.share.state_nbytes + sum(slot.nbytes for slot in self.share.slots)
        if self.share.masters is not None:
            # What is stepped together has its gradients in fp32 for that time, when none are waiting.
            masters = self.share.masters.values
            widened = [sum(masters[number].nbytes for number in group if number in masters) for group in self._together]
            waiting = max(waiting, *widened)
        return sum(self.bucket_nbytes()) + state + gradients + int(min(waiting, sum(self.bucket_nbytes())))

    def _gradient_nbytes(self) -> int:
        """Of shards that are alive at one time. Stepped in backward, if all are used: those of buckets on their way."""
        shards = sorted((bucket.own.nbytes for bucket in self._memory.buckets), reverse=True)
        largest, most = max(self.bucket_nbytes(), default=0), self.transport.in_flight_nbytes
        if self._in_backward is None or not largest or (most == math.inf and self.channel.world_size > 1):
            return sum(shards)
        return sum(shards[: max(1, int(min(most / largest, 2)))])


def params_of(groups: ParamGroups) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]


def trainable_of(groups: ParamGroups) -> list[bool]:
    with quickly():
        return [bool(param.requires_grad) for group in groups for param in group["params"]]
