"""Gathers of weights that were sent and are not finished: any thread may need their weights, and one finishes each.

[Note: two threads] The backend gives what has arrived to one thread that waits for it, and a second one would wait for
ever. So a thread claims the gathers that it finishes; others that need their weights wait until it has. `books` is held
only while it is written down who does what, and while classes of parameters are changed to follow that: never while a
message is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardstep.comm.transport import Gather

books = threading.RLock()  # of all optimizers; a thread may come again, when what it releases is an optimizer


VERDICT = -1  # in the place of a bucket: how all ranks fared in what was sent last
Finish = Callable[[Sequence[int], Sequence[Any]], None]
Landed = Callable[[Sequence[int]], None]


class PendingGathers(dict[int, "Gather | None"]):
    """By bucket. What sends them finishes them too, when it is asked to; VERDICT is finished as if it were one."""

    def __init__(self) -> None:
        super().__init__()
        self._claimed: dict[int, int] = {}  # by bucket: the thread that finishes it
        self._changed = threading.Condition(books)

    def wait_for(self, buckets: Sequence[int], finish: Finish, landed: Landed | None) -> None:
        """Return when these are finished, here by `finish` or in another thread, and `landed` has been called."""
        while needed := [bucket for bucket in buckets if bucket in self]:
            claimed = self._claim(needed)
            if not claimed:
                continue
            try:
                finish(list(claimed), list(claimed.values()))
                with books:
                    for bucket in claimed:
                        self.pop(bucket, None)  # an optimizer that was closed meanwhile has forgotten them
                    if landed is not None:
                        landed(list(claimed))
            finally:
                self._give_back(claimed)

    def forget(self) -> None:
        """Nobody may wait for any of them."""
        with self._changed:
            self.clear()
            self._changed.notify_all()

    def _claim(self, needed: Sequence[int]) -> Mapping[int, Gather | None]:
        """Those that nobody finishes; if there are none, return when another thread has done something."""
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

    def _give_back(self, claimed: Iterable[int]) -> None:
        with self._changed:
            for bucket in claimed:
                del self._claimed[bucket]
            self._changed.notify_all()
