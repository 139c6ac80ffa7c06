"""One step: gradients are settled, this rank steps its part of the weights, and all ranks get all of them.

    hook -> pass -> (bucket full) transport.reduce                backward
    step -> pass.settle -> local_step.step -> weights.send        step
    pre-hook -> weights.wait_for                                  the next forward, with gather="overlap"

What a step works with is a Runtime (runtime.py), made for a plan (build.py) and replaced by another (replan.py).
"""

from __future__ import annotations

import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn

from shardstep.comm.agreement import Claim, Facts, agree, attempt
from shardstep.comm.call_order import Call
from shardstep.comm.channel import Channel
from shardstep.comm.choose import release
from shardstep.comm.comm_timing import CommTiming
from shardstep.comm.tensors import broadcast_tensors
from shardstep.config import ShardConfig
from shardstep.engine.build import Parts, connect, make_parts, open_context, plan_for
from shardstep.engine.context import ParamGroups, Recipe, params_of, trainable_of
from shardstep.engine.registry import check_unowned
from shardstep.engine.replan import NextPlan, build_from, leave, move_state, settle_in, try_plan
from shardstep.engine.runtime import Runtime
from shardstep.engine.step_timing import HALF_STEPPED, REASON
from shardstep.engine.validation import check_apart, check_lookups, check_parameters
from shardstep.optimizers.local_optimizer import check_shapes
from shardstep.params.compiled import compile_in_regions
from shardstep.params.profiler_ranges import is_profiled, named
from shardstep.params.views import move_out, span_of
from shardstep.params.weight_arrival import WeightArrivals
from shardstep.planning import read_specs
from shardstep.state.audit import Audit
from shardstep.state.join_sync import hand_over
from shardstep.state.saved_state import SavedState
from shardstep.stepping.masters import cut_masters
from shardstep.stepping.steppers import Scaling

_abandoned: list[Any] = []  # what diverged ranks have left in flight
_STATE_IS_LOST = "The model has the weights of the last step, and the optimizer's state is lost"


