"""One plan, and everything that is made from it: memory, this rank's share, gradients, messages.

When the facts change (a parameter is frozen, a group is added) a new plan is made, and what changes its holder moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from shardstep.comm.agreement import Claim, Facts, FinalAgreement, attempt
from shardstep.comm.call_order import CallOrder
from shardstep.comm.channel import Channel
from shardstep.comm.choose import open_transport, release
from shardstep.comm.encoding import round_all, scratch_nbytes
from shardstep.comm.transport import BucketSizes
from shardstep.config import ShardConfig
from shardstep.engine.make_step import Recipe, make_step
from shardstep.engine.step_in_backward import HALF_STEPPED, StepInBackward
from shardstep.gradients.replicated import ReplicatedGradients
from shardstep.gradients.sharded import Gradients, Kept, ShardedGradients, Surroundings
from shardstep.optimizers.local_optimizer import is_of_torch
from shardstep.optimizers.trial import no_trace
from shardstep.params.flat import FlatMemory
from shardstep.params.views import ALIGNMENT_NBYTES, move_out, quickly, span_of
from shardstep.planning import Layout, Piece, Plan, make_plan, read_specs
from shardstep.state.loaded_by_class import LoadedByClass
from shardstep.state.resharding import reshard
from shardstep.stepping.element_state import Entry
from shardstep.stepping.local_step import Prepared
from shardstep.stepping.masters import MASTER
from shardstep.stepping.step_preconditions import StepPreconditions

ParamGroups = Sequence[dict[str, Any]]

_GRADIENT = "shardstep.gradient"  # a gradient that moves with the state of its piece
_OF_A_PLAN = (
    "plan", "share", "gradients", "_facts", "_trainable", "_memory", "_together", "_streams", "_gathers", "_in_backward"
)  # fmt: skip
_STATE_IS_LOST = "The model has the weights of the last step, and the optimizer's state is lost"


@dataclass(frozen=True, slots=True)
class Next:
    """A plan that the class of the optimizer takes, and that is not made yet."""

    plan: Plan
    recipe: Recipe


class Planned:
    """What an Engine is made of. `groups` are passed in: a program may change them between any two calls."""

    def __init__(self, model: nn.Module, channel: Channel, recipe: Recipe, config: ShardConfig) -> None:
        self._model, self.channel, self._recipe, self._config = model, channel, recipe, config
        params = list(model.parameters())
        self.transport = open_transport(
            channel, params, self, ordered_sums=config.ordered_sums, awaited_singly=config.gather == "overlap"
        )
        self.call_order = CallOrder(channel)
        self.transport.before_waiting(self.call_order.check)
        self._preconditions = StepPreconditions(model, has_buffers=config.sync_buffers and channel.world_size > 1)
        self._counted: Mapping[str, Any] = {}  # what the optimizer's class has counted on itself under earlier plans
        self._last_word = FinalAgreement(channel)
        self.lost = ""  # why there is no plan any more: what failed, and could not be taken back
        self.keeps_gradients = config.gradients == "keep"
        with torch.no_grad():
            self.transport.broadcast([*params, *model.buffers()])

    # -- the plan, and everything that is made from it ----------------------------------------------------------------

    def plan_for(self, groups: ParamGroups, trainable: Sequence[bool], recipe: Recipe | None = None) -> Plan:
        """Return the plan for these parameters; the same on every rank. Nothing is sent."""
        recipe = self._recipe if recipe is None else recipe
        params = params_of(groups)
        specs = [spec.encoded(self._config.wire or "") for spec in read_specs(groups, trainable)]
        wanted = self._config.bucket_mb
        itemsize = max((param.element_size() for param in params), default=4)
        if any(spec.wire and spec.trainable for spec in specs):  # sizes are of what travels
            itemsize = min(itemsize, 2)
        total = sum(
            spec.numel * min(itemsize, param.element_size())
            for spec, param in zip(specs, params, strict=True)
            if spec.trainable
        )
        sizes = self.transport.bucket_sizes(total) if wanted is None else BucketSizes(wanted * 1e6)
        return make_plan(
            specs,
            recipe.layouts,
            world_size=self.channel.world_size,
            bucket_numel=max(int(sizes.usual / itemsize), 1),
            end_numel=int(sizes.ends / itemsize) if sizes.ends else None,
            alignment=ALIGNMENT_NBYTES // min((param.element_size() for param in params), default=4),
            order=self._backward_order(params),
            costs=[recipe.costs[spec.group].of(spec) for spec in specs] if self._is_dealt(recipe) else None,
        )

    def _is_dealt(self, recipe: Recipe) -> bool:
        """Whether ranks hold whole parameters."""
        return Layout.WHOLE in recipe.layouts and self.channel.world_size > 1

    def _backward_order(self, params: Sequence[torch.Tensor]) -> list[int]:
        """Return the places of `params` in the order in which backward reaches them: from the last layer to the first.

        The order of the param groups says nothing of it: a group of all norms would complete its bucket only when
        backward ends, and every other bucket would wait behind it.
        """
        position: dict[torch.Tensor, int] = {param: number for number, param in enumerate(self._model.parameters())}
        return sorted(range(len(params)), key=lambda place: position.get(params[place], -1), reverse=True)

    def build(self, groups: ParamGroups, plan: Plan, entries: dict[Piece, Entry], action: str) -> None:
        """Build on all ranks, or raise on all: a rank may be refused a parameter that others do not hold."""
        attempt(self.channel, action, lambda: self._build_local(groups, plan, entries))
        self._connect(groups, plan)

    def _build_local(self, groups: ParamGroups, plan: Plan, entries: dict[Piece, Entry]) -> None:
        """Memory and local optimizers for a plan; `entries` are the state of its pieces, and emptied."""
        self.plan, self._facts = plan, Facts(map(str, plan.params))
        self._trainable = [spec.trainable for spec in plan.params]
        self._memory = FlatMemory(plan, params_of(groups), self.channel.rank)
        self._together = self.transport.step_order(len(plan.buckets))
        made = make_step(self._recipe, self._config, plan, self._memory, self._together, groups)
        self.share, self._streams, self._together = made.share, made.streams, made.together
        self.share.build(groups, entries, self._counted)

    def _connect(self, groups: ParamGroups, plan: Plan) -> None:
        """What talks to other ranks. Its messages are told apart by counting, so all ranks get here, or none."""
        params = params_of(groups)
        round_all(self._memory.buckets)  # weights that were never sent; their masters have been taken
        self._preconditions.watch(groups)
        overlap = self._config.gather == "overlap"
        self._gathers = self.transport.range_gathers(self._memory.buckets, ring=not overlap)
        sharded = not self.keeps_gradients
        given = Surroundings(
            self.channel,
            self.transport,
            self.call_order,
            self._model,
            self._memory,
            params,
            self._config.reduce_dtype,
            wide=sharded and self.share.masters is not None,
            # What a class of somebody else's keeps of a gradient cannot be known; and "keep" needs shards for a moment.
            reuse_memory=sharded and is_of_torch(self._recipe.optimizer_class),
        )
        self.gradients: Gradients = ShardedGradients(given) if sharded else ReplicatedGradients(given)
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

    # -- another plan -------------------------------------------------------------------------------------------------
    #
    # First what may be refused, of which nothing is left if a rank raises: the class sees tensors without storage, and
    # state travels into memory of its own. Then memory moves, bucket by bucket, because there is no room for a second
    # model: from there on there is no way back, and whatever fails closes the optimizer on all ranks.

    def try_plan(self, groups: ParamGroups, trainable: Sequence[bool], recipe: Recipe | None = None) -> Next:
        """A plan for what has changed; raises on all ranks if one of them cannot have it. Nothing is changed."""
        wanted = self._recipe if recipe is None else recipe

        def build_without_memory() -> Next:
            self._memory.adopt()
            self.share.check_may_move()
            plan, params = self.plan_for(groups, trainable, wanted), params_of(groups)
            memory = FlatMemory(plan, params, self.channel.rank, stored=False)
            together = self.transport.step_order(len(plan.buckets))
            made = make_step(wanted, self._config, plan, memory, together, groups)
            with no_trace(params[0].device):
                made.share.try_class(groups)
            return Next(plan, wanted)

        return attempt(self.channel, "a new plan", build_without_memory)

    def replan(self, groups: ParamGroups, to: Next, added: Sequence[torch.Tensor] = ()) -> None:
        """Move what changes its holder. Called on all ranks; `added` parameters become what they are on the first."""

        def give_up() -> tuple[Kept, dict[Piece, Entry], Mapping[str, Any]]:
            self.share.check_may_move()  # a step may have been made since it was tried
            kept, entries = self.gradients.kept(), self.share.entries()
            for piece, gradient in kept.by_piece.items():
                entries[piece] = {**entries.get(piece, {}), _GRADIENT: gradient}
            return kept, entries, self.share.counted()

        kept, entries, counted = attempt(self.channel, "a new plan", give_up)
        moved = reshard(self.channel, self.plan, to.plan, entries, "a new plan")
        del entries
        with torch.no_grad():  # the last that ranks wait for: a rank that fails behind it can say so
            self.transport.broadcast(added)
        with self._closing("a new plan", _STATE_IS_LOST):
            self.gradients.hooks.remove()
            self._disconnect()
            gradients = {piece: entry.pop(_GRADIENT) for piece, entry in moved.items() if _GRADIENT in entry}
            buffers = [span_of(bucket.values) for bucket in self._memory.buckets]
            # Nothing holds on to the old buffers but the parameters that have not moved yet: one is free when all of
            # its parameters have left it, so that a new plan takes no second model.
            self._drop_plan()
            self._recipe, self._counted = to.recipe, counted
            self._build_local(groups, to.plan, {piece: moved.pop(piece) for piece in list(moved) if moved[piece]})
            self._connect(groups, to.plan)
            params = params_of(groups)
            move_out([param for param, moves in zip(params, self._trainable, strict=True) if not moves], buffers)
            self.gradients.take_over(Kept(kept.phase, kept.used, gradients))

    def _drop_plan(self) -> None:
        for name in _OF_A_PLAN:
            vars(self).pop(name, None)

    @contextmanager
    def _closing(self, action: str, left: str) -> Iterator[None]:
        """What is done inside cannot be taken back: if it fails on a rank, this optimizer is closed on all of them.

        `left` says what there is then.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
        try:
            self._last_word.agree(Claim(action, failure, Facts()))
        except BaseException as error:
            self.lose(action, left, error)

    def lose(self, action: str, left: str, error: BaseException) -> NoReturn:
        """Nothing is left that could go on."""
        self.lost = (
            f"{action} failed half-way ({type(error).__name__}: {error}). {left}. Call shard(...) again on all ranks, "
            "and load a checkpoint"
        )
        if "gradients" in vars(self):
            self.gradients.hooks.remove()
        self._disconnect()
        self._drop_plan()
        release(self)
        if isinstance(error, Exception):
            raise RuntimeError(f"this optimizer is closed on all ranks: {self.lost}") from error
        raise error

    if not TYPE_CHECKING:  # or every attribute would be one of any type

        def __getattr__(self, name: str) -> Any:
            """Whoever asks for something of a plan when there is none any more hears why."""
            if vars(self).get("lost"):
                raise RuntimeError(f"this optimizer was closed: {self.lost}")
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    # -- state --------------------------------------------------------------------------------------------------------

    def load(
        self, groups: ParamGroups, plan: Plan, entries: Mapping[Piece, Entry], others: Mapping[str, Any]
    ) -> dict[Piece, torch.Tensor]:
        """State that was saved under `plan`; `others` is what was saved beside it. Called on all ranks.

        `groups` have the options that are loaded, and then what the class makes of them. Taken on all ranks or on none.
        Returns the masters that were among it, if none are kept here.
        """
        own = reshard(self.channel, plan, self.plan, entries, "load")
        keeps = self.share.masters is not None
        masters = {} if keeps else {piece: entry[MASTER] for piece, entry in own.items() if MASTER in entry}
        made = attempt(self.channel, "load", lambda: self.prepare_state(groups, own, {}, others))
        self.take_state(made, groups)
        return masters

    def prepare_state(
        self,
        groups: ParamGroups,
        entries: dict[Piece, Entry],
        weights: Mapping[Piece, torch.Tensor],
        others: Mapping[str, Any],
    ) -> Prepared:
        """Make what loaded state is taken by, of this rank's pieces under the plan that is. The class may refuse it:
        nothing is changed but `groups`, and `entries`, which is emptied so that nothing is held twice.
        """
        self._memory.adopt()
        made = self._recipe
        loaded = LoadedByClass(
            made.optimizer_class, made.defaults, groups, made.layouts, self.plan, self._config.master
        )
        counted = loaded.run(self.plan.pieces_of(self.channel.rank), entries, weights, self.share.counted(), others)
        return self.share.prepare(groups, entries, counted)

    def take_state(self, made: Prepared, groups: ParamGroups) -> None:
        """Take what was prepared, on all ranks. No code of the class runs here."""
        with self._closing("load", "The optimizer's state is neither what it was nor what was saved"):
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
            narrow = {number for number in masters if not self._memory.buckets[number].bucket.wire}
            widened = [sum(masters[number].nbytes for number in group if number in narrow) for group in self._together]
            waiting = max(waiting, *widened)
        waiting = min(waiting, sum(self.bucket_nbytes()))
        waiting = max(waiting, *(stepper.temporary_nbytes for stepper in self.share.steppers), 0)
        return sum(self.bucket_nbytes()) + state + gradients + int(waiting) + scratch_nbytes(self._memory.buckets)

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
