"""A stand-in for the streams and events of an accelerator, on the CPU: work runs at once, calls are written down.

It takes the place of the module that `torch.get_device_module` returns (`torch.cuda` on a GPU). Nothing is enqueued and
nobody waits; what the package asks for goes to a `Recorder`, in the order in which it is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from shardstep.comm import comm_stream
from shardstep.engine import build
from shardstep.stepping import two_streams

if TYPE_CHECKING:
    from recorder import Recorder


class Stream:
    def __init__(self, streams: StreamModule, name: str) -> None:
        self._streams, self._record = streams, streams.record
        self.name = name

    def __str__(self) -> str:
        return self.name

    def wait_stream(self, other: Stream) -> None:
        self._record.note(f"{self} waits for {other}")

    def wait_event(self, event: Event) -> None:
        self._record.note(f"{self} waits for event {self._record.show_event(event.name)}")

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self._streams) if event is None else event
        if event.is_time:
            self._record.mark(f"{self} records a time")
        else:
            event.name = self._record.name_event()
            self._record.note(f"{self} records event {self._record.show_event(event.name)}")
        return event

    def synchronize(self) -> None:
        self._record.note(f"HOST waits for {self}")

    def query(self) -> bool:
        return False


class Event:
    """An event. One that takes the time has no name, because only the host waits for it."""

    def __init__(self, streams: StreamModule, enable_timing: bool = False, **options: Any) -> None:
        del options
        self._streams, self.is_time = streams, enable_timing
        self.name: Any = None  # where it was recorded last

    def record(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current_stream()).record_event(self)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or self._streams.current_stream()).wait_event(self)

    def synchronize(self) -> None:
        record = self._streams.record
        record.mark("HOST reads times" if self.is_time else f"HOST waits for event {record.show_event(self.name)}")

    def query(self) -> bool:
        return False  # no event is over before somebody has waited for it

    def elapsed_time(self, end: Event) -> float:
        del end
        return 1.0


class StreamModule:
    """What a program finds in `torch.cuda`. Streams are named in the order in which they are made."""

    def __init__(self, record: Recorder) -> None:
        self.record = record
        self._made = 0
        self._default = self._current = Stream(self, "default")
        self.Event = partial(Event, self)
        self.Stream = self._make_stream

    def _make_stream(self, device: Any = None, priority: int = 0, **options: Any) -> Stream:
        del device, options
        self._made += 1
        made = Stream(self, f"stream {self._made}")
        self.record.note(f"make {made} of priority {priority}")
        return made

    def current_stream(self, device: Any = None) -> Stream:
        del device
        return self._current

    def set_stream(self, stream: Stream) -> None:
        """Make a stream the current one, and indent what follows, unless it is the default stream."""
        if stream is not self._current:
            self._current = stream
            self.record.indent = 0
            if stream is not self._default:
                self.record.note(f"{stream}:")
                self.record.indent = 1

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self._current
        self.set_stream(stream)
        try:
            yield
        finally:
            self.set_stream(before)

    def synchronize(self, device: Any = None) -> None:
        del device
        self.record.note("HOST waits for the device")

    def is_current_stream_capturing(self) -> bool:
        return False


@contextmanager
def stand_in_streams(record: Recorder) -> Iterator[StreamModule]:
    """Let what is built inside find streams on the CPU. This is the one place where the stand-in is put in."""
    streams, real = StreamModule(record), torch.get_device_module

    def get_device_module(device: Any = None) -> Any:
        on_the_cpu = device is not None and torch.device(device).type == "cpu"
        return streams if on_the_cpu else real(device)

    with (
        mock.patch.object(comm_stream, "WITHOUT_STREAMS", set()),
        mock.patch.object(torch, "get_device_module", get_device_module),
    ):
        yield streams


@contextmanager
def steps_on_two_streams(streams: StreamModule) -> Iterator[None]:
    """Let what `shard` builds inside be stepped on two streams in turn, as large fused optimizers are on a GPU."""
    with ExitStack() as stack:
        for name in ("Stream", "current_stream", "stream"):
            stack.enter_context(mock.patch.object(torch.cuda, name, getattr(streams, name)))
        second = two_streams._second_stream
        stack.callback(second.cache_clear)
        second.cache_clear()
        chosen = mock.patch.object(build, "two_streams", lambda own, groups: two_streams.TwoStreams(own[0].device))
        stack.enter_context(chosen)
        yield
