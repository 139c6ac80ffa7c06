"""One copy of the optimizer state in a data-parallel job, instead of one per rank."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstep.checkpoint.loading import load
    from shardstep.checkpoint.saving import save
    from shardstep.config import ShardConfig
    from shardstep.optimizer import ShardedOptimizer, shard
    from shardstep.planning import Layout
    from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = ["Layout", "ShardConfig", "ShardedOptimizer", "ZeroRedundancyOptimizer", "load", "save", "shard"]

_HOME = {
    "Layout": "shardstep.planning",
    "ShardConfig": "shardstep.config",
    "ShardedOptimizer": "shardstep.optimizer",
    "ZeroRedundancyOptimizer": "shardstep.zero_redundancy_optimizer",
    "load": "shardstep.checkpoint.loading",
    "save": "shardstep.checkpoint.saving",
    "shard": "shardstep.optimizer",
}


def __getattr__(name: str) -> Any:
    # Loaded when asked for: planning and `shardstep --help` start in milliseconds because torch is not imported here.
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'shardstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
