"""The order of a step that happens inside the backward pass: events in, bucket numbers out.

DistributedDataParallel reduces its buckets one after the other, and calls its hook for each on the thread that runs the
backward pass. What is issued there, in which order, must be the same on every rank, or the job hangs. So the order is a
function of bucket numbers alone: never of what has already arrived, which differs from rank to rank.
"""

from __future__ import annotations

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


AFTER_BACKWARD = StepOrder(lag=None)
INTERLEAVED = StepOrder(lag=1)
