"""An exponential moving average of the weights, of this rank's pieces: 1/N of its memory on each of N ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardstep.memory.flat import FlatMemory
from shardstep.stepping.masters import Masters
from shardstep.stepping.slots import Slot

AVERAGE = "shardstep.ema"  # in the state of a piece


class Average(Slot):
    """Begins with the weights as they are. Of 16-bit parameters it is one of their masters, in fp32 in any case.

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

    @torch.no_grad()
    def follow(self, buckets: Iterable[int]) -> None:
        """They were stepped."""
        for number in buckets:
            average = self.values[number]
            average.lerp_(self._now(number).to(average.dtype), 1 - self._decay)

    def _now(self, bucket: int) -> torch.Tensor:
        masters = {} if self._masters is None else self._masters.values
        return masters[bucket] if bucket in masters else self._memory.buckets[bucket].own

    @torch.no_grad()
    def swap_in(self) -> None:
        """This rank's parameters become the average."""
        self._before = [bucket.own.clone() for bucket in self._memory.buckets]
        for number, bucket in enumerate(self._memory.buckets):
            bucket.own.copy_(self.values[number])

    @torch.no_grad()
    def swap_out(self) -> None:
        """They become what they were."""
        for bucket, values in zip(self._memory.buckets, self._before, strict=True):
            bucket.own.copy_(values)
        self._before = []
