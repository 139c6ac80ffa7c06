"""The order of a step that happens inside the backward pass: events in, bucket numbers out.

DistributedDataParallel reduces its buckets one after the other, and calls its hook for each on the thread that runs the
backward pass. What is issued there, in which order, must be the same on every rank, or the job hangs. So the order is a
function of bucket numbers alone: never of what has already arrived, which differs from rank to rank.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOrder:
    """Which buckets are stepped once the reduction of a bucket has been issued.

    `lag` is the number of buckets by which stepping stays behind. The reduction of a bucket takes time, and stepping
    waits for it: with a lag of one, the gradients of the next bucket are computed meanwhile. None: nothing is stepped
    before the last bucket.
    """

    lag: int | None

    def due(self, bucket: int, last: bool) -> range:
        """The buckets to step now, in order, when the reduction of `bucket` has just been issued."""
        if self.lag is None:
            return range(bucket + 1) if last else range(0)
        return range(max(bucket - self.lag, 0), bucket + 1 if last else max(bucket - self.lag + 1, 0))


AFTER_BACKWARD = StepOrder(lag=None)
INTERLEAVED = StepOrder(lag=1)
