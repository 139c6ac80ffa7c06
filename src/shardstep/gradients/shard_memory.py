"""Where this rank's part of the mean gradient lies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardstep.params.views import ALIGNMENT_NBYTES


class ShardMemory:
    """This rank's part of the mean gradient, in each bucket. `like` are its ranges of the parameters.

    One block for all of a dtype. On the CPU it may be kept from step to step: a dozen megabytes here and there, taken
    and given back in every pass, leave the heap in pieces (250 MB of holes in the process that trains 30 M parameters),
    and every page of a new block costs a fault. An accelerator's allocator keeps memory itself: there it is let go.
    """

    def __init__(self, like: Sequence[torch.Tensor], *, keep: bool, wide: bool = False) -> None:
        """`wide`: of fp16 parameters in fp32. Divided by the scale of a GradScaler, most of it would vanish in fp16."""
        halves = torch.float32 if wide else torch.float16
        self.dtypes = [halves if values.dtype is torch.float16 else values.dtype for values in like]
        self._sizes = [(values.device, values.numel()) for values in like]
        self._keep = keep and all(values.device.type == "cpu" for values in like)
        self._ranges: list[torch.Tensor] = []
        self.one_by_one = False  # each has memory of its own, from when it is asked for until it is let go of
        self.alone: dict[int, torch.Tensor] = {}

    def of(self, bucket: int) -> torch.Tensor:
        if self.one_by_one:
            if bucket not in self.alone:
                device, numel = self._sizes[bucket]
                self.alone[bucket] = torch.zeros(numel, device=device, dtype=self.dtypes[bucket])
            return self.alone[bucket]
        if not self._ranges:
            self._ranges = self._make()
        return self._ranges[bucket]

    def let_go_of(self, bucket: int) -> None:
        self.alone.pop(bucket, None)

    def let_go(self) -> None:
        self.alone.clear()
        if not self._keep:
            self._ranges = []

    def _make(self) -> list[torch.Tensor]:
        ends: dict[tuple[torch.device, torch.dtype], int] = {}
        places = []
        for (device, numel), dtype in zip(self._sizes, self.dtypes, strict=True):
            start = ends.get((device, dtype), 0)
            places.append((device, dtype, slice(start, start + numel)))
            unit = max(ALIGNMENT_NBYTES // dtype.itemsize, 1)
            ends[device, dtype] = start + -(-numel // unit) * unit
        blocks = {key: torch.zeros(end, device=key[0], dtype=key[1]) for key, end in ends.items()}
        return [blocks[device, dtype][place] for device, dtype, place in places]
