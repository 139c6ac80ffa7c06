"""Random programs: whatever they do with a sharded model, the plain optimizer on the mean gradients does the same.

A number makes a program: layers that are tied, frozen, called twice or left out on some ranks; passes that add up, some
inside no_sync; clipping, schedulers, freezing, new groups, saving and loading, any layout and transport, overlap, the
compiler. Thirty in the suite; `make fuzz` runs three hundred.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from shardstep import Layout, ShardConfig

WIDTH = 6
PROGRAMS = int(os.environ.get("SHARDSTEP_FUZZ", "30"))
TOGETHER = 10  # programs of one job
CLASSES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.05}),
    (optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    (optim.AdamW, {"lr": 0.02}),
    (optim.Adam, {"lr": 0.02, "amsgrad": True}),
    (optim.AdamW, {"lr": 0.02, "fused": True}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (optim.Adagrad, {"lr": 0.05}),
]


class Odd(nn.Module):
    """Layers that are tied, shared, frozen, never used, or used on some ranks only."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        count = draw.randint(2, 5)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.7) for _ in range(count)])
        self.norm = nn.BatchNorm1d(WIDTH) if draw.random() < 0.3 else nn.Identity()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 2))
        self.unused = nn.Linear(3, 2) if draw.random() < 0.3 else None
        if draw.random() < 0.4:
            self.layers[-1].weight = self.layers[0].weight
        if draw.random() < 0.3:
            self.layers[draw.randrange(count)].weight.requires_grad_(False)
        self.twice = draw.randrange(count) if draw.random() < 0.3 else None
        self.sometimes = draw.randrange(count) if draw.random() < 0.4 else None

    def forward(self, x: torch.Tensor, skips: bool) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if skips and number == self.sometimes:
                continue
            x = torch.tanh(layer(x))
            if number == self.twice:
                x = layer(x)
        late = getattr(self, "late", None)
        return self.norm(x if late is None else x * late) * self.scale + self.nothing.sum()


@dataclass
class Side:
    """A model, what calls it, and its optimizer."""

    model: Odd
    call: Any
    optimizer: Any

    def is_ours(self) -> bool:
        return isinstance(self.optimizer, shardstep.ShardedOptimizer)


def config_of(draw: random.Random, cls: type[optim.Optimizer]) -> ShardConfig:
    del cls
    return ShardConfig(
        layout=draw.choice([Layout.AUTO, Layout.FLAT, Layout.WHOLE]),
        bucket_mb=draw.choice([None, 0.0002, 0.0005]),
        gradients=draw.choice(["shard", "shard", "keep"]),
        gather=draw.choice(["wait", "overlap"]),
        ordered_sums=draw.random() < 0.2,
        audit=draw.choice([None, None, 2]),
    )


def average(model: nn.Module) -> None:
    """What DDP with unused parameters would do: the mean over ranks, and nothing where no rank has a gradient."""
    for param in model.parameters():
        has = torch.tensor(float(param.grad is not None))
        dist.all_reduce(has)
        if has and param.numel():
            mean = torch.zeros_like(param) if param.grad is None else param.grad
            dist.all_reduce(mean)
            param.grad = mean / dist.get_world_size()


def run_program(number: int) -> None:
    draw = random.Random(number)
    torch.manual_seed(number)
    cls, options = draw.choice(CLASSES)
    model = Odd(draw).double()  # so that what differs is not rounding, which small batches and their norms amplify
    twin = copy.deepcopy(model)
    config = config_of(draw, cls)
    collectives = draw.random() < 0.4
    with by_collectives() if collectives else nullcontext():
        ours = Side(model, model, shardstep.shard(model, cls, config=config, **options))
    theirs = Side(twin, twin, cls(twin.parameters(), **options))
    if draw.random() < 0.15:
        ours.call = torch.compile(model, backend="eager")
    both = (ours, theirs)
    schedules = draw.random() < 0.5  # a scheduler knows the groups that there were when it was made
    schedulers = [optim.lr_scheduler.StepLR(side.optimizer, 2, gamma=0.5) for side in both if schedules]
    describe = f"program {number}: {cls.__name__} {options} {config} collectives={collectives}"
    for step in range(draw.randint(3, 6)):
        iterate(draw, step, number, ours, theirs, config)
        if draw.random() < 0.5:
            for scheduler in schedulers:
                scheduler.step()
        change(draw, ours, theirs, may_grow=not schedules)
        for (name, one), other in zip(ours.model.named_parameters(), theirs.model.parameters(), strict=True):
            assert torch.allclose(one, other, rtol=1e-6, atol=1e-7), (
                f"{describe}: {name} after step {step} is {(one - other).abs().max()} off"
            )
    ours.optimizer.close()


