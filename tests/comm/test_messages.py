"""What a step sends with Gloo, message by message, and how many crossings of the network it waits for.

`docs/concepts.md` has the same as a table. Time is counted here, not measured: a message arrives one crossing after it
is sent; or, if its receive is posted later than that, two crossings after the receive (Gloo asks for it then).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep

LAYERS, WIDTH = 3, 64
PARAMS, NUMEL = 2 * LAYERS, LAYERS * (WIDTH + 1) * WIDTH
RECORD = 1 + 2 * PARAMS + 10  # whether the pass failed; which gradients came, and which too late; the call
FARED = 33  # whether this rank failed, and a digest of what it believes to train


class Event(NamedTuple):
    """What one rank did: "send" or "receive" a message, or "wait" for the one that event `number` began."""

    kind: str
    peer: int = -1
    tag: int = -1
    nbytes: int = 0
    number: int = -1


class Watched:
    """Work of the backend that writes down when it is waited for."""

    def __init__(self, work: Any, number: int, events: list[Event]) -> None:
        self._work, self._number, self._events = work, number, events

    def wait(self) -> None:
        self._work.wait()
        self._events.append(Event("wait", number=self._number))


@contextmanager
def watched() -> Iterator[list[Event]]:
    """Inside, every message of this rank is written down."""
    events: list[Event] = []
    send, receive = dist.isend, dist.irecv

    def watch(kind: str, peer: int, tensor: torch.Tensor, tag: int, work: Any) -> Watched:
        events.append(Event(kind, peer, tag, tensor.nbytes))
        return Watched(work, len(events) - 1, events)

    def isend(tensor: torch.Tensor, *, group: Any, group_dst: int, tag: int) -> Watched:
        return watch("send", group_dst, tensor, tag, send(tensor, group=group, group_dst=group_dst, tag=tag))

    def irecv(tensor: torch.Tensor, *, group: Any, group_src: int, tag: int) -> Watched:
        return watch("receive", group_src, tensor, tag, receive(tensor, group=group, group_src=group_src, tag=tag))

    with mock.patch.object(dist, "isend", isend), mock.patch.object(dist, "irecv", irecv):
        yield events


def count_crossings(ranks: list[list[Event]]) -> int:
    """Return after how many crossings of the network the last rank is through with its events."""
    began: defaultdict[tuple[str, int, int, int, int], list[tuple[int, int]]] = defaultdict(list)
    other_end: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, events in enumerate(ranks):
        for number, event in enumerate(events):
            if event.kind != "wait":
                source, to = (rank, event.peer) if event.kind == "send" else (event.peer, rank)
                began[event.kind, source, to, event.tag, event.nbytes].append((rank, number))
    for (kind, *key), sends in began.items():
        if kind == "send":
            for sent, received in zip(sends, began["receive", key[0], key[1], key[2], key[3]], strict=True):
                other_end[sent], other_end[received] = received, sent
    times = [[0] * len(events) for events in ranks]
    while True:
        before = [row.copy() for row in times]
        for rank, events in enumerate(ranks):
            now = 0
            for number, event in enumerate(events):
                if event.kind == "wait":
                    peer, place = other_end[rank, event.number]
                    own, others = times[rank][event.number], times[peer][place]
                    sent, posted = (own, others) if events[event.number].kind == "send" else (others, own)
                    goes_out = max(sent, posted + 1)  # the sender has heard of the receive
                    now = max(now, goes_out if events[event.number].kind == "send" else goes_out + 1)
                times[rank][number] = now
        if times == before:
            return max(row[-1] for row in times if row)


def nothing(opt: Any) -> None:
    del opt


def clip(opt: Any) -> None:
    opt.clip_grad_norm_(1.0)


def events_of_steps(steps: int, before_step: Callable[[Any], None] = nothing, passes: int = 1) -> list[Event]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    dist.barrier()
    with watched() as events:
        for _ in range(steps):
            for _ in range(passes):
                model(torch.ones(2, WIDTH)).sum().backward()
            before_step(opt)
            opt.step()
            opt.zero_grad()
    return events


def crossings_of_a_step(ranks: Any, before_step: Callable[[Any], None] = nothing, passes: int = 1) -> int:
    """What one step more takes, of a program that does nothing else."""
    three, four = (count_crossings(ranks.run(events_of_steps, steps, before_step, passes)) for steps in (3, 4))
    return four - three


def sent_to(other: int, events: list[Event]) -> Counter[int]:
    """Return how many messages there were of each size."""
    return Counter(event.nbytes for event in events if event.kind == "send" and event.peer == other)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_sends_four_messages_to_every_other_rank(workers, world_size):
    ranks = workers(world_size)
    three, four = ranks.run(events_of_steps, 3), ranks.run(events_of_steps, 4)
    part = -(-NUMEL // world_size) * 4
    for rank in range(world_size):
        for other in set(range(world_size)) - {rank}:
            sent = sent_to(other, four[rank]) - sent_to(other, three[rank])
            assert sent.pop(RECORD) == 1, "which gradients came, and what follows: beside the gradients"
            assert sent.pop(FARED) == 1, "how this rank fared: beside the weights"
            assert sum(sent.values()) == 2, "gradients of one bucket, and its weights"
            assert all(abs(nbytes - part) < 4096 for nbytes in sent)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_takes_three_crossings(workers, world_size):
    """Gradients and the record take two: their receives are posted when the pass begins. The weights take one, because
    theirs are posted when the step begins."""
    assert crossings_of_a_step(workers(world_size)) == 3


def test_clipping_adds_a_norm_and_an_announcement(workers):
    """Two crossings for the norm, and one for the step that follows it."""
    assert crossings_of_a_step(workers(3), clip) == 6


def test_a_second_pass_adds_its_gradients(workers):
    """Three crossings: receives are posted when it begins, and its record waits for that of the pass before it."""
    assert crossings_of_a_step(workers(2), nothing, 2) == 5


def test_crossings_are_counted_as_the_network_takes_them():
    ask = Event("receive", 1, 7, 8), Event("send", 1, 7, 8), Event("wait", number=0)
    answer = Event("receive", 0, 7, 8), Event("send", 0, 7, 8), Event("wait", number=0)
    assert count_crossings([list(ask), list(answer)]) == 2, "both post their receives when they send"
    again = Event("receive", 1, 8, 8), *ask, Event("send", 1, 8, 8), Event("wait", number=0)
    again_there = Event("receive", 0, 8, 8), *answer, Event("send", 0, 8, 8), Event("wait", number=0)
    first = [event._replace(number=1) if event.kind == "wait" else event for event in again[:-1]]
    second = [event._replace(number=1) if event.kind == "wait" else event for event in again_there[:-1]]
    assert count_crossings([[*first, again[-1]], [*second, again_there[-1]]]) == 3, "the second was posted early"
