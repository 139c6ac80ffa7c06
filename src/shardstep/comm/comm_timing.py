"""How long communication is under way, and how long it is waited for: only while somebody asked for it.

[Note: hidden] What is sent is under way from its launch until it has been waited for. Of that time some is spent in
launching, waiting and summing: there nothing else is computed, and the rest is hidden under computation. Backends do
not tell when a message arrived; one that came early is under way until somebody needs it. So what is waited for is
exact, and what is hidden is at most that.

Nothing of this is in the way of a step that nobody measures: the objects that send are replaced, and put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from shardstep.comm.comm_stream import streams_of
from shardstep.comm.transport import Gather, Parts, Reduction, finish_gathers

Span = tuple[Any, Any]  # two marks


class Clock:
    """The host's, or that of the computing stream: its marks are read later, and no host waits when one is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: Any = streams_of(device)

    def mark(self) -> Any:
        if self._streams is None:
            return perf_counter()
        event = self._streams.Event(enable_timing=True)
        event.record(self._streams.current_stream(self._device))
        return event

    def seconds(self, since: Any, mark: Any) -> float:
        """The host waits for the stream to get there."""
        if self._streams is None:
            return float(mark - since)
        mark.synchronize()
        return float(since.elapsed_time(mark)) / 1e3


@dataclass(frozen=True, slots=True)
class Covered:
    """Seconds of one kind of communication: see [Note: hidden]."""

    under_way: float
    waited: float

    @property
    def hidden(self) -> float | None:
        """The share of the time under way in which this rank computed; None if nothing was under way."""
        return 1 - self.waited / self.under_way if self.under_way > 0 else None


class Tally:
    """Spans of one kind of communication."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._under_way: list[Span] = []
        self._waited: list[Span] = []

    def landed(self, launch: Span, landing: Span) -> None:
        """It began with `launch` and is there after `landing`."""
        self._under_way.append((launch[0], landing[1]))
        self._waited += [launch, landing]

    def read(self, since: Any) -> Covered:
        under_way, waited = (
            _union([(self.clock.seconds(since, begin), self.clock.seconds(since, end)) for begin, end in spans])
            for spans in (self._under_way, self._waited)
        )
        return Covered(under_way, waited)


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in at least one of them."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return total


class TimedReduction:
    """A `Reduction`, with its times."""

    def __init__(self, inner: Reduction, tally: Tally) -> None:
        self.inner, self._tally = inner, tally
        self._launch: Span | None = None

    def expect(self, places: Sequence[slice], dtype: torch.dtype) -> None:
        self.inner.expect(places, dtype)

    def start(self, parts: Sequence[Parts], places: Sequence[slice], earlier: torch.Tensor | None) -> torch.Tensor:
        mark = self._tally.clock.mark
        begin = mark()
        shard = self.inner.start(parts, places, earlier)
        self._launch = begin, mark()
        return shard

    def land(self) -> None:
        launch, self._launch = self._launch, None
        if launch is None:  # it was started before anybody watched
            self.inner.land()
            return
        begin = self._tally.clock.mark()
        self.inner.land()
        self._tally.landed(launch, (begin, self._tally.clock.mark()))


class Sender(Protocol):
    """What gives parameters to everyone: a transport, or one that is watched."""

    def send(self, gathers: Sequence[Gather]) -> None: ...
    def finish(self, gathers: Sequence[Gather]) -> None: ...


class TimedSender:
    """A `Sender`, with its times."""

    def __init__(self, inner: Sender, tally: Tally) -> None:
        self._inner, self._tally = inner, tally
        self._launched: dict[int, Span] = {}  # by the identity of a gather, which lives as long as its plan

    def send(self, gathers: Sequence[Gather]) -> None:
        begin = self._tally.clock.mark()
        self._inner.send(gathers)
        launch = begin, self._tally.clock.mark()
        self._launched.update((id(gather), launch) for gather in gathers)

    def finish(self, gathers: Sequence[Gather]) -> None:
        launches = [self._launched.pop(id(gather)) for gather in gathers if id(gather) in self._launched]
        begin = self._tally.clock.mark()
        self._inner.finish(gathers)
        landing = begin, self._tally.clock.mark()
        for launch in launches:
            self._tally.landed(launch, landing)


class EachByItself:
    """The `Sender` of gathers that no transport has together."""

    def send(self, gathers: Sequence[Gather]) -> None:
        for gather in gathers:
            gather.send()

    def finish(self, gathers: Sequence[Gather]) -> None:
        finish_gathers(gathers)


class CommTiming:
    """From when it is made until `end`."""

    def __init__(self, device: torch.device) -> None:
        self._clock = Clock(device)
        self._begin = self._end = self._clock.mark()
        self._reduced, self._gathered = Tally(self._clock), Tally(self._clock)
        self.steps = 0

    def reduction(self, inner: Reduction) -> Reduction:
        return TimedReduction(inner, self._reduced)

    def sender(self, inner: Sender) -> Sender:
        """Of parameters."""
        return TimedSender(inner, self._gathered)

    def gradient_sender(self, inner: Sender) -> Sender:
        """Of gradients that every rank gets: a part of reducing them."""
        return TimedSender(inner, self._reduced)

    def end(self, steps: int) -> None:
        self.steps, self._end = steps, self._clock.mark()

    def read(self) -> tuple[float, Covered, Covered]:
        """Seconds from the beginning to the end; of reducing, and of gathering. The host waits for the device."""
        seconds = self._clock.seconds(self._begin, self._end)
        return seconds, self._reduced.read(self._begin), self._gathered.read(self._begin)


def unwatched(reduction: Reduction) -> Reduction:
    return reduction.inner if isinstance(reduction, TimedReduction) else reduction
