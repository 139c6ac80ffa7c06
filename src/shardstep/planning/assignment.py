"""Who steps which part of DistributedDataParallel's buckets. Parameters are not cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


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
    """Cut buckets towards an equal number of elements for each rank; a rank has at most one part of a bucket.

    The largest bucket first: a parameter that is too large for any share lies there, and the ranks that do not hold it
    take the other buckets. Every bucket is cut for all ranks that have room, so that they step and send it together.
    """
    load = [0] * world_size
    assigned: list[Assignment] = []
    for bucket in sorted(range(len(numels)), key=lambda i: -sum(numels[i])):
        for rank, start, stop in _cut(numels[bucket], load):
            load[rank] += sum(numels[bucket][start:stop])
            assigned.append(Assignment(bucket, start, stop, rank))
    return sorted(assigned, key=lambda part: (part.bucket, part.start))


def _cut(sizes: Sequence[int], load: Sequence[int]) -> list[tuple[int, int, int]]:
    """(rank, start, stop): every parameter to the rank in whose quota its middle lies."""
    quotas = _quotas(sum(sizes), load)
    ranks = sorted(quotas, key=lambda rank: (-quotas[rank], rank))
    ends = list(accumulate(quotas[rank] for rank in ranks))
    middles = [end - numel / 2 for numel, end in zip(sizes, accumulate(sizes), strict=True)]
    takers = [min(bisect_left(ends, middle), len(ranks) - 1) for middle in middles]
    return [(ranks[taker], bisect_left(takers, taker), bisect_right(takers, taker)) for taker in sorted(set(takers))]


def _quotas(numel: int, load: Sequence[int]) -> dict[int, float]:
    """How much each rank takes so that those that take anything end with the same load, and none ends with less."""
    by_load = sorted(range(len(load)), key=lambda rank: (load[rank], rank))
    for count in range(len(load), 0, -1):
        level = (numel + sum(load[rank] for rank in by_load[:count])) / count
        if count == 1 or level >= load[by_load[count - 1]]:
            return {rank: level - load[rank] for rank in by_load[:count]}
    raise AssertionError("a single rank can always take everything")
