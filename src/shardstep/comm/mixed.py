"""Parameters on the CPU and on an accelerator at once: each bucket by the transport of its device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from shardstep.comm.transport import (
    BucketSizes,
    Check,
    Gather,
    HolderReduction,
    Memory,
    Message,
    Reduction,
    Transport,
    finish_gathers,
    in_order,
    send_each,
)
from shardstep.planning import Bucket


class MixedDevices:
    """`transports` by the type of a device."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        self._transports = transports

    def before_waiting(self, check: Check) -> None:
        for transport in self._transports.values():
            transport.before_waiting(check)

    @property
    def part_nbytes(self) -> float:
        """A size that serves all: what is one part for one of them is one part for all."""
        return max(one.part_nbytes for one in self._transports.values())

    @property
    def in_flight_nbytes(self) -> float:
        return min(one.in_flight_nbytes for one in self._transports.values())

    def packs_by_rank(self, bucket: Bucket) -> bool:
        return self._transports[bucket.device.partition(":")[0]].packs_by_rank(bucket)

    def waiting_nbytes(self, largest: int) -> float:
        return sum(one.waiting_nbytes(largest) for one in self._transports.values())

    def post_receives(self, gathers: Sequence[Gather]) -> None:
        """`expect` posts them: of what is on several devices little is saved."""

    def send(self, gathers: Sequence[Gather]) -> None:
        send_each(gathers)

    def finish(self, gathers: Sequence[Gather]) -> None:
        finish_gathers(gathers)

    def reductions(self, memory: Sequence[Memory], shard_of: Callable[[int], torch.Tensor]) -> Sequence[Reduction]:
        rows = {kind: one.reductions(memory, shard_of) for kind, one in self._transports.items()}
        return [rows[bucket.values.device.type][number] for number, bucket in enumerate(memory)]

    def add_up(self, values: torch.Tensor, *, highest: bool = False) -> torch.Tensor:
        return self._transports[values.device.type].add_up(values, highest=highest)

    def bucket_sizes(self, total: int) -> BucketSizes:
        return BucketSizes(min(one.bucket_sizes(total).usual for one in self._transports.values()))

    def in_place_nbytes(self, device: torch.device) -> float:
        return self._transports[device.type].in_place_nbytes(device)

    def step_order(self, buckets: int) -> list[list[int]]:
        return in_order(buckets)

    def range_gathers(self, memory: Sequence[Memory], *, ring: bool) -> Sequence[Gather]:
        rows = {kind: one.range_gathers(memory, ring=ring) for kind, one in self._transports.items()}
        return [rows[bucket.values.device.type][number] for number, bucket in enumerate(memory)]

    def message_gathers(self, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]]) -> Sequence[Gather]:
        rows = {kind: one.message_gathers(buckets) for kind, one in self._transports.items()}
        return [rows[device.type][number] for number, (device, _) in enumerate(buckets)]

    def holder_reduction(self, device: torch.device) -> HolderReduction:
        return self._transports[device.type].holder_reduction(device)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for kind, transport in self._transports.items():
            transport.broadcast([tensor for tensor in tensors if tensor.device.type == kind])
