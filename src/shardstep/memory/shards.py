"""Where this rank's part of the mean gradient lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardstep.memory.views import ALIGNMENT_NBYTES


class ShardMemory:
    """This rank's part of the mean gradient, in each bucket. `like` are its ranges of the parameters.

    One block for all of a dtype. On the CPU it may be kept from step to step: a dozen megabytes here and there, taken
    and given back in every pass, leave the heap in pieces (250 MB of holes in the process that trains 30 M parameters),
    and every page of a new block costs a fault. An accelerator's allocator keeps memory itself: there it is let go.
    """

    def __init__(self, like: Sequence[torch.Tensor], *, keep: bool) -> None:
        self._like = like
        self._keep = keep and all(values.device.type == "cpu" for values in like)
        self._ranges: list[torch.Tensor] = []

    def of(self, bucket: int) -> torch.Tensor:
        if not self._ranges:
            self._ranges = self._make()
        return self._ranges[bucket]

    def let_go(self) -> None:
        if not self._keep:
            self._ranges = []

    def _make(self) -> list[torch.Tensor]:
        ends: dict[tuple[torch.device, torch.dtype], int] = {}
        starts = []
        for values in self._like:
            key = values.device, values.dtype
            starts.append(ends.get(key, 0))
            unit = max(ALIGNMENT_NBYTES // values.element_size(), 1)
            ends[key] = starts[-1] + -(-values.numel() // unit) * unit
        blocks = {key: torch.zeros(end, device=key[0], dtype=key[1]) for key, end in ends.items()}
        return [
            blocks[values.device, values.dtype][start : start + values.numel()]
            for values, start in zip(self._like, starts, strict=True)
        ]
