"""The seam: how gradients come to the ranks that hold them, and parameters back to everyone.

A transport is chosen once, when an optimizer is built (choose.py). Nothing above knows which one it has: what differs
between backends is asked of it, as a size or an order, and never as a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardstep.planning import Bucket

Parts = Sequence[torch.Tensor]
Check = Callable[[], None]


class Memory(Protocol):
    """One bucket of a plan, and where its values lie."""

    @property
    def bucket(self) -> Bucket: ...
    @property
    def values(self) -> torch.Tensor:
        """Flat, of all ranks; what lies between two parameters is no one's, and travels too."""

    @property
    def own(self) -> torch.Tensor:
        """This rank's range of it."""

    def range_of(self, rank: int) -> torch.Tensor: ...


class Message(Protocol):
    """Parameters of one rank that travel together."""

    nbytes: int

    def prepare(self) -> None:
        """Called on every rank before every step; may raise, the other methods do not."""

    def outgoing(self) -> torch.Tensor:
        """Their values as one flat tensor; called on the rank that holds them."""

    def landing(self) -> torch.Tensor:
        """Where the values may be received."""

    def landed(self, values: torch.Tensor) -> None:
        """The values have arrived in what `landing` returned."""

    def sent(self) -> None:
        """What `outgoing` returned has been sent; until then nobody reads the values on this rank."""


@dataclass(frozen=True, slots=True)
class BucketSizes:
    """In bytes. `ends`: of the first and of the last bucket, if they are to be smaller.

    The links are idle until the first bucket is full; and what the next forward needs first is in the last one.
    """

    usual: float
    ends: float | None = None


class Gather(Protocol):
    """Gives every rank the parameters of every rank; made once for a plan and used at every step, in this order."""

    def expect(self) -> None:
        """Other ranks' parameters may be written from now on."""

    def send(self) -> None:
        """This rank's parameters are final."""

    hops: int  # how many ranks a message may pass through

    def pass_on(self, distance: int) -> None:
        """Pass on what comes to this rank for others, from the rank that is so far behind it in the ring."""

    def finish(self) -> None:
        """Everything that is done from now on finds the new parameters: the stream waits, where there is one."""


class Reduction(Protocol):
    """Brings the mean of all ranks' gradients of one bucket to the ranks that hold it; used in every pass."""

    def expect(self, places: Sequence[slice], dtype: torch.dtype) -> None:
        """A pass follows, and `start` comes with these: post receives now where that takes little memory."""

    def start(self, parts: Sequence[Parts], places: Sequence[slice], earlier: torch.Tensor | None) -> torch.Tensor:
        """`parts[r]` are for rank r, or `parts[0]` for all (`packs_by_rank`); they must not change before `land`.
        Their dtype is that in which they are sent.

        `places` are those of this rank's own parts in its range. Returns this rank's range of the mean, which is there
        after `land`; what is in `earlier` is added to it, and it is that memory.
        """

    def land(self) -> None:
        """Everything that is done from now on finds the mean; what was sent may be overwritten."""


class HolderReduction(Protocol):
    """Brings the sum of a bucket's parts to the ranks that hold them, while backward goes on; for DDP's buckets."""

    @property
    def hops(self) -> int | None:
        """Buckets that go out until one has arrived; None: it arrives when its future says so."""

    def begin(self, bucket: int, parts: Sequence[torch.Tensor], last: bool) -> torch.futures.Future[Any]:
        """`parts[r]` is for rank r; this rank's own is overwritten with the sum."""


class Transport(Protocol):
    """The only sender. All ranks call it in the same order: see [Note: order] in channel.py."""

    def before_waiting(self, check: Check) -> None:
        """`check` is called before the host waits for what other ranks send only if they do what this one does."""

    # -- gradients ----------------------------------------------------------------------------------------------------

    @property
    def part_nbytes(self) -> float:
        """A gradient from this size on is sent from its own memory, smaller neighbours are joined."""

    @property
    def in_flight_nbytes(self) -> float:
        """Beyond this, the oldest bucket lands before the next one is sent."""

    def waiting_nbytes(self, largest: int) -> float:
        """Gradients in memory beside this rank's shards, at most, if that is the bytes of the largest bucket."""

    def packs_by_rank(self, bucket: Bucket) -> bool:
        """Whether gradients are packed for each rank by itself, or the whole bucket at once."""

    def reductions(self, memory: Sequence[Memory], shard_of: Callable[[int], torch.Tensor]) -> Sequence[Reduction]:
        """One for each bucket. `shard_of(b)` is memory for this rank's range of the mean."""

    def add_up(self, values: torch.Tensor, *, highest: bool = False) -> torch.Tensor:
        """The sum (or the highest) of a few numbers of every rank; where they are, and the same on every rank."""

    # -- parameters ---------------------------------------------------------------------------------------------------

    def bucket_sizes(self, total: int) -> BucketSizes:
        """What should travel together of a model of so many bytes."""

    def in_place_nbytes(self, device: torch.device) -> float:
        """Parameters from this size on travel from and to where they lie; smaller ones share a message."""

    def step_order(self, buckets: int) -> list[list[int]]:
        """Buckets that are stepped together, and then sent; in this order."""

    def post_receives(self, gathers: Sequence[Gather]) -> None:
        """`expect` of all of these follows, if all ranks go on alike: where there are receives, post them now.

        A message whose receive is posted when it is sent takes one crossing of the network, any other takes two.
        """

    def send(self, gathers: Sequence[Gather]) -> None:
        """This rank's parameters in all of these are final; they were stepped together."""

    def finish(self, gathers: Sequence[Gather]) -> None:
        """Everything that is done from now on finds the new parameters of all of these."""

    def range_gathers(self, memory: Sequence[Memory], *, ring: bool) -> Sequence[Gather]:
        """One for each bucket; none at all if there is nobody to gather from.

        Without `ring` ranks may finish when each likes, and none waits for another to pass something on.
        """

    def message_gathers(self, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]]) -> Sequence[Gather]:
        """One for each bucket: the device of its parameters, and the messages of each rank."""

    def holder_reduction(self, device: torch.device) -> HolderReduction: ...

    # -- occasional tensors -------------------------------------------------------------------------------------------

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give every rank the values of the first, in place."""


def finish_gathers(gathers: Sequence[Gather]) -> None:
    """Return when everything has arrived. Passed on first, and in the order in which it comes: the rank before this one
    sends its own parts of all gathers, then those of the rank before it, and so on."""
    for distance in range(1, max((gather.hops for gather in gathers), default=0) + 1):
        for gather in gathers:
            gather.pass_on(distance)
    for gather in gathers:
        gather.finish()


def send_each(gathers: Sequence[Gather]) -> None:
    for gather in gathers:
        gather.send()


LEAST_MB, USUAL_MB, MOST_MB = 8.0, 64.0, 128.0
FEW, MANY = 3.4, 48  # buckets of usual size: of a small model, so that few calls are made late; and of a large one
FEW_AWAITED = 7  # of a small model, if a forward waits for each of them
END = 0.25  # of the usual size


def few_large_buckets(total: int, few: float = FEW) -> BucketSizes:
    """Where each bucket costs the host a call or more; `total` are the bytes of the model."""
    usual = min(USUAL_MB * 1e6, max(LEAST_MB * 1e6, total / few))
    usual = max(usual, min(MOST_MB * 1e6, total / MANY))
    return BucketSizes(usual, END * usual)


def in_order(buckets: int) -> list[list[int]]:
    """One bucket is on its way while the next is stepped."""
    return [[bucket] for bucket in range(buckets)]
