"""Gradients go only to the rank that steps them: two thirds of an all-reduce at four ranks, half of it at many."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shardstep.drop_in.inside_backward import InsideBackward
from shardstep.planning.schedule import StepOrder


class HolderReduction:
    """Takes the place of a hook that reduces a bucket. Until it is known who steps what, it all-reduces."""

    def __init__(self, inside: InsideBackward, device: torch.device) -> None:
        self._inside = inside
        self._reduction = inside.transport.holder_reduction(device)

    def order(self, wanted: StepOrder) -> StepOrder:
        """Round a ring a bucket takes as many buckets as there are hops, and can then be stepped."""
        hops = self._reduction.hops
        return wanted if hops is None or wanted.lag is None else StepOrder(hops)

    def __call__(self, state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        overlapped = self._inside.overlapped
        if overlapped is None:
            return allreduce_hook(state, bucket)
        # Divided first, as torch's hook does: on two ranks the bits are the same.
        buffer = bucket.buffer().div_(self._inside.world_size)
        parts = overlapped.parts_of(bucket.index(), buffer)
        return self._reduction.begin(bucket.index(), parts, bucket.is_last()).then(lambda _: buffer)
