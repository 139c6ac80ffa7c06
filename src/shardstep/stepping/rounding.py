"""bfloat16 parameters without masters, rounded by chance: stepped in float32, which lasts as long as the step.

What the optimizer has for a parameter between two steps is a tensor of its shape and without memory.
"""

from __future__ import annotations

from typing import Any

import torch

from shardstep.memory.views import dense_view, flat_gradient
from shardstep.planning.runs import Run
from shardstep.stepping.kernel import Noise, round_to_bfloat16

SEED = 20_240_229  # the same on all ranks, and in every run


class Rounded:
    """Of one share."""

    def __init__(self) -> None:
        self._counts: dict[torch.Tensor, int] = {}  # of tensors whose optimizer keeps no count

    @staticmethod
    def stand_in(shape: torch.Size, device: torch.device) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=device).expand(shape)

    @torch.no_grad()
    def lend(self, tensor: torch.Tensor, own: torch.Tensor) -> None:
        """The values of `own`, flat, for the time of a step; `tensor` has the shape that is stepped."""
        values = own.to(torch.float32)
        tensor.data = values if tensor.dim() == 1 else dense_view(values, 0, tensor)

    @torch.no_grad()
    def take_back(self, tensor: torch.Tensor, own: torch.Tensor, run: Run, state: dict[str, Any]) -> None:
        """Round what was stepped into `own`."""
        values = flat_gradient(tensor, tensor)
        step = self._count(tensor, state)
        for piece, offset in zip(run.pieces, run.offsets, strict=True):
            part = slice(offset, offset + piece.numel)
            own[part] = round_to_bfloat16(values[part], Noise(SEED, step, piece.param), piece.start)
        tensor.data = self.stand_in(tensor.shape, tensor.device)

    def _count(self, tensor: torch.Tensor, state: dict[str, Any]) -> int:
        """Of steps: the optimizer's, which is saved with its state, or ours."""
        count = state.get("step")
        if count is not None and not (isinstance(count, torch.Tensor) and count.device.type != "cpu"):
            return int(count)  # nobody waits for a device to tell
        self._counts[tensor] = self._counts.get(tensor, 0) + 1
        return self._counts[tensor]
