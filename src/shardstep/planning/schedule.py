"""The order in which buckets are reduced, stepped and sent: events in, bucket numbers out.

DistributedDataParallel reduces its buckets one after the other, and calls its hook for each on the thread that runs the
backward pass. What is issued there, in which order, must be the same on every rank, or the job hangs. So the order is a
function of bucket numbers alone: never of what has already arrived, which differs from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Which buckets are stepped and sent once the reduction of a bucket has been issued.

    `lag` is the number of buckets by which stepping stays behind. The reduction of a bucket takes time, and stepping
    waits for it: with a lag of one, the gradients of the next bucket are computed meanwhile. None: nothing is stepped
    before the last bucket, and nothing is sent before all are stepped.
    """

    lag: int | None

    def due(self, bucket: int, last: bool) -> list[range]:
        """What to do now, in order, when the reduction of `bucket` was just issued: step a range, send it, the next."""
        if self.lag is None:
            return [range(bucket + 1)] if last else []
        stop = bucket + 1 if last else bucket - self.lag + 1
        return [range(index, index + 1) for index in range(max(bucket - self.lag, 0), stop)]

    def passed_on(self, bucket: int, hops: int) -> list[tuple[int, int]]:
        """(bucket, distance): the stepped parameters to pass on round the ring now, after what was due."""
        return [] if self.lag is None else ring_hops(bucket - self.lag, hops)


AFTER_BACKWARD = StepOrder(lag=None)
INTERLEAVED = StepOrder(lag=1)


def ring_hops(newest: int, hops: int) -> list[tuple[int, int]]:
    """(bucket, distance): what to pass on when bucket `newest` has just set out on its way round the ring.

    What the rank at distance d has sent of a bucket set out d buckets ago, and has since been passed on d - 1 times: so
    it has come, and nobody waits. What is left when the backward pass ends is passed on then.
    """
    return [(newest - distance, distance) for distance in range(1, hops + 1) if newest >= distance]


def keep_batches_whole(order: Sequence[Sequence[int]], numels: Sequence[int], least: int) -> list[list[int]]:
    """`order`, which are groups of buckets, but that buckets with batches are stepped together until they are many.

    `numels[b]` are the elements of bucket b that are stepped in batches; of others none. A group of such buckets comes
    where its first bucket did, and has at least `least` elements; the last takes what is left. The other buckets keep
    their places: those that come before the first batch are sent while it is stepped.
    """
    groups: list[list[int]] = []
    filling: list[int] | None = None  # takes batched buckets until it has enough of them
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
