"""The ranks that save or load together: those of the optimizer's process group, all ranks, or one process alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.channel import Channel, accelerator_among, open_channel
from shardstep.comm.tensors import broadcast_bytes, broadcast_tensors
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.optimizer import ShardedOptimizer


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a process group, or one process without a group."""

    channel: Channel | None  # None: one process without a group

    @property
    def rank(self) -> int:
        return 0 if self.channel is None else self.channel.rank

    @property
    def world_size(self) -> int:
        return 1 if self.channel is None else self.channel.world_size

    def agree(self, action: str, failure: Exception | None, *facts: str) -> None:
        """Return on all ranks, or raise on all ranks if one has a failure or facts differ."""
        if self.channel is not None:
            agree(self.channel, Claim(action, failure, Facts(facts)))
        elif failure is not None:
            raise failure

    def broadcast_text(self, text: str) -> str:
        """Return rank 0's text on all ranks."""
        if self.channel is None or self.channel.world_size == 1:
            return text
        payload = text.encode()
        length = broadcast_bytes(self.channel, len(payload).to_bytes(8, "big"), 8, 0)
        return broadcast_bytes(self.channel, payload, int.from_bytes(length, "big"), 0).decode()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Write the values that rank `source` has into `tensor` on all ranks."""
        if self.channel is not None and self.channel.world_size > 1:
            broadcast_tensors(self.channel, [tensor], source)


def ranks_of(optimizer: Any, model: nn.Module) -> Ranks:
    """Return the ranks that save or load `optimizer` (one, a list of them, or None). Called on all of them."""
    if isinstance(optimizer, list | tuple):
        return _common_ranks(optimizer, model)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
        optimizer.check_whole("a checkpoint")
        return Ranks(optimizer.checkpoint_view().channel)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return Ranks(optimizer.channel)
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(None)
    # The channel needs a device of the model: a group with NCCL alone cannot send tensors that are on the CPU.
    return Ranks(open_channel(None, accelerator_among([*model.parameters(), *model.buffers()])))


def _common_ranks(optimizers: Sequence[Any], model: nn.Module) -> Ranks:
    each = [ranks_of(one, model) for one in optimizers]
    if not each:
        return ranks_of(None, model)
    groups = {id(one.channel.group) for one in each if one.channel is not None}
    if len(groups) > 1:
        raise ValueError(
            "these optimizers belong to different process groups: save and load each of them by a call of its own"
        )
    return each[0]
