"""Which neighbouring pieces are stepped as one tensor: the work of a step grows with buckets, not with parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardstep.planning.plan import Piece, Placed


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


def find_runs(placed: Sequence[Placed], together: Callable[[Piece, Piece], bool]) -> tuple[Run, ...]:
    """The fewest runs in which all neighbours belong `together`."""
    rows: list[list[Placed]] = []
    for piece, offset in placed:
        if rows and together(rows[-1][-1][0], piece):
            rows[-1].append((piece, offset))
        else:
            rows.append([(piece, offset)])
    return tuple(
        Run(
            pieces=tuple(piece for piece, _ in row),
            offsets=tuple(offset - row[0][1] for _, offset in row),
            start=row[0][1],
            stop=row[-1][1] + row[-1][0].numel,
        )
        for row in rows
    )
