"""One plan, and everything that is made from it: memory, this rank's share, gradients, messages; and one step.

    hook -> pass -> (bucket full) transport.reduce          backward
    step -> pass.settle -> share.step -> transport.gather   step
    pre-hook -> gather.finish                               the next forward, with gather="overlap"

When the facts change (a parameter is frozen, a group is added) a new plan is made, and what changes its holder moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardstep.config import ShardConfig
from shardstep.gradients.kept import KeptGradients
from shardstep.gradients.sharded import Gradients, Kept, ShardedGradients, Surroundings
from shardstep.memory.arrival import Arrivals, Readers
from shardstep.memory.flat import FlatMemory
from shardstep.memory.views import ALIGNMENT_NBYTES, move_out, quickly, span_of
from shardstep.owners import check_unowned
from shardstep.planning import Layout, Piece, Plan, make_plan, read_specs
from shardstep.state.audit import Audit
from shardstep.state.handing_over import hand_over
from shardstep.state.resharding import reshard
from shardstep.stepping.average import Average
from shardstep.stepping.by_kernel import ByKernel, can_step
from shardstep.stepping.costs import StepCosts
from shardstep.stepping.entries import Entry
from shardstep.stepping.local_optimizer import check_shapes, is_of_torch
from shardstep.stepping.masters import Masters, has_narrow
from shardstep.stepping.premises import Premises
from shardstep.stepping.rounding import SEED, Rounded
from shardstep.stepping.scaling import Scaling
from shardstep.stepping.share import LocalShare
from shardstep.stepping.two_streams import in_halves, two_streams
from shardstep.wire.agreement import Agreement, Claim, Facts, agree
from shardstep.wire.channel import Channel
from shardstep.wire.choose import open_transport, release
from shardstep.wire.tensors import broadcast_tensors
from shardstep.wire.transport import BucketSizes, Gather
from shardstep.wire.turns import Turn, Turns

ParamGroups = Sequence[dict[str, Any]]

_abandoned: list[Any] = []  # what ranks that went apart left under way
_GRADIENT = "shardstep.gradient"  # a gradient that moves with the state of its piece


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the local optimizers are made."""

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    layouts: Sequence[Layout]  # of each group
    elementwise: Sequence[bool]  # of each group: whether it is, as far as a trial has seen


