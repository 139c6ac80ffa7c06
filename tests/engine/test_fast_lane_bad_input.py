"""What `shard` cannot take is refused on all ranks, with what to do instead."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import shardstep
from as_collectives import by_collectives
from fast_lane_training import Matrices, Net, assert_trains_like_ddp, batch, loss_of
from shardstep import ShardConfig
from training import assert_ranks_equal, raised

BOTH_WAYS = pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])


def wraps_in_ddp(collectives: bool) -> None:
    with by_collectives() if collectives else nullcontext():
        for wrapped in (DistributedDataParallel(Matrices()), nn.Sequential(DistributedDataParallel(Matrices()))):
            kind, text = raised(lambda wrapped=wrapped: shardstep.shard(wrapped, optim.SGD, lr=0.1))
            assert kind == "TypeError"
            assert "is wrapped in DistributedDataParallel" in text
            assert "leave DDP out" in text
            assert "shardstep.ZeroRedundancyOptimizer" in text
        model = Matrices()
        opt = shardstep.shard(model, optim.SGD, lr=0.1)
    kind, text = raised(lambda: DistributedDataParallel(model)(batch(0)))
    assert kind == "TypeError"
    assert "is called inside DistributedDataParallel" in text
    assert "shardstep.ZeroRedundancyOptimizer" in text
    loss_of(model, batch(0)).backward()
    opt.step()
    assert_ranks_equal(list(model.parameters()))


@BOTH_WAYS
def test_a_model_in_ddp_is_not_averaged_twice(workers, collectives):
    workers(2).run(wraps_in_ddp, collectives)


class Student(nn.Module):
    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.own = Matrices()
        self._teacher = [teacher]  # not a part of it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            aim = self._teacher[0](x)
        return self.own(x) - aim


def teaches_a_model_in_ddp() -> None:
    teacher = Matrices()
    opt = shardstep.shard(teacher, optim.SGD, lr=0.1)
    student = DistributedDataParallel(Student(teacher))
    loss_of(student, batch(0)).backward()
    loss_of(teacher, batch(0)).backward()
    opt.step()


def test_a_sharded_model_may_be_called_by_another_in_ddp(workers):
    workers(2).run(teaches_a_model_in_ddp)


def embeds_sparsely(collectives: bool) -> None:
    with by_collectives() if collectives else nullcontext():
        model: nn.Module = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
        kind, text = raised(lambda: shardstep.shard(model, optim.SGD, lr=0.1))
        assert kind == "ValueError"
        assert "0 is built with sparse=True" in text
        assert "sparse=False" in text
        own = Sparse()
        opt = shardstep.shard(own, optim.SGD, lr=0.1)
    before = copy.deepcopy(own.state_dict())
    kind, text = raised(own(torch.tensor([1, 2])).sum().backward)
    assert "table has a sparse gradient" in text
    assert f"the backward pass failed on ranks {list(range(dist.get_world_size()))}" in raised(opt.step)[1]
    assert all(torch.equal(value, before[name]) for name, value in own.state_dict().items())


class Sparse(nn.Module):
    """Sparse gradients that nothing in the module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(9, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=True) * self.scale


@BOTH_WAYS
def test_sparse_gradients_are_refused_by_name(workers, collectives):
    workers(2).run(embeds_sparsely, collectives)


