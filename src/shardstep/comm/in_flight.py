"""Messages under way outlive whoever sent for them.

Gloo stalls a connection for good when bytes arrive for a receive whose memory is gone. A program may drop an optimizer
at any time, also when a step has raised half-way. So what is under way is held here until it was waited for.
"""

from __future__ import annotations

from typing import Any

_in_flight: set[MessagesInFlight] = set()


class MessagesInFlight:
    """Work of the backend, and the memory it uses."""

    def __init__(self) -> None:
        self.work: list[Any] = []
        self._memory: list[Any] = []

    def hold(self, *memory: Any) -> None:
        """Before the first message that uses it."""
        self._memory.extend(memory)
        _in_flight.add(self)

    def wait(self) -> None:
        while self.work:
            # Taken off first: what has arrived arrives once, and whoever is interrupted here may come again.
            self.work.pop(0).wait()
        self._memory = []
        _in_flight.discard(self)
