"""Split a list of tensors into messages of bounded size. Sender and receiver compute the same split from the sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of one tensor of the list."""

    tensor: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


def plan_chunks(nbytes: Sequence[int], *, limit: int, large: int) -> Iterator[tuple[Span, ...]]:
    """Yield the messages that carry tensors of these sizes; no message is larger than `limit` bytes.

    Small tensors share messages. A tensor of at least `large` bytes has messages of its own, so that it is sent from
    and received into its own memory without a copy. Small tensors come first: optimizer state alternates a step counter
    of four bytes with large moments, which would otherwise make one tiny message per parameter.
    """
    if limit < 1:
        raise ValueError(f"a message must be allowed at least one byte, got {limit}")
    large = min(large, limit)
    row: list[Span] = []
    filled = 0
    for tensor, size in enumerate(nbytes):
        if size == 0 or size >= large:
            continue
        if filled + size > limit:
            yield tuple(row)
            row, filled = [], 0
        row.append(Span(tensor, 0, size))
        filled += size
    if row:
        yield tuple(row)
    for tensor, size in enumerate(nbytes):
        if size >= large:
            for start in range(0, size, limit):
                yield (Span(tensor, start, min(start + limit, size)),)