class Engine:
    """The calls that all ranks make together. One per ShardedOptimizer.

    Its `param_groups` are passed in: a program may change them between any two calls.
    """

    def __init__(self, model: nn.Module, channel: Channel, config: ShardConfig) -> None:
        self.context = open_context(model, channel, config, owner=self)
        self._runtime: Runtime | None = None
        self.lost = ""  # why there is no Runtime any more: what failed, and could not be taken back
        self.keeps_gradients = config.gradients == "keep"
        self.call_order = self.context.call_order
        self.saved = SavedState()
        self.steps = 0
        self.timing: CommTiming | None = None  # of the last block that was measured
        self._audit = None if config.audit is None else Audit(channel)

    # -- the plan, and everything that is made from it ----------------------------------------------------------------

    @property
    def runtime(self) -> Runtime:
        """The plan and everything made from it; raises if the optimizer was closed by a failure."""
        if self._runtime is None:
            raise RuntimeError(f"this optimizer was closed: {self.lost}")
        return self._runtime

    def start(self, recipe: Recipe, groups: ParamGroups, given: Mapping[int, torch.Tensor]) -> None:
        """Build the first Runtime on all ranks, or raise on all: a rank may be refused a parameter that others do not
        hold. fp32 master weights begin with the values `given`, by the place of the parameter."""
        channel = self.context.channel
        plan = plan_for(self.context, recipe, groups, trainable_of(groups))
        masters = cut_masters(given, params_of(groups), plan, channel.rank, self.context.transport.broadcast)

        def build_alone() -> Parts:
            parts = make_parts(self.context, recipe, plan, groups)
            parts.local_step.build(groups, masters, {})
            return parts

        self._runtime = connect(self.context, attempt(channel, "shard(...)", build_alone), groups)

    def try_plan(self, groups: ParamGroups, trainable: Sequence[bool], recipe: Recipe | None = None) -> NextPlan:
        """Return a plan for what has changed; raise on all ranks if one of them cannot have it. Nothing is changed."""
        return try_plan(self.context, self.runtime, groups, trainable, recipe)

    def replan(self, groups: ParamGroups, to: NextPlan, added: Sequence[torch.Tensor] = ()) -> None:
        """Replace the Runtime by one of another plan. On all ranks; `added` parameters become what the first has."""
        moved = move_state(self.context, self.runtime, to, added)
        try:
            with self.closing("a new plan", _STATE_IS_LOST):
                buffers = leave(self.runtime)
                self._runtime = None  # it holds the memory that parameters move out of
                self._runtime = build_from(self.context, to, groups, moved)
                settle_in(self.runtime, moved, buffers)
        finally:
            del moved  # the traceback of an error would keep it

    @contextmanager
    def closing(self, action: str, left: str) -> Iterator[None]:
        """What is done inside cannot be taken back: if it fails on a rank, this optimizer is closed on all of them.

        `left` says what there is then.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            traceback.clear_frames(error.__traceback__)  # what was half built there would live as long as the error
        try:
            self.context.final_agreement.agree(Claim(action, failure, Facts()))
        except BaseException as error:
            self.lose(action, left, error)

    def lose(self, action: str, left: str, error: BaseException) -> NoReturn:
        """Close this optimizer: nothing is left that could go on."""
        self.lost = (
            f"{action} failed half-way ({type(error).__name__}: {error}). {left}. Call shard(...) again on all ranks, "
            "and load a checkpoint"
        )
        if self._runtime is not None:
            leave(self._runtime)
            self._runtime = None
        release(self)
        if isinstance(error, Exception):
            raise RuntimeError(f"this optimizer is closed on all ranks: {self.lost}") from error
        raise error

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the model in regions of about one bucket: between them weights arrive and gradients leave."""
        me = weakref.ref(self)

        def arrivals() -> WeightArrivals | None:
            engine = me()
            runtime = None if engine is None else engine._runtime  # None, too, while a new plan is made
            return None if runtime is None else runtime.weights.arrivals

        self.synchronize()
        self.context.readers.in_regions = True
        nbytes = self.runtime.bucket_nbytes()
        sizes = (max(nbytes), min(nbytes[0], max(nbytes))) if nbytes and self.context.channel.world_size > 1 else None
        compile_in_regions(self.context.model, arrivals, sizes, options)

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self, groups: ParamGroups, scaling: Scaling | None = None) -> None:
        """Step this rank's part of the weights with the mean gradients, and give every rank all weights."""
        self._wait_for_last_step()
        trainable = self.read_preconditions(groups)
        self.announce_call(Call.STEP, groups)
        self.step_together(groups, scaling, trainable)

    def _wait_for_last_step(self) -> None:
        """Wait for its weights. In a function of its own: a variable of `step` would hold an old plan's memory."""
        weights = self.runtime.weights
        if weights.in_flight or weights.failure is not None:
            weights.synchronize()

    def read_preconditions(self, groups: ParamGroups) -> tuple[bool, ...]:
        """Find whether this rank can step, before it tells the others that it does. Returns which parameters train."""
        runtime, trainable = self.runtime, trainable_of(groups)
        changes = []
        if trainable != runtime.trainable:
            rows = zip(runtime.plan.params, runtime.trainable, trainable, strict=True)
            changes = [f"{spec.name}.requires_grad = {now}" for spec, before, now in rows if before != now]
        refusal = self._find_refusal(groups, trainable)
        self.call_order.precondition = self.context.preconditions.look(groups, refusal, changes)
        return trainable

    def _find_refusal(self, groups: ParamGroups, trainable: Sequence[bool]) -> Exception | None:
        """Make parameters that were given other memory views of the buffers again; or return why that cannot be."""
        context, runtime = self.context, self.runtime
        try:
            runtime.memory.adopt()
            if trainable != runtime.trainable:  # what was frozen may belong to another optimizer, too
                check_unowned(groups, context.model)
                check_parameters(groups, allow_mixed_dtypes=True)
                check_apart(groups, context.model)
                if context.channel.world_size > 1:
                    check_lookups(context.model, groups)
                check_shapes(runtime.recipe.optimizer_class, groups, read_specs(groups, trainable))
        except Exception as error:
            return error
        return None

    def step_together(self, groups: ParamGroups, scaling: Scaling | None, trainable: tuple[bool, ...]) -> None:
        """Step. All ranks have announced it."""
        preconditions = self.context.preconditions
        if self.call_order.preconditions_differ or self.call_order.followers:
            self.call_order.preconditions_differ = False
            agree(self.context.channel, Claim("step", preconditions.failure, Facts(preconditions.lines())))
        if preconditions.failure is not None:  # the same on all ranks, or their digests would differ
            raise preconditions.failure
        # Before a weight has moved: a new plan may be refused.
        planned = None if trainable == self.runtime.trainable else self.try_plan(groups, trainable)
        if preconditions.buffers:
            self._sync_buffers(preconditions.buffers)
        self._begin_step(groups)
        failure = self._step_and_send(groups, scaling)
        self.runtime.weights.deliver(now=planned is not None or failure is not None)
        if planned is not None:
            self.replan(groups, planned)

    @torch.no_grad()
    def _sync_buffers(self, buffers: list[torch.Tensor]) -> None:
        """Make running means and the like those of rank 0.

        DDP does this in forward. Here it would be a collective that nobody sees: an evaluation on rank 0 alone, which
        under DDP goes round the wrapper, would hang.
        """
        if self.call_order.notify is not None:  # rank 0 may be without inputs, and without news
            broadcast_tensors(self.context.channel, buffers, self.call_order.source)
        else:
            self.context.transport.broadcast(buffers)

    def _begin_step(self, groups: ParamGroups) -> None:
        """Count the step, and audit every few of them, before weights are stepped: a step hides what was written."""
        self.steps += 1
        self.saved.is_new = False
        if self.saved.is_here:
            self.saved.stepped("a step")
        if self._audit is not None and self.steps % (self.context.config.audit or 1) == 0:
            self._audit.check(self._replicated(groups), self.context.preconditions.all_options(groups))

    def _replicated(self, groups: ParamGroups) -> dict[str, torch.Tensor]:
        """Return what must be the same on all ranks, by name."""
        names = [spec.name for spec in self.runtime.plan.params]
        buffers = self.context.model.named_buffers() if self.context.config.sync_buffers else ()
        return {**dict(zip(names, params_of(groups), strict=True)), **dict(buffers)}

    def _step_and_send(self, groups: ParamGroups, scaling: Scaling | None) -> Exception | None:
        """Step the buckets; each group is in flight while the next is stepped. Returns what failed on this rank."""
        runtime = self.runtime
        local_step, gradients, weights = runtime.local_step, runtime.gradients, runtime.weights
        failure = self._why_not_reduced()
        try:
            local_step.begin(groups, gradients.used)
        except Exception as error:  # the others wait for what this rank sends; all raise together at the end
            failure = failure or error
        for gather in weights.gathers:
            gather.expect()
        streams = runtime.streams
        if streams is not None:
            gradients.land()  # on the stream that took their memory, before there are two
        with nullcontext() if streams is None else streams:
            for number, buckets in enumerate(runtime.step_order):
                with nullcontext() if streams is None else streams.of(number):
                    try:
                        if failure is None and not runtime.timing.stepped.issuperset(buckets):
                            step = local_step.step
                            if is_profiled():
                                step = named(runtime.memory.titles.of("step", buckets), step)
                            step(number, gradients.of_run, scaling, gradients.factor)
                    except Exception as error:
                        failure = error
                    if number + 1 == len(runtime.step_order):
                        weights.announce_outcome("step", failure)  # it arrives while the last are sent
                    if weights.gathers:
                        weights.send(buckets)
        if not runtime.step_order:
            weights.announce_outcome("step", failure)
        if failure is None:
            local_step.end(groups)
        gradients.stepped()
        runtime.timing.stepped.clear()
        return failure

    def _why_not_reduced(self) -> Exception | None:
        runtime = self.runtime
        unsent = runtime.gradients.unsent()
        if not unsent:
            return None
        others = f" and of {len(unsent) - 1} other parameters" if len(unsent) > 1 else ""
        return RuntimeError(
            f"the gradients of {runtime.plan.params[unsent[0]].name}{others} were never reduced: run the last backward "
            "pass before step() outside no_sync(), and set no param.grad yourself"
        )

    def synchronize(self) -> None:
        """Return when the weights of the last step are complete for all that is done from now on; raise if a rank
        failed in it."""
        self.runtime.weights.synchronize()

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop the gradients, or make them zero."""
        self.check_not_stepped("zero_grad()")
        self.runtime.gradients.clear(to_none=set_to_none)

    # -- calls that all ranks make ------------------------------------------------------------------------------------

    def announce_call(
        self, call: Call, groups: ParamGroups, *, waits: bool = True, options: Mapping[str, Any] | None = None
    ) -> None:
        """Tell the other ranks which call comes next, and settle the gradients for it.

        `waits`: whether the call waits for other ranks. Inside Join, ranks without inputs get its `options`.
        """
        call_order, runtime = self.call_order, self.runtime
        if call_order.apart:
            call_order.raise_if_diverged()
        if call in runtime.timing.refused_calls:
            raise RuntimeError(REASON.format(what="clipping, a norm or a GradScaler"))
        if call is Call.REPORT:
            self.check_not_stepped("report()")
        if call_order.notify is not None:
            waits = True  # what a rank does to its own shards alone, those without inputs do to theirs
            if runtime.gradients.rest:
                runtime.gradients.make_up_for_a_pass()
            call_order.notify()
        if call is Call.STEP and runtime.weights.gathers:  # what others send when all have announced it finds receives
            self.context.transport.post_receives(runtime.weights.gathers)
            self.context.agreement.expect()
        try:
            late = runtime.gradients.settle(call if waits else None)
        except RuntimeError as error:
            reason = self._why_not_reduced() or error  # this rank's own, if it has one
            raise runtime.timing.explain(reason) from None
        if waits or any(late):
            call_order.announce(call)
        if call_order.followers:
            self.send_options(call, groups, options or {})
        if any(late):
            runtime.timing.check_late_gradients()
            del runtime  # a new plan takes no second model
            self.reduce_late(late, groups)

    def reduce_late(self, late: Sequence[int], groups: ParamGroups) -> None:
        """Reduce the gradients that came too late to be reduced in their pass, on some rank."""
        self.call_order.check()
        if any(flag and not moves for flag, moves in zip(late, self.runtime.trainable, strict=True)):
            # Unfrozen since the last step: it has a gradient, and no place in the plan.
            self.synchronize()  # a new plan forgets what is in flight of the last step
            trainable = trainable_of(groups)
            refusal = self._find_refusal(groups, trainable)
            agree(self.context.channel, Claim("step", refusal, Facts(map(str, read_specs(groups, trainable)))))
            self.replan(groups, self.try_plan(groups, trainable))
        # A new plan may have more parameters, if a group was added; none of them can be late.
        runtime = self.runtime
        runtime.gradients.reduce_late([*late, *[0] * (len(runtime.plan.params) - len(late))])

    def check_not_stepped(self, action: str) -> None:
        """Raise if backward has stepped, and `step` has not given everyone the parameters."""
        if self.runtime.timing.stepped:
            raise RuntimeError(
                f'{action}: with ShardConfig(step="backward") the last backward pass has stepped already, and ranks '
                f"hold different parameters until step() was called. {HALF_STEPPED}"
            )

    def check_not_joined(self, action: str) -> None:
        if self.call_order.notify is not None:
            raise RuntimeError(f"{action} inside Join would wait for ranks that have no inputs left: call it outside")

    def check_not_accumulating(self, action: str) -> None:
        """Raise where a pass inside no_sync() has left gradients: made up for, a pass would be a failed one."""
        self.runtime.gradients.hooks.recover()  # what is left of a pass that raised goes with that
        if self.runtime.gradients.unsent():
            raise RuntimeError(
                f"{action} between passes inside no_sync(): call it before them, or after the pass that ends them"
            )

    def send_options(self, call: Call, groups: ParamGroups, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inside Join, give ranks without inputs what they need for `call`, and return it. On all ranks."""
        call_order = self.call_order
        if call is Call.UNSCALE:
            followers = list(call_order.followers)
            raise RuntimeError(
                f"a GradScaler cannot go on inside Join when ranks have run out of inputs ({followers}): "
                "there its scale would stand still. Give all ranks the same number of batches, or train in bfloat16"
            )
        return hand_over(self.context.channel, call_order.source, call_order.followers, groups, options)

    def change_weights(self, action: str, change: Callable[[], None], half_way: str = "") -> None:
        """Change this rank's part of the weights, on all ranks, and give all ranks all of them.

        If that fails on a rank the optimizer is closed, unless nothing is changed then; `half_way` says what is.
        """
        self.check_not_joined(action)
        weights = self.runtime.weights
        weights.synchronize()
        weights.agree_to_send(action)
        try:
            weights.change(action, change)
        except BaseException as error:
            if not half_way:
                raise
            self.lose(action, half_way, error)

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self, groups: ParamGroups) -> None:
        """Let go of the model; raises if a rank failed in the last step."""
        if self.lost:
            return
        try:
            if not self.call_order.apart:
                self.synchronize()
        finally:
            self.let_go(groups)

    def let_go(self, groups: ParamGroups) -> None:
        """Let go of the model, and wait for nothing but weights: no failure is raised."""
        runtime = self.runtime
        if self.call_order.apart:
            runtime.weights.stop_watching()  # they will not come, and nobody may wait for them
            # Messages of a step that not all ranks made may still come, and must find memory that is nobody else's.
            move_out(params_of(groups), [span_of(bucket.values) for bucket in runtime.memory.buckets])
            _abandoned.append((runtime.memory, runtime.weights.gathers, runtime.gradients))
        else:
            runtime.weights.wait_before_closing()
        self.detach()
        release(self)

    def detach(self) -> None:
        """Make the model what it was before it was sharded, but for where its parameters lie."""
        self.runtime.detach()
