"""One copy of the optimizer state in a data-parallel job, instead of one per rank."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

__version__ = "0.1.0"

__all__ = ["ZeroRedundancyOptimizer"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: planning and `shardstep --help` start in milliseconds because torch is not imported here.
    if name == "ZeroRedundancyOptimizer":
        from shardstep.zero_redundancy_optimizer import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer
    raise AttributeError(f"module 'shardstep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
