"""One rank: nothing is sent, and what is packed is the mean."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardstep.comm.encoding import round_all
from shardstep.comm.transport import (
    BucketSizes,
    Check,
    Gather,
    Memory,
    Message,
    Parts,
    Reduction,
    few_large_buckets,
    finish_gathers,
    send_each,
)
from shardstep.planning import Bucket


class SingleRank:
    """The transport of a group of one."""

    part_nbytes = math.inf
    in_flight_nbytes = math.inf

    def before_waiting(self, check: Check) -> None:
        """There is nobody to wait for."""

    def packs_by_rank(self, bucket: Bucket) -> bool:
        del bucket
        return False

    def waiting_nbytes(self, largest: int) -> float:
        return 2 * largest  # as autograd made them, and packed

    def post_receives(self, gathers: Sequence[Gather]) -> None:
        """There is nobody to receive from."""

    def send(self, gathers: Sequence[Gather]) -> None:
        send_each(gathers)

    def finish(self, gathers: Sequence[Gather]) -> None:
        finish_gathers(gathers)

    def reductions(self, memory: Sequence[Memory], shard_of: Callable[[int], torch.Tensor]) -> Sequence[Reduction]:
        del shard_of
        return [_OwnGradients(bucket) for bucket in memory]

    def add_up(self, values: torch.Tensor, *, highest: bool = False) -> torch.Tensor:
        del highest
        return values

    def bucket_sizes(self, total: int) -> BucketSizes:
        return few_large_buckets(total)

    def in_place_nbytes(self, device: torch.device) -> float:
        del device
        return math.inf

    def step_order(self, buckets: int) -> list[list[int]]:
        """All at once: there is nothing to send meanwhile, and every call to an optimizer costs the host."""
        return [list(range(buckets))] if buckets else []

    def range_gathers(self, memory: Sequence[Memory], *, ring: bool) -> Sequence[Gather]:
        """There is nothing to gather; but what would be rounded on its way is rounded here, too."""
        del ring
        return [_Rounding(bucket) for bucket in memory] if any(bucket.bucket.wire for bucket in memory) else []

    def message_gathers(self, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]]) -> Sequence[Gather]:
        return [_NoGather() for _ in buckets]

    def holder_reduction(self, device: torch.device) -> _OwnParts:
        return _OwnParts(device)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        """They are what they are."""


class _NoGather:
    """Nothing has to arrive."""

    hops = 0

    def expect(self) -> None: ...
    def send(self) -> None: ...
    def pass_on(self, distance: int) -> None: ...
    def finish(self) -> None: ...


class _Rounding(_NoGather):
    """One rank holds what several would."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def send(self) -> None:
        round_all([self._memory])


class _OwnGradients:
    """What was packed is kept where it was packed, or added to what there is."""

    def __init__(self, memory: Memory) -> None:
        self._nothing = memory.own

    def expect(self, places: Sequence[slice], dtype: torch.dtype) -> None:
        """Nobody sends anything."""

    @torch.no_grad()
    def start(self, parts: Sequence[Parts], places: Sequence[slice], earlier: torch.Tensor | None) -> torch.Tensor:
        packed = parts[0][0] if parts[0] else self._nothing
        return packed if earlier is None else earlier.add_(packed)

    def land(self) -> None: ...


class _OwnParts:
    hops = None

    def __init__(self, device: torch.device) -> None:
        # A future refuses tensors of devices that it was not told of.
        self._devices: list[int | str | torch.device] = [] if device.type == "cpu" else [device]

    def begin(self, bucket: int, parts: Sequence[torch.Tensor], last: bool) -> torch.futures.Future[Any]:
        del bucket, last
        future: torch.futures.Future[Any] = torch.futures.Future(devices=self._devices)
        future.set_result(parts)
        return future
