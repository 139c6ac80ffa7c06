"""Which neighbouring pieces are stepped as one tensor: the work of a step grows with buckets, not with parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardstep.planning.plan import Piece


@dataclass(frozen=True, slots=True)
class Run:
    """Pieces that lie one behind the other in one rank's range of a bucket."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]  # where each begins in the run
    start: int  # of the run in the range
    stop: int

    @property
    def numel(self) -> int:
        """With what lies between two parameters."""
        return self.stop - self.start


def find_runs(
    pieces: Sequence[Piece], offsets: Sequence[int], together: Callable[[Piece, Piece], bool]
) -> tuple[Run, ...]:
    """The fewest runs in which all neighbours belong `together`; `offsets` are those of the pieces in the range."""
    rows: list[list[int]] = []
    for place, piece in enumerate(pieces):
        if rows and together(pieces[place - 1], piece):
            rows[-1].append(place)
        else:
            rows.append([place])
    return tuple(
        Run(
            pieces=tuple(pieces[place] for place in row),
            offsets=tuple(offsets[place] - offsets[row[0]] for place in row),
            start=offsets[row[0]],
            stop=offsets[row[-1]] + pieces[row[-1]].numel,
        )
        for row in rows
    )
