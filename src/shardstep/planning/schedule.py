"""Decide the order in which buckets are stepped and sent, from bucket numbers alone.

DistributedDataParallel reduces its buckets one after the other, and calls its hook for each on the thread that runs the
backward pass. All ranks must issue the same collectives there in the same order, or the job hangs. So the order never
depends on what has already arrived, which differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Decides which buckets are stepped and sent when the reduction of a bucket has just been issued.

    `lag` is by how many buckets stepping stays behind. Stepping waits for the reduction: with a lag of one, the
    gradients of the next bucket are computed meanwhile. With None, nothing is stepped before the last bucket, and
    nothing is sent before all buckets are stepped.
    """

    lag: int | None

    def due(self, bucket: int, last: bool) -> list[range]:
        """Return the ranges of buckets to step now, in order; each is sent before the next is stepped.

        The reduction of `bucket` has just been issued, and `last` says whether it is the last one.
        """
        if self.lag is None:
            return [range(bucket + 1)] if last else []
        stop = bucket + 1 if last else bucket - self.lag + 1
        return [range(index, index + 1) for index in range(max(bucket - self.lag, 0), stop)]

    def passed_on(self, bucket: int, hops: int) -> list[tuple[int, int]]:
        """Return (bucket, distance) of the stepped parameters to pass on round the ring now, after those of `due`."""
        return [] if self.lag is None else ring_hops(bucket - self.lag, hops)


AFTER_BACKWARD = StepOrder(lag=None)
INTERLEAVED = StepOrder(lag=1)


def ring_hops(newest: int, hops: int) -> list[tuple[int, int]]:
    """Return (bucket, distance) of the messages to pass on when bucket `newest` has just been sent to the next rank.

    What the rank at distance d sent of a bucket was sent d buckets ago, and has been passed on d - 1 times since. So it
    has arrived, and no rank waits for it. What remains when the backward pass ends is passed on then.
    """
    return [(newest - distance, distance) for distance in range(1, hops + 1) if newest >= distance]


def keep_batches_whole(order: Sequence[Sequence[int]], numels: Sequence[int], least: int) -> list[list[int]]:
    """Merge groups of buckets so that those that are stepped in batches have at least `least` elements.

    `numels[b]` are the elements of bucket b that are stepped in batches, 0 if there are none. A merged group takes the
    place of its first bucket and has at least `least` elements; the last group takes the remaining buckets. Other
    buckets keep their places, so those before the first batch are sent while it is stepped.
    """
    groups: list[list[int]] = []
    filling: list[int] | None = None  # the group to which batched buckets are added until it has `least` elements
    left = sum(numels)
    for members in order:
        others = [bucket for bucket in members if not numels[bucket]]
        if others:
            groups.append(others)
        for bucket in members:
            if not numels[bucket]:
                continue
            if filling is None:
                filling = []
                groups.append(filling)
            filling.append(bucket)
            left -= numels[bucket]
            if sum(numels[one] for one in filling) >= least and left >= least:
                filling = None
    return groups
