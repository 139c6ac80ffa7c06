"""Find adjacent pieces that are stepped as one tensor, so that a step takes time per bucket and not per parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardstep.planning.plan import Piece, Placed


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive pieces of one rank's range of a bucket: elements [start, stop) of the range."""

    pieces: tuple[Piece, ...]
    offsets: tuple[int, ...]  # of each piece, in the run
    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements of the run, with the padding between two parameters."""
        return self.stop - self.start


def find_runs(placed: Sequence[Placed], together: Callable[[Piece, Piece], bool]) -> tuple[Run, ...]:
    """Return the fewest runs such that `together` holds for all neighbours in a run."""
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
