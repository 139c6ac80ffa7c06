"""Gradients go only to the rank that steps them: two thirds of an all-reduce at four ranks, half of it at many."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shardstep.planning.schedule import StepOrder, ring_hops
from shardstep.runtime.collectives import takes_many_messages
from shardstep.runtime.reductions import ChainedReduction, reduce_parts
from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer


class HolderReduction:
    """Takes the place of a hook that reduces a bucket. Until it is known who steps what, it all-reduces.

    Gloo's own reduce brings a bucket to its holder in as many bytes as an all-reduce brings it to everyone; so there it
    goes round the ring, a hop with every bucket. NCCL's does what is wanted.
    """

    def __init__(self, zero: ZeroRedundancyOptimizer, device: torch.device) -> None:
        self._zero = zero
        self._channel = zero._channel
        self._in_ring = takes_many_messages(self._channel, device)
        self._hops = self._channel.world_size - 1
        self._chains: dict[int, ChainedReduction] = {}
        self._waiting: dict[int, tuple[torch.futures.Future[torch.Tensor], torch.Tensor]] = {}

    def order(self, wanted: StepOrder) -> StepOrder:
        """Round the ring a bucket takes as many buckets as there are hops, and can then be stepped."""
        return StepOrder(self._hops) if self._in_ring and wanted.lag is not None else wanted

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        overlapped = self._zero._overlapped
        if overlapped is None or self._hops == 0:
            return allreduce_hook(state, bucket)
        # Divided first, as torch's hook does: on two ranks the bits are the same.
        buffer = bucket.buffer().div_(self._channel.world_size)
        parts = overlapped.parts_of(bucket.index(), buffer)
        if not self._in_ring:
            return reduce_parts(self._channel, parts).then(lambda _: buffer)
        if bucket.index() not in self._chains:  # in the first pass, in the order of the buckets: the same on every rank
            self._chains[bucket.index()] = ChainedReduction(self._channel)
        self._chains[bucket.index()].begin(parts)
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        self._waiting[bucket.index()] = (future, buffer)
        self._advance(bucket.index(), last=bucket.is_last())
        return future

    def _advance(self, newest: int, *, last: bool) -> None:
        """All that has come goes one rank further; at the end of the pass, all the way."""
        for index, distance in ring_hops(newest, self._hops):
            if index in self._waiting:  # the first bucket of the first such pass was all-reduced
                self._chains[index].pass_on(distance)
        if last:
            for distance in range(1, self._hops + 1):
                for index in self._waiting:
                    self._chains[index].pass_on(distance)
        for index in list(self._waiting):
            if last or newest - index >= self._hops:
                self._chains[index].finish()
                future, buffer = self._waiting.pop(index)
                future.set_result(buffer)
