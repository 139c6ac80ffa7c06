"""A few bytes from every rank: asked for now, read later."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardstep.comm.channel import Channel, take_tags
from shardstep.comm.host_groups import HostGroups
from shardstep.comm.in_flight import MessagesInFlight

Words = Callable[[bytes], str]  # what a rank that sends this record is doing


class Answer(Protocol):
    """What all ranks said; the same on every rank."""

    equal: bool  # whether all said the same
    any: bytes  # flags, byte for byte: whether one is set on some rank

    def rows(self, first: int | None = None) -> list[bytes]:
        """The record of every rank, or its first bytes. It may take another exchange, which all ranks then make."""


class Poll(Protocol):
    """One question that the ranks ask each other again and again; one answer is read for each time."""

    # Whether what is asked goes out only when somebody reads an answer, together with all else that is open.
    goes_together: bool
    is_open: bool  # asked, and not yet read

    def expect(self, nbytes: int) -> None:
        """Post the receives of the next answer now; of records of `nbytes`, as all of this poll are. May come again.

        A message whose receive is posted when it is sent takes one crossing of the network, any other takes two.
        """

    def ask(self, record: bytes, *, soon: bool = False) -> None:
        """This rank's record. Returns at once; of an earlier one that nobody has read, the answer is lost.

        Where questions go together, all that are open go out now if the answer is wanted `soon`.
        """

    def answer(self) -> Answer:
        """Wait for the other ranks' hosts, never for a device."""

    def forget(self) -> None:
        """The answer is not wanted any more. What was sent already is received before the next question is asked."""


def open_poll(channel: Channel, words: Words = lambda record: "") -> Poll:
    """Made on all ranks in the same order. `words` are for an error: what a rank with this record is about to do."""
    if channel.world_size == 1:
        return _SingleRankPoll()
    return MessagePoll(channel) if channel.hosts is None else _HostPoll(channel.hosts, words)


class _SingleRankPoll:
    """There is one rank."""

    goes_together = False

    def __init__(self) -> None:
        self._record = b""
        self.is_open = False

    def expect(self, nbytes: int) -> None:
        """Nobody sends anything."""

    def ask(self, record: bytes, *, soon: bool = False) -> None:
        del soon
        self._record, self.is_open = record, True

    def answer(self) -> Answer:
        assert self.is_open, "an answer is read once for each question"
        self.is_open = False
        return _Gathered([self._record])

    def forget(self) -> None:
        self.is_open = False


class _Gathered:
    def __init__(self, records: list[bytes]) -> None:
        self._records = records
        self.equal = len(set(records)) == 1
        # As whole numbers, because there may be thousands of flags.
        together = reduce(or_, (int.from_bytes(row, "big") for row in records))
        self.any = together.to_bytes(len(records[0]), "big")

    def rows(self, first: int | None = None) -> list[bytes]:
        return [record[:first] for record in self._records]


class MessagePoll:
    """One message from each rank to each other one, by the backend of the CPU.

    A gather takes several turns, and behind megabytes on the same connections each of its messages would wait for them.
    These are on their way at once, and what is sent later stays behind them.
    """

    goes_together = False

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.tag = take_tags(channel)
        self._in_flight = MessagesInFlight()
        self._others = [other for other in range(channel.world_size) if other != channel.rank]
        self._landing: torch.Tensor | None = None  # by rank; receives into it are posted
        self.is_open = False

    def expect(self, nbytes: int) -> None:
        if self.is_open or self._landing is not None:
            return
        self._channel.check_process()
        landing = torch.empty(self._channel.world_size, nbytes, dtype=torch.uint8, device="cpu")
        self._in_flight.hold(landing)
        self._landing = landing
        for other in self._others:
            self._in_flight.work.append(
                dist.irecv(landing[other], group=self._channel.group, group_src=other, tag=self.tag)
            )

    def ask(self, record: bytes, *, soon: bool = False) -> None:
        del soon  # it goes at once
        self._channel.check_process()
        if self.is_open:
            self.answer()
        self.expect(len(record))
        assert self._landing is not None, "posted by `expect`"
        assert self._landing.shape[1] == len(record), "records of a poll have one length"
        self.is_open = True
        own = self._landing[self._channel.rank]
        own.copy_(torch.frombuffer(bytearray(record), dtype=torch.uint8))
        for other in self._others:
            self._in_flight.work.append(dist.isend(own, group=self._channel.group, group_dst=other, tag=self.tag))

    def answer(self) -> Answer:
        assert self.is_open, "an answer is read once for each question"
        self._in_flight.wait()
        assert self._landing is not None, "its receives were posted at the latest when it was asked"
        landing, self._landing, self.is_open = self._landing, None, False
        return _Gathered([record.numpy().tobytes() for record in landing])

    def forget(self) -> None:
        """Other ranks may send their records much later: they are received when this rank asks again."""


class _HostPoll:
    """Combined on its way: see hosts.py."""

    goes_together = True

    def __init__(self, hosts: HostGroups, words: Words) -> None:
        self._hosts, self._words = hosts, words
        self._question = hosts.new_question()
        self._record = b""
        self.is_open = False

    def expect(self, nbytes: int) -> None:
        """Groups of hosts combine records by collectives, which have no receives."""

    def ask(self, record: bytes, *, soon: bool = False) -> None:
        self._record, self.is_open = record, True
        self._hosts.ask(self._question, record, self._words(record))
        if soon:
            self._hosts.start()

    def answer(self) -> Answer:
        assert self.is_open, "an answer is read once for each question"
        self.is_open = False
        return _Combined(self._hosts, self._record, self._hosts.answer(self._question))

    def forget(self) -> None:
        self.is_open = False
        self._hosts.forget(self._question)


class _Combined:
    def __init__(self, hosts: HostGroups, own: bytes, combined: Any) -> None:
        self._hosts, self._own = hosts, own
        self.equal = combined.highest == combined.lowest
        self.any = combined.highest

    def rows(self, first: int | None = None) -> list[bytes]:
        return self._hosts.rows(self._own[:first])
