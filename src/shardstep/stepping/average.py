"""An exponential moving average of the weights, of this rank's pieces: 1/N of its memory on each of N ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardstep.params.flat import FlatMemory
from shardstep.planning import Piece
from shardstep.stepping.element_slots import Slot
from shardstep.stepping.element_state import Entry
from shardstep.stepping.masters import Masters
from shardstep.stepping.scaling import Scaling

AVERAGE = "shardstep.ema"  # in the state of a piece


class Average(Slot):
    """Begins with the weights as they are before the first step. Of 16-bit parameters it is one of their masters.

    A frozen parameter has none to show: it is as it is. Its average waits until it trains again.
    """

    def __init__(self, memory: FlatMemory, decay: float, masters: Masters | None) -> None:
        self._decay, self._masters = decay, masters
        self._before: list[torch.Tensor] = []  # while the parameters are the average
        wide = {
            number: bucket.own.detach().to(torch.promote_types(bucket.own.dtype, torch.float32), copy=True)
            for number, bucket in enumerate(memory.buckets)
        }
        super().__init__(memory, AVERAGE, wide)
        self._unbegun = {piece for bucket in memory.buckets for piece, _ in bucket.placed}

    @property
    def is_shown(self) -> bool:
        """Whether the parameters are the average."""
        return bool(self._before)

    def filled(self, bucket: int, piece: Piece) -> None:
        self._unbegun.discard(piece)

    def missed(self, piece: Piece) -> None:
        """What it was the average of is replaced by what is loaded."""
        self._unbegun.add(piece)

    def begin(self) -> None:
        """Before a step. The first of all begins with the weights as they are then: they may have been loaded."""
        self._catch_up()
        self._unbegun.clear()

    @torch.no_grad()
    def _catch_up(self) -> None:
        """What has not begun is the weights."""
        if not self._unbegun:
            return
        for number, values in self.values.items():
            now = self._now(number)
            for piece, offset in self._memory.buckets[number].placed:
                if piece in self._unbegun:
                    values[offset : offset + piece.numel].copy_(now[offset : offset + piece.numel])

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        self._catch_up()
        super().put_into(entries)

    @torch.no_grad()
    def follow(self, buckets: Iterable[int], scaling: Scaling | None = None) -> None:
        """They were stepped; not if a GradScaler's verdict on the device was against it."""
        for number in buckets:
            average, weight = self.values[number], 1 - self._decay
            now = self._now(number).to(average.dtype)
            if scaling is None:
                average.lerp_(now, weight)
            else:
                skips = scaling.found_inf.to(average.device, average.dtype).reshape(())
                average.lerp_(now, (1 - skips.clamp(max=1)) * weight)

    def _now(self, bucket: int) -> torch.Tensor:
        masters = {} if self._masters is None else self._masters.values
        return masters[bucket] if bucket in masters else self._memory.buckets[bucket].own

    @torch.no_grad()
    def swap_in(self) -> None:
        """This rank's parameters become the average."""
        if self._masters is not None:
            self._masters.follow_writes()  # now: what they would follow later is the average
        self.begin()
        self._before = [bucket.own.clone() for bucket in self._memory.buckets]
        for number, bucket in enumerate(self._memory.buckets):
            bucket.own.copy_(self.values[number])

    @torch.no_grad()
    def swap_out(self) -> None:
        """They become what they were."""
        for bucket, values in zip(self._memory.buckets, self._before, strict=bool(self._before)):
            bucket.own.copy_(values)
        self._before = []
