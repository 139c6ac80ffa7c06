"""One step: gradients settled, this rank's share stepped, and all of it given to everyone.

    hook -> pass -> (bucket full) transport.reduce          backward
    step -> pass.settle -> share.step -> transport.gather   step
    pre-hook -> gather.finish                               the next forward, with gather="overlap"

What a step works with is made in planned.py.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from shardstep.comm.agreement import Agreement, Claim, Facts, agree, attempt
from shardstep.comm.call_order import Call
from shardstep.comm.channel import Channel
from shardstep.comm.choose import release
from shardstep.comm.comm_timing import CommTiming, Sender
from shardstep.comm.control import Poll, open_poll
from shardstep.comm.tensors import broadcast_tensors
from shardstep.config import ShardConfig
from shardstep.engine.make_step import Recipe
from shardstep.engine.planned import ParamGroups, Planned, params_of, trainable_of
from shardstep.engine.registry import check_unowned
from shardstep.engine.report import Group, Report, exchange, holding_of, sent_by_ddp
from shardstep.engine.step_in_backward import HALF_STEPPED, REASON
from shardstep.engine.validation import check_apart, check_lookups, check_parameters
from shardstep.optimizers.local_optimizer import check_shapes
from shardstep.params.compiled import compile_in_regions
from shardstep.params.pending_gathers import VERDICT, PendingGathers, books
from shardstep.params.profiler_ranges import is_profiled, named
from shardstep.params.views import move_out, span_of
from shardstep.params.weight_arrival import Readers, WeightArrivals
from shardstep.planning import Piece, Plan, read_specs
from shardstep.state.audit import Audit
from shardstep.state.join_sync import hand_over
from shardstep.state.saved_state import SavedState
from shardstep.stepping.element_state import Entry
from shardstep.stepping.local_step import Prepared
from shardstep.stepping.masters import Average, make_exact
from shardstep.stepping.steppers import Scaling

_abandoned: list[Any] = []  # what ranks that went apart left under way


class Engine(Planned):
    """Of one ShardedOptimizer. Its `param_groups` are passed in: a program may change them between any two calls."""

    def __init__(self, model: nn.Module, channel: Channel, recipe: Recipe, config: ShardConfig) -> None:
        super().__init__(model, channel, recipe, config)
        self._sender: Sender = self.transport  # or one that is watched
        self._watch: CommTiming | None = None  # the last one, when it is over
        self._agreement = Agreement(channel)
        self._open = PendingGathers()
        self._claimed_by = 0  # the thread that made the last claim of `_agreement`
        self._failure: BaseException | None = None  # what became of it, until that thread was told
        self._debt: tuple[Poll, Average] | None = None  # the weights are still averages: ema() was left by an error
        self._arrivals: WeightArrivals | None = None  # with gather="overlap", or while there is a debt
        self._readers = Readers()
        self._audit = None if config.audit is None else Audit(channel)
        self._steps = 0
        self.saved = SavedState()

    def _connected(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        if self._config.gather == "overlap":
            self._watch_weights()

    def _watch_weights(self) -> None:
        """Weights may be in flight from now on: whatever reads one waits for it."""
        buckets_of: dict[torch.Tensor, list[int]] = {}
        for number, bucket in enumerate(self.plan.buckets):
            for segment in bucket.segments:
                buckets_of.setdefault(self._params[segment.param], []).append(number)
        self._arrivals = WeightArrivals(self._model, buckets_of, self.wait_for, self.wait_for_all, self._readers)

    def _disconnect(self) -> None:
        self._forget_arrivals()
        self._open.forget()  # none, unless what was under way has failed half-way
        self._debt = None
        self._agreement.is_open = False

    def compile(self, options: Mapping[str, Any]) -> None:
        """Compile the model in regions of about one bucket: between them weights arrive and gradients leave."""
        me = weakref.ref(self)

        def weights() -> WeightArrivals | None:
            engine = me()
            return None if engine is None else engine._arrivals

        self.synchronize()
        self._readers.in_regions = True
        nbytes = self.bucket_nbytes()
        sizes = (max(nbytes), min(nbytes[0], max(nbytes))) if nbytes and self.channel.world_size > 1 else None
        compile_in_regions(self._model, weights, sizes, options)

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self, groups: ParamGroups, scaling: Scaling | None = None) -> None:
        """Step this rank's share with the mean of all ranks' gradients, and give every rank all of it."""
        self.synchronize()
        trainable = self.look(groups)
        self.announce_call(Call.STEP, groups)
        self.step_together(groups, scaling, trainable)

    def look(self, groups: ParamGroups) -> list[bool]:
        """Whether this rank can step, before it says that it does. Returns which parameters train."""
        trainable = trainable_of(groups)
        changes = []
        if trainable != self._trainable:
            rows = zip(self.plan.params, self._trainable, trainable, strict=True)
            changes = [f"{spec.name}.requires_grad = {now}" for spec, before, now in rows if before != now]
        self.call_order.precondition = self._preconditions.look(
            groups, self._why_not_to_go_on(groups, trainable), changes
        )
        return trainable

    def step_together(self, groups: ParamGroups, scaling: Scaling | None, trainable: list[bool]) -> None:
        """All ranks have turned to it."""
        if self.call_order.preconditions_differ or self.call_order.followers:
            self.call_order.preconditions_differ = False
            agree(self.channel, Claim("step", self._preconditions.failure, Facts(self._preconditions.lines())))
        if self._preconditions.failure is not None:  # the same on all ranks, or their digests would differ
            raise self._preconditions.failure
        # Before a weight has moved: a new plan may be refused.
        planned = None if trainable == self._trainable else self.try_plan(groups, trainable)
        self._sync_buffers()
        self._look_at_everything(groups)
        failure = self._step_and_send(groups, scaling)
        if self._agreement.is_exchanged_when_read:
            # Now, and on all ranks: later one of them alone may read its weights, and would wait for the others.
            try:
                self._hear([VERDICT])
            except BaseException:
                self.wait_for(list(self._open))  # who catches it goes on with weights that are there
                raise
        if self._arrivals is None or self._arrivals.has_readers_that_do_not_ask or planned or failure is not None:
            self.synchronize()
        else:
            with books:  # another thread may have waited for some of them already
                self._arrivals.begin(list(self._open))
        if planned is not None:
            self.replan(groups, planned)

    def _look_at_everything(self, groups: ParamGroups) -> None:
        """Every few steps, before the weights are stepped: what this step writes hides what was written before."""
        self._steps += 1
        self.saved.is_new = False
        if self.saved.is_here:
            self.saved.stepped("a step")
        if self._audit is not None and self._steps % (self._config.audit or 1) == 0:
            self._audit.check(self._held(groups), self._preconditions.all_options(groups))

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
        if not self._preconditions.buffers:
            return
        if self.call_order.notify is not None:  # rank 0 may be without inputs, and without news
            broadcast_tensors(self.channel, self._preconditions.buffers, self.call_order.source)
        else:
            self.transport.broadcast(self._preconditions.buffers)

    def _why_not_to_go_on(self, groups: ParamGroups, trainable: Sequence[bool]) -> Exception | None:
        """Parameters that were given other memory lie in the buffers again; or why that cannot be."""
        try:
            self._memory.adopt()
            if trainable != self._trainable:  # what was frozen may belong to another optimizer, too
                check_unowned(groups, self._model)
                check_parameters(groups, allow_mixed_dtypes=True)
                check_apart(groups, self._model)
                if self.channel.world_size > 1:
                    check_lookups(self._model, groups)
                check_shapes(self._recipe.optimizer_class, groups, read_specs(groups, trainable))
        except Exception as error:
            return error
        return None

    def announce_call(
        self, turn: Call, groups: ParamGroups, *, waits: bool = True, told: Mapping[str, Any] | None = None
    ) -> None:
        """Before anything is done with gradients: `turn` says what, and `waits` whether it waits for other ranks.

        Inside Join ranks without inputs are `told` how it is to be done.
        """
        call_order = self.call_order
        if call_order.apart:
            call_order.raise_if_diverged()
        if self._in_backward is not None and turn is not Call.STEP:
            if turn is not Call.REPORT:
                raise RuntimeError(REASON.format(what="clipping, a norm or a GradScaler"))
            self.check_not_stepped("report()")
        if call_order.notify is not None:
            waits = True  # what a rank does to its own shards alone, those without inputs do to theirs
            if self.gradients.rest:
                self.gradients.make_up_for_a_pass()
            call_order.notify()
        try:
            late = self.gradients.settle(turn if waits else None)
        except RuntimeError as error:
            reason = self._why_not_to_step() or error  # this rank's own, if it has one
            if self._in_backward is not None:
                reason = RuntimeError(f"{reason}. {HALF_STEPPED}")
            raise reason from None
        if waits or any(late):
            call_order.announce(turn)
        if call_order.followers:
            self.hand_over_for(turn, groups, told or {})
        if any(late):
            if self._in_backward is not None and trainable_of(groups) == self._trainable:
                raise RuntimeError(REASON.format(what="a gradient that comes after its bucket was reduced"))
            self.take_in(late, groups)

    def take_in(self, late: Sequence[int], groups: ParamGroups) -> None:
        """What came too late to be reduced in its pass, on some rank."""
        self.call_order.check()
        if any(flag and not moves for flag, moves in zip(late, self._trainable, strict=True)):
            # Unfrozen since the last step: it has a gradient, and no place in the plan.
            self.synchronize()  # a new plan forgets what is open of the last step
            trainable = trainable_of(groups)
            refusal = self._why_not_to_go_on(groups, trainable)
            agree(self.channel, Claim("step", refusal, Facts(map(str, read_specs(groups, trainable)))))
            self.replan(groups, self.try_plan(groups, trainable))
        # A new plan may have more parameters, if a group was added; none of them can be late.
        self.gradients.reduce_late([*late, *[0] * (len(self.plan.params) - len(late))])

    def check_not_joined(self, action: str) -> None:
        if self.call_order.notify is not None:
            raise RuntimeError(f"{action} inside Join would wait for ranks that have no inputs left: call it outside")

    def check_not_accumulating(self, action: str) -> None:
        """Raise where a pass inside no_sync() has left gradients: made up for, a pass would be a failed one."""
        self.gradients.hooks.recover()  # what is left of a pass that raised goes with that
        if self.gradients.unsent():
            raise RuntimeError(
                f"{action} between passes inside no_sync(): call it before them, or after the pass that ends them"
            )

    def hand_over_for(self, turn: Call, groups: ParamGroups, told: Mapping[str, Any]) -> Mapping[str, Any]:
        """Inside Join: what ranks without inputs need for `turn`; called on all ranks."""
        call_order = self.call_order
        if turn is Call.UNSCALE:
            followers = list(call_order.followers)
            raise RuntimeError(
                f"a GradScaler cannot go on inside Join when ranks have run out of inputs ({followers}): "
                "there its scale would stand still. Give all ranks the same number of batches, or train in bfloat16"
            )
        return hand_over(self.channel, call_order.source, call_order.followers, groups, told)

    def _step_and_send(self, groups: ParamGroups, scaling: Scaling | None) -> Exception | None:
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
                        if failure is None and not self._is_stepped(buckets):
                            step = self.share.step
                            if is_profiled():
                                step = named(self._memory.titles.of("step", buckets), step)
                            step(number, self.gradients.of_run, scaling, self.gradients.factor)
                    except Exception as error:
                        failure = error
                    if number + 1 == len(self._together):
                        self._claim(Claim("step", failure, self._facts))  # arrives while the last are sent
                    self._send(buckets)
        if not self._together:
            self._claim(Claim("step", failure, self._facts))
        if failure is None:
            self.share.end(groups)
        self.gradients.stepped()
        if self._in_backward is not None:
            self._in_backward.done()
        return failure

    def _is_stepped(self, buckets: Sequence[int]) -> bool:
        return self._in_backward is not None and self._in_backward.stepped.issuperset(buckets)

    def _send(self, buckets: Sequence[int]) -> None:
        if self._gathers:
            sent = {bucket: self._gathers[bucket] for bucket in buckets}
            send = self._sender.send
            if is_profiled():
                send = named(self._memory.titles.of("gather", buckets), send)
            send(list(sent.values()))
            self._open.update(sent)

    def switch(self, groups: ParamGroups, mode: str) -> None:
        """`train()` or `eval()` of the class, which may change weights: this rank's share, and then all of it."""
        self._give_all(f"{mode}()", lambda: self.share.switch(groups, mode), "Weights may be switched in part")

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, all ranks' parameters are the average. On all ranks."""
        average = self.share.average
        if average is None:
            raise RuntimeError("there is no average: pass config=ShardConfig(ema=0.999)")
        self.check_not_joined("ema()")
        self.check_not_stepped("ema()")
        if self._in_backward is not None:
            self._in_backward.paused = True
        is_left_by_error = True
        try:
            self._give_all("ema()", average.swap_in)
            yield
            is_left_by_error = False
        finally:
            self._leave(average, is_left_by_error)
            if self._in_backward is not None:
                self._in_backward.paused = False

    def _leave(self, average: Average, is_left_by_error: bool) -> None:
        """The weights become what they were. A rank with an error does not wait for the others before it raises.

        They hear of it when they leave, and then no rank moves weights: all do when they next read one, or call
        anything that needs them. Until then parameters are as if they were in flight.
        """
        if self.channel.world_size > 1:
            poll = open_poll(self.channel, lambda record: "leave ema()")
            with suppress(Exception) if is_left_by_error else nullcontext():  # that error says why
                poll.ask(bytes([is_left_by_error]), soon=True)
            if is_left_by_error or poll.answer().any[0]:
                self._debt = (poll, average)
                if self._arrivals is None:
                    self._watch_weights()
                assert self._arrivals is not None, "made just now"
                with books:
                    self._open.update(dict.fromkeys(range(len(self.plan.buckets))))
                    self._arrivals.begin(list(self._open))
                return
        left = "Some weights may be averages"
        try:
            self._give_all("the end of ema()", average.swap_out, left)
        except BaseException as error:
            if not self.lost:  # refused before anything was changed: all of them are averages
                self.lose("the end of ema()", left, error)
            raise

    def load(
        self, groups: ParamGroups, plan: Plan, entries: Mapping[Piece, Entry], others: Mapping[str, Any]
    ) -> dict[Piece, torch.Tensor]:
        masters = super().load(groups, plan, entries, others)
        if self.share.masters is None:
            poll = open_poll(self.channel, lambda record: "load masters" if record[0] else "load no masters")
            poll.ask(bytes([bool(masters)]))
            if any(poll.answer().any):
                exact = partial(make_exact, self._memory, masters)
                self._give_all("load", exact, "Some weights may be what their masters say")
        return masters

    def take_state(self, made: Prepared, groups: ParamGroups) -> None:
        super().take_state(made, groups)
        self.saved.loaded()

    def take_weights(self, weights: Mapping[Piece, torch.Tensor]) -> None:
        """This rank's pieces become these values, and all ranks get them. On all ranks."""
        self._give_all("load", lambda: self._take(weights), "Weights may be loaded in part")

    @torch.no_grad()
    def _take(self, weights: Mapping[Piece, torch.Tensor]) -> None:
        for bucket in self._memory.buckets:
            for piece, offset in bucket.placed:
                if piece in weights:
                    bucket.own[offset : offset + piece.numel].copy_(weights[piece])

    def _give_all(self, action: str, change: Callable[[], None], half_way: str = "") -> None:
        """Change this rank's share, on all ranks, and give it to everyone.

        If that fails on a rank the optimizer is closed, unless nothing is changed then; `half_way` says what is.
        """
        self.check_not_joined(action)
        self.synchronize()
        self._agree_to_give(action)
        try:
            self._change_and_send(action, change)
            self._note_claim()
            self.synchronize()
        except BaseException as error:
            if not half_way:
                raise
            self.lose(action, half_way, error)

    def _agree_to_give(self, action: str) -> None:
        attempt(self.channel, action, lambda: self._memory.adopt(), [action])

    def _change_and_send(self, action: str, change: Callable[[], None]) -> None:
        for gather in self._gathers:
            gather.expect()
        failure: BaseException | None = None
        try:
            change()
        except BaseException as error:
            failure = error
        self._agreement.claim(Claim(action, failure, self._facts))
        for buckets in self._together:
            self._send(buckets)

    def _why_not_to_step(self) -> Exception | None:
        unsent = [self.plan.params[place].name for place in self.gradients.unsent()]
        if not unsent:
            return None
        others = f" and of {len(unsent) - 1} other parameters" if len(unsent) > 1 else ""
        return RuntimeError(
            f"the gradients of {unsent[0]}{others} were never reduced: run the last backward pass before step() "
            "outside no_sync(), and set no param.grad yourself"
        )

    def synchronize(self) -> None:
        """The weights of the last step are complete for all that is done from now on; raises if a rank failed in it."""
        self._hear(list(self._open))

    def _claim(self, claim: Claim) -> None:
        self._agreement.claim(claim)
        self._note_claim()

    def _note_claim(self) -> None:
        self._claimed_by, self._failure = threading.get_ident(), None
        self._open[VERDICT] = None

    def _hear(self, buckets: Sequence[int]) -> None:
        """Wait for these, and raise if a rank failed in what was claimed last: all had turned to it, so all have told.

        The thread that claimed it is told in any case, also if another one was told before.
        """
        self._wait(buckets)
        failure = self._failure
        if failure is not None:
            if self._claimed_by == threading.get_ident():
                self._failure = None
            raise failure

    def wait_for_all(self) -> None:
        """For who reads weights, in whatever thread."""
        if self._claimed_by == threading.get_ident():
            self.synchronize()
        else:
            self.wait_for(list(self._open))

    def wait_for(self, buckets: Sequence[int]) -> None:
        """For who reads weights of these buckets: how the ranks fared is not asked."""
        needed = [bucket for bucket in buckets if bucket in self._open and bucket != VERDICT]
        if needed:  # it is asked before every module's forward
            self._wait(needed)

    def _wait(self, buckets: Sequence[int]) -> None:
        if not self._open:
            return
        if self._debt is not None:
            buckets = list(self._open)  # they come together
        self._open.wait_for(buckets, self._finish, None if self._arrivals is None else self._arrivals.landed)
        if self._arrivals is not None and self._config.gather != "overlap":
            self._forget_arrivals()

    def _finish(self, buckets: Sequence[int], gathers: Sequence[Any]) -> None:
        if self._debt is not None:
            poll, average = self._debt
            if poll.is_open:
                poll.answer()
            self._agree_to_give("the end of ema()")
            self._change_and_send("the end of ema()", average.swap_out)
            gathers = [self._open[bucket] for bucket in buckets]
        sent = [gather for gather in gathers if gather is not None]
        if sent:
            finish = self._sender.finish
            if is_profiled():
                waiting = [bucket for bucket in buckets if bucket != VERDICT]
                finish = named(self._memory.titles.of("wait for weights of", waiting), finish)
            finish(sent)
        if VERDICT in buckets or self._debt is not None:
            self._debt = None
            try:
                self._agreement.finish()
            except BaseException as error:
                self._failure = error

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
        """As `close`, and waits for nothing but weights: nobody is there to be told of a failure."""
        if self.call_order.apart:
            self._forget_arrivals()  # they will not come, and nobody may wait for them
            self._leave_what_may_arrive(groups)
        elif self._debt is None:
            self.wait_for(list(self._open))
        self.detach()
        release(self)

    def detach(self) -> None:
        """The model is as it was before it was sharded, but for where its parameters lie."""
        self.gradients.hooks.remove()
        self._forget_arrivals()

    def _forget_arrivals(self) -> None:
        arrivals, self._arrivals = self._arrivals, None
        if arrivals is not None:
            arrivals.remove()

    def _leave_what_may_arrive(self, groups: ParamGroups) -> None:
        """Messages of a step that not all ranks made may still come, and must find memory that is nobody else's."""
        move_out(params_of(groups), [span_of(bucket.values) for bucket in self._memory.buckets])
        _abandoned.append((self._memory, self._gathers, self.gradients))

    # -- what it takes ------------------------------------------------------------------------------------------------

    def report(self, groups: ParamGroups, kinds: Sequence[Group]) -> Report:
        """What all ranks hold and send; `kinds` are of the groups. On all ranks, which wait for each other."""
        self.check_not_joined("report()")
        self.check_not_accumulating("report()")
        self.synchronize()
        at_rest = self.gradients.rest
        self.announce_call(Call.REPORT, groups)  # other ranks may be in a backward pass, and wait for this one's part
        self.call_order.check()
        if at_rest and not any(self.gradients.used):
            self.gradients.rest_again()
        params = params_of(groups)
        own = holding_of(self._memory, params, self.share, self.gradients, self._config.reduce_dtype, self.channel.rank)
        holdings, steps, times = exchange(self.channel, own, self._watch)
        ddp = sent_by_ddp(params, self._trainable, self.channel.world_size)
        return Report(holdings, tuple(self.bucket_nbytes()), tuple(kinds), ddp, steps, times)

    @contextmanager
    def measured(self, groups: ParamGroups) -> Iterator[None]:
        """Inside, it is measured how long communication is under way; not if a new plan is made there."""
        sender, gradients, steps = self._sender, self.gradients, self._steps
        watch = CommTiming(params_of(groups)[0].device)
        self._sender = watch.sender(sender)
        try:
            with gradients.watched(watch):
                yield
        finally:
            self._sender = sender
            watch.end(self._steps - steps)
            self._watch = watch if self.gradients is gradients else None
