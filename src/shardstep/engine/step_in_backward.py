"""The step inside backward: a bucket is stepped as soon as it is reduced, so that gradients are never all alive.

What is not known before the pass has ended is whether some other rank had a gradient of a parameter that had none here.
So a bucket is stepped early if all of its parameters had one here; the others wait for `step()`, which in any case
agrees with the other ranks and gives everyone all parameters. A pass that fails half-way leaves weights that are
stepped in part, as torch's `_apply_optimizer_in_backward` does: all ranks raise, and go on from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

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


class StepInBackward:
    """Of one plan. `groups` are the program's own, as they are when a pass begins."""

    def __init__(
        self,
        share: LocalStep,
        current: GradientPass,
        memory: FlatMemory,
        groups: Sequence[dict[str, Any]],
        number_of: Mapping[int, int],
        fits: Callable[[], bool],
    ) -> None:
        """`number_of` a bucket: under which the share steps it alone. `fits`: whether the plan is still that of the
        parameters that train; if not, there is a new one before anything of the pass is stepped."""
        self._fits = fits
        self._share, self._pass, self._groups, self._number_of = share, current, groups, number_of
        self._members = [sorted({segment.param for segment in bucket.bucket.segments}) for bucket in memory.buckets]
        self._memory = memory
        self.stepped: set[int] = set()
        self.paused = False  # the parameters are something else for a while
        current.step_when_landed(self.landed)

    def landed(self, bucket: int) -> None:
        """This rank's part of a bucket's mean gradient is there, and the pass goes on."""
        if self.paused:
            raise RuntimeError("a backward pass inside ema() would step averages: leave it first")
        if bucket in self.stepped:
            raise RuntimeError(
                'with ShardConfig(step="backward") a backward pass outside no_sync() is a step: call step() before the '
                "next one"
            )
        if not all(self._pass.used[param] for param in self._members[bucket]) or not self._fits():
            return
        if not self.stepped:
            self._memory.adopt()  # parameters that the program has given other memory
            self._share.begin(self._groups, bytes([1]) * len(self._pass.used))
        self._share.step(self._number_of[bucket], self._gradient_of)
        self.stepped.add(bucket)
        self._pass.let_go_of(bucket)
        # Whatever still needs one of these weights for its gradient raises then, as torch does.
        torch.autograd.graph.increment_version([self._memory.params[param] for param in self._members[bucket]])

    def done(self) -> None:
        """`step()` has done the rest. Nothing of a pass is kept for the next: some of it is gone already."""
        self.stepped.clear()
        self._pass.forget()

    def _gradient_of(self, bucket: int, run: Run) -> torch.Tensor | None:
        shard = self._pass.shards[bucket]
        return None if shard is None else shard[run.start : run.stop]
