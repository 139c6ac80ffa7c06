"""What this rank keeps for every element that it holds, beside the optimizer's own state: a master, an average.

It lies in one piece for each bucket, like this rank's range of it. With the state of a piece it is saved, and moves to
another rank when that comes to hold the piece.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardstep.memory.flat import FlatMemory
from shardstep.planning import Piece
from shardstep.stepping.entries import Entry


class Slot:
    """`key` is its name in the state of a piece, `values` are by bucket."""

    def __init__(self, memory: FlatMemory, key: str, values: dict[int, torch.Tensor]) -> None:
        self._memory, self._key, self.values = memory, key, values

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values.values())

    def fill(self, entries: Mapping[Piece, Entry]) -> dict[Piece, Entry]:
        """Take what the state of pieces has of it; returns the rest of the state."""
        rest = {piece: {**entry} for piece, entry in entries.items()}
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                saved = rest.get(piece, {}).pop(self._key, None)
                if saved is not None:
                    values[offset : offset + piece.numel].copy_(saved.reshape(-1))
                    self.filled(number)
        return {piece: entry for piece, entry in rest.items() if entry}

    def filled(self, bucket: int) -> None:
        """Something of a bucket was taken from saved state."""

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        """Into the state of pieces, views of it."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                entries.setdefault(piece, {})[self._key] = values[offset : offset + piece.numel]
