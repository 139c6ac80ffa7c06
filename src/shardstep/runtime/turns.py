"""Whether all ranks go on with the same: another backward pass, a look at the gradients, or a step.

Each of these waits for what the others send in theirs. A rank that leaves out a step because its own loss is not
finite, or makes one backward pass more, would leave everybody waiting for ever. So each rank says what it turns to
next, and reads what the others have said before it waits for anything that they send only if they do the same.

The first backward pass after a step is not announced: a rank that makes none, or fails in it, sends what the others
wait for before it turns to anything else.
"""

from __future__ import annotations

from enum import IntEnum

from shardstep.runtime.collectives import Channel, DirectRecords, Records, take_tags


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

    def __init__(self, channel: Channel, *, announced: bool) -> None:
        """Not `announced` where a message costs too much: on an accelerator reading it would hold up the host."""
        self._channel = channel
        self._announced = announced and channel.world_size > 1
        self._tag = take_tags(channel)
        self._records: Records | None = None
        self._difference: str | None = None

    @property
    def apart(self) -> bool:
        """Whether ranks have turned to different things: nothing of what is under way will ever be complete."""
        return self._difference is not None

    def announce(self, turn: Turn) -> None:
        """Tell the others. They may still be busy with what was before: this does not wait for them."""
        self.check()
        if self._announced:
            self._records = DirectRecords(self._channel, bytes([turn]), self._tag)

    def check(self) -> None:
        """Raise, on every rank, if not all have announced the same; once it was so, always."""
        if self._records is not None:
            records, self._records = self._records.read(), None
            turns = [Turn(record[0]) for record in records]
            if len(set(turns)) > 1:
                self._difference = "; ".join(
                    f"ranks {[rank for rank, other in enumerate(turns) if other is turn]} {_WORDS[turn]}"
                    for turn in sorted(set(turns))
                )
        self.raise_if_apart()

    def raise_if_apart(self) -> None:
        """What `check` has found before; this never waits."""
        if self._difference is not None:
            raise RuntimeError(
                f"the ranks do not go on alike: {self._difference}. All must do the same, in the same order: leave out "
                "a batch or a step on every rank or on none. Build the optimizer again and load a checkpoint"
            )
