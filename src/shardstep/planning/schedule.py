"""The order in which buckets are reduced, stepped and sent: events in, bucket numbers out.

DistributedDataParallel reduces its buckets one after the other, and calls its hook for each on the thread that runs the
backward pass. What is issued there, in which order, must be the same on every rank, or the job hangs. So the order is a
function of bucket numbers alone: never of what has already arrived, which differs from rank to rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
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


class LaunchOrder:
    """Which buckets can be reduced, as gradients come: always in the order of the buckets, whatever comes first."""

    def __init__(self, members: Sequence[Collection[int]]) -> None:
        """`members[b]` are the parameters of which bucket b holds elements."""
        self._sizes = [len(set(params)) for params in members]
        self._buckets_of: defaultdict[int, list[int]] = defaultdict(list)
        for bucket, params in enumerate(members):
            for param in set(params):
                self._buckets_of[param].append(bucket)
        self._missing: list[int] = []  # of each bucket: how many gradients are still to come
        self._seen: set[int] = set()
        self._next = 0
        self.running = False  # between `begin` and `end`

    def begin(self) -> None:
        """A backward pass begins."""
        self._missing = [*self._sizes, -1]  # after the last bucket comes one that is never complete
        self._seen = set()
        self._next = 0
        self.running = True

    def note(self, param: int) -> bool:
        """The gradient of `param` is there: is there something to do? Called for every parameter, so it does little.

        Yes if a bucket is `due`, or if no pass has begun. A gradient may come twice; the
        first time counts.
        """
        if not self.running:
            return True
        if param not in self._seen and param in self._buckets_of:
            self._seen.add(param)
            for bucket in self._buckets_of[param]:
                self._missing[bucket] -= 1
        return self._missing[self._next] == 0

    def all_came(self) -> bool:
        """Whether no gradient is missing: the pass is about to end."""
        return len(self._seen) == len(self._buckets_of)

    def due(self) -> int | None:
        """The bucket to reduce now; None if gradients of the next one are missing."""
        return self._next if self._missing[self._next] == 0 else None

    def launched(self) -> None:
        """The next bucket is on its way. Until then it is due, or `left`: whatever raises, it is sent, and once."""
        self._next += 1

    def left(self) -> range:
        """The buckets that were not reduced: at the end of a pass, gradients that did not come count as none."""
        return range(self._next, len(self._sizes))

    def end(self) -> None:
        """The backward pass is over, and what was left is on its way."""
        self.running = False
