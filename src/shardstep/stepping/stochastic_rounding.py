"""bfloat16 parameters without masters, rounded by chance: stepped in float32, which lasts as long as the step.

What the optimizer has for a parameter between two steps is a tensor of its shape and without memory. Noise depends on
the number of the step. Where the class has that in its state, it is saved with it; where it has not (SGD, Muon), steps
are counted here, and the count is saved, and moves to another rank, with the state of the piece: a run that is resumed
goes on with the bits it would have had.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardstep.params.flat import FlatMemory
from shardstep.params.views import dense_view, flat_gradient
from shardstep.planning import Piece
from shardstep.planning.runs import Run
from shardstep.stepping.element_slots import Slot
from shardstep.stepping.element_state import Entry
from shardstep.stepping.kernel import Noise, round_to_bfloat16

COUNT = "shardstep.rounded"  # in the state of a piece
SEED = 20_240_229  # the same on all ranks, and in every run


class StochasticRounding(Slot):
    """Of one share. What it keeps is one number for each piece whose optimizer counts no steps."""

    def __init__(self, memory: FlatMemory) -> None:
        super().__init__(memory, COUNT, {})
        buckets = [bucket for bucket in memory.buckets if bucket.values.dtype is torch.bfloat16]
        self._pieces = {piece for bucket in buckets for piece, _ in bucket.placed}
        self.counts: dict[Piece, torch.Tensor] = {}  # the kernel's too, if there is one; it has them on the device

    # -- state --------------------------------------------------------------------------------------------------------

    def split(self, entries: Mapping[Piece, Entry]) -> tuple[dict[Piece, torch.Tensor], dict[Piece, Entry]]:
        live = {piece: entry for piece, entry in entries.items() if piece in self._pieces}
        own = {piece: torch.as_tensor(entry[COUNT]).clone() for piece, entry in live.items() if COUNT in entry}
        parked = {piece: entry for piece, entry in entries.items() if piece not in self._pieces}
        return own, {**parked, **without_counts(live)}

    def fill(self, own: Mapping[Piece, torch.Tensor]) -> None:
        self.counts.clear()
        self.counts.update(own)

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        for piece, count in self.counts.items():
            entries.setdefault(piece, {})[COUNT] = count

    # -- stepping -----------------------------------------------------------------------------------------------------

    @staticmethod
    def stand_in(shape: torch.Size, device: torch.device) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=device).expand(shape)

    @torch.no_grad()
    def lend(self, tensor: torch.Tensor, own: torch.Tensor, home: torch.Tensor) -> None:
        """The values of `own`, flat, for the time of a step; `tensor` has the shape that is stepped.

        If that is the shape of the parameter, they lie as in its `home`.
        """
        values = own.to(torch.float32)
        tensor.data = values if tensor.dim() == 1 else dense_view(values, 0, home)

    @torch.no_grad()
    def take_back(self, tensor: torch.Tensor, own: torch.Tensor, run: Run, state: dict[str, Any]) -> None:
        """Round what was stepped into `own`."""
        values = flat_gradient(tensor, tensor)
        step = self._count(run.pieces[0], state)
        for piece, offset in zip(run.pieces, run.offsets, strict=True):
            part = slice(offset, offset + piece.numel)
            own[part] = round_to_bfloat16(values[part], Noise(SEED, step, piece.param), piece.start)
        tensor.data = self.stand_in(tensor.shape, tensor.device)

    def _count(self, piece: Piece, state: Mapping[str, Any]) -> int:
        """Of steps: the optimizer's, or ours."""
        count = state.get("step")
        if count is not None and not (isinstance(count, torch.Tensor) and count.device.type != "cpu"):
            self.counts.pop(piece, None)
            return int(count)  # nobody waits for a device to tell
        own = self.counts.setdefault(piece, torch.zeros((), device="cpu"))
        own += 1
        return int(own)


def without_counts(entries: Mapping[Piece, Entry]) -> dict[Piece, Entry]:
    """For optimizers that do not round by chance: to some, an entry that is there is one that they have made."""
    rest = {piece: {key: value for key, value in entry.items() if key != COUNT} for piece, entry in entries.items()}
    return {piece: entry for piece, entry in rest.items() if entry}
