"""Whether all ranks go on with the same: another backward pass, a look at the gradients, or a step.

Each of these waits for what the others send in theirs. A rank that leaves out a step because its own loss is not
finite, or makes one backward pass more, would leave everybody waiting for ever. So each rank says what it turns to
next, and reads what the others have said before it waits for anything that they send only if they do the same.

The first backward pass after a step is not announced: a rank that makes none, or fails in it, sends what the others
wait for before it turns to anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum

from shardstep.comm.channel import Channel
from shardstep.comm.control import Answer, open_poll
from shardstep.comm.host_groups import RanksDivergedError, describe_divergence
from shardstep.comm.idle_check import IdleCheck


class Call(IntEnum):
    PASS = 0
    CLIP_NORM = 1
    CLIP_VALUE = 2
    NORMS = 3
    STEP = 4
    UNSCALE = 5
    FOLLOW = 6
    REPORT = 7


_PREMISE = bytes(8)  # a digest
_NO_CALL = b"\xff" + bytes(1 + len(_PREMISE))  # in the place of a record
_HEAD = 2  # bytes of a record that say what a rank does; the rest is its premise
_WORDS = {
    Call.PASS: "make another backward pass",
    Call.CLIP_NORM: "call clip_grad_norm_()",
    Call.CLIP_VALUE: "call clip_grad_value_()",
    Call.NORMS: "call grad_norms()",
    Call.STEP: "call step()",
    Call.UNSCALE: "unscale gradients with a GradScaler",
    Call.REPORT: "call report()",
    Call.FOLLOW: "have no inputs left, and do what the others do",
}


def _in_words(record: bytes) -> str:
    dropped = " after zero_grad() dropped the gradients of their last backward pass" if record[1] else ""
    return _WORDS[Call(record[0])] + dropped


class CallOrder:
    """What this rank and the others turn to; one for an optimizer's life.

    A rank also says whether it has dropped the gradients of the last pass: its part of the model would not be stepped.
    And with a step a digest of what that takes for granted, its `premise`; if those differ, `premises_differ` is set,
    on all ranks.

    Inside torch's Join a rank without inputs turns to whatever the others do. Those call `notify` before they turn to
    anything, and then read at once who follows them: `followers`.
    """

    def __init__(self, channel: Channel) -> None:
        self._poll = open_poll(channel, _in_words)
        self.idle = IdleCheck(channel)
        self._alone = channel.world_size == 1
        # What the record of a pass carries: the call that follows, or none. Where records go together, it need not.
        self.prepared_call = self.no_call = b"" if self._poll.goes_together else _NO_CALL
        self._prepared: Call | None = None
        self._announced: Call | None = None  # by all ranks, in records that carried it
        self._difference = ""
        self.syncs = True  # whether backward passes are reduced: not inside no_sync()
        self.apart = False  # ranks have turned to different things: what is under way will never be complete
        self.dropped = False  # gradients were dropped here since the last step, and no pass came after that
        self.precondition = _PREMISE
        self.preconditions_differ = False
        self.notify: Callable[[], None] | None = None  # inside Join
        self.following = False  # this rank has none
        self.followers: Sequence[int] = ()  # ranks without inputs, as of the last turn
        self.source = 0  # inside Join: the highest rank with inputs, from which others take what only one can give
        self.others = _PREMISE  # the record of the ranks with inputs

    def join(self, notify: Callable[[], None], world_size: int) -> None:
        """Ranks may run out of inputs from now on; so far the highest of all has some."""
        self.notify, self.followers, self.source = notify, (), world_size - 1

    def leave_join(self) -> None:
        self.notify, self.followers = None, ()

    def _record(self, turn: Call) -> bytes:
        return bytes([turn, self.dropped]) + (self.precondition if turn is Call.STEP else _PREMISE)

    def prepare(self, turn: Call) -> None:
        """This rank is about to announce `turn`: it goes along with what is told and read before that.

        With messages in the record of the pass, as `prepared_call`: that saves an exchange. If all ranks' records carry
        the same call, all have announced it. If not (a rank drops its gradients, makes another pass, looks at its own
        gradients only), it is announced by itself.
        """
        self.raise_if_diverged()
        self._prepared, self._announced = turn, None
        if self._poll.goes_together:
            self._poll.ask(self._record(turn))
        else:
            self.prepared_call = self._record(turn)

    def compare_carried(self, answer: Answer) -> None:
        """Note whether all ranks' records have carried the call that is prepared here. The same on all ranks."""
        own, self.prepared_call = self.prepared_call, self.no_call
        if own != self.no_call and all(row.endswith(own) for row in answer.rows()):
            self._announced = self._prepared

    def announce(self, turn: Call) -> None:
        """Tell the others. With messages they may still be busy with what was before: this does not wait for them.

        Before a step it does: no weight may move before it is certain that all ranks step, and step alike. So it does
        where records go together: what follows are collectives, which all ranks must issue.
        """
        if self._alone:
            return
        prepared, announced = self._prepared, self._announced
        self._prepared, self._announced, self.prepared_call = None, None, self.no_call
        if self._poll.goes_together:
            if prepared is not turn:
                self._poll.ask(self._record(turn))
            self.check()
        elif announced is turn:
            self.followers = ()
            if turn is not Call.STEP:  # then another call follows, which no record of a pass carries
                self._poll.expect(len(self.no_call))
        else:
            self.check()
            self._poll.ask(self._record(turn))
            if turn is Call.STEP or self.notify is not None:
                self.check()

    def check(self) -> None:
        """Raise, on every rank, if not all have announced the same; once it was so, always."""
        if self._poll.is_open:
            try:
                self._compare(self._poll.answer())
            except RanksDivergedError as error:
                self._diverge(str(error))
        self.raise_if_diverged()

    def _compare(self, answer: Answer) -> None:
        self.followers = ()
        if answer.equal:
            return
        rows = answer.rows()
        self.followers = [rank for rank, row in enumerate(rows) if row[0] == Call.FOLLOW]
        going = {rank: row for rank, row in enumerate(rows) if rank not in self.followers}
        if len({row[:_HEAD] for row in going.values()}) > 1:
            self._diverge(describe_divergence([_in_words(row) for row in rows]))
            return
        self.preconditions_differ = len(set(going.values())) > 1
        if self.followers:
            self.source = max(going)  # as under DistributedDataParallel
            self.others = going[self.source]

    def _diverge(self, difference: str) -> None:
        self._difference, self.apart = difference, True

    def diverged(self, error: RanksDivergedError) -> None:
        """Found when something else was read; raises what `check` would."""
        self._diverge(str(error))
        self.raise_if_diverged()

    def raise_if_diverged(self) -> None:
        """What `check` has found before; this never waits."""
        if self.apart:
            raise RuntimeError(
                f"the ranks do not go on alike: {self._difference}. All must do the same, in the same order: leave out "
                "a batch or a step on every rank or on none. Build the optimizer again and load a checkpoint"
            )
