"""What hosts have to say to each other beside an accelerator's backend: small, combined, and never through a device.

[Note: hosts wait for hosts] A host that reads a device's answer waits for everything the device was given before. So
who had a gradient, whose turn it is and whether all agree goes between the hosts' processes, by Gloo groups of our own.
Gloo connects every member of a group with every other; so a group has at most FAN members, and above it is a group of
their first members, and so on: each rank has a few dozen connections, among 16 ranks or 16,384. What is told is
combined on the way (the highest and the lowest of every byte), so that a rank sends as much at any number of ranks.

[Note: together] Several questions may be open at a time, and ranks that have gone apart ask different ones. So nothing
is sent when a question is asked. When the first answer is needed, or soon will be, all that is open goes in one message
of fixed size, with a digest of what is being asked: if ranks ask different things, all of them see it, and all raise.
"""

from __future__ import annotations

import atexit
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

FAN = 32  # members of one Gloo group
MEETING = timedelta(seconds=30)  # for ranks that come at once, to connect
_FRAME = 128  # bytes of the message that goes in any case
_SHORT = 48  # records up to this size go in it; of longer ones it says whether they have changed
_WORDS = 96  # bytes of what a rank says it is doing, when the ranks have gone apart


FORKED = (
    "this process was forked from one that trains, and has no ranks to talk to: it may use the model as it is, and its "
    "optimizer not at all. Step, save and load in the process that trains; or start processes by spawn"
)


def check_process(own: int) -> None:
    """Raise if this is not the process `own`, but was forked from it."""
    if os.getpid() != own:
        raise RuntimeError(FORKED)


class Forked:
    """In the place of what talked to other ranks, in a forked process: whatever is asked of it raises."""

    def __init__(self, before: Any) -> None:
        self.__dict__["_before"] = before  # kept: to end its connections would wait for threads that are not here

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(FORKED)


class RanksDivergedError(RuntimeError):
    """The ranks ask each other different things: they are at different places of the program."""


@dataclass(frozen=True, slots=True)
class Combined:
    """What all ranks' records have in common: byte for byte the highest and the lowest."""

    highest: bytes
    lowest: bytes


class Sent:
    """A record that is being combined: `works` are the steps of it, of which the first has begun."""

    def __init__(self, values: torch.Tensor, works: Iterator[Any]) -> None:
        self._values, self._works, self._first = values, works, next(works)

    def read(self) -> Combined:
        """Wait for the other hosts."""
        self._first.wait()
        for work in self._works:
            work.wait()
        high, low = self._values.chunk(2)
        return Combined(high.numpy().tobytes(), (~low).numpy().tobytes())


@dataclass(eq=False, slots=True)
class Question:
    """What the hosts ask each other again and again, under a number that is the same on all ranks.

    Whoever asks holds it: with a plan that is replaced its questions go, and what was kept of their answers.
    """

    number: int
    last: tuple[bytes, Combined] | None = None  # of long records: the last one, and what came of it


@dataclass(frozen=True, slots=True)
class _Exchange:
    """All that was open, under way in one message."""

    asked: Sequence[tuple[Question, tuple[bytes, str]]]  # by question: the record, and what this rank is doing
    parts: Sequence[bytes]  # of each question: its record, or whether that has changed
    is_short: Sequence[bool]
    sent: Sent

    def has(self, question: Question) -> bool:
        return any(question is other for other, _ in self.asked)


