"""One copy of the optimizer state in a data-parallel job, instead of one per rank."""

from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = ["ZeroRedundancyOptimizer"]
