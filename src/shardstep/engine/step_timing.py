"""When a bucket is stepped: in `step()`, or inside backward as soon as it is reduced (`ShardConfig(step="backward")`).

Stepped inside backward, gradients are never all alive. What is not known before the pass has ended is whether some
other rank had a gradient of a parameter that had none here. So a bucket is stepped early if all of its parameters had
one here; the others wait for `step()`, which in any case agrees with the other ranks and gives everyone all parameters.
A pass that fails half-way leaves weights that are stepped in part, as torch's `_apply_optimizer_in_backward` does: all
ranks raise, and go on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardstep.comm.call_order import Call
from shardstep.gradients.passes import GradientPass
from shardstep.params.flat import FlatMemory
from shardstep.planning.runs import Run
from shardstep.stepping.local_step import LocalStep

REASON = (
    'with ShardConfig(step="backward") each bucket is stepped as soon as its gradient is there, before those of other '
    "buckets are: {what} needs all of them at once. Use the default step"
)


HALF_STEPPED = (
    "If a backward pass has failed, some weights are stepped and others are not: load a checkpoint of model and "
    "optimizer on all ranks, and go on from there"
)


class StepAfterBackward:
    """The default: `step()` steps every bucket, and until then any call may look at the gradients."""

    refused_calls: frozenset[Call] = frozenset()

    def __init__(self) -> None:
        self.stepped: set[int] = set()  # buckets that the next step() finds stepped: none

    def check_late_gradients(self) -> None:
        """Do nothing: no bucket was stepped without them."""

    def explain(self, failure: Exception) -> Exception:
        """Return why a backward pass failed."""
        return failure

    def gradient_nbytes(self, shards: Sequence[int], largest_bucket: int) -> int:
        """Return how many bytes of `shards` are alive at one time: all."""
        del largest_bucket
        return sum(shards)


class StepInBackward:
    """Steps a bucket as soon as its gradient is there. `groups` are the program's own, as they are in a pass."""

    refused_calls = frozenset({Call.CLIP_NORM, Call.CLIP_VALUE, Call.NORMS, Call.UNSCALE})  # need all gradients at once

    def __init__(
        self,
        local_step: LocalStep,
        current: GradientPass,
        memory: FlatMemory,
        groups: Sequence[dict[str, Any]],
        group_of: Mapping[int, int],
        is_planned: Callable[[], bool],
        in_flight_nbytes: float | None,
    ) -> None:
        """`group_of` a bucket is its place in the step order, where it is alone. `is_planned` tells whether the plan is
        still that of the parameters that train; if not, there is a new one before anything of the pass is stepped.
        `in_flight_nbytes` of buckets are reduced at a time; None: of all."""
        self._is_planned, self._in_flight_nbytes = is_planned, in_flight_nbytes
        self._local_step, self._pass, self._groups, self._group_of = local_step, current, groups, group_of
        self._members = [sorted({segment.param for segment in bucket.bucket.segments}) for bucket in memory.buckets]
        self._memory = memory
        self.stepped: set[int] = set()  # until step() has stepped the rest
        current.step_when_landed(self.step_bucket)

    def step_bucket(self, bucket: int) -> None:
        """Step a bucket whose mean gradient has just arrived, unless `step()` has to: the pass goes on."""
        average = self._local_step.average
        if average is not None and average.is_shown:
            raise RuntimeError("a backward pass inside ema() would step averages: leave it first")
        if bucket in self.stepped:
            raise RuntimeError(
                'with ShardConfig(step="backward") a backward pass outside no_sync() is a step: call step() before the '
                "next one"
            )
        if not all(self._pass.used[param] for param in self._members[bucket]) or not self._is_planned():
            return
        if not self.stepped:
            self._memory.adopt()  # parameters that the program has given other memory
            self._local_step.begin(self._groups, bytes([1]) * len(self._pass.used))
        self._local_step.step(self._group_of[bucket], self._gradient_of)
        self.stepped.add(bucket)
        self._pass.let_go_of(bucket)
        # Whatever still needs one of these weights for its gradient raises then, as torch does.
        torch.autograd.graph.increment_version([self._memory.params[param] for param in self._members[bucket]])

    def _gradient_of(self, bucket: int, run: Run) -> torch.Tensor | None:
        shard = self._pass.shards[bucket]
        return None if shard is None else shard[run.start : run.stop]

    def check_late_gradients(self) -> None:
        """Raise: a gradient has come after its bucket was stepped. A new plan may still take it in."""
        if self._is_planned():
            raise RuntimeError(REASON.format(what="a gradient that comes after its bucket was reduced"))

    def explain(self, failure: Exception) -> Exception:
        """Return the failure of a pass, and what may have happened to the weights."""
        return RuntimeError(f"{failure}. {HALF_STEPPED}")

    def gradient_nbytes(self, shards: Sequence[int], largest_bucket: int) -> int:
        """Return how many bytes of `shards` are alive at one time: if all are used, those of buckets in flight."""
        if not largest_bucket or self._in_flight_nbytes is None:
            return sum(shards)
        alive = max(1, int(min(self._in_flight_nbytes / largest_bucket, 2)))
        return sum(sorted(shards, reverse=True)[:alive])
