"""Decide which rank steps which parameters of DistributedDataParallel's buckets. Parameters are not cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Assignment:
    """Parameters [start, stop) of one bucket, in the bucket's own order; one rank steps them."""

    bucket: int
    start: int
    stop: int
    rank: int


def assign_whole_buckets(numels: Sequence[Sequence[int]], world_size: int) -> list[Assignment]:
    """Assign bucket i to rank `i % world_size`. `numels[i]` are the sizes of the parameters in bucket i."""
    return [Assignment(bucket, 0, len(sizes), bucket % world_size) for bucket, sizes in enumerate(numels)]


def assign_parts_of_buckets(numels: Sequence[Sequence[int]], world_size: int) -> list[Assignment]:
    """Cut buckets so that every rank steps about as many elements; a rank gets at most one part of each bucket.

    The largest bucket is cut first: it has the parameters that are larger than a rank's fair share, and the ranks that
    do not get one of those make up for it with the other buckets. Every bucket is cut for all ranks that have room, so
    that many ranks step and send it at the same time.
    """
    load = [0] * world_size
    assigned: list[Assignment] = []
    for bucket in sorted(range(len(numels)), key=lambda i: -sum(numels[i])):
        for rank, start, stop in _cut(numels[bucket], load):
            load[rank] += sum(numels[bucket][start:stop])
            assigned.append(Assignment(bucket, start, stop, rank))
    return sorted(assigned, key=lambda part: (part.bucket, part.start))


def _cut(sizes: Sequence[int], load: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (rank, start, stop) for each part; a parameter goes to the rank whose quota contains its middle."""
    quotas = _quotas(sum(sizes), load)
    ranks = sorted(quotas, key=lambda rank: (-quotas[rank], rank))
    ends = list(accumulate(quotas[rank] for rank in ranks))
    middles = [end - numel / 2 for numel, end in zip(sizes, accumulate(sizes), strict=True)]
    takers = [min(bisect_left(ends, middle), len(ranks) - 1) for middle in middles]
    return [(ranks[taker], bisect_left(takers, taker), bisect_right(takers, taker)) for taker in sorted(set(takers))]


def _quotas(numel: int, load: Sequence[int]) -> dict[int, float]:
    """Return how many elements each rank takes, so that the ranks that take any end with equal, and the least, load."""
    by_load = sorted(range(len(load)), key=lambda rank: (load[rank], rank))
    for count in range(len(load), 0, -1):
        level = (numel + sum(load[rank] for rank in by_load[:count])) / count
        if count == 1 or level >= load[by_load[count - 1]]:
            return {rank: level - load[rank] for rank in by_load[:count]}
    raise AssertionError("a single rank can always take everything")