class LateAndSparse(nn.Module):
    """The head's gradient comes, its bucket goes, and then, inside a reentrant checkpoint, comes a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.table = nn.Parameter(torch.linspace(-1, 1, 36).view(9, 4))

    def forward(self, x: torch.Tensor, *, sparse: bool) -> torch.Tensor:
        def looked_up(gain: torch.Tensor) -> torch.Tensor:
            return nn.functional.embedding(x, self.table, sparse=sparse) * gain

        looked: Any = checkpoint(looked_up, self.gain * 1, use_reentrant=True)
        return nn.functional.linear(looked.tanh(), self.table)


class Unfrozen(Sparse):
    """A parameter that has no place in the plan yet: its first gradient is late."""

    def __init__(self) -> None:
        super().__init__()
        self.table.requires_grad_(False)

    def forward(self, x: torch.Tensor, *, sparse: bool = False) -> torch.Tensor:
        return nn.functional.embedding(x, self.table, sparse=sparse) * self.scale


def comes_late_and_sparse(make: Callable[[], Any], gradients: Any, collectives: bool) -> None:
    with by_collectives() if collectives else nullcontext():
        model, x = make(), torch.tensor([1, 2])
        config = ShardConfig(bucket_mb=1e-5, gradients=gradients)
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=config)

    def train(*, sparse: bool) -> None:
        model(x, sparse=sparse).square().sum().backward()
        opt.step()
        opt.zero_grad()

    train(sparse=False)
    model.table.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    _, text = raised(lambda: train(sparse=dist.get_rank() == 1))
    assert "failed on rank 1: table has a sparse gradient" in text
    assert "build its module with sparse=False" in text
    assert "zero_grad() on all ranks" in text
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    opt.zero_grad()
    train(sparse=False)
    assert not torch.equal(model.table, before["table"])
    assert_ranks_equal(list(model.parameters()))


@BOTH_WAYS
@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("make", [LateAndSparse, Unfrozen])
def test_a_sparse_gradient_that_comes_late_on_one_rank_left_the_others_waiting(workers, make, gradients, collectives):
    workers(2).run(comes_late_and_sparse, make, gradients, collectives, timeout=20)


def passes_something_else() -> None:
    with torch.device("meta"):
        ghost = Matrices()
    kind, text = raised(lambda: shardstep.shard(ghost, optim.SGD, lr=0.1))
    assert kind == "ValueError"
    assert "first.weight, second.weight: on the meta device" in text
    assert "to_empty" in text
    kind, text = raised(lambda: shardstep.shard(Matrices().parameters(), optim.SGD, lr=0.1))
    assert kind == "TypeError"
    assert "takes the model itself, an nn.Module, got generator; pass the module" in text
    model = ghost if dist.get_rank() else Matrices()
    if dist.get_world_size() > 1:
        assert "on the meta device" in raised(lambda: shardstep.shard(model, optim.SGD, lr=0.1))[1]
    kind, text = raised(lambda: shardstep.shard(Net(), optim.LBFGS, lr=0.1))
    assert kind == "ValueError"
    assert "Use it unsharded" in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_generator_a_meta_model_and_lbfgs_are_refused_with_a_remedy(workers, ranks):
    workers(ranks).run(passes_something_else)


class KnowsItsKeys(optim.Optimizer):
    """Checks its groups as Muon with an auxiliary Adam does: with an assertion that says nothing."""

    def __init__(self, params: Any) -> None:
        for group in params:
            if set(group) != {"params", "lr"}:
                raise AssertionError  # without words, as an assert in a library
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])


def knows_its_keys() -> None:
    model = Matrices()
    opt = shardstep.shard(model, KnowsItsKeys, groups=[{"params": "*", "lr": 0.1}])
    before = model.first.weight.detach().clone()
    loss_of(model, batch(0)).backward()
    opt.step()
    assert not torch.equal(before, model.first.weight)
    text = raised(lambda: shardstep.shard(model, KnowsItsKeys, groups=[{"params": "*", "lr": 0.1, "beta": 1}]))[1]
    assert "KnowsItsKeys refuses its options" in text
    assert "'beta'" in text


def test_an_optimizer_that_checks_its_groups_keys_is_not_given_others(workers):
    workers(2).run(knows_its_keys)


class LooksUp(nn.Module):
    def __init__(self, max_norm: float | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(9, 5, max_norm=max_norm)
        self.head = nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x.abs().mul(10).long() % 9))


def scales_rows_in_forward() -> None:
    model = LooksUp(0.5)
    if dist.get_world_size() == 1:
        assert_trains_like_ddp(lambda: LooksUp(0.5))
        return
    text = raised(lambda: shardstep.shard(model, optim.SGD, lr=0.1))[1]
    assert "table is built with max_norm=0.5" in text
    assert "weight.renorm_(2.0, 0, 0.5)" in text
    model.table.requires_grad_(False)  # then it is the same row whoever scales it, and how often
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    model.table.requires_grad_(True)
    loss_of(model, batch(1)).backward()
    assert "table is built with max_norm=0.5" in raised(opt.step)[1]
    opt.close()
    model = LooksUp(None)
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            model.table.weight.renorm_(2.0, 0, 0.5)
    assert model.table.weight.norm(dim=1).max() < 0.5001
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_rows_that_one_rank_looked_up_were_scaled_in_part(workers, ranks):
    workers(ranks).run(scales_rows_in_forward, timeout=30)


@pytest.mark.parametrize("config", [{"gather": "overlap"}, {}, "overlap"], ids=["dict", "empty dict", "text"])
def test_a_config_that_is_no_config_is_refused(config):
    with pytest.raises(TypeError, match=r"config must be a ShardConfig, got .*shardstep\.ShardConfig\(\.\.\.\)"):
        shardstep.shard(nn.Linear(2, 2), optim.SGD, config=config, lr=0.1)
