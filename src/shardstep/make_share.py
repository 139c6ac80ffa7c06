"""Everything of a plan that steps: chosen by what the program asks for, and by what there is to step with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.config import ShardConfig
from shardstep.memory.flat import FlatMemory
from shardstep.planning import Layout, Plan
from shardstep.stepping.average import Average
from shardstep.stepping.by_kernel import ByKernel, can_step
from shardstep.stepping.local_optimizer import is_of_torch
from shardstep.stepping.masters import Masters, has_narrow
from shardstep.stepping.rounding import SEED, Rounded
from shardstep.stepping.share import LocalShare
from shardstep.stepping.two_streams import TwoStreams, in_halves, two_streams

ParamGroups = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the local optimizers are made."""

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    layouts: Sequence[Layout]  # of each group
    elementwise: Sequence[bool]  # of each group: whether it is, as far as a trial has seen


@dataclass(frozen=True, slots=True)
class Made:
    """A share, and how it is stepped: which buckets `together`, on which streams."""

    share: LocalShare
    together: list[list[int]]
    streams: TwoStreams | None


def make_share(
    recipe: Recipe,
    config: ShardConfig,
    plan: Plan,
    memory: FlatMemory,
    together: list[list[int]],
    groups: ParamGroups,
) -> Made:
    """`together` are the buckets that the transport wants stepped at a time. The share is still to be built."""
    params = [param for group in groups for param in group["params"]]
    kernel = _choose_kernel(recipe, config, groups)
    streams = None
    if is_of_torch(recipe.optimizer_class) and kernel is None and config.step == "after":
        streams = two_streams([bucket.own for bucket in memory.buckets], groups)
    if streams is not None:
        together = in_halves(together)
    if config.step == "backward":
        together = [[bucket] for group in together for bucket in group]
    masters = Masters(memory) if config.master == "fp32" and has_narrow(params) else None
    share = LocalShare(
        recipe.optimizer_class,
        recipe.defaults,
        plan,
        memory,
        recipe.layouts,
        together,
        join=config.gradients == "shard",
        masters=masters,
        average=None if config.ema is None else Average(memory, config.ema, masters),
        rounded=Rounded(memory) if config.master == "stochastic" else None,
        kernel=kernel,
    )
    return Made(share, together, streams)


def _choose_kernel(recipe: Recipe, config: ShardConfig, groups: ParamGroups) -> ByKernel | None:
    by_chance = config.master == "stochastic"
    # Noise is for bfloat16; beside it, parameters of another dtype would need a kernel of their own.
    alike = not by_chance or all(param.dtype is torch.bfloat16 for group in groups for param in group["params"])
    wanted = config.kernel == "auto" and config.gradients == "shard" and alike
    if not (wanted and can_step(recipe.optimizer_class, recipe.defaults, groups, recipe.layouts)):
        return None
    return ByKernel(recipe.optimizer_class, SEED if by_chance else None)
