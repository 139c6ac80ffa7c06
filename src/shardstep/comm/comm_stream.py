"""A stream of its own for communication, beside the one that computes.

[Note: memory and streams] torch's allocator gives memory back to the stream it was taken on, as soon as the last
reference goes: it does not know that another stream still reads it. `record_stream` would tell it, and then keep the
memory until some later call finds that stream done, so that reserved memory grows. Here every tensor is taken and given
back on the computing stream, and a reference is held until that stream has been made to wait for the communication that
uses it (`Trip.join`). What is enqueued after that, and may get the same memory, runs after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

WITHOUT_STREAMS = {"cpu"}  # types of devices where everything is done when a call returns; tests take the CPU out


def streams_of(device: torch.device) -> Any:
    """Return torch's module of streams and events for a device; None if the device has no streams."""
    return None if device.type in WITHOUT_STREAMS else torch.get_device_module(device)


class CommStream:
    """The communication stream of a device; on the CPU, where everything is done when a call returns, none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = streams_of(device)
        # Of high priority: its kernels are few and short of work, and others wait for them.
        self._stream: Any = None if self._streams is None else self._streams.Stream(device=device, priority=-1)

    @contextmanager
    def trip(self, *kept: torch.Tensor) -> Iterator[Pending]:
        """Inside, what is enqueued runs behind what was enqueued so far; `kept` lives until the trip is joined."""
        if self._stream is None:
            with nullcontext():
                yield Pending(None, self._device, None, kept)
            return
        home = self._streams.current_stream(self._device)
        trip = Pending(self._streams, self._device, home, kept)
        self._stream.wait_stream(home)
        with self._streams.stream(self._stream):
            yield trip
            trip.end()


class Pending:
    """Communication that was enqueued, and the memory it must not lose."""

    def __init__(self, streams: Any, device: torch.device, home: Any, kept: tuple[torch.Tensor, ...]) -> None:
        self._streams, self._device, self._home = streams, device, home
        self._kept: Any = kept
        self._done: Any = None

    def end(self) -> None:
        self._done = self._streams.current_stream(self._device).record_event()

    def join(self) -> None:
        """What is enqueued from now on runs behind it. The host does not wait."""
        if self._done is not None:
            _refuse_to_be_captured(self._streams)
            # Of the parameters' device, which a program need not have made the current one.
            stream = self._streams.current_stream(self._device)
            stream.wait_event(self._done)
            if stream != self._home:  # a look from another stream must not be all that ever waits
                self._home.wait_event(self._done)
        self._kept = None

    def sweep(self) -> bool:
        """If it is over, its memory is free. Whether it is; nobody waits."""
        if self._done is None or self._done.query():
            self._kept = None
            return True
        return False


def _refuse_to_be_captured(streams: Any) -> None:
    """A graph would keep the wait for this one event, and its replays find it over."""
    is_capturing = getattr(streams, "is_current_stream_capturing", None)
    if is_capturing is not None and is_capturing():
        raise RuntimeError(
            "weights of the last step are on their way while a graph is captured, and its replays would not wait for "
            "those of later steps: call synchronize() of the optimizer before the capture and before every replay"
        )
