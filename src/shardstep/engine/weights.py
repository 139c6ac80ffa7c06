"""The weights of one plan from a step to the next forward: sent, in flight, arrived.

How every rank fared in the step travels with them, and is read when the last of them is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardstep.comm.agreement import Claim, Facts, attempt
from shardstep.comm.comm_timing import Sender
from shardstep.comm.control import Poll
from shardstep.comm.transport import Gather
from shardstep.engine.context import Context
from shardstep.params.flat import FlatMemory
from shardstep.params.pending_gathers import VERDICT, PendingGathers
from shardstep.params.profiler_ranges import is_profiled, named
from shardstep.params.weight_arrival import WeightArrivals


class Weights:
    """Sends this rank's range of every bucket to all ranks, and waits for theirs."""

    def __init__(
        self,
        context: Context,
        memory: FlatMemory,
        params: Sequence[torch.Tensor],
        gathers: Sequence[Gather],
        step_order: Sequence[Sequence[int]],
        facts: Facts,
    ) -> None:
        """`facts` must be the same on all ranks when they have sent. `params` are in the plan's order."""
        self._context, self._memory, self._params = context, memory, params
        self._step_order, self._facts = step_order, facts
        self.gathers = gathers
        self.sender: Sender = context.transport  # or one that is timed
        self.in_flight = PendingGathers()  # by bucket; at the end of them how all ranks fared
        self._announced_by = 0  # the thread that announced the last outcome
        self.failure: BaseException | None = None  # of some rank in what was sent last, until that thread has raised
        self._restore: tuple[Poll, Callable[[], None]] | None = None  # weights are averages: an error has ended ema()
        self._overlap = context.config.gather == "overlap"
        self.arrivals: WeightArrivals | None = None  # with gather="overlap", or where weights are to be restored
        if self._overlap:
            self._watch()

    def _watch(self) -> WeightArrivals:
        """From now on whatever reads a weight in flight waits for its buckets."""
        buckets_of: dict[torch.Tensor, list[int]] = {}
        for number, bucket in enumerate(self._memory.plan.buckets):
            for segment in bucket.segments:
                buckets_of.setdefault(self._params[segment.param], []).append(number)
        readers = self._context.readers
        self.arrivals = WeightArrivals(self._context.model, buckets_of, self.wait_for, self.wait_for_all, readers)
        return self.arrivals

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(self, buckets: Sequence[int]) -> None:
        """Send this rank's range of these buckets."""
        sent = {bucket: self.gathers[bucket] for bucket in buckets}
        send = self.sender.send
        if is_profiled():
            send = named(self._memory.titles.of("gather", buckets), send)
        send(list(sent.values()))
        self.in_flight.update(sent)

    def announce_outcome(self, action: str, failure: BaseException | None) -> None:
        """Tell the other ranks how this one fared. Whoever waits for the weights raises what failed on any rank."""
        self._context.agreement.claim(Claim(action, failure, self._facts))
        self._await_verdict()

    def _await_verdict(self) -> None:
        self._announced_by, self.failure = threading.get_ident(), None
        self.in_flight[VERDICT] = None

    def agree_to_send(self, action: str) -> None:
        """Return if all ranks are about to change weights by `action`, and can; raise on all of them otherwise."""
        attempt(self._context.channel, action, self._memory.adopt, [action])

    def change(self, action: str, change: Callable[[], None]) -> None:
        """Change this rank's range of the weights, and give it to all ranks; raise on all if it fails on one."""
        self._change_and_send(action, change)
        self._await_verdict()
        self.synchronize()

    def _change_and_send(self, action: str, change: Callable[[], None]) -> None:
        for gather in self.gathers:
            gather.expect()
        failure: BaseException | None = None
        try:
            change()
        except BaseException as error:
            failure = error
        self._context.agreement.claim(Claim(action, failure, self._facts))
        for buckets in self._step_order if self.gathers else ():
            self.send(buckets)

    def restore_later(self, poll: Poll, swap_out: Callable[[], None]) -> None:
        """A rank left ema() by an error, and does not wait for the others before it raises.

        They learn of it by `poll`, and then no rank moves weights: all do when they next read one, or call anything
        that needs them. Until then parameters are as if they were in flight.
        """
        self._restore = (poll, swap_out)
        arrivals = self._watch() if self.arrivals is None else self.arrivals
        self.in_flight.update(dict.fromkeys(range(len(self._memory.buckets))))
        arrivals.begin(self.in_flight)

    # -- waiting ------------------------------------------------------------------------------------------------------

    def deliver(self, *, now: bool) -> None:
        """At the end of a step: wait for the weights, or leave that to whoever reads one, unless it must be `now`."""
        if self._context.agreement.is_exchanged_when_read:
            # Now, and on all ranks: later one of them alone may read its weights, and would wait for the others.
            try:
                self._wait_and_raise([VERDICT])
            except BaseException:
                self.wait_for(list(self.in_flight))  # who catches it goes on with weights that are there
                raise
        if self.arrivals is None or self.arrivals.has_readers_that_do_not_ask or now:
            self.synchronize()
        else:
            self.arrivals.begin(self.in_flight)

    def synchronize(self) -> None:
        """Return when all weights are complete for what is done from now on; raise if a rank failed in the step."""
        self._wait_and_raise(list(self.in_flight))

    def _wait_and_raise(self, buckets: Sequence[int]) -> None:
        """Wait for these, and raise what failed on a rank in what was sent last: all ranks have sent, so all know.

        The thread that announced its outcome raises in any case, also if another one has raised before.
        """
        self._wait(buckets)
        failure = self.failure
        if failure is not None:
            if self._announced_by == threading.get_ident():
                self.failure = None
            raise failure

    def wait_for_all(self) -> None:
        """For readers of any weight, in whatever thread."""
        if self._announced_by == threading.get_ident():
            self.synchronize()
        else:
            self.wait_for(list(self.in_flight))

    def wait_for(self, buckets: Sequence[int]) -> None:
        """For readers of weights in these buckets: whether a rank failed is not asked."""
        needed = [bucket for bucket in buckets if bucket in self.in_flight and bucket != VERDICT]
        if needed:  # it is asked before every module's forward
            self._wait(needed)

    def wait_before_closing(self) -> None:
        """Wait for weights that were sent; not for ranks that have yet to restore theirs."""
        if self._restore is None:
            self.wait_for(list(self.in_flight))

    def _wait(self, buckets: Sequence[int]) -> None:
        if not self.in_flight:
            return
        if self._restore is not None:
            buckets = list(self.in_flight)  # they come together
        self.in_flight.wait_for(buckets, self._finish, None if self.arrivals is None else self.arrivals.landed)
        if self.arrivals is not None and not self._overlap:
            self.stop_watching()

    def _finish(self, buckets: Sequence[int], gathers: Sequence[Any]) -> None:
        if self._restore is not None:
            poll, swap_out = self._restore
            if poll.is_open:
                poll.answer()
            self.agree_to_send("the end of ema()")
            self._change_and_send("the end of ema()", swap_out)
            gathers = [self.in_flight[bucket] for bucket in buckets]
        sent = [gather for gather in gathers if gather is not None]
        if sent:
            finish = self.sender.finish
            if is_profiled():
                waiting = [bucket for bucket in buckets if bucket != VERDICT]
                finish = named(self._memory.titles.of("wait for weights of", waiting), finish)
            finish(sent)
        if VERDICT in buckets or self._restore is not None:
            self._restore = None
            try:
                self._context.agreement.finish()
            except BaseException as error:
                self.failure = error

    # -- the end ------------------------------------------------------------------------------------------------------

    def stop_watching(self) -> None:
        """Let nobody wait for a weight any more."""
        arrivals, self.arrivals = self.arrivals, None
        if arrivals is not None:
            arrivals.remove()

    def abandon(self) -> None:
        """Forget what is in flight: there is none, unless what was being sent has failed half-way."""
        self.stop_watching()
        self.in_flight.forget()
        self._restore = None
        self._context.agreement.is_open = False
