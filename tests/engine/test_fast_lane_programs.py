"""What programs do with the fast lane: schedulers, groups, freezing, saving, subgroups; and what goes wrong in them."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from fast_lane_training import SMALL_BUCKETS, Matrices, Net, assert_trains_like_ddp, batch, loss_of
from shardstep import ShardConfig
from training import raised


def schedules_and_closures() -> None:
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    opt = shardstep.shard(model, optim.SGD, lr=0.1, momentum=0.9)
    assert isinstance(opt, optim.Optimizer)
    schedulers = [optim.lr_scheduler.StepLR(o, 2, gamma=0.1) for o in (plain, opt)]
    for step in range(5):
        for net, o in ((ddp, plain), (model, opt)):

            def closure(net: nn.Module = net, o: Any = o, step: int = step) -> torch.Tensor:
                o.zero_grad()
                loss = loss_of(net, batch(step))
                loss.backward()
                return loss

            assert o.step(closure).item() > 0
        for scheduler in schedulers:
            scheduler.step()
    assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_schedulers_and_closures(workers):
    workers(2).run(schedules_and_closures)


def takes_groups() -> None:
    def groups(net: Net) -> list[dict[str, Any]]:
        return [{"params": ["*.bias", net.scale], "weight_decay": 0.0}, {"params": "*", "lr": 0.02}]

    model = Net()
    twin = copy.deepcopy(model)
    opt = shardstep.shard(model, optim.AdamW, groups=groups(model), lr=0.05, weight_decay=0.1)
    assert opt.param_groups[0]["param_names"] == ["first.bias", "second.bias", "scale"]
    assert [group["lr"] for group in opt.param_groups] == [0.05, 0.02]
    named = dict(twin.named_parameters())
    plain = optim.AdamW(
        [
            {"params": [named[name] for name in group["param_names"]], "lr": group["lr"], "weight_decay": decay}
            for group, decay in zip(opt.param_groups, (0.0, 0.1), strict=True)
        ]
    )
    ddp = DistributedDataParallel(twin)
    for step in range(3):
        for net, o in ((ddp, plain), (model, opt)):
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for bad, word in (
        ([{"params": "first.*"}, {"params": "*.weight"}], "groups[0] and groups[1] both ask for first.weight"),
        ([{"params": "rest"}, {"params": "*"}], "groups[0] and groups[1] both ask for the rest"),
        ([{"params": "frist.*"}], "no parameter is called"),
        ([{"params": [torch.zeros(2)]}], "not in the model"),
    ):
        assert word in raised(lambda bad=bad: shardstep.shard(Net(), optim.AdamW, groups=bad, lr=0.1))[1]


def test_groups_by_name_pattern_and_tensor(workers):
    workers(2).run(takes_groups)


def freezes_and_adds(gradients: Any) -> None:
    """Freeze, unfreeze and add a group between steps; the plain optimizer does the same."""
    model = nn.ModuleDict({"a": nn.Linear(7, 7), "b": nn.Linear(7, 7), "c": nn.Linear(7, 7)})
    for index, param in enumerate(model.parameters()):
        torch.manual_seed(index)
        nn.init.normal_(param)
    twin = copy.deepcopy(model)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net["c"](torch.tanh(net["b"](torch.tanh(net["a"](x))))).square().mean()

    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05)
    plain = optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(10):
        for net in (model, twin):
            net["a"].requires_grad_(step < 2 or step >= 5)
            net["b"].requires_grad_(step != 7)
        loss(model, batch(step)).backward()
        loss(twin, batch(step)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        for o in (opt, plain):
            o.step()
            o.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6), (step, name)
    extra, other = (nn.Linear(7, 7) for _ in range(2))
    other.load_state_dict(extra.state_dict())
    with torch.no_grad():
        for param in [*extra.parameters(), *other.parameters()]:
            dist.broadcast(param, 0)
    model["d"], twin["d"] = extra, other
    opt.add_param_group({"params": extra.parameters(), "lr": 0.01})
    plain.add_param_group({"params": other.parameters(), "lr": 0.01})
    for step in range(3):
        for net in (model, twin):
            net["d"](loss(net, batch(step)) * batch(step)).square().mean().backward()
        for param in twin.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for o in (opt, plain):
            o.step()
            o.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.allclose(ours, theirs[1], rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_freezing_unfreezing_and_new_groups(workers, ranks, gradients):
    workers(ranks).run(freezes_and_adds, gradients)


def swaps_what_is_frozen() -> None:
    """First the head trains, then the rest: no parameter that the plan knew has a gradient."""
    model = Matrices()
    model.first.requires_grad_(False)
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    for _ in range(2):
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model, batch(0)).backward()
        opt.step()
        opt.zero_grad()
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, value) != param.requires_grad
        for param in model.parameters():
            param.requires_grad_(not param.requires_grad)


def test_what_is_frozen_is_swapped(workers):
    workers(2).run(swaps_what_is_frozen)


def saves_and_loads() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(bucket_mb=SMALL_BUCKETS))

    def train(net: nn.Module, o: Any, steps: range) -> None:
        for step in steps:
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()

    train(model, opt, range(2))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(saved)
    train(model, opt, range(2, 4))
    again = Net()
    again.load_state_dict(weights)
    other = shardstep.shard(again, optim.AdamW, lr=0.9)  # another bucket size, so other pieces
    other.load_state_dict(saved)
    assert str(saved) == str(kept), "what was passed is not written to"
    train(again, other, range(2, 4))
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # The plain optimizer's state loads too.
    twin = Net()
    plain = optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(2):
        loss_of(twin, torch.full((4, 7), 0.1 * step)).backward()
        plain.step()
        plain.zero_grad()
    from_plain = copy.deepcopy(twin)
    loaded = shardstep.shard(from_plain, optim.AdamW, lr=0.05)
    loaded.load_state_dict(plain.state_dict())
    for net, o in ((twin, plain), (from_plain, loaded)):
        loss_of(net, torch.full((4, 7), 0.3)).backward()
        o.step()
    for ours, theirs in zip(from_plain.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    bad = plain.state_dict()
    bad["state"][0]["exp_avg"] = torch.zeros(3)
    assert "exp_avg" in raised(lambda: loaded.load_state_dict(bad))[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_saves_and_loads(workers, ranks):
    workers(ranks).run(saves_and_loads)


def is_balanced() -> None:
    model = nn.Sequential(nn.Embedding(501, 16), nn.Linear(16, 33), nn.Linear(33, 7))
    opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(bucket_mb=0.01))
    loss_of(model, torch.arange(20)).backward()
    opt.step()
    held = sum(entry["exp_avg"].numel() for entry in opt.state.values())
    total = sum(param.numel() for param in model.parameters())
    assert held <= 1.01 * total / dist.get_world_size() + 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_is_balanced(workers, ranks):
    workers(ranks).run(is_balanced)


def disagrees(how: str) -> None:
    rank = dist.get_rank()
    if how == "options":
        kind, text = raised(lambda: shardstep.shard(Net(), optim.AdamW, lr=-1.0 if rank == 1 else 0.1))
        assert kind == "ValueError"
        assert "rank 1" in text
    elif how == "model":
        net = nn.Linear(7, 5 if rank == 1 else 4)
        assert "do not agree" in raised(lambda: shardstep.shard(net, optim.AdamW, lr=0.1))[1]
    else:
        model = Net()
        opt = shardstep.shard(model, Failing, lr=0.1)
        loss_of(model, batch(0)).backward()
        Failing.armed = rank == 1
        kind, text = raised(opt.step)
        Failing.armed = False
        assert kind == "RuntimeError"
        assert "rank 1" in text or rank == 1


class Failing(optim.SGD):
    armed = False

    def step(self, closure: Any = None) -> Any:
        if Failing.armed:
            raise RuntimeError("this rank cannot")
        return super().step(closure)


@pytest.mark.parametrize("how", ["options", "model", "step"])
def test_when_ranks_disagree_all_raise(workers, how):
    workers(2).run(disagrees, how)


def trains_in_a_subgroup() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    assert_trains_like_ddp(Net, group=mine)


def test_subgroups_train_at_the_same_time(workers):
    workers(4).run(trains_in_a_subgroup)


def delays(seed: int, steps: int) -> None:
    """Train with random pauses in gradients, different ones on every rank."""
    rng = random.Random(1000 * seed + dist.get_rank())

    def pause(_: torch.Tensor) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.002)

    model, twin = Net(), Net()
    for param in model.parameters():
        param.register_hook(pause)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS)
    overlapped = ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap")
    opt = shardstep.shard(model, optim.AdamW, config=overlapped, lr=0.01)
    other = shardstep.shard(twin, optim.AdamW, config=config, lr=0.01)
    for step in range(steps):
        for net, o in ((model, opt), (twin, other)):
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()
    opt.synchronize()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), "overlap on and off must give the same bits, whatever the timing"


def stress(seeds: int, steps: int) -> None:
    for seed in range(seeds):
        delays(seed, steps)


# Every seed has other pauses. What 200 steps of each find and 40 do not is rare: those are for `make test-slow`.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("steps", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_stress_random_delays_never_deadlock_and_change_no_bit(workers, steps):
    workers(4).run(stress, 20, steps, timeout=580)