class HostGroups:
    """The hosts of one process group: the groups `below` the top that this rank is in, and the `top` if it is in it."""

    def __init__(self, rank: int, world_size: int, below: Sequence[Any], top: Any | None) -> None:
        self.rank, self.world_size = rank, world_size
        self._below, self._top = below, top
        self._process = os.getpid()
        self.questions = 0  # so far
        self._open: dict[Question, tuple[bytes, str]] = {}  # by question: the record, and what this rank is doing
        self._under_way: _Exchange | None = None
        self._answers: dict[Question, Combined] = {}

    # -- questions ----------------------------------------------------------------------------------------------------

    def new_question(self) -> Question:
        """All ranks make them in the same order, so they count alike."""
        self.questions += 1
        return Question(self.questions)

    def ask(self, question: Question, record: bytes, doing: str) -> None:
        """Records of one question have one length. Asked again before it is answered, the last counts."""
        self.forget(question)
        self._open[question] = (record, doing)

    def start(self) -> None:
        """What is open goes on its way now: what this rank does until it reads an answer costs no time."""
        self._read()
        if self._open:
            self._under_way = self._send_open()

    def forget(self, question: Question) -> None:
        if self._under_way is not None and self._under_way.has(question):
            self._read()
        self._open.pop(question, None)
        self._answers.pop(question, None)

    def answer(self, question: Question) -> Combined:
        self._read()
        if question not in self._answers:
            if question not in self._open:
                raise RanksDivergedError("what this rank asked was lost when the ranks went apart")
            self.start()
            self._read()
        return self._answers.pop(question)

    # -- records ------------------------------------------------------------------------------------------------------

    def rows(self, record: bytes) -> list[bytes]:
        """The record of every rank: for errors, because it is as long as there are ranks. Called by all ranks."""
        size = len(record)
        everyone = bytearray(size * self.world_size)
        everyone[self.rank * size : (self.rank + 1) * size] = record
        together = self.combine(bytes(everyone)).highest
        return [together[start : start + size] for start in range(0, len(together), size)]

    def combine(self, record: bytes) -> Combined:
        """Byte for byte the highest and the lowest of all ranks; of the same length on every rank."""
        self._read()  # what was sent before is read before
        return self.send(record).read()

    def send(self, record: bytes) -> Sent:
        check_process(self._process)
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        values = torch.cat([own, ~own])
        return Sent(values, self._up_and_down(values))

    def _up_and_down(self, values: torch.Tensor) -> Iterator[Any]:
        """To the first of each group, among those at the top, and back. Each step begins when the last is over."""
        for group in self._below:
            yield group.reduce([values], _highest(dist.ReduceOptions()))
        if self._top is not None:
            yield self._top.allreduce([values], _highest(dist.AllreduceOptions()))
        for group in reversed(self._below):
            yield group.broadcast([values], dist.BroadcastOptions())  # from the first

    # -- what is open, in one message ---------------------------------------------------------------------------------

    def _send_open(self) -> _Exchange:
        asked, self._open = sorted(self._open.items(), key=lambda row: row[0].number), {}
        shape = repr([(question.number, len(record)) for question, (record, _) in asked]).encode()
        short = [len(record) <= _SHORT for _, (record, _) in asked]
        if 8 + sum(len(record) if flag else 1 for flag, (_, (record, _)) in zip(short, asked, strict=True)) > _FRAME:
            short = [False] * len(asked)  # too many at a time: of each, whether it has changed
        parts = [
            record if flag else self._news(question, record)
            for flag, (question, (record, _)) in zip(short, asked, strict=True)
        ]
        frame = hashlib.blake2b(shape, digest_size=8).digest() + b"".join(parts)
        assert len(frame) <= _FRAME, "more than a hundred questions are open at a time"
        return _Exchange(asked, parts, short, self.send(frame.ljust(_FRAME, b"\0")))

    def _read(self) -> None:
        """What is under way, if anything is."""
        exchange, self._under_way = self._under_way, None
        if exchange is None:
            return
        came = exchange.sent.read()
        if came.highest[:8] != came.lowest[:8]:
            self._raise_apart([doing for _, (_, doing) in exchange.asked])
        changed = []
        place = 8
        rows = zip(exchange.asked, exchange.parts, exchange.is_short, strict=True)
        for (question, (record, _)), part, is_short in rows:
            span = slice(place, place + len(part))
            place += len(part)
            if is_short:
                self._answers[question] = Combined(came.highest[span], came.lowest[span])
            elif came.highest[span] == b"\0":  # as last time on every rank: so is the answer
                assert question.last is not None, "this rank said so"
                self._answers[question] = question.last[1]
            else:
                changed.append((question, record))
        self._read_long(changed)

    def _news(self, question: Question, record: bytes) -> bytes:
        return bytes([question.last is None or question.last[0] != record])

    def _read_long(self, changed: Sequence[tuple[Question, bytes]]) -> None:
        if not changed:
            return
        came = self.combine(b"".join(record for _, record in changed))
        place = 0
        for question, record in changed:
            span = slice(place, place + len(record))
            place += len(record)
            self._answers[question] = Combined(came.highest[span], came.lowest[span])
            question.last = (record, self._answers[question])

    def _raise_apart(self, doing: Sequence[str]) -> None:
        told = [words for words in doing if words] or ["do something else"]
        own = told[-1].encode()[:_WORDS].ljust(_WORDS, b"\0")
        words = [row.rstrip(b"\0").decode(errors="ignore") for row in self.rows(own)]
        raise RanksDivergedError(describe_divergence(words))


