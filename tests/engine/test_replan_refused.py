"""A new plan is made, or everything stays as it was; and what can be neither closes the optimizer on all ranks."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, batch, loss_of
from shardstep import ShardConfig
from shardstep.engine import step as engine_step
from training import raised

WAYS = pytest.mark.parametrize(
    ("ranks", "collectives"), [(1, False), (2, False), (2, True)], ids=["alone", "messages", "collectives"]
)


class MatricesOnly(optim.SGD):
    """Its constructor refuses vectors."""

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9) -> None:
        super().__init__(params, lr=lr, momentum=momentum)
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() != 2:
                    raise ValueError("matrices only")


class Biased(nn.Module):
    """Two matrices that train, and a vector that does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, 9, bias=False)
        self.second = nn.Linear(9, 4)
        self.second.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def sharded(collectives: bool, kind: Any = MatricesOnly, **options: Any) -> tuple[nn.Module, Any]:
    model = Biased()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, **options)
    with by_collectives() if collectives else nullcontext():
        return model, shardstep.shard(model, kind, lr=0.1, config=config)


def everything(model: nn.Module, opt: Any) -> list[Any]:
    """Weights, state, gradients, groups and hooks, to be compared."""
    opt.synchronize()
    opt.grad_norms()  # all ranks know which gradients there are
    return [
        [param.detach().clone() for param in model.parameters()],
        [
            (piece, sorted(entry), *map(str, entry.values()))
            for piece, entry in opt._engine.runtime.local_step.entries().items()
        ],
        [(piece, values.clone()) for piece, values in opt._engine.runtime.gradients.present()],
        [[*map(id, group["params"]), str({**group, "params": None})] for group in opt.param_groups],
        [len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()],
        [len(model._forward_hooks), *(len(module._forward_pre_hooks) for module in model.modules())],
    ]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


def refuses_a_vector(collectives: bool, gather: str, folder: Path) -> None:
    model, opt = sharded(collectives, gather=gather)
    twin, other = sharded(collectives, gather=gather)
    for step in range(3):
        for net in (model, twin):
            loss_of(net, batch(step)).backward()
        before = everything(model, opt)
        if step == 1:
            kind, text = raised(lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]}))
        else:
            model.second.bias.requires_grad_(True)
            kind, text = raised(opt.step)
            model.second.bias.requires_grad_(False)
        assert kind == "ValueError", (kind, text)
        assert "matrices only" in text
        assert is_same(everything(model, opt), before)
        opt.step()
        other.step()
        assert all(map(torch.equal, model.parameters(), twin.parameters())), step
        opt.zero_grad()
        other.zero_grad()
    shardstep.save(folder / "last", model, opt)
    fresh, loaded = sharded(collectives, gather=gather)
    shardstep.load(folder / "last", fresh, loaded)
    assert len(loaded.state_dict()["state"]) > 0
    for net, one in ((model, opt), (fresh, loaded)):
        loss_of(net, batch(9)).backward()
        one.step()
        one.synchronize()
    assert all(map(torch.equal, model.parameters(), fresh.parameters()))


@WAYS
@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_a_refused_group_or_unfrozen_parameter_destroyed_the_optimizer(workers, ranks, collectives, gather, tmp_path):
    workers(ranks).run(refuses_a_vector, collectives, gather, tmp_path, timeout=60)


# -- memory -----------------------------------------------------------------------------------------------------------


def lets_go_of_the_old_plan(options: dict[str, Any]) -> None:
    """Without the garbage collector: what waits for it takes memory beside the new plan."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=ShardConfig(**options))
    build, is_gone = engine_step.build_from, []

    def watched(*args: Any) -> Any:
        is_gone.append(old() is None)
        return build(*args)

    def iterate() -> None:
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()

    def add_group() -> None:
        opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})

    iterate()
    gc.disable()
    try:
        with mock.patch.object(engine_step, "build_from", watched):
            for trains, act in ((False, iterate), (True, iterate), (True, add_group), (False, iterate)):
                old = weakref.ref(opt._engine.runtime.memory)
                model[0].weight.requires_grad_(trains)
                act()
                iterate()
    finally:
        gc.enable()
    assert len(is_gone) >= 4, is_gone
    assert all(is_gone), is_gone


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"gather": "overlap"}, {"step": "backward"}, {"gradients": "keep"}], ids=lambda value: str(value)
)
def test_a_new_plan_takes_no_memory_beside_the_old_one(workers, ranks, options):
    workers(ranks).run(lets_go_of_the_old_plan, options)


def freezes_with_an_empty_first_group() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups: Any = [{"params": []}, {"params": "rest"}]
    opt = shardstep.shard(model, optim.AdamW, groups=groups, lr=0.1)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        opt.step()
        opt.zero_grad()
        model[0].bias.requires_grad_(False)
    assert not opt._engine.runtime.trainable[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_new_plan_behind_an_empty_first_group_raised_index_error(workers, ranks):
    workers(ranks).run(freezes_with_an_empty_first_group)
