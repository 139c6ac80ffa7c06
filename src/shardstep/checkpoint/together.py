"""Who saves and loads together: the ranks of the optimizer's group, or all there are."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from shardstep.checkpoint.ranks import Ranks
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.sharded_optimizer import ShardedOptimizer
from shardstep.wire.channel import accelerator_among, open_channel


def ranks_of(optimizer: Any) -> Ranks:
    """Called on all of them."""
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
