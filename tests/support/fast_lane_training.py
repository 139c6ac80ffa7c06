"""What the tests of the fast lane share: small models, batches, and DDP with the plain optimizer as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ShardConfig
from training import assert_ranks_equal

SMALL_BUCKETS = 0.0004  # MB: a hundred elements, so that parameters are cut by buckets and by ranks


class Net(nn.Module):
    """Matrices, vectors, a scalar and a parameter without elements; sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale + self.nothing.sum()


def batch(step: int, width: int = 7) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator, device="cpu", dtype=torch.float32)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.to(next(model.parameters()).device)).square().mean()


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def assert_trains_like_ddp(
    make: Callable[[], nn.Module],
    optimizer_class: type[optim.Optimizer] = optim.AdamW,
    options: dict[str, Any] | None = None,
    config: ShardConfig | None = None,
    *,
    loss: Loss = loss_of,
    steps: int = 4,
    accumulate: int = 1,
    find_unused: bool = False,
    group: Any = None,
    width: int = 7,
) -> Any:
    """Bitwise on one and two ranks. A sum of three or more depends on its order: 1e-5 after a few steps, or 1e-4 where
    the optimizer subtracts squares that are nearly equal."""
    model = make()
    options = {"lr": 0.05, **(options or {})}
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=find_unused, process_group=group)
    plain = optimizer_class(ddp.parameters(), **options)
    config = config or ShardConfig(bucket_mb=SMALL_BUCKETS)
    sharded = shardstep.shard(model, optimizer_class, config=config, process_group=group, **options)
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            x = batch(step * 10 + micro, width)
            with nullcontext() if last else ddp.no_sync():
                loss(ddp, x).backward()
            with nullcontext() if last else sharded.no_sync():
                loss(model, x).backward()
        plain.step()
        plain.zero_grad()
        sharded.step()
        sharded.zero_grad()
    sharded.synchronize()
    exact = dist.get_world_size(group) <= 2
    most = 1e-4 if options.get("centered") else 1e-5
    pairs = zip(model.named_parameters(), ddp.module.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=most, atol=most)
        assert same, f"{optimizer_class.__name__} {options}: {name} differs by {(ours - theirs).abs().max()}"
    if dist.get_rank(group) == 0:  # under DDP the others' follow before the next forward
        for ours, theirs in zip(model.buffers(), ddp.module.buffers(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5), "buffers differ"
    assert_ranks_equal(list(model.buffers()), group)
    assert_ranks_equal(list(model.parameters()), group)
    return sharded


class NormScaled(optim.Optimizer):
    """Like LAMB: the step of a parameter depends on the norm of all of it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() + 1e-3), alpha=group["lr"])


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, 9, bias=False)
        self.second = nn.Linear(9, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Breaks.armed:
            raise ArithmeticError("half-way")
        return gradient


class Normed(nn.Module):
    """Batch norm: buffers that depend on the rank's own batches.

    No bias before it: its gradient would be zero but for rounding, and AdamW makes full steps of that.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(7, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)