def iterate(draw: random.Random, step: int, number: int, ours: Side, theirs: Side, config: ShardConfig) -> None:
    passes = draw.choice([1, 1, 1, 2, 3])
    silent = draw.random() < 0.3  # all but the last send nothing
    to_none = draw.random() < 0.8
    clips = draw.choice([None, None, 0.5])
    rank = dist.get_rank()
    skipping = [draw.random() < 0.5 for _ in range(dist.get_world_size())]
    for side in (ours, theirs):
        for part in range(passes):
            generator = torch.Generator().manual_seed(1000 * number + 100 * step + 10 * part + rank)
            x = torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)
            inside = side.is_ours() and silent and part + 1 < passes
            with side.optimizer.no_sync() if inside else nullcontext():
                (side.call(x, skipping[rank]) - 0.3).square().mean().backward()
        if not side.is_ours():
            average(side.model)
        if clips is not None:
            clip = side.optimizer.clip_grad_norm_ if side.is_ours() else None
            clip(clips) if clip else nn.utils.clip_grad_norm_(side.model.parameters(), clips)
        side.optimizer.step()
        side.optimizer.zero_grad(set_to_none=to_none)
    if isinstance(theirs.model.norm, nn.BatchNorm1d):  # running means follow rank 0
        for buffer in theirs.model.buffers():
            dist.broadcast(buffer, 0)


def change(draw: random.Random, ours: Side, theirs: Side, *, may_grow: bool) -> None:
    """What a program may do between two steps."""
    what = draw.choice(["nothing", "nothing", "freeze", "save", "load plain", "evaluate", "group"])
    place = draw.randrange(len(ours.model.layers))
    for side in (ours, theirs):
        if what == "freeze":
            # torch goes on stepping a frozen parameter by its momentum while a gradient of zeros is left.
            side.optimizer.zero_grad()
            layer = side.model.layers[place]
            layer.weight.requires_grad_(not layer.weight.requires_grad)
        elif what == "evaluate":
            side.model.eval()
            with torch.no_grad():
                side.model(torch.ones(2, WIDTH, dtype=torch.float64), False)
            side.model.train()
        elif what == "group" and may_grow and not hasattr(side.model, "late"):
            side.model.late = nn.Parameter(torch.full((WIDTH,), 0.9, dtype=torch.float64))
            side.optimizer.add_param_group({"params": [side.model.late], "lr": 0.01})
        elif what == "save":
            saved = copy.deepcopy(side.optimizer.state_dict())
            weights = copy.deepcopy(side.model.state_dict())
            side.model.load_state_dict(weights)
            side.optimizer.load_state_dict(saved)
    if what == "load plain" and not any(group.get("fused") for group in ours.optimizer.param_groups):
        ours.optimizer.load_state_dict(theirs.optimizer.state_dict())


def run_programs(numbers: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's, and that it hides nothing
        for number in numbers:
            try:
                run_program(number)
            except Exception as error:
                raise AssertionError(f"program {number}: {type(error).__name__}: {error}") from error


JOBS = [list(range(start, min(start + TOGETHER, PROGRAMS))) for start in range(0, PROGRAMS, TOGETHER)]


@pytest.mark.parametrize("numbers", JOBS, ids=lambda numbers: f"{numbers[0]} to {numbers[-1]}")
def test_random_programs_train_like_the_plain_optimizer(workers, numbers):
    ranks = 1 + numbers[0] // TOGETHER % 3
    workers(ranks).run(run_programs, numbers, timeout=110)
