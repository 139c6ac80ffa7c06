"""Gathers of weights that are in flight: several threads may need the weights of one, and one thread finishes it.

[Note: two threads] The backend hands what it has received to one thread that waits, and a second one would wait for
ever. So a thread claims the gathers that it finishes; others that need their weights wait until it has finished them.
`in_flight_lock` is held while claims are written down and while classes of parameters are changed to follow that, and
never while a message is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardstep.comm.transport import Gather

# One for all optimizers. A thread that holds it may take it again: what it frees may be an optimizer.
in_flight_lock = threading.RLock()

VERDICT = -1  # stands among the buckets for the agreement whether all ranks succeeded in what was sent last
Finish = Callable[[Sequence[int], Sequence[Any]], None]
Landed = Callable[[Sequence[int]], None]


class PendingGathers(dict[int, "Gather | None"]):
    """The gathers in flight, by bucket. VERDICT is finished as if it were one of them."""

    def __init__(self) -> None:
        super().__init__()
        self._claimed: dict[int, int] = {}  # by bucket: the thread that finishes it
        self._changed = threading.Condition(in_flight_lock)

    def wait_for(self, buckets: Sequence[int], finish: Finish, landed: Landed | None) -> None:
        """Return when these are finished, by `finish` here or in another thread, and `landed` was called with them."""
        while needed := [bucket for bucket in buckets if bucket in self]:
            claimed = self._claim(needed)
            if not claimed:
                continue
            try:
                finish(list(claimed), list(claimed.values()))
                with in_flight_lock:
                    for bucket in claimed:
                        self.pop(bucket, None)  # `forget` was called if another thread closed the optimizer
                    if landed is not None:
                        landed(list(claimed))
            finally:
                self._release(claimed)

    def forget(self) -> None:
        """Drop all of them, and let threads that wait for one go on."""
        with self._changed:
            self.clear()
            self._changed.notify_all()

    def _claim(self, needed: Sequence[int]) -> Mapping[int, Gather | None]:
        """Claim those of `needed` that no thread has claimed. If there are none, return when a claim has ended."""
        own = threading.get_ident()
        with self._changed:
            free = {b: self[b] for b in needed if b in self and b not in self._claimed}
            self._claimed.update(dict.fromkeys(free, own))
            if not free and any(bucket in self._claimed for bucket in needed):
                if any(self._claimed.get(bucket) == own for bucket in needed):
                    raise RuntimeError(
                        "a weight is read while this very thread waits for it to arrive: do not read weights in a "
                        "signal handler or in __del__"
                    )
                self._changed.wait()
        return free

    def _release(self, claimed: Iterable[int]) -> None:
        with self._changed:
            for bucket in claimed:
                del self._claimed[bucket]
            self._changed.notify_all()
