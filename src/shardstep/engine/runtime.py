"""Everything that lives as long as one plan, as one value: build.py makes it whole, replan.py replaces it whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from shardstep.comm.agreement import Facts
from shardstep.comm.encoding import scratch_nbytes
from shardstep.comm.transport import Transport
from shardstep.engine.context import Recipe
from shardstep.engine.step_timing import StepAfterBackward, StepInBackward
from shardstep.engine.weights import Weights
from shardstep.gradients.replicated import ReplicatedGradients
from shardstep.gradients.sharded import ShardedGradients
from shardstep.params.flat import FlatMemory
from shardstep.planning import Plan
from shardstep.stepping.local_step import LocalStep
from shardstep.stepping.two_streams import TwoStreams

Gradients = ShardedGradients | ReplicatedGradients
Timing = StepAfterBackward | StepInBackward


@dataclass(frozen=True, slots=True)
class Runtime:
    """A plan, and everything that is made from it."""

    recipe: Recipe
    plan: Plan
    trainable: tuple[bool, ...]  # of each parameter, as it was planned
    facts: Facts  # what is compared between ranks at the end of every step
    params: Sequence[torch.Tensor]  # in the plan's order
    memory: FlatMemory
    local_step: LocalStep
    step_order: Sequence[Sequence[int]]  # groups of buckets: those that are stepped and sent together
    streams: TwoStreams | None  # on which those groups alternate
    gradients: Gradients
    weights: Weights
    timing: Timing

    def detach(self) -> None:
        """Remove all hooks from the model: no gradient is reduced and no weight is waited for any more."""
        self.gradients.hooks.remove()
        self.weights.stop_watching()

    # -- what it takes ------------------------------------------------------------------------------------------------

    def bucket_nbytes(self) -> list[int]:
        return [bucket.values.nbytes for bucket in self.memory.buckets]

    def predicted_nbytes(self, transport: Transport) -> int:
        """Bytes that this rank needs at most between two steps, beside activations: by the plan, not measured."""
        buckets, local_step = self.bucket_nbytes(), self.local_step
        waiting = transport.waiting_nbytes(max(buckets, default=0))
        state = local_step.state_nbytes + sum(slot.nbytes for slot in local_step.slots)
        if local_step.masters is not None:
            # What is stepped together has its gradients in fp32 for that time, when none are waiting.
            masters = local_step.masters.values
            narrow = {number for number in masters if not self.memory.buckets[number].bucket.wire}
            widened = [sum(masters[number].nbytes for number in group if number in narrow) for group in self.step_order]
            waiting = max(waiting, *widened)
        waiting = min(waiting, sum(buckets))
        waiting = max(waiting, *(stepper.temporary_nbytes for stepper in local_step.steppers), 0)
        return sum(buckets) + state + self.gradient_nbytes() + int(waiting) + scratch_nbytes(self.memory.buckets)

    def gradient_nbytes(self) -> int:
        """Bytes of the gradient shards that are alive at one time."""
        shards = [bucket.own.nbytes for bucket in self.memory.buckets]
        return self.timing.gradient_nbytes(shards, max(self.bucket_nbytes(), default=0))
