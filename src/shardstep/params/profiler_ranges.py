"""Ranges for torch's profiler: which bucket is reduced, stepped or gathered, and which parameters are in it.

A range costs 6 microseconds with or without a profiler, and asking whether a profiler runs costs 0.04. So callers ask
`is_profiled()` first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch.profiler import record_function

from shardstep.planning import Plan

P = ParamSpec("P")
T = TypeVar("T")

_autograd: Any = torch.autograd
is_profiled: Callable[[], bool] = _autograd._profiler_enabled


def named(title: str, call: Callable[P, T]) -> Callable[P, T]:
    """Return a function that calls `call` inside a range of that name."""

    def inside(*args: P.args, **kwargs: P.kwargs) -> T:
        with record_function(title):
            return call(*args, **kwargs)

    return inside


class RangeNames:
    """The names of ranges for the buckets of a plan; each is made when it is first needed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: dict[tuple[str, tuple[int, ...]], str] = {}

    def of(self, verb: str, buckets: Sequence[int]) -> str:
        """Return a name such as `shardstep: reduce bucket 3 (blocks.7.fc.weight ... blocks.6.qkv.bias)`.

        Parameters are named in the order of backward.
        """
        key = verb, tuple(buckets)
        if key not in self._made:
            held = {segment.param for bucket in buckets for segment in self._plan.buckets[bucket].segments}
            names = [self._plan.params[param].name for param in sorted(held, reverse=True)]
            ends = names if len(names) < 3 else [names[0], names[-1]]
            numbers = ", ".join(map(str, buckets))
            noun = "bucket" if len(buckets) == 1 else "buckets"
            self._made[key] = f"shardstep: {verb} {noun} {numbers} ({' ... '.join(ends)})"
        return self._made[key]
