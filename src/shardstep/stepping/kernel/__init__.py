"""One pass over memory: a step of many pieces in one launch, with every number that changes read on the device.

Only `device_code.py` needs Triton, and `KernelStep` imports it when the first one is built.
"""

from shardstep.stepping.kernel.launch import KernelStep, is_available
from shardstep.stepping.kernel.rules import Rule, rule_of, supports
from shardstep.stepping.kernel.stochastic import Noise, round_to_bfloat16
from shardstep.stepping.kernel.table import BlockShape, KernelPiece

__all__ = [
    "BlockShape",
    "KernelPiece",
    "KernelStep",
    "Noise",
    "Rule",
    "is_available",
    "round_to_bfloat16",
    "rule_of",
    "supports",
]
