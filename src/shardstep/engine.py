"""One step: gradients settled, this rank's share stepped, and all of it given to everyone.

    hook -> pass -> (bucket full) transport.reduce          backward
    step -> pass.settle -> share.step -> transport.gather   step
    pre-hook -> gather.finish                               the next forward, with gather="overlap"

What a step works with is made in planned.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from shardstep.arguments import check_apart, check_lookups, check_parameters
from shardstep.config import ShardConfig
from shardstep.make_share import Recipe
from shardstep.memory.arrival import Arrivals, Readers
from shardstep.memory.traced import is_profiled, named
from shardstep.memory.views import move_out, span_of
from shardstep.owners import check_unowned
from shardstep.planned import ParamGroups, Planned, params_of, trainable_of
from shardstep.planning import Piece, read_specs
from shardstep.report import Group, Report, exchange, holding_of, sent_by_ddp
from shardstep.state.audit import Audit
from shardstep.state.handing_over import hand_over
from shardstep.state.saved_state import SavedState
from shardstep.step_in_backward import HALF_STEPPED, REASON
from shardstep.stepping.entries import Entry
from shardstep.stepping.local_optimizer import check_shapes
from shardstep.stepping.scaling import Scaling
from shardstep.wire.agreement import Agreement, Claim, Facts, agree
from shardstep.wire.channel import Channel
from shardstep.wire.choose import release
from shardstep.wire.tensors import broadcast_tensors
from shardstep.wire.transport import Gather
from shardstep.wire.turns import Turn
from shardstep.wire.watch import Sender, Watch

_abandoned: list[Any] = []  # what ranks that went apart left under way


class Engine(Planned):
    """Of one ShardedOptimizer. Its `param_groups` are passed in: a program may change them between any two calls."""

    def __init__(self, model: nn.Module, channel: Channel, recipe: Recipe, config: ShardConfig) -> None:
        super().__init__(model, channel, recipe, config)
        self._sender: Sender = self.transport  # or one that is watched
        self._watch: Watch | None = None  # the last one, when it is over
        self._agreement = Agreement(channel)
        self._arriving: dict[int, Gather] = {}
        self._arrivals: Arrivals | None = None  # with gather="overlap"
        self._readers = Readers()
        self._audit = None if config.audit is None else Audit(channel)
        self._steps = 0
        self.saved = SavedState()

    def _connected(self, params: Sequence[torch.Tensor]) -> None:
        if self._config.gather != "overlap":
            return
        buckets_of: dict[torch.Tensor, list[int]] = {}
        for number, bucket in enumerate(self.plan.buckets):
            for segment in bucket.segments:
                buckets_of.setdefault(params[segment.param], []).append(number)
        self._arrivals = Arrivals(self._model, buckets_of, self.wait_for, self.synchronize, self._readers)

    def _disconnect(self) -> None:
        self._forget_arrivals()

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self, groups: ParamGroups, scaling: Scaling | None = None) -> None:
        """Step this rank's share with the mean of all ranks' gradients, and give every rank all of it."""
        self.synchronize()
        trainable = self.look(groups)
        self.take_turn(Turn.STEP, groups)
        self.step_together(groups, scaling, trainable)

    def look(self, groups: ParamGroups) -> list[bool]:
        """Whether this rank can step, before it says that it does. Returns which parameters train."""
        trainable = trainable_of(groups)
        self.turns.premise = self._premises.look(groups, self._why_not_to_go_on(groups, trainable))
        return trainable

    def step_together(self, groups: ParamGroups, scaling: Scaling | None, trainable: list[bool]) -> None:
        """All ranks have turned to it."""
        if self.turns.premises_differ or self.turns.followers:
            self.turns.premises_differ = False
            agree(self.channel, Claim("step", self._premises.failure, Facts(self._premises.lines())))
        if self._premises.failure is not None:  # the same on all ranks, or their digests would differ
            raise self._premises.failure
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
        self.saved.is_new = False
        if self.saved.is_here:
            self.saved.stepped("a step")
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
                check_parameters(groups, allow_mixed_dtypes=True)
                check_apart(groups, self._model)
                if self.channel.world_size > 1:
                    check_lookups(self._model, groups)
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
        if self._in_backward is not None and turn is not Turn.STEP:
            if turn is not Turn.REPORT:
                raise RuntimeError(REASON.format(what="clipping, a norm or a GradScaler"))
            self.check_not_stepped("report()")
        if turns.notify is not None:
            waits = True  # what a rank does to its own shards alone, those without inputs do to theirs
            if self.gradients.rest:
                self.gradients.make_up_for_a_pass()
            turns.notify()
        try:
            late = self.gradients.settle(turn if waits else None)
        except RuntimeError as error:
            reason = self._why_not_to_step() or error  # this rank's own, if it has one
            if self._in_backward is not None:
                reason = RuntimeError(f"{reason}. {HALF_STEPPED}")
            raise reason from None
        if waits or any(late):
            turns.announce(turn)
        if turns.followers:
            self.hand_over_for(turn, groups, told or {})
        if any(late):
            if self._in_backward is not None and trainable_of(groups) == self._trainable:
                raise RuntimeError(REASON.format(what="a gradient that comes after its bucket was reduced"))
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
                        if failure is None and not self._is_stepped(buckets):
                            step = self.share.step
                            if is_profiled():
                                step = named(self._memory.titles.of("step", buckets), step)
                            step(number, self.gradients.of_run, scaling, self.gradients.factor)
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
            self._arriving.update(sent)

    def switch(self, groups: ParamGroups, mode: str) -> None:
        """`train()` or `eval()` of the class, which may change weights: this rank's share, and then all of it."""
        self._give_all(f"{mode}()", lambda: self._switch(groups, mode))

    def _switch(self, groups: ParamGroups, mode: str) -> None:
        self._memory.adopt()
        self.share.switch(groups, mode)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Inside, all ranks' parameters are the average. On all ranks."""
        average = self.share.average
        if average is None:
            raise RuntimeError("there is no average: pass config=ShardConfig(ema=0.999)")
        self.check_not_stepped("ema()")
        if self._in_backward is not None:
            self._in_backward.paused = True
        try:
            self._give_all("ema()", average.swap_in)
            yield
        finally:
            self._give_all("the end of ema()", average.swap_out)
            if self._in_backward is not None:
                self._in_backward.paused = False

    def take_state(self, groups: ParamGroups, entries: dict[Piece, Entry]) -> None:
        self.check_not_joined("load")
        self.synchronize()
        super().take_state(groups, entries)
        self.saved.loaded()

    def take_weights(self, weights: Mapping[Piece, torch.Tensor]) -> None:
        """This rank's pieces become these values, and all ranks get them. On all ranks."""
        self._give_all("load", lambda: self._take(weights))

    @torch.no_grad()
    def _take(self, weights: Mapping[Piece, torch.Tensor]) -> None:
        self._memory.adopt()
        for bucket in self._memory.buckets:
            for piece, offset in bucket.placed:
                if piece in weights:
                    bucket.own[offset : offset + piece.numel].copy_(weights[piece])

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
            self._agreement.finish()  # all ranks had turned to the step, so all have told

    def wait_for(self, buckets: Sequence[int]) -> None:
        waiting = [bucket for bucket in buckets if bucket in self._arriving]
        if waiting:
            finish = self._sender.finish
            if is_profiled():
                finish = named(self._memory.titles.of("wait for weights of", waiting), finish)
            finish([self._arriving[bucket] for bucket in waiting])
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

    def report(self, groups: ParamGroups, kinds: Sequence[Group]) -> Report:
        """What all ranks hold and send; `kinds` are of the groups. On all ranks, which wait for each other."""
        self.check_not_joined("report()")
        if self._why_not_to_step() is not None:
            raise RuntimeError(
                "report() between passes inside no_sync(): call it before them, or after the pass that ends them"
            )
        self.synchronize()
        at_rest = self.gradients.rest
        self.take_turn(Turn.REPORT, groups)  # other ranks may be in a backward pass, and wait for this one's part
        self.turns.check()
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
        watch = Watch(params_of(groups)[0].device)
        self._sender = watch.sender(sender)
        try:
            with gradients.watched(watch):
                yield
        finally:
            self._sender = sender
            watch.end(self._steps - steps)
            self._watch = watch if self.gradients is gradients else None
