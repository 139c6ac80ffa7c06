"""Whether all ranks go on with the same: another backward pass, a look at the gradients, or a step.

Each of these waits for what the others send in theirs. A rank that leaves out a step because its own loss is not
finite, or makes one backward pass more, would leave everybody waiting for ever. So each rank says what it turns to
next, and reads what the others have said before it waits for anything that they send only if they do the same.

The first backward pass after a step is not announced: a rank that makes none, or fails in it, sends what the others
wait for before it turns to anything else.
"""

from __future__ import annotations

from enum import IntEnum

from shardstep.wire.channel import Channel
from shardstep.wire.hosts import RanksApartError, describe_apart
from shardstep.wire.records import open_poll


class Turn(IntEnum):
    PASS = 0
    CLIP_NORM = 1
    CLIP_VALUE = 2
    NORMS = 3
    STEP = 4


_WORDS = {
    Turn.PASS: "make another backward pass",
    Turn.CLIP_NORM: "call clip_grad_norm_()",
    Turn.CLIP_VALUE: "call clip_grad_value_()",
    Turn.NORMS: "call grad_norms()",
    Turn.STEP: "call step()",
}


class Turns:
    """What this rank and the others turn to; one for an optimizer's life."""

    def __init__(self, channel: Channel) -> None:
        self._poll = open_poll(channel, lambda record: _WORDS[Turn(record[0])])
        self._alone = channel.world_size == 1
        self._prepared: Turn | None = None
        self._difference: str | None = None

    @property
    def apart(self) -> bool:
        """Whether ranks have turned to different things: nothing of what is under way will ever be complete."""
        return self._difference is not None

    def prepare(self, turn: Turn) -> None:
        """This rank is about to announce `turn`. Where records go together, it goes with what is read before that."""
        self.raise_if_apart()
        if self._poll.goes_together:
            self._poll.ask(bytes([turn]))
            self._prepared = turn

    def announce(self, turn: Turn) -> None:
        """Tell the others. With messages they may still be busy with what was before: this does not wait for them.

        Where records go together it does: what follows are collectives, which must not be issued before it is certain
        that all ranks issue them.
        """
        if self._alone:
            return
        if self._poll.goes_together:
            if self._prepared is not turn:
                self._poll.ask(bytes([turn]))
            self._prepared = None
            self.check()
        else:
            self.check()
            self._poll.ask(bytes([turn]))

    def check(self) -> None:
        """Raise, on every rank, if not all have announced the same; once it was so, always."""
        if self._poll.is_open:
            try:
                answer = self._poll.answer()
                if not answer.equal:
                    self._difference = describe_apart([_WORDS[Turn(record[0])] for record in answer.rows()])
            except RanksApartError as error:
                self._difference = str(error)
        self.raise_if_apart()

    def went_apart(self, error: RanksApartError) -> None:
        """Found when something else was read; raises what `check` would."""
        self._difference = str(error)
        self.raise_if_apart()

    def raise_if_apart(self) -> None:
        """What `check` has found before; this never waits."""
        if self._difference is not None:
            raise RuntimeError(
                f"the ranks do not go on alike: {self._difference}. All must do the same, in the same order: leave out "
                "a batch or a step on every rank or on none. Build the optimizer again and load a checkpoint"
            )
