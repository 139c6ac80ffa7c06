"""What the tests of Muon's batches share: a model that is given its gradients, options, and rows without a share."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_batched import by_batches
from shardstep import ShardConfig
from shardstep.planning import Piece
from shardstep.stepping.batched_muon import BatchedMuon
from shardstep.stepping.steppers import Row

LR, STEPS, MOST = 0.02, 4, 0.02
# Tall, wide and square; of most several, in turn as in a transformer; the last is alone.
SHAPES = [(16, 8), (8, 16), (12, 12)] * 3 + [(24, 8)]
SMALL = 0.002  # MB: several buckets
Options = dict[str, Any]


def orthogonal(shape: tuple[int, int], seed: int) -> torch.Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    u, s, v = torch.linalg.svd(values, full_matrices=False)
    return u @ torch.diag(torch.linspace(0.4, 1, len(s))) @ v


def gradient_of(place: int, shape: tuple[int, int], step: int, rank: int) -> torch.Tensor:
    return orthogonal(shape, place) + 0.3 * orthogonal(shape, 1000 * (1 + rank) + 100 * step + place)


class Given(nn.Module):
    """Its gradients are what it is called with."""

    def __init__(self, dtype: torch.dtype = torch.float32, biases: bool = False) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(orthogonal(shape, 50 + i).to(dtype) for i, shape in enumerate(SHAPES))
        self.biases = nn.ParameterList(torch.ones(5, dtype=dtype) for _ in range(3 if biases else 0))

    def forward(self, step: int, without: tuple[int, ...] = ()) -> torch.Tensor:
        total = sum(bias.float().square().sum() for bias in self.biases)
        for place, (param, shape) in enumerate(zip(self.matrices, SHAPES, strict=True)):
            if place not in without:
                total = total + (param * gradient_of(place, shape, step, dist.get_rank()).to(param.dtype)).sum().float()
        return total


def shard(model: nn.Module, batched: bool, options: Options, config: ShardConfig, **others: Any) -> Any:
    with by_batches() if batched else nullcontext():
        opt = shardstep.shard(model, optim.Muon, config=config, **{"lr": LR, **options}, **others)
    assert [type(one) for one in opt._engine.runtime.local_step.steppers] == [BatchedMuon] * batched
    return opt


def train(model: nn.Module, opt: Any, steps: Any = range(STEPS), **given: Any) -> None:
    for step in steps:
        model(step, **given).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()


def assert_near(ours: nn.Module, theirs: nn.Module, most: float = STEPS * MOST * LR) -> None:
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        apart = (one.double() - other.double()).abs().max().item() if one.numel() else 0.0
        assert apart <= most, f"{name} differs by {apart:.2g}, and may by {most:.2g}"


def both(options: Options, config: ShardConfig, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """A model stepped by batches, and one by the class."""
    models = Given(dtype), Given(dtype)
    for batched, model in zip((True, False), models, strict=True):
        train(model, shard(model, batched, options, config))
    return models


OPTIONS: dict[str, Options] = {
    "default": {},
    "momentum": {"momentum": 0.3},
    "no momentum": {"momentum": 0.0},
    "without nesterov": {"nesterov": False, "momentum": 0.8},
    "weight decay": {"weight_decay": 5.0},
    "ns_steps": {"ns_steps": 2},
    "ns_coefficients": {"ns_coefficients": (2.0, -1.5, 0.5)},
    "eps": {"eps": 100.0},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"},
    "original": {"adjust_lr_fn": "original"},
    "lr in a tensor": {"lr": torch.tensor(LR)},
    "lr in a tensor of one dim": {"lr": torch.tensor([LR])},
}


def both_classes() -> list[Options]:
    return [
        {"params": "matrices.*", "optimizer": optim.Muon, "lr": LR},
        {"params": "rest", "optimizer": optim.AdamW, "lr": 1e-2},
    ]


def rows_of(tensors: list[torch.Tensor]) -> list[Row]:
    return [
        Row(tensor, tensor.reshape(-1), None, tensor.dtype, 0, Piece(place, 0, tensor.numel(), 0), tensor.stride())
        for place, tensor in enumerate(tensors)
    ]


def stepper_of(rows: list[Row], **options: Any) -> tuple[BatchedMuon, dict[Any, Any], list[Options]]:
    group = dict(optim.Muon([torch.zeros(2, 2)], **{"lr": LR, **options}).param_groups[0])
    state: dict[Any, Any] = {}
    stepper = BatchedMuon([0])
    stepper.build([rows], state, [group], {})
    return stepper, state, [group]