def _highest(options: Any) -> Any:
    options.reduceOp = dist.ReduceOp.MAX
    return options


def describe_divergence(words: Sequence[str]) -> str:
    """Which ranks do what, from what each of them does."""
    return "; ".join(
        f"ranks {[rank for rank, other in enumerate(words) if other == text]} {text}" for text in sorted(set(words))
    )


_known: dict[str, tuple[Any, HostGroups]] = {}  # by name
# While the interpreter still runs, Gloo ends its threads. Left to the end, they may take the process down with them.
atexit.register(_known.clear)
_generations: Counter[str] = Counter()  # how many were made for groups of a name: their ranks count alike


def hosts_of(group: Any, backends: dict[str, str]) -> HostGroups:
    """The hosts of a process group; made once, on all of its ranks."""
    name = group.group_name
    if name in _known and _known[name][0] is group:
        return _known[name][1]
    _generations[name] += 1  # one of a group of this name that was destroyed may have left its addresses behind
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if backends.get("cpu", "gloo") != "gloo":  # it takes the hosts' own tensors, and is not Gloo: it will do
        hosts = HostGroups(rank, world_size, [], group)
    else:
        meeting = f"shardstep/hosts/{name}/{_generations[name]}"
        hosts = HostGroups(rank, world_size, *_make_levels(meeting, rank, world_size, timeout_of(group)))
    _known[name] = (group, hosts)
    return hosts


def separate_hosts(group: Any, purpose: str) -> HostGroups:
    """Connections of their own between the hosts of a group, for another thread. Made on all of its ranks.

    In the middle of a job a peer may die before it comes. All of them come at once, so it is not waited for as long as
    the group's calls may take: Gloo tries five times as long to connect with one that has told its address and died.
    The program's store is more patient, too, and so is asked by way of a copy that is not.
    """
    name = f"{purpose}/{group.group_name}"
    _generations[name] += 1
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    meeting = f"shardstep/{name}/{_generations[name]}"
    store, timeout = default_store().clone(), timeout_of(group)
    store.set_timeout(min(timeout, MEETING))
    below, top = _make_levels(meeting, rank, world_size, min(timeout, MEETING), store)
    for made in (*below, top):
        if made is not None:
            made._set_default_timeout(timeout)
    return HostGroups(rank, world_size, below, top)


def default_store() -> Any:
    """Return the store by which the program's processes have met."""
    return dist.distributed_c10d._get_default_store()


def _make_levels(
    meeting: str, rank: int, world_size: int, timeout: timedelta, meeting_store: Any = None
) -> tuple[list[Any], Any | None]:
    """Groups of FAN neighbours, then of the first of each FAN, until one group is all: those that `rank` is in.

    They meet under a name that follows from the group's own. `torch.distributed.new_group` would name them after how
    many groups a rank is in, which may differ from rank to rank: they would wait for each other under different names.
    """
    below: list[Any] = []
    members = list(range(world_size))
    while rank in members:
        place = members.index(rank) // FAN * FAN
        nearest = members[place : place + FAN]
        store = PrefixStore(f"{meeting}/{len(below)}/{nearest[0]}", meeting_store or default_store())
        made = dist.ProcessGroupGloo(store, nearest.index(rank), len(nearest), timeout)
        if len(members) <= FAN:
            return below, made
        below.append(made)
        members = members[::FAN]
    return below, None


def timeout_of(group: Any) -> timedelta:
    """As long as the group's own calls may take, so long hosts wait for each other."""
    for device in ("cuda", "cpu"):
        try:
            found = group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        if isinstance(found, timedelta):
            return found
    return dist.default_pg_timeout
