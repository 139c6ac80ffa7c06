"""Refuses a sharded model inside DistributedDataParallel: both would average its gradients."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

REMEDY = (
    "shard(...) takes the place of DistributedDataParallel: leave DDP out (in a trainer, its strategy), or keep DDP "
    "and use shardstep.ZeroRedundancyOptimizer, which works with it"
)


def refuse_ddp(model: nn.Module) -> None:
    """Called before `model` is sharded: raise if it or a module inside it is wrapped already."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            wrapped = f"{name} of this {type(model).__name__}" if name else "this model"
            raise TypeError(f"{wrapped} is wrapped in DistributedDataParallel, which averages its gradients. {REMEDY}")


def refuse_inside_ddp(model: nn.Module) -> None:
    """Called in the forward of some DDP: raise if that one wraps `model`. Another may call it, say as a teacher."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(module is model for module in wrapper.modules()):
        raise TypeError(
            f"this sharded {type(model).__name__} is called inside DistributedDataParallel, which averages its "
            f"gradients, too. {REMEDY}"
        )
