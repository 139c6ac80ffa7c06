"""Who saves and loads together: the ranks of the optimizer's group, or all there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from shardstep.checkpoint.ranks import Ranks
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.sharded_optimizer import ShardedOptimizer
from shardstep.wire.channel import accelerator_among, open_channel


def ranks_of(optimizer: Any) -> Ranks:
    """Called on all of them."""
    if isinstance(optimizer, list | tuple):
        return _ranks_of_all(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        optimizer.synchronize()
        optimizer.check_whole("a checkpoint")
        return Ranks(optimizer._channel)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return Ranks(optimizer._channel)
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(None)
    groups = getattr(optimizer, "param_groups", [])
    return Ranks(open_channel(None, accelerator_among(param for group in groups for param in group["params"])))


def _ranks_of_all(optimizers: Sequence[Any]) -> Ranks:
    each = [ranks_of(one) for one in optimizers]
    if not each:
        return ranks_of(None)
    groups = {id(one.channel.group) for one in each if one.channel is not None}
    if len(groups) > 1:
        raise ValueError("these optimizers belong to different process groups: save and load each by itself")
    return each[0]
