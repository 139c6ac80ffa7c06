"""Makes a plan, and a Runtime for it: memory, this rank's optimizers, gradients and messages.

What a rank can be refused comes first and talks to nobody (`make_parts`); only then is there anything that other ranks
wait for (`connect`). A new plan is tried by the first half alone, on tensors without storage (replan.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardstep.comm.agreement import Agreement, Facts, FinalAgreement
from shardstep.comm.call_order import CallOrder
from shardstep.comm.channel import Channel
from shardstep.comm.choose import open_transport
from shardstep.comm.encoding import round_all
from shardstep.comm.transport import BucketSizes
from shardstep.config import ShardConfig
from shardstep.engine.context import Context, ParamGroups, Recipe, params_of, trainable_of
from shardstep.engine.runtime import Gradients, Runtime, Timing
from shardstep.engine.step_timing import StepAfterBackward, StepInBackward
from shardstep.engine.weights import Weights
from shardstep.gradients.passes import GradientContext
from shardstep.gradients.replicated import ReplicatedGradients
from shardstep.gradients.sharded import ShardedGradients
from shardstep.optimizers.layout_policy import choose_layouts
from shardstep.optimizers.local_optimizer import class_of, is_muon, is_of_torch
from shardstep.params.flat import FlatMemory
from shardstep.params.views import ALIGNMENT_NBYTES
from shardstep.params.weight_arrival import Readers
from shardstep.planning import Layout, Plan, make_plan, read_specs
from shardstep.planning.cost import Cost, elementwise_cost, muon_cost
from shardstep.planning.schedule import keep_batches_whole
from shardstep.stepping import batched_muon
from shardstep.stepping.batched_muon import BatchedMuon
from shardstep.stepping.element_state import SEED, StochasticRounding
from shardstep.stepping.local_step import LocalStep
from shardstep.stepping.masters import Average, Masters, has_narrow
from shardstep.stepping.step_preconditions import StepPreconditions
from shardstep.stepping.steppers import KernelStepper, Stepper, can_step
from shardstep.stepping.two_streams import TwoStreams, in_halves, two_streams

# Elements of a rank that are stepped before any of them is sent: of fewer there would be one or two matrices of each
# shape, too few to fill a GPU.
LEAST_TOGETHER = 2 * batched_muon.MOST_NUMEL


def open_context(model: nn.Module, channel: Channel, config: ShardConfig, owner: Any) -> Context:
    """Open what an optimizer sends by, and give all ranks the first one's parameters and buffers. On all ranks.

    While `owner` lives its communicator is nobody else's.
    """
    params = list(model.parameters())
    overlap = config.gather == "overlap"
    transport = open_transport(channel, params, owner, ordered_sums=config.ordered_sums, awaited_singly=overlap)
    call_order = CallOrder(channel)
    transport.before_waiting(call_order.check)
    preconditions = StepPreconditions(model, has_buffers=config.sync_buffers and channel.world_size > 1)
    final = FinalAgreement(channel)
    with torch.no_grad():
        transport.broadcast([*params, *model.buffers()])
    return Context(model, config, channel, transport, call_order, Agreement(channel), final, preconditions, Readers())


def make_recipe(optimizer_class: Any, defaults: Mapping[str, Any], config: ShardConfig, groups: ParamGroups) -> Recipe:
    """Choose the layouts; raises if none gives the numbers of the plain optimizer."""
    layouts, elementwise = choose_layouts(config.layout, optimizer_class, defaults, groups)
    costs = [_cost_of(class_of(optimizer_class, group), {**defaults, **group}, config) for group in groups]
    return Recipe(optimizer_class, defaults, layouts, elementwise, costs)


def _cost_of(kind: Any, group: Mapping[str, Any], config: ShardConfig) -> Cost:
    """Return what stepping a parameter of a group costs: a formula for torch's Muon, elements for other classes.

    It follows from the options, on which all ranks agree before they plan: plans that follow from it must be equal.
    """
    device = group["params"][0].device.type if group["params"] else "cpu"
    if not is_muon(kind):
        return elementwise_cost(device)
    batched = config.kernel == "auto" and batched_muon.can_step(kind, [group], config.master)
    return muon_cost(device, int(group["ns_steps"]), batched=batched)


# -- the plan ---------------------------------------------------------------------------------------------------------


def plan_for(context: Context, recipe: Recipe, groups: ParamGroups, trainable: Sequence[bool]) -> Plan:
    """Return the plan for these parameters; the same on every rank. Nothing is sent."""
    config, transport, params = context.config, context.transport, params_of(groups)
    specs = [spec.encoded(config.wire or "") for spec in read_specs(groups, trainable)]
    itemsize = max((param.element_size() for param in params), default=4)
    if any(spec.wire and spec.trainable for spec in specs):  # sizes are of what travels
        itemsize = min(itemsize, 2)
    total = sum(
        spec.numel * min(itemsize, param.element_size())
        for spec, param in zip(specs, params, strict=True)
        if spec.trainable
    )
    sizes = transport.bucket_sizes(total) if config.bucket_mb is None else BucketSizes(config.bucket_mb * 1e6)
    return make_plan(
        specs,
        recipe.layouts,
        world_size=context.channel.world_size,
        bucket_numel=max(int(sizes.usual / itemsize), 1),
        end_numel=int(sizes.ends / itemsize) if sizes.ends else None,
        alignment=ALIGNMENT_NBYTES // min((param.element_size() for param in params), default=4),
        order=_backward_order(context.model, params),
        costs=[recipe.costs[spec.group].of(spec) for spec in specs] if _assigns_whole(context, recipe) else None,
    )


def _assigns_whole(context: Context, recipe: Recipe) -> bool:
    """Whether ranks hold whole parameters, whose costs then decide who holds what."""
    return Layout.WHOLE in recipe.layouts and context.channel.world_size > 1


def _backward_order(model: nn.Module, params: Sequence[torch.Tensor]) -> list[int]:
    """Return the places of `params` in the order in which backward reaches them: from the last layer to the first.

    The order of the param groups says nothing of it: a group of all norms would complete its bucket only when backward
    ends, and every other bucket would wait behind it.
    """
    position: dict[torch.Tensor, int] = {param: number for number, param in enumerate(model.parameters())}
    return sorted(range(len(params)), key=lambda place: position.get(params[place], -1), reverse=True)


# -- what a rank builds by itself -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Parts:
    """What of a Runtime talks to no other rank. The local optimizers are still to be built, or tried."""

    recipe: Recipe
    plan: Plan
    memory: FlatMemory
    local_step: LocalStep
    step_order: Sequence[Sequence[int]]
    streams: TwoStreams | None


def make_parts(context: Context, recipe: Recipe, plan: Plan, groups: ParamGroups, *, stored: bool = True) -> Parts:
    """Unless they are `stored`, parameters stay where they are, and memory has shapes alone."""
    config, params = context.config, params_of(groups)
    memory = FlatMemory(plan, params, context.channel.rank, stored=stored)
    order = context.transport.step_order(len(plan.buckets))
    steppers = _choose_steppers(recipe, config, groups)
    streams = None
    if is_of_torch(recipe.optimizer_class) and not steppers and config.step == "after":
        streams = two_streams([bucket.own for bucket in memory.buckets], groups)
    if streams is not None:
        order = in_halves(order)
    if config.step == "backward":
        order = [[bucket] for group in order for bucket in group]
    else:
        order = _keep_batches_whole(order, plan, steppers)
    has_masters = config.master == "fp32" and (has_narrow(params) or config.wire is not None)
    masters = Masters(memory) if has_masters else None
    local_step = LocalStep(
        recipe.optimizer_class,
        recipe.defaults,
        plan,
        memory,
        recipe.layouts,
        order,
        join=config.gradients == "shard",
        masters=masters,
        average=None if config.ema is None else Average(memory, config.ema, masters),
        rounding=StochasticRounding(memory) if config.master == "stochastic" else None,
        steppers=steppers,
    )
    return Parts(recipe, plan, memory, local_step, order, streams)


def _keep_batches_whole(order: list[list[int]], plan: Plan, steppers: Sequence[Stepper]) -> list[list[int]]:
    """Return `order` with groups so large that what is sent meanwhile is larger than a batch; on all ranks the same."""
    batched = {group for stepper in steppers if isinstance(stepper, BatchedMuon) for group in stepper.groups}
    if not batched:
        return order
    numels = [
        bucket.numel // plan.world_size if any(plan.params[s.param].group in batched for s in bucket.segments) else 0
        for bucket in plan.buckets
    ]
    return keep_batches_whole(order, numels, LEAST_TOGETHER)


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
    stochastic = config.master == "stochastic"
    # Noise is for bfloat16; beside it, parameters of another dtype would need a kernel of their own.
    one_kernel = not stochastic or all(param.dtype is torch.bfloat16 for param in params)
    layouts = [recipe.layouts[number] for number in numbers]
    if config.gradients == "shard" and one_kernel and can_step(kind, own, layouts):
        return KernelStepper(kind, numbers, SEED if stochastic else None)
    return BatchedMuon(numbers) if batched_muon.can_step(kind, own, config.master) else None


# -- what talks to other ranks ----------------------------------------------------------------------------------------


def connect(context: Context, parts: Parts, groups: ParamGroups) -> Runtime:
    """Make a Runtime of `parts`. Its messages are numbered, so all ranks call this, or none."""
    config, memory, plan = context.config, parts.memory, parts.plan
    params, trainable = params_of(groups), tuple([spec.trainable for spec in plan.params])
    round_all(memory.buckets)  # weights that were never sent; their masters have been taken
    context.preconditions.watch(groups)
    gathers = context.transport.range_gathers(memory.buckets, ring=config.gather != "overlap")
    gradients = _make_gradients(context, parts, params)
    facts = Facts(map(str, plan.params))
    try:
        timing = _make_timing(context, parts, gradients, groups, trainable)
        return Runtime(
            parts.recipe,
            plan,
            trainable,
            facts,
            params,
            memory,
            parts.local_step,
            parts.step_order,
            parts.streams,
            gradients,
            Weights(context, memory, params, gathers, parts.step_order, facts),
            timing,
        )
    except BaseException:
        gradients.hooks.remove()
        raise


def _make_gradients(context: Context, parts: Parts, params: Sequence[torch.Tensor]) -> Gradients:
    sharded = context.config.gradients == "shard"
    given = GradientContext(
        context.channel,
        context.transport,
        context.call_order,
        context.model,
        parts.memory,
        params,
        context.config.reduce_dtype,
        wide=sharded and parts.local_step.masters is not None,
        # What a class of somebody else's keeps of a gradient cannot be known; and "keep" needs shards for a moment.
        reuse_memory=sharded and is_of_torch(parts.recipe.optimizer_class),
    )
    return ShardedGradients(given) if sharded else ReplicatedGradients(given)


def _make_timing(
    context: Context, parts: Parts, gradients: Gradients, groups: ParamGroups, trainable: Sequence[bool]
) -> Timing:
    if context.config.step == "after":
        return StepAfterBackward()
    assert isinstance(gradients, ShardedGradients), "checked by ShardConfig"
    group_of = {bucket: number for number, (bucket,) in enumerate(parts.step_order)}
    most = context.transport.in_flight_nbytes
    return StepInBackward(
        parts.local_step,
        gradients.current,
        parts.memory,
        groups,
        group_of,
        lambda: trainable_of(groups) == trainable,
        None if math.isinf(most) and context.channel.world_size > 1 else most,
    )
