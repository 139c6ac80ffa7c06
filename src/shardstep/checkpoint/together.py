"""Who saves and loads together: the ranks of the optimizer's group, or all there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from shardstep.checkpoint.ranks import Ranks
from shardstep.comm.channel import accelerator_among, open_channel
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.optimizer import ShardedOptimizer


def ranks_of(optimizer: Any, model: nn.Module) -> Ranks:
    """Called on all of them."""
    if isinstance(optimizer, list | tuple):
        return _ranks_of_all(optimizer, model)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
        optimizer.check_whole("a checkpoint")
        return Ranks(optimizer.checkpoint_view().channel)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return Ranks(optimizer.channel)
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(None)
    # The model's, because there may be no optimizer: a group with NCCL alone sends nothing that lies on the CPU.
    return Ranks(open_channel(None, accelerator_among([*model.parameters(), *model.buffers()])))


def _ranks_of_all(optimizers: Sequence[Any], model: nn.Module) -> Ranks:
    each = [ranks_of(one, model) for one in optimizers]
    if not each:
        return ranks_of(None, model)
    groups = {id(one.channel.group) for one in each if one.channel is not None}
    if len(groups) > 1:
        raise ValueError("these optimizers belong to different process groups: save and load each by itself")
    return each[0]
