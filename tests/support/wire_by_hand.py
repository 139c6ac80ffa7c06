"""What the tests of ShardConfig(wire="bf16") share: the oracle, in which every rank keeps all exact values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardstep
from fast_lane_training import SMALL_BUCKETS, batch, loss_of
from shardstep import ShardConfig
from shardstep.stepping.masters import MASTER
from training import assert_ranks_equal

SMALL = ShardConfig(bucket_mb=SMALL_BUCKETS, wire="bf16", ordered_sums=True)
ADAMW = {"lr": 1e-3, "weight_decay": 0.1}


def is_rounded(param: torch.Tensor) -> bool:
    return sum(size > 1 for size in param.shape) >= 2


class ByHand:
    """Every rank steps all exact values with the mean of all gradients; the model computes with what is rounded."""

    def __init__(self, model: nn.Module, optimizer_class: Any, config: ShardConfig, **options: Any) -> None:
        self.params, self._config = list(model.parameters()), config
        self.exact = [nn.Parameter(param.detach().clone()) for param in self.params]
        self._rounded = [is_rounded(param) and param.requires_grad for param in self.params]
        self.optimizer = optimizer_class(self.exact, **options)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        for param, exact, rounds in zip(self.params, self.exact, self._rounded, strict=True):
            param.copy_(exact.bfloat16() if rounds else exact)

    def step(self) -> None:
        for param, exact in zip(self.params, self.exact, strict=True):
            exact.grad = None if param.grad is None else self._mean(param.grad, is_rounded(param))
            param.grad = None
        self.optimizer.step()
        self.round()

    def _mean(self, gradient: torch.Tensor, rounds: bool) -> torch.Tensor:
        rounds &= self._config.reduce_dtype is None and dist.get_world_size() > 1  # one rank sends none
        sent = gradient.bfloat16() if rounds else gradient
        rows = [torch.empty_like(sent) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, sent)
        mean = torch.zeros_like(gradient)
        for row in rows:
            mean += row.float()
        mean /= len(rows)
        return mean.bfloat16().float() if rounds and self._config.gradients == "keep" else mean


def assert_like(model: nn.Module, by_hand: ByHand, context: str) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), by_hand.params, strict=True):
        assert torch.equal(ours, theirs), f"{context}: {name} differs by {(ours - theirs).abs().max()}"
    assert_ranks_equal(list(model.parameters()))


def exact_of(opt: shardstep.ShardedOptimizer) -> dict[Any, torch.Tensor]:
    masters = opt._engine.runtime.local_step.masters
    assert masters is not None
    return masters.of_encoded()


def truth_of(opt: shardstep.ShardedOptimizer) -> dict[str, torch.Tensor]:
    """The exact values of every parameter, on every rank: masters put together, or weights that have none."""
    specs = opt._engine.runtime.plan.params
    found = [param.detach().clone().reshape(-1) for group in opt.param_groups for param in group["params"]]
    entries = opt._engine.runtime.local_step.entries()
    own = [(p.param, p.start, p.stop, entry[MASTER]) for p, entry in entries.items() if MASTER in entry]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    for param, start, stop, values in (row for rows in everyone for row in rows):
        found[param][start:stop] = values
    return {spec.name: values.view(spec.shape) for spec, values in zip(specs, found, strict=True)}


def train(model: nn.Module, opt: shardstep.ShardedOptimizer, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
