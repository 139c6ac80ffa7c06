"""What this rank keeps for every element that it holds, beside the optimizer's own state: a master, an average.

It lies in one piece for each bucket, like this rank's range of it. With the state of a piece it is saved, and moves to
another rank when that comes to hold the piece.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardstep.params.flat import FlatMemory
from shardstep.planning import Piece
from shardstep.stepping.element_state import Entry


class Slot:
    """`key` is its name in the state of a piece, `values` are by bucket."""

    def __init__(self, memory: FlatMemory, key: str, values: dict[int, torch.Tensor]) -> None:
        self._memory, self.key, self.values = memory, key, values

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values.values())

    def split(self, entries: Mapping[Piece, Entry]) -> tuple[dict[Piece, torch.Tensor], dict[Piece, Entry]]:
        """What the state of pieces has of it, and the rest of the state; ValueError if it is no piece's."""
        own: dict[Piece, torch.Tensor] = {}
        rest = {piece: {**entry} for piece, entry in entries.items()}
        for number in self.values:
            for piece, _ in self._memory.buckets[number].placed:
                saved = rest.get(piece, {}).pop(self.key, None)
                if saved is None:
                    continue
                if saved.numel() != piece.numel:
                    name = self._memory.plan.params[piece.param].name
                    raise ValueError(
                        f"{self.key} of {name} has {saved.numel()} elements where {piece.numel} are held: load what "
                        "was saved of this model"
                    )
                own[piece] = saved
        return own, {piece: entry for piece, entry in rest.items() if entry}

    def fill(self, own: Mapping[Piece, torch.Tensor]) -> None:
        """Take what `split` has found."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                if piece in own:
                    values[offset : offset + piece.numel].copy_(own[piece].reshape(-1))
                    self.filled(number, piece)
                else:
                    self.missed(piece)

    def filled(self, bucket: int, piece: Piece) -> None:
        """A piece in a bucket was taken from saved state."""

    def missed(self, piece: Piece) -> None:
        """Saved state has nothing of a piece."""

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        """Into the state of pieces, views of it."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                entries.setdefault(piece, {})[self.key] = values[offset : offset + piece.numel]
