"""torch.optim.Muon in the fast lane: whole matrices, dealt by cost; other classes, dealt by elements."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from fast_lane_training import NormScaled, assert_trains_like_ddp, batch, loss_of
from shardstep import Layout, ShardConfig
from shardstep.planning import make_plan
from shardstep.planning.cost import muon_cost
from training import all_same, assert_ranks_equal, raised


class Hidden(nn.Module):
    """Matrices alone: wide, square and tall, some of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        widths = [7, 16, 16, 16, 40, 16, 3]
        self.layers = nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def trains_like_plain_muon(gradients: str) -> str:
    config = ShardConfig(bucket_mb=0.003, gradients=gradients)
    sharded = assert_trains_like_ddp(Hidden, optim.Muon, {"lr": 0.02}, config, steps=6)
    assert sharded._engine.runtime.recipe.layouts[0] is Layout.WHOLE
    return sharded._engine.runtime.plan.digest()


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_muon_is_the_plain_muon_on_the_mean_gradient(workers, ranks):
    """Bitwise at two ranks; at three and four to 1e-5, because a sum of three depends on its order."""
    all_same(workers(ranks).run(trains_like_plain_muon, "shard"))


def test_muon_with_gradients_that_are_kept(workers):
    all_same(workers(2).run(trains_like_plain_muon, "keep"))


def is_dealt_by_cost() -> list[int]:
    model = Hidden()
    plan = shardstep.shard(model, optim.Muon, lr=0.02)._engine.runtime.plan
    cost = muon_cost("cpu")
    loads = [0] * plan.world_size
    for spec, rank in zip(plan.params, plan.holders(), strict=True):
        loads[rank] += cost.of(spec)
    return loads


def test_matrices_that_cost_the_same_are_dealt_by_count(workers):
    """Six tiny ones: each takes the time of its launches, whatever its size. Three each, and elements even enough."""
    loads = all_same(workers(2).run(is_dealt_by_cost))
    assert len(set(loads)) == 1


# -- what is no matrix -------------------------------------------------------------------------------------------------


def biased() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 5, bias=False), nn.LayerNorm(5))


def refuses_biases() -> list[tuple[str, str]]:
    model = biased()
    before = [(param, param.data_ptr()) for param in model.parameters()]
    errors = [raised(lambda: shardstep.shard(model, optim.Muon, lr=0.02))]
    assert all(param.data_ptr() == place for param, place in before), "nothing has moved"
    matrices = [name for name, param in model.named_parameters() if param.ndim == 2]
    for name, param in model.named_parameters():
        param.requires_grad_(name in matrices)
    opt = shardstep.shard(model, optim.Muon, groups=[{"params": matrices}], lr=0.02)
    model[0].bias.requires_grad_(True)
    errors.append(raised(lambda: opt.add_param_group({"params": [model[0].bias]})))
    model[0].bias.requires_grad_(False)
    assert len(opt.param_groups) == 1
    trains_on(model, opt)
    opt = shardstep.shard(model, optim.Muon, lr=0.02)  # with biases that are frozen, and then are not
    trains_on(model, opt)
    model[0].bias.requires_grad_(True)
    errors.append(raised(lambda: trains_on(model, opt)))
    model[0].bias.requires_grad_(False)
    opt.zero_grad()
    model.zero_grad()
    trains_on(model, opt)
    return errors


def trains_on(model: nn.Module, opt: Any) -> None:
    before = model[1].weight.detach().clone()
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    assert not torch.equal(model[1].weight, before)
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_bias_given_to_muon_raised_after_parameters_had_moved_and_named_the_rank_that_held_it(workers, ranks):
    first, later, unfrozen = all_same(workers(ranks).run(refuses_biases, timeout=60))
    assert first[0] == later[0] == unfrozen[0] == "ValueError"
    assert "Muon refuses 0.bias of shape (5,), 2.weight of shape (5,), 2.bias of shape (5,): it takes 2-D" in first[1]
    assert "Muon refuses 0.bias of shape (5,)" in later[1]
    assert "Muon refuses 0.bias of shape (5,)" in unfrozen[1]
    assert "rank" not in first[1]


def trains_matrices_and_the_rest() -> None:
    """What the error says to do: each optimizer has a module of its own."""
    model, twin = biased(), biased()

    def parts(net: nn.Module) -> list[nn.ParameterList]:
        return [nn.ParameterList(p for p in net.parameters() if (p.ndim == 2) is flag) for flag in (True, False)]

    kinds: list[tuple[type[optim.Optimizer], float]] = [(optim.Muon, 0.02), (optim.AdamW, 0.01)]
    ours = [shardstep.shard(part, kind, lr=lr) for part, (kind, lr) in zip(parts(model), kinds, strict=True)]
    plain: list[Any] = [kind(part, lr=lr) for part, (kind, lr) in zip(parts(twin), kinds, strict=True)]
    for step in range(4):
        loss_of(model, batch(step)).backward()
        loss_of(twin, batch(step)).backward()
        for param in twin.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for opt in [*ours, *plain]:
            opt.step()
            opt.zero_grad()
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(param, other), name


def test_muon_for_the_matrices_and_adamw_for_the_rest(workers):
    workers(2).run(trains_matrices_and_the_rest)


# -- new plans ---------------------------------------------------------------------------------------------------------


def freezes_and_grows() -> list[str]:
    """Against the plain optimizer, with a layer frozen for some steps and two matrices that come later."""
    model, twin = Hidden(), Hidden()
    early = [f"layers.{number}.weight" for number in range(4)]
    late = [f"layers.{number}.weight" for number in (4, 5)]
    for net in (model, twin):
        for name in late:
            net.get_parameter(name).requires_grad_(False)
    opt = shardstep.shard(model, optim.Muon, groups=[{"params": early}], lr=0.02)
    plain = optim.Muon([twin.get_parameter(name) for name in early], lr=0.02)
    plans = []
    for step in range(9):
        for net in (model, twin):
            net.get_parameter(early[1]).requires_grad_(step not in (3, 4))
        if step == 6:
            for net in (model, twin):
                for name in late:
                    net.get_parameter(name).requires_grad_(True)
            opt.add_param_group({"params": [model.get_parameter(name) for name in late], "ns_steps": 3})
            plain.add_param_group({"params": [twin.get_parameter(name) for name in late], "ns_steps": 3})
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        loss_of(twin, batch(step)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        plain.step()
        twin.zero_grad()
        model.zero_grad()
        plans.append(opt._engine.runtime.plan.digest())
    for name, param in model.named_parameters():
        most = 0.0 if dist.get_world_size() == 2 else 1e-5
        assert torch.allclose(param, twin.get_parameter(name), rtol=most, atol=most), name
    return plans


@pytest.mark.parametrize("ranks", [2, 3])
def test_new_plans_are_the_same_on_all_ranks_and_lose_nothing(workers, ranks):
    plans = all_same(workers(ranks).run(freezes_and_grows))
    assert len(set(plans)) == 3, "as at first, with a layer frozen, and with a group more"


# -- a class that is not known -----------------------------------------------------------------------------------------


def is_dealt_by_elements() -> str:
    sharded = assert_trains_like_ddp(Hidden, NormScaled, {"lr": 0.05})
    plan = sharded._engine.runtime.plan
    by_elements = make_plan(plan.params, Layout.WHOLE, world_size=plan.world_size)
    assert max(plan.held()) <= max(by_elements.held())
    return plan.digest()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_class_of_somebody_else_is_dealt_by_elements(workers, ranks):
    all_same(workers(ranks).run(is_dealt_by_elements))
