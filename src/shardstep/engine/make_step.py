"""Everything of a plan that steps: chosen by what the program asks for, and by what there is to step with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.config import ShardConfig
from shardstep.optimizers.local_optimizer import class_of, is_muon, is_of_torch
from shardstep.params.flat import FlatMemory
from shardstep.planning import Layout, Plan
from shardstep.planning.cost import Cost, elementwise_cost, muon_cost
from shardstep.planning.schedule import keep_batches_whole
from shardstep.stepping import batched_muon
from shardstep.stepping.batched_muon import BatchedMuon
from shardstep.stepping.element_state import SEED, StochasticRounding
from shardstep.stepping.local_step import LocalStep
from shardstep.stepping.masters import Average, Masters, has_narrow
from shardstep.stepping.steppers import KernelStepper, Stepper, can_step
from shardstep.stepping.two_streams import TwoStreams, in_halves, two_streams

ParamGroups = Sequence[dict[str, Any]]

# Elements of a rank that are stepped before any of them is sent: of fewer there would be one or two matrices of each
# shape, too few to fill a GPU.
LEAST_TOGETHER = 2 * batched_muon.MOST_NUMEL


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the local optimizers are made."""

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    layouts: Sequence[Layout]  # of each group
    costs: Sequence[Cost]  # of each group: what stepping a parameter costs


@dataclass(frozen=True, slots=True)
class Made:
    """A share, and how it is stepped: which buckets `together`, on which streams."""

    share: LocalStep
    together: list[list[int]]
    streams: TwoStreams | None


def make_step(
    recipe: Recipe,
    config: ShardConfig,
    plan: Plan,
    memory: FlatMemory,
    together: list[list[int]],
    groups: ParamGroups,
) -> Made:
    """`together` are the buckets that the transport wants stepped at a time. The share is still to be built."""
    params = [param for group in groups for param in group["params"]]
    steppers = _choose_steppers(recipe, config, groups)
    streams = None
    if is_of_torch(recipe.optimizer_class) and not steppers and config.step == "after":
        streams = two_streams([bucket.own for bucket in memory.buckets], groups)
    if streams is not None:
        together = in_halves(together)
    if config.step == "backward":
        together = [[bucket] for group in together for bucket in group]
    else:
        together = _keep_batches_whole(together, plan, steppers)
    has_masters = config.master == "fp32" and (has_narrow(params) or config.wire is not None)
    masters = Masters(memory) if has_masters else None
    share = LocalStep(
        recipe.optimizer_class,
        recipe.defaults,
        plan,
        memory,
        recipe.layouts,
        together,
        join=config.gradients == "shard",
        masters=masters,
        average=None if config.ema is None else Average(memory, config.ema, masters),
        rounding=StochasticRounding(memory) if config.master == "stochastic" else None,
        steppers=steppers,
    )
    return Made(share, together, streams)


def _keep_batches_whole(together: list[list[int]], plan: Plan, steppers: Sequence[Stepper]) -> list[list[int]]:
    """What is sent meanwhile is larger than a batch; and the groups are the same on all ranks, because the plan is."""
    batched = {group for stepper in steppers if isinstance(stepper, BatchedMuon) for group in stepper.groups}
    if not batched:
        return together
    numels = [
        bucket.numel // plan.world_size if any(plan.params[s.param].group in batched for s in bucket.segments) else 0
        for bucket in plan.buckets
    ]
    return keep_batches_whole(together, numels, LEAST_TOGETHER)


def _choose_steppers(recipe: Recipe, config: ShardConfig, groups: ParamGroups) -> list[Stepper]:
    """Those that step all groups of a class like the class does; what has none, the class steps itself."""
    if config.kernel != "auto":
        return []
    kinds: dict[Any, list[int]] = {}
    for number, group in enumerate(groups):
        kinds.setdefault(class_of(recipe.optimizer_class, group), []).append(number)
    found = (_stepper_of(kind, numbers, recipe, config, groups) for kind, numbers in kinds.items())
    return [stepper for stepper in found if stepper is not None]


def _stepper_of(
    kind: Any, numbers: Sequence[int], recipe: Recipe, config: ShardConfig, groups: ParamGroups
) -> Stepper | None:
    """Of all groups that one class steps; None if it steps them itself."""
    own = [{**recipe.defaults, **groups[number]} for number in numbers]
    params = [param for group in own for param in group["params"]]
    by_chance = config.master == "stochastic"
    # Noise is for bfloat16; beside it, parameters of another dtype would need a kernel of their own.
    alike = not by_chance or all(param.dtype is torch.bfloat16 for param in params)
    layouts = [recipe.layouts[number] for number in numbers]
    if config.gradients == "shard" and alike and can_step(kind, own, layouts):
        return KernelStepper(kind, numbers, SEED if by_chance else None)
    return BatchedMuon(numbers) if batched_muon.can_step(kind, own, config.master) else None


def costs_of_groups(
    optimizer_class: Any, defaults: Mapping[str, Any], config: ShardConfig, groups: ParamGroups
) -> list[Cost]:
    """Return, for each group, what stepping a parameter costs: a formula for torch's Muon, elements for other classes.

    Called where all ranks have agreed on the options, because plans that follow from it must be equal.
    """
    return [_cost_of(class_of(optimizer_class, group), {**defaults, **group}, config) for group in groups]


def _cost_of(kind: Any, group: Mapping[str, Any], config: ShardConfig) -> Cost:
    device = group["params"][0].device.type if group["params"] else "cpu"
    if not is_muon(kind):
        return elementwise_cost(device)
    batched = config.kernel == "auto" and batched_muon.can_step(kind, [group], config.master)
    return muon_cost(device, int(group["ns_steps"]), batched=batched)