class Engine:
    """Of one ShardedOptimizer. Its `param_groups` are passed in: a program may change them between any two calls."""

    def __init__(self, model: nn.Module, channel: Channel, recipe: Recipe, config: ShardConfig) -> None:
        self._model, self.channel, self._recipe, self._config = model, channel, recipe, config
        params = list(model.parameters())
        self.transport = open_transport(channel, params, self, ordered_sums=config.ordered_sums)
        self.turns = Turns(channel)
        self.transport.before_waiting(self.turns.check)
        self._agreement = Agreement(channel)
        self._costs = StepCosts(channel, recipe.optimizer_class, recipe.defaults)
        self._premises = Premises(model, has_buffers=config.sync_buffers)
        self._arriving: dict[int, Gather] = {}
        self._arrivals: Arrivals | None = None  # with gather="overlap"
        self._readers = Readers()
        self._audit = None if config.audit is None else Audit(channel)
        self._steps = 0
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
        own = [bucket.own for bucket in self._memory.buckets]
        kernel = self._make_kernel(groups)
        of_torch = is_of_torch(self._recipe.optimizer_class)
        self._streams = two_streams(own, groups) if of_torch and kernel is None else None
        if self._streams is not None:
            self._together = in_halves(self._together)
        masters = self._make_masters(groups)
        decay = self._config.ema
        self.share = LocalShare(
            self._recipe.optimizer_class,
            self._recipe.defaults,
            plan,
            self._memory,
            self._recipe.layouts,
            self._together,
            join=not self.keeps_gradients,
            masters=masters,
            average=None if decay is None else Average(self._memory, decay, masters),
            rounded=Rounded() if self._config.master == "stochastic" else None,
            kernel=kernel,
        )
        self.share.build(groups, entries, self._counted)

    def _make_kernel(self, groups: ParamGroups) -> ByKernel | None:
        recipe, config = self._recipe, self._config
        wanted = config.kernel == "auto" and not self.keeps_gradients
        if not (wanted and can_step(recipe.optimizer_class, recipe.defaults, groups, recipe.layouts)):
            return None
        return ByKernel(recipe.optimizer_class, SEED if config.master == "stochastic" else None)

    def _make_masters(self, groups: ParamGroups) -> Masters | None:
        wanted = self._config.master == "fp32" and has_narrow(params_of(groups))
        return Masters(self._memory) if wanted else None

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
            # What a class of somebody else's keeps of a gradient cannot be known; and "keep" needs shards for a moment.
            reuse_memory=sharded and is_of_torch(self._recipe.optimizer_class),
        )
        self.gradients: Gradients = ShardedGradients(given) if sharded else KeptGradients(given)
        if overlap:
            buckets_of: dict[torch.Tensor, list[int]] = {}
            for number, bucket in enumerate(plan.buckets):
                for segment in bucket.segments:
                    buckets_of.setdefault(params[segment.param], []).append(number)
            self._arrivals = Arrivals(self._model, buckets_of, self.wait_for, self.synchronize, self._readers)

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
        self._forget_arrivals()
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
        self.share.build(groups, reshard(self.channel, plan, self.plan, entries))

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self, groups: ParamGroups, scaling: Scaling | None = None) -> None:
        """Step this rank's share with the mean of all ranks' gradients, and give every rank all of it."""
        self.synchronize()
        self.look(groups)
        self.take_turn(Turn.STEP, groups)
        self.step_together(groups, scaling)

    def look(self, groups: ParamGroups) -> None:
        """Whether this rank can step, before it says that it does."""
        why_not = self._why_not_to_go_on(groups, trainable_of(groups))
        self.turns.premise = self._premises.look(groups, why_not)

    def step_together(self, groups: ParamGroups, scaling: Scaling | None) -> None:
        """All ranks have turned to it."""
        if self.turns.premises_differ or self.turns.followers:
            self.turns.premises_differ = False
            agree(self.channel, Claim("step", self._premises.failure, Facts(self._premises.lines())))
        if self._premises.failure is not None:  # the same on all ranks, or their digests would differ
            raise self._premises.failure
        trainable = trainable_of(groups)
        self._sync_buffers()
        self._look_at_everything(groups)
        changed = trainable != self._trainable
        facts = Facts(map(str, read_specs(groups, trainable))) if changed else self._facts
        failure = self._step_and_send(groups, facts, scaling)
        if self._agreement.is_exchanged_when_read:
            # Now, and on all ranks: later one of them alone may read its weights, and would wait for the others.
            try:
                self._agreement.finish()
            except BaseException:
                self.wait_for(list(self._arriving))  # who catches it goes on with weights that are there
                raise
        if self._arrivals is None or self._arrivals.has_readers_that_do_not_ask or changed or failure is not None:
            self.synchronize()
        else:
            self._arrivals.begin(self._arriving)
        if changed:
            self.replan(groups, trainable)

    def _look_at_everything(self, groups: ParamGroups) -> None:
        """Every few steps, before the weights are stepped: what this step writes hides what was written before."""
        self._steps += 1
        if self._audit is not None and self._steps % (self._config.audit or 1) == 0:
            self._audit.check(self._held(groups), self._premises.all_options(groups))

    def _held(self, groups: ParamGroups) -> dict[str, torch.Tensor]:
        """What is the same on all ranks, by name."""
        names = [spec.name for spec in self.plan.params]
        buffers = self._model.named_buffers() if self._config.sync_buffers else ()
        return {**dict(zip(names, params_of(groups), strict=True)), **dict(buffers)}

    @torch.no_grad()
    def _sync_buffers(self) -> None:
        """Running means and the like follow rank 0.

        DDP does this in forward. Here it would be a collective that nobody sees: an evaluation on rank 0 alone, which
        under DDP goes round the wrapper, would hang.
        """
        if not self._premises.buffers:
            return
        if self.turns.notify is not None:  # rank 0 may be without inputs, and without news
            broadcast_tensors(self.channel, self._premises.buffers, self.turns.source)
        else:
            self.transport.broadcast(self._premises.buffers)

    def _why_not_to_go_on(self, groups: ParamGroups, trainable: Sequence[bool]) -> Exception | None:
        """Parameters that were given other memory lie in the buffers again; or why that cannot be."""
        try:
            self._memory.adopt()
            if trainable != self._trainable:  # what was frozen may belong to another optimizer, too
                check_unowned(groups, self._model)
                check_shapes(self._recipe.optimizer_class, groups, read_specs(groups, trainable))
        except Exception as error:
            return error
        return None

    def take_turn(
        self, turn: Turn, groups: ParamGroups, *, waits: bool = True, told: Mapping[str, Any] | None = None
    ) -> None:
        """Before anything is done with gradients: `turn` says what, and `waits` whether it waits for other ranks.

        Inside Join ranks without inputs are `told` how it is to be done.
        """
        turns = self.turns
        if turns.apart:
            turns.raise_if_apart()
        if turns.notify is not None:
            waits = True  # what a rank does to its own shards alone, those without inputs do to theirs
            if self.gradients.rest:
                self.gradients.make_up_for_a_pass()
            turns.notify()
        try:
            late = self.gradients.settle(turn if waits else None)
        except RuntimeError as error:
            raise self._why_not_to_step() or error from None  # this rank's own reason, if it has one
        if waits or any(late):
            turns.announce(turn)
        if turns.followers:
            self.hand_over_for(turn, groups, told or {})
        if any(late):
            self.take_in(late, groups)

    def take_in(self, late: Sequence[int], groups: ParamGroups) -> None:
        """What came too late to be reduced in its pass, on some rank."""
        self.turns.check()
        if any(flag and not moves for flag, moves in zip(late, self._trainable, strict=True)):
            # Unfrozen since the last step: it has a gradient, and no place in the plan.
            trainable = trainable_of(groups)
            refusal = self._why_not_to_go_on(groups, trainable)
            agree(self.channel, Claim("step", refusal, Facts(map(str, read_specs(groups, trainable)))))
            self.replan(groups, trainable)
        # A new plan may have more parameters, if a group was added; none of them can be late.
        self.gradients.reduce_late([*late, *[0] * (len(self.plan.params) - len(late))])

    def check_not_joined(self, action: str) -> None:
        if self.turns.notify is not None:
            raise RuntimeError(f"{action} inside Join would wait for ranks that have no inputs left: call it outside")

    def hand_over_for(self, turn: Turn, groups: ParamGroups, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inside Join: what ranks without inputs need for `turn`; called on all ranks."""
        turns = self.turns
        if turn is Turn.UNSCALE:
            raise RuntimeError(
                f"a GradScaler cannot go on inside Join when ranks have run out of inputs ({list(turns.followers)}): "
                "there its scale would stand still. Give all ranks the same number of batches, or train in bfloat16"
            )
        return hand_over(self.channel, turns.source, turns.followers, groups, told)

    def _step_and_send(self, groups: ParamGroups, facts: Facts, scaling: Scaling | None) -> Exception | None:
        """One group of buckets is on its way while the next is stepped. Returns what failed on this rank."""
        failure = self._why_not_to_step()
        try:
            self.share.begin(groups, self.gradients.used)
        except Exception as error:  # the others wait for what this rank sends; all raise together at the end
            failure = failure or error
        for gather in self._gathers:
            gather.expect()
        streams = self._streams
        if streams is not None:
            self.gradients.land()  # on the stream that took their memory, before there are two
        with nullcontext() if streams is None else streams:
            for number, buckets in enumerate(self._together):
                with nullcontext() if streams is None else streams.of(number):
                    try:
                        if failure is None:
                            self.share.step(number, self.gradients.of_run, scaling)
                    except Exception as error:
                        failure = error
                    if number + 1 == len(self._together):
                        self._agreement.claim(Claim("step", failure, facts))  # arrives while the last are sent
                    self._send(buckets)
        if not self._together:
            self._agreement.claim(Claim("step", failure, facts))
        if failure is None:
            self.share.end(groups)
        self.gradients.stepped()
        return failure

    def _send(self, buckets: Sequence[int]) -> None:
        if self._gathers:
            sent = {bucket: self._gathers[bucket] for bucket in buckets}
            self.transport.send(list(sent.values()))
            self._arriving.update(sent)

    def switch(self, groups: ParamGroups, mode: str) -> None:
        """`train()` or `eval()` of the class, which may change weights: this rank's share, and then all of it."""
        self._give_all(f"{mode}()", lambda: self.share.switch(groups, mode))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, all ranks' parameters are the average. On all ranks."""
        average = self.share.average
        if average is None:
            raise RuntimeError("there is no average: pass config=ShardConfig(ema=0.999)")
        self._give_all("ema()", average.swap_in)
        try:
            yield
        finally:
            self._give_all("the end of ema()", average.swap_out)

    def _give_all(self, action: str, change: Callable[[], None]) -> None:
        """Change this rank's share, on all ranks, and give it to everyone."""
        self.check_not_joined(action)
        self.synchronize()
        agree(self.channel, Claim(action, None, Facts([action])))
        for gather in self._gathers:
            gather.expect()
        failure = None
        try:
            change()
        except Exception as error:
            failure = error
        self._agreement.claim(Claim(action, failure, self._facts))
        for buckets in self._together:
            self._send(buckets)
        self.synchronize()

    def _why_not_to_step(self) -> Exception | None:
        unsent = [self.plan.params[place].name for place in self.gradients.unsent()]
        if not unsent:
            return None
        return RuntimeError(
            f"{unsent[0]} and {len(unsent) - 1} other parameters have gradients that were never reduced: run the last "
            "backward pass before step() outside no_sync(), and set no param.grad yourself"
        )

    def synchronize(self) -> None:
        """The weights of the last step are complete for all that is done from now on; raises if a rank failed in it."""
        if self._arriving:
            self.wait_for(list(self._arriving))
        if self._agreement.is_open:
            self.turns.check()
            self._agreement.finish()

    def wait_for(self, buckets: Sequence[int]) -> None:
        waiting = [bucket for bucket in buckets if bucket in self._arriving]
        if waiting:
            self.transport.finish([self._arriving[bucket] for bucket in waiting])
            for bucket in waiting:
                del self._arriving[bucket]
            if self._arrivals is not None:
                self._arrivals.landed(waiting)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, groups: ParamGroups) -> None:
        """Let go of the model; raises if a rank failed in the last step."""
        try:
            if not self.turns.apart:
                self.synchronize()
        finally:
            self.let_go(groups)

    def let_go(self, groups: ParamGroups) -> None:
        """As `close`, and waits for nothing but weights: nobody is there to be told of a failure."""
        if self.turns.apart:
            self._forget_arrivals()  # they will not come, and nobody may wait for them
            self._leave_what_may_arrive(groups)
        else:
            self.wait_for(list(self._arriving))
        self.gradients.hooks.remove()
        self._forget_arrivals()
        release(self)

    def _forget_arrivals(self) -> None:
        if self._arrivals is not None:
            self._arrivals.remove()
            self._arrivals = None

    def _leave_what_may_arrive(self, groups: ParamGroups) -> None:
        """Messages of a step that not all ranks made may still come, and must find memory that is nobody else's."""
        move_out(params_of(groups), [span_of(bucket.values) for bucket in self._memory.buckets])
        _abandoned.append((self._memory, self._gathers, self.gradients))

    # -- what it takes ------------------------------------------------------------------------------------------------

    def bucket_nbytes(self) -> list[int]:
        return [bucket.values.nbytes for bucket in self._memory.buckets]

    def predicted_nbytes(self) -> int:
        """What this rank needs at most between two steps, beside activations: by the plan, not by what was measured."""
        state = sum(
            value.nbytes
            for entry in self.share.local.state.values()
            for value in entry.values()
            if isinstance(value, torch.Tensor)
        )
        gradients = sum(bucket.own.nbytes for bucket in self._memory.buckets)
        waiting = self.transport.waiting_nbytes(max(self.bucket_nbytes(), default=0))
        state += sum(slot.nbytes for slot in self.share.slots)
        if self.share.masters is not None:
            # What is stepped together has its gradients in fp32 for that time, when none are waiting.
            masters = self.share.masters.values
            widened = [sum(masters[number].nbytes for number in group if number in masters) for group in self._together]
            waiting = max(waiting, *widened)
        return sum(self.bucket_nbytes()) + state + gradients + int(min(waiting, sum(self.bucket_nbytes())))


def params_of(groups: ParamGroups) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]


def trainable_of(groups: ParamGroups) -> list[bool]:
    with quickly():
        return [bool(param.requires_grad) for group in groups for param in group["params"]]
