"""A sharded model inside DistributedDataParallel: both would average the gradients, and the program gets neither."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

REMEDY = (
    "shard(...) takes the place of DistributedDataParallel: leave DDP out (in a trainer, its strategy), or keep DDP "
    "and use shardstep.ZeroRedundancyOptimizer, which works with it"
)


def refuse_ddp(model: nn.Module) -> None:
    """Before a model is sharded: raise if it is wrapped already, or a part of it is."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            place = f"{name} of this {type(model).__name__}" if name else "this model"
            raise TypeError(f"{place} is wrapped in DistributedDataParallel, which averages its gradients. {REMEDY}")


def refuse_inside_ddp(model: nn.Module) -> None:
    """In the forward of some DDP: raise if it is one round `model`. Another may use it, say as a teacher."""
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(module is model for module in wrapper.modules()):
        raise TypeError(
            f"this sharded {type(model).__name__} is called inside DistributedDataParallel, which averages its "
            f"gradients, too. {REMEDY}"
        )
