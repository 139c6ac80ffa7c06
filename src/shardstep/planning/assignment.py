"""Who steps which part of DistributedDataParallel's buckets. Parameters are not cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """Parameters [start, stop) of one bucket, in the bucket's own order, stepped by one rank."""

    bucket: int
    start: int
    stop: int
    rank: int


def assign_whole_buckets(numels: Sequence[Sequence[int]], world_size: int) -> list[Assignment]:
    """Bucket i to rank i modulo the ranks; `numels[i]` are the sizes of the parameters of bucket i."""
    return [Assignment(bucket, 0, len(sizes), bucket % world_size) for bucket, sizes in enumerate(numels)]


def assign_parts_of_buckets(numels: Sequence[Sequence[int]], world_size: int) -> list[Assignment]:
    """Cut buckets towards total / ranks elements for each rank; a rank has at most one part of a bucket.

    The smallest bucket first, each part to the rank that has least so far, ties to the lowest.
    """
    share = sum(sum(sizes) for sizes in numels) / world_size
    load = [0] * world_size
    assigned: list[Assignment] = []
    for bucket in sorted(range(len(numels)), key=lambda i: sum(numels[i])):
        free = set(range(world_size))
        for start, stop in _cut(numels[bucket], share, world_size):
            rank = min(free, key=lambda r: (load[r], r))
            free.remove(rank)
            load[rank] += sum(numels[bucket][start:stop])
            assigned.append(Assignment(bucket, start, stop, rank))
    return sorted(assigned, key=lambda part: (part.bucket, part.start))


def _cut(sizes: Sequence[int], share: float, most: int) -> list[tuple[int, int]]:
    """Consecutive parameters that stay below `share` together, in at most `most` parts."""
    parts: list[tuple[int, int]] = []
    start = filled = 0
    for index, numel in enumerate(sizes):
        if index > start and filled + numel >= share and len(parts) < most - 1:
            parts.append((start, index))
            start, filled = index, 0
        filled += numel
    return [*parts, (start, len(sizes))]
