"""Whether all ranks are idle: none has made a backward pass since the last step.

A rank that is in a pass may block in it until an idle rank makes up for the pass, before it can send anything. So an
idle rank waits a bounded time for the others, and then makes up for a pass. All idle ranks must decide alike: one that
has just given up would otherwise reduce with ranks that find, a moment later, that all are idle. The process group's
store decides, because it takes the first verdict of any rank and returns that one to all.
"""

from __future__ import annotations

import time
from typing import Any

from shardstep.comm.channel import Channel, take_tags
from shardstep.comm.host_groups import default_store

PATIENCE = 2.0  # seconds that an idle rank waits for the others to be idle too
LONGEST_PAUSE = 0.1  # seconds between two looks at the store

_IDLE, _BUSY = "idle", "busy"


class IdleCheck:
    """Made once for an optimizer, on all ranks. Between checks it sends nothing."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._name = f"shardstep/idle/{channel.group.group_name}/{take_tags(channel)}"
        self._checks = 0

    def on_all_ranks(self, idle: bool) -> bool:
        """Return whether all ranks are here with `idle`; the same on all idle ranks, after PATIENCE at the latest."""
        if self._channel.world_size == 1:
            return idle
        self._channel.check_process()
        self._checks += 1
        store, key = default_store(), f"{self._name}/{self._checks}"
        verdict = _BUSY
        if idle and store.add(f"{key}/idle ranks", 1) == self._channel.world_size:
            verdict = _IDLE
        elif idle:
            _wait_for(store, key)
        return bool(store.compare_set(key, "", verdict) == _IDLE.encode())


def _wait_for(store: Any, key: str) -> None:
    """Return when `key` is set, or after PATIENCE. The store's own wait logs a warning whenever its time is over."""
    until, pause = time.monotonic() + PATIENCE, 0.0005
    while not store.check([key]) and time.monotonic() < until:
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
