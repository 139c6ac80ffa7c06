"""The backward pass that runs, or the last one: gradients from autograd, reduced bucket by bucket, kept as shards.

[Note: a pass] One backward pass reduces every bucket exactly once, in the order of the plan, on every rank, whatever
gradients came on which rank: so ranks never wait for a message that another does not send. Gradients that did not come
count as zero; which ones came anywhere is exchanged once per pass, because a parameter that no rank has used is not
stepped. A gradient that comes after its bucket has gone (only reentrant checkpointing of tied weights does that) is
told in the same exchange, and reduced before the step.

[Note: one record] That record is sent when it is known what follows the pass (a step, another pass, gradients dropped),
and says that, too: so all ranks know in one exchange that they step, and with what. Where the last bucket is large the
record goes before it, and what follows is a record of its own: a step begins when all ranks have sent theirs, which
behind megabytes of gradients on the same connections would be when all of them have arrived.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from threading import Lock

import torch
from torch import nn

from shardstep.comm.call_order import Call, CallOrder
from shardstep.comm.channel import Channel
from shardstep.comm.control import open_poll
from shardstep.comm.encoding import gradient_dtype
from shardstep.comm.host_groups import RanksDivergedError
from shardstep.comm.transport import Reduction, Transport
from shardstep.gradients.clipping import multiply
from shardstep.gradients.packing import GradientPacking, Parts
from shardstep.gradients.shard_memory import ShardMemory
from shardstep.params.flat import FlatMemory
from shardstep.params.profiler_ranges import is_profiled, named
from shardstep.params.proxy import gradient_of
from shardstep.params.views import quickly

RECORD_FIRST_NBYTES = 1_000_000  # of the last bucket: from here on the record of a pass goes before it


class Phase(Enum):
    """Where the gradients are between one step and the next."""

    RESTING = "no backward pass since the last step: other ranks may have made one, and wait for this one"
    FILLING = "a pass runs: buckets go out as they fill, and no gradient may be looked at"
    ENDING = "the pass is over here, and its last buckets go out: none may be added to"
    SENT = "all of it is on its way: what other ranks had is not known, and nothing may be stepped"
    SETTLED = "all ranks know which gradients there are: shards may be looked at and stepped"


_MOVES = {
    (Phase.RESTING, Phase.FILLING),
    (Phase.FILLING, Phase.ENDING),
    (Phase.ENDING, Phase.SENT),
    (Phase.SENT, Phase.SETTLED),
    (Phase.SENT, Phase.FILLING),
    (Phase.SETTLED, Phase.FILLING),
    (Phase.SETTLED, Phase.RESTING),
}


class LaunchOrder:
    """Which buckets can be reduced, as gradients come: always in the order of the buckets, whatever comes first."""

    def __init__(self, members: Sequence[Collection[int]]) -> None:
        """`members[b]` are the parameters of which bucket b holds elements."""
        self._sizes = [len(set(params)) for params in members]
        self._buckets_of: defaultdict[int, list[int]] = defaultdict(list)
        for bucket, params in enumerate(members):
            for param in set(params):
                self._buckets_of[param].append(bucket)
        # These are always the same objects: the hooks of thousands of parameters look at them, without a call.
        self._awaited: set[int] = set()  # parameters whose gradient is still to come; none between passes
        self._missing: list[int] = []  # of each bucket: how many of them
        self._next = 0

    def begin(self) -> None:
        """A backward pass begins."""
        self._missing[:] = [*self._sizes, -1]  # after the last bucket comes one that is never complete
        self._next = 0
        # Last: from here on hooks count, and those of another device run on a thread of their own.
        self._awaited.update(self._buckets_of)

    def hook(self, param: int, act: Callable[[int], None]) -> Callable[[torch.Tensor], None]:
        """For autograd: `act` is called where a gradient makes a bucket `due`, or is not awaited: no pass has begun.

        It is called for every parameter in every pass, and does for most nothing but to count.
        """
        awaited, missing, buckets = self._awaited, self._missing, self._buckets_of.get(param, ())

        def ready(tensor: torch.Tensor) -> None:
            del tensor
            if param in awaited:
                awaited.remove(param)
                for bucket in buckets:
                    missing[bucket] -= 1
                if missing[self._next]:
                    return
            act(param)

        return ready

    def note(self, param: int) -> None:
        """The gradient of `param` is there. It may come twice; the first time counts."""
        if param in self._awaited:
            self._awaited.remove(param)
            for bucket in self._buckets_of[param]:
                self._missing[bucket] -= 1

    def all_came(self) -> bool:
        """Whether no gradient is missing: the pass is about to end."""
        return not self._awaited

    def due(self) -> int | None:
        """The bucket to reduce now; None if gradients of the next one are missing."""
        return self._next if self._missing[self._next] == 0 else None

    def launched(self) -> None:
        """The next bucket is on its way. Until then it is due, or `left`: whatever raises, it is sent, and once."""
        self._next += 1

    def left(self) -> range:
        """The buckets that were not reduced: at the end of a pass, gradients that did not come count as none."""
        return range(self._next, len(self._sizes))

    def end(self) -> None:
        """The backward pass is over, and what was left is on its way."""
        self._awaited.clear()


@dataclass(frozen=True, slots=True)
class GradientContext:
    """What gradients of one plan are reduced with."""

    channel: Channel
    transport: Transport
    call_order: CallOrder
    model: nn.Module
    memory: FlatMemory
    params: Sequence[torch.Tensor]  # in the plan's order
    wire_dtype: torch.dtype | None
    wide: bool  # gradients of fp16 parameters are kept in fp32
    reuse_memory: bool  # nobody looks at a gradient of an earlier step, so the next may lie where it lay


@dataclass(frozen=True, slots=True)
class Settled:
    """What all ranks know of the passes since the last step: flags by parameter."""

    used: bytes  # a gradient came on some rank
    late: bytes  # it came too late on some rank
    failed: tuple[int, ...] = ()  # ranks whose pass failed


class GradientPass:
    """Made anew with every plan."""

    def __init__(self, given: GradientContext) -> None:
        channel, transport, memory = given.channel, given.transport, given.memory
        self._transport, self._call_order, self._params = transport, given.call_order, given.params
        self._alone = channel.world_size == 1
        # One rank sends nothing, in any dtype: what it packs is the mean.
        sent = [b.values.dtype if self._alone else gradient_dtype(b, given.wire_dtype) for b in memory.buckets]
        self._packing = GradientPacking(memory, given.params, transport, sent)
        self._titles = memory.titles
        self._sent_dtypes = sent
        self.order = LaunchOrder([{s.param for s in bucket.bucket.segments} for bucket in memory.buckets])
        self._places = [self._packing.places(bucket) for bucket in range(len(memory.buckets))]
        self._nbytes = [bucket.values.nbytes for bucket in memory.buckets]
        self._memory = ShardMemory([bucket.own for bucket in memory.buckets], keep=given.reuse_memory, wide=given.wide)
        self._reductions: Sequence[Reduction] = transport.reductions(memory.buckets, self._memory.of)
        self._when_landed: weakref.WeakMethod[Callable[[int], None]] | None = None
        self._poll = open_poll(channel)
        self._record: bytes | None = None  # of the last pass, until the other ranks are told
        last_nbytes = self._nbytes[-1] if self._nbytes else 0
        by_messages = not self._alone and not self._poll.goes_together
        self._record_first = by_messages and last_nbytes >= RECORD_FIRST_NBYTES  # see [Note: one record]
        self._packed: dict[int, list[Parts]] = {}  # while the record goes first: what is still to be sent
        self._lock = Lock()  # autograd calls from one thread for each device
        self.phase = Phase.RESTING
        self.are_zero = False  # they were made so, and nothing was added since
        self._flying: dict[int, int] = {}  # buckets on their way, the oldest first, and their bytes
        self._failed = False  # a pass failed here since `drop`: what the next one adds to is not all there
        self._lost = False  # something arrived and could not be taken in: `drop` is the way out
        self.shards: list[torch.Tensor | None] = [None] * len(self._nbytes)
        self.factor: torch.Tensor | None = None  # by which they are still to be multiplied: the step may do it
        self._late = bytes(len(given.params))

    def _move(self, to: Phase) -> None:
        if (self.phase, to) not in _MOVES:
            raise RuntimeError(f"a backward pass cannot go from {self.phase.name} to {to.name}: {self.phase.value}")
        self.phase = to

    @property
    def runs(self) -> bool:
        """A pass has begun, and its messages are not all on their way."""
        return self.phase in (Phase.FILLING, Phase.ENDING)

    # -- a pass -------------------------------------------------------------------------------------------------------

    def ready(self, param: int) -> None:
        """Autograd has added to the gradient of `param`, and the order's hook says that there is something to do."""
        with self._lock:
            if not self.runs:
                self._begin()
            self.order.note(param)
            if self._record_first and self.order.all_came():
                return  # `end` comes next, and has a record to send before the last buckets
            while (bucket := self.order.due()) is not None:
                self._make_room(bucket)
                self._launch(bucket, self._packing.pack(bucket))

    def _begin(self) -> None:
        call_order = self._call_order
        self._tell(call_order.no_call)
        if not call_order.following:
            if call_order.notify is not None:
                call_order.notify()
            if self.phase is not Phase.RESTING:
                call_order.announce(Call.PASS)
        call_order.dropped = False
        self.land_all()  # of an earlier pass
        self.apply_factor()
        self._move(Phase.FILLING)
        self.order.begin()
        if not self._alone:
            self._post_receives()

    def _post_receives(self) -> None:
        """Post receives for what other ranks send in this pass, where that takes little memory.

        Where backward takes longer than a crossing of the network, that saves one. To post them when the step before is
        over would save one always, but a pass that never comes would leave receives behind with every plan and every
        optimizer, and a rank that ends after its last step would make those of the others fail.
        """
        self._poll.expect(1 + 2 * len(self._params) + len(self._call_order.no_call))
        for reduction, places, dtype in zip(self._reductions, self._places, self._sent_dtypes, strict=True):
            reduction.expect(places, dtype)

    def end_of_backward(self) -> bool:
        """Autograd is done. Whether there was a pass: something came here, also of parameters that have no bucket."""
        has_pass = self.runs or any(self._present())
        if has_pass:
            self.end()
        return has_pass

    def end(self, *, failed: bool = False) -> None:
        """The pass is over: reduce what is left, and write down for the others what came here.

        If memory runs out the pass is still to end, as a failed one: this is called again for the rest. A record that
        was sent already holds.
        """
        if self._call_order.apart:
            self._call_order.raise_if_diverged()
        if not self.runs:
            self._begin()  # nothing came here, but it did elsewhere
        if self._record_first and self.phase is Phase.FILLING:
            # All of them before the record is sent: if memory runs out here, it can say that the pass has failed.
            for bucket in self.order.left():
                if bucket not in self._packed:
                    self._packed[bucket] = self._packing.pack(bucket)
            self._write_record(failed=failed)
            self._tell(self._call_order.no_call)
        if self.phase is Phase.FILLING:
            self._move(Phase.ENDING)
        for bucket in self.order.left():
            self._make_room(bucket)
            self._launch(bucket, self._packed[bucket] if self._record_first else self._packing.pack(bucket))
            self._packed.pop(bucket, None)
        if not self._record_first:
            self._write_record(failed=failed)
        self.order.end()
        self._move(Phase.SENT)
        if failed:  # at once: what this rank turns to next may be no call of ours, and the others raise by this
            self._tell(self._call_order.no_call)

    def _write_record(self, *, failed: bool) -> None:
        self._packing.end_pass()
        self._late = self._present()
        self._failed = self._failed or failed
        self._record = bytes([self._failed]) + self._packing.used + self._late

    def _tell(self, call: bytes) -> None:
        """Tell all other ranks which gradients came here, and what `call` follows: see [Note: one record].

        Called before this rank waits for others or announces anything. What an earlier pass told is contained in it.
        """
        if self._record is not None:
            self._poll.ask(self._record + call)
            self._record = None  # last: an interrupt before leaves it to the next call

    def _present(self) -> bytes:
        """Flags: which parameters train and have a gradient."""
        with quickly():
            return bytes(gradient_of(param) is not None and param.requires_grad for param in self._params)

    def shard_dtype(self, bucket: int) -> torch.dtype:
        return self._memory.dtypes[bucket]

    def _make_room(self, bucket: int) -> None:
        """Before a bucket is packed: the oldest lands if there would be more in flight than the transport wants."""
        most = self._transport.in_flight_nbytes
        if self._when_landed is not None and (self._alone or most < math.inf):
            most = min(most, 2.0 * self._nbytes[bucket])  # it is to be stepped soon
        while self._flying and sum(self._flying.values()) + self._nbytes[bucket] > most:
            self._land(next(iter(self._flying)))

    def step_when_landed(self, step: Callable[[int], None]) -> None:
        """While a pass runs, `step` is called for each bucket that has landed; each has memory of its own then."""
        self._when_landed = weakref.WeakMethod(step)
        self._memory.one_by_one = True

    def let_go_of(self, bucket: int) -> None:
        """It was stepped, and its gradient is not needed any more."""
        self.shards[bucket] = None
        self._memory.let_go_of(bucket)

    def _launch(self, bucket: int, parts: list[Parts]) -> None:
        self.are_zero = False
        start = self._reductions[bucket].start
        if is_profiled():
            start = named(self._titles.of("reduce", [bucket]), start)
        shard, dtype = start(parts, self._places[bucket], self.shards[bucket]), self._memory.dtypes[bucket]
        self.shards[bucket] = shard if shard.dtype is dtype else shard.to(dtype)  # alone, a rank keeps what it packed
        self._flying[bucket] = self._nbytes[bucket]
        self.order.launched()

    def _land(self, bucket: int) -> None:
        lost_before, self._lost = self._lost, True  # if anything raises here, there is no second try
        del self._flying[bucket]
        land = self._reductions[bucket].land
        if is_profiled():
            land = named(self._titles.of("wait for gradients of", [bucket]), land)
        land()
        self._lost = lost_before
        step = None if self._when_landed is None else self._when_landed()
        if step is not None and self.runs:
            step(bucket)

    def land_all(self) -> None:
        """Of the last pass."""
        for bucket in list(self._flying):
            self._land(bucket)

    def apply_factor(self) -> None:
        """The shards are as they are said to be, for those that look at them or add to them."""
        if self.factor is not None:
            factor, self.factor = self.factor, None
            multiply([shard for shard in self.shards if shard is not None and shard.numel()], factor)

    def replace_reductions(self, by: Callable[[Reduction], Reduction]) -> None:
        """Each by one that does the same, and takes note of it."""
        self._reductions = [by(reduction) for reduction in self._reductions]

    # -- between passes -----------------------------------------------------------------------------------------------

    def land(self, bucket: int) -> torch.Tensor | None:
        """This rank's range of a bucket's gradient, once it is there; None if no pass was made since `drop`."""
        if bucket in self._flying:
            for earlier in [other for other in self._flying if other <= bucket]:
                self._land(earlier)
        if self._lost:
            raise RuntimeError("gradients were lost when an earlier call raised: call zero_grad() on all ranks")
        return self.shards[bucket]

    def settle(self) -> Settled:
        """What all ranks had; the same on every rank."""
        if self.phase is not Phase.SENT:
            return Settled(bytes(self._packing.used), self._late)
        self._tell(self._call_order.prepared_call)
        self._call_order.check()  # what others had is told only by those that do what this rank does
        try:
            answer = self._poll.answer()
        except RanksDivergedError as error:
            self._call_order.diverged(error)
            raise
        flags, size = answer.any, 1 + len(self._params)
        end = size + len(self._params)
        if not self._alone:
            self._call_order.compare_carried(answer)
        self._move(Phase.SETTLED)
        used, self._late = flags[1:size], flags[size:end]
        self._packing.used = bytearray(used)
        failed = [rank for rank, row in enumerate(answer.rows(1)) if row[0]] if flags[0] else []
        return Settled(used, self._late, tuple(failed))

    def stepped(self) -> None:
        """What comes from now on is for the next step."""
        self._call_order.dropped = False
        if self._when_landed is not None:  # some gradients are gone already, so none can be added to
            self.drop_shards()
            self._packing.forget()
        if self.phase is not Phase.RESTING:
            self._move(Phase.RESTING)

    def reduce_late(self, late: Sequence[int]) -> Exception | None:
        """Reduce what came too late, on some rank; called on every rank if it did on any.

        Returns what failed here: the other ranks wait for every bucket, so the rest goes out all the same.
        """
        failure = None
        self.land_all()
        self._late = bytes(len(self._params))
        self.order.begin()
        for bucket in self.order.left():
            self._make_room(bucket)
            try:
                parts = self._packing.pack(bucket)
            except Exception as error:
                failure, parts = failure or error, self._packing.pack(bucket)  # what could not be packed is dropped
            self._launch(bucket, parts)
        self.order.end()
        self._packing.end_pass()
        self._packing.used = bytearray(used or more for used, more in zip(self._packing.used, late, strict=True))
        return failure

    def take_over(self, used: Sequence[int], shards: Sequence[torch.Tensor | None], phase: Phase) -> None:
        """What an earlier plan's pass knew and held."""
        self._packing.used = bytearray(used)
        self.shards = list(shards)
        self.phase = phase

    @property
    def used(self) -> Sequence[int]:
        """Flags: whether a gradient was taken into shards; of other ranks' it is known when it is SETTLED."""
        return self._packing.used

    def drop(self) -> None:
        """Forget all gradients."""
        self._tell(self._call_order.no_call)
        self._call_order.check()
        self.land_all()  # the memory belongs to the transport until then
        self._call_order.dropped = self.phase is not Phase.RESTING
        if self.phase is Phase.SENT:
            if self._call_order.notify is None:  # a rank without inputs asks, and only then hears of it
                self._poll.forget()
            self._move(Phase.SETTLED)
        self.drop_shards()
        self._failed = False
        self._packing.forget()
        self._late = bytes(len(self._params))

    def drop_shards(self) -> None:
        self._lost, self.factor = False, None
        self.shards = [None] * len(self._nbytes)
        self._memory.let_go()

    def zero(self) -> None:
        """Make all gradients zero, without forgetting that they were there."""
        self._tell(self._call_order.no_call)
        self._call_order.check()
        self.land_all()
        self._call_order.dropped = self.phase is not Phase.RESTING
        self._lost, self.factor = False, None
        for shard in self.shards:
            if shard is not None:
                shard.zero_()
        self.are_zero = True
