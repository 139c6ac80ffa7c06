"""Muon for the matrices and AdamW for the rest, in one sharded optimizer or in two."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, NormScaled, batch, loss_of
from shardstep import Layout, ShardConfig
from shardstep.planning import WholeRanges
from training import assert_ranks_equal, raised

MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "weight_decay": 0.0}


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.embed = nn.Linear(7, 12)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 12)) for _ in range(3)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def both_groups() -> list[dict[str, Any]]:
    return [
        {"params": "blocks.*.weight", "optimizer": optim.Muon, **MUON},
        {"params": "rest", "optimizer": optim.AdamW, **ADAMW},
    ]


def plain_pair(model: nn.Module) -> list[optim.Optimizer]:
    named = dict(model.named_parameters())
    matrices = [param for name, param in named.items() if "blocks." in name and name.endswith("weight")]
    others = [param for param in named.values() if all(param is not matrix for matrix in matrices)]
    return [optim.Muon(matrices, **MUON), optim.AdamW(others, **ADAMW)]


def trains(sharded: list[Any], model: nn.Module, exact: bool) -> None:
    twin = copy.deepcopy(model)
    ddp, plain = DistributedDataParallel(twin), plain_pair(twin)
    schedulers = [optim.lr_scheduler.ExponentialLR(opt, 0.9) for opt in (*sharded, *plain)]
    for step in range(5):
        for net, opts in ((ddp, plain), (model, sharded)):
            loss_of(net, batch(step)).backward()
            for opt in opts:
                opt.step()
            for opt in opts:
                opt.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
    for opt in sharded:
        opt.synchronize()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        exact = exact and not ours.is_cuda  # where matrix products of a view may round otherwise
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)
        assert same, f"{name} differs by {(ours - theirs).abs().max()}"
    assert_ranks_equal(list(model.parameters()))


def trains_both(config: ShardConfig, collectives: bool) -> None:
    model = Blocks()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, groups=both_groups(), config=config)
    assert opt._engine.runtime.recipe.layouts == [Layout.WHOLE, Layout.FLAT]
    kinds = {isinstance(bucket.ranges, WholeRanges) for bucket in opt._engine.runtime.plan.buckets}
    assert kinds == {True, False}
    trains([opt], model, exact=dist.get_world_size() <= 2)


CONFIGS = {
    "default": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "one bucket": ShardConfig(),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_muon_and_adamw_in_one_optimizer_equal_the_two_of_torch(workers, ranks, config):
    workers(ranks).run(trains_both, config, False)


@pytest.mark.parametrize("ranks", [2, 3])
def test_muon_and_adamw_with_collectives(workers, ranks):
    workers(ranks).run(trains_both, CONFIGS["default"], True)


def reduces_early(groups: list[dict[str, Any]]) -> list[set[str]]:
    """Of each bucket, in the order in which they are reduced, the modules that it waits for."""
    opt = shardstep.shard(Blocks(), groups=groups, config=ShardConfig(bucket_mb=SMALL_BUCKETS))
    plan = opt._engine.runtime.plan
    return [{plan.params[segment.param].name.rpartition(".")[0] for segment in b.segments} for b in plan.buckets]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_nothing_was_reduced_before_backward_ended_when_groups_were_not_in_the_order_of_the_model(
    workers, ranks, turned
):
    """Weights in one group and biases in another: by groups, the first buckets have something of the first layer."""
    by_dims: list[dict[str, Any]] = [
        {"params": "blocks.*.weight", "optimizer": optim.Muon, **MUON},
        {"params": ["embed.weight", "head.weight"], "optimizer": optim.AdamW, **ADAMW},
        {"params": "rest", "optimizer": optim.AdamW, **ADAMW},
    ]
    for buckets in workers(ranks).run(reduces_early, by_dims[::-1] if turned else by_dims):
        half = buckets[: len(buckets) // 2]
        assert not any("embed" in modules or "blocks.0.0" in modules for modules in half), buckets


def trains_two_optimizers(collectives: bool) -> None:
    """Two calls of shard on one model, with different parameters."""
    model = Blocks()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS)
    with by_collectives() if collectives else nullcontext():
        muon = shardstep.shard(model, optim.Muon, groups=[{"params": "blocks.*.weight"}], config=config, **MUON)
        loss_of(model, batch(0)).backward()
        assert "no group has embed.weight, embed.bias" in raised(muon.step)[1]
        muon.close()
        muon = shardstep.shard(model, optim.Muon, groups=[{"params": "blocks.*.weight"}], config=config, **MUON)
        rest = [param for name, param in model.named_parameters() if not ("blocks." in name and "weight" in name)]
        adamw = shardstep.shard(model, optim.AdamW, groups=[{"params": rest}], config=config, **ADAMW)
    assert not muon.is_closed
    model.zero_grad()
    trains([muon, adamw], model, exact=True)
    again = shardstep.shard(model, optim.SGD, lr=0.1)
    assert muon.is_closed
    assert adamw.is_closed
    again.close()


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
def test_two_optimizers_may_share_a_model(workers, collectives):
    workers(2).run(trains_two_optimizers, collectives)


def is_saved_and_loaded() -> None:
    model = Blocks()
    opt = shardstep.shard(model, groups=both_groups())

    def iterate(net: nn.Module, o: Any, steps: range) -> None:
        for step in steps:
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()

    iterate(model, opt, range(2))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    assert [group["optimizer"] for group in saved["param_groups"]] == [
        "torch.optim.Muon", "torch.optim.adamw.AdamW",
    ]  # fmt: skip
    iterate(model, opt, range(2, 4))
    other = Blocks()
    resumed = shardstep.shard(other, groups=both_groups())
    other.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0]["optimizer"] is optim.Muon
    iterate(other, resumed, range(2, 4))
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    turned = [{**group, "optimizer": optim.SGD} if number else group for number, group in enumerate(both_groups())]
    turned[1].pop("weight_decay")
    wrong = shardstep.shard(Blocks(), groups=turned)
    assert (
        "was saved by torch.optim.adamw.AdamW, and is torch.optim.sgd.SGD here"
        in raised(lambda: wrong.load_state_dict(saved))[1]
    )


def test_several_are_saved_and_loaded_as_one(workers):
    workers(2).run(is_saved_and_loaded)


def freezes_and_adds() -> None:
    """A new plan, with a group that comes later."""
    model = Blocks()
    model.extra = nn.Linear(3, 3)
    model.extra.requires_grad_(False)
    twin = copy.deepcopy(model)
    late = [twin.extra.weight, twin.extra.bias]
    groups = both_groups()
    groups[1]["params"] = ["embed.*", "head.*", "blocks.*.bias"]
    opt = shardstep.shard(model, groups=groups, config=ShardConfig(bucket_mb=SMALL_BUCKETS))
    named = dict(twin.named_parameters())
    plain = [
        kind([named[name] for name in group["param_names"]], lr=group["lr"], weight_decay=group["weight_decay"])
        for kind, group in zip((optim.Muon, optim.AdamW), opt.param_groups, strict=True)
    ]
    for step in range(6):
        for net in (model, twin):
            net.blocks[1].requires_grad_(step not in (1, 2))
        if step == 3:
            for net in (model, twin):
                net.extra.requires_grad_(True)
            assert (
                "must be one that there is already: Muon, AdamW"
                in raised(lambda: opt.add_param_group({"params": [model.extra.bias], "optimizer": optim.SGD}))[1]
            )
            opt.add_param_group({"params": [model.extra.weight, model.extra.bias], "optimizer": optim.AdamW, "lr": 0.1})
            assert opt.param_groups[-1]["betas"] == (0.9, 0.999)
            plain[1].add_param_group({"params": late, "lr": 0.1, "weight_decay": 0.01})
        for net, opts in ((twin, plain), (model, [opt])):
            loss = loss_of(net, batch(step))
            if step >= 3:
                loss = loss + net.extra(torch.ones(3)).square().sum()
            loss.backward()
            if net is twin:
                for param in net.parameters():
                    if param.grad is not None:
                        dist.all_reduce(param.grad)
                        param.grad /= dist.get_world_size()
            for o in opts:
                o.step()
                o.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{name} differs by {(ours - theirs).abs().max()}"


def test_several_follow_new_plans(workers):
    workers(2).run(freezes_and_adds)


def is_refused() -> None:
    def text_of(*args: Any, **options: Any) -> str:
        return raised(lambda: shardstep.shard(Blocks(), *args, **options))[1]

    muon_on_all = [{"params": "rest", "optimizer": optim.Muon, "lr": 0.1}]
    assert "Muon refuses embed.bias of shape (12,), blocks.0.0.bias" in text_of(groups=muon_on_all)
    assert "no group has embed.weight" in text_of(groups=both_groups()[:1])
    assert "both ask for blocks.0.0.weight" in text_of(groups=[*both_groups(), {**both_groups()[0]}])
    assert "lr: options belong into the groups" in text_of(groups=both_groups(), lr=0.1)
    assert 'groups[1] says "optimizer": None' in text_of(groups=[both_groups()[0], {"params": "rest"}])
    assert "groups[1] says \"optimizer\": 'AdamW'" in text_of(
        groups=[both_groups()[0], {"params": "rest", "optimizer": "AdamW"}]
    )
    assert "LBFGS" in text_of(groups=[both_groups()[0], {"params": "rest", "optimizer": optim.LBFGS}])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_groups_that_do_not_fit_are_refused_by_name(workers, ranks):
    workers(ranks).run(is_refused)


def has_one_of_somebody_elses() -> None:
    model = Blocks()
    groups = [{"params": "blocks.*", "optimizer": NormScaled, "lr": 0.01}, {"params": "rest", "lr": 0.1}]
    opt = shardstep.shard(model, optim.SGD, groups=groups, momentum=0.9)
    twin = copy.deepcopy(model)
    blocks = [param for name, param in twin.named_parameters() if "blocks." in name]
    rest = [param for name, param in twin.named_parameters() if "blocks." not in name]
    plain = [NormScaled(blocks, lr=0.01), optim.SGD(rest, lr=0.1, momentum=0.9)]
    ddp = DistributedDataParallel(twin)
    for step in range(4):
        for net, opts in ((ddp, plain), (model, [opt])):
            loss_of(net, batch(step)).backward()
            for o in opts:
                o.step()
                o.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


def test_a_class_of_somebody_elses_beside_one_of_torch(workers):
    workers(2).run(has_one_of_somebody_elses)


def two_that_have_betas() -> list[dict[str, Any]]:
    return [{"params": "*.weight", "optimizer": optim.Adam}, {"params": "rest", "optimizer": optim.AdamW, "lr": 2e-3}]


def cycles(collectives: bool) -> None:
    """OneCycleLR moves beta1 beside the learning rate, if the optimizer says that it has one."""
    model = Blocks()
    twin = copy.deepcopy(model)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, groups=two_that_have_betas())
    ddp = DistributedDataParallel(twin)
    weights = [param for name, param in twin.named_parameters() if name.endswith(".weight")]
    others = [param for name, param in twin.named_parameters() if not name.endswith(".weight")]
    plain = [optim.Adam(weights), optim.AdamW(others, lr=2e-3)]
    most = {"total_steps": 8, "cycle_momentum": True}
    schedulers = [optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.01, 0.02], **most)]
    schedulers += [
        optim.lr_scheduler.OneCycleLR(one, max_lr=lr, **most) for one, lr in zip(plain, (0.01, 0.02), strict=True)
    ]
    betas = set()
    for step in range(4):
        for net in (ddp, model):
            loss_of(net, batch(step)).backward()
        for one in (opt, *plain):
            one.step()
            one.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        betas.add(opt.param_groups[0]["betas"])
        assert [group["betas"] for group in opt.param_groups] == [one.param_groups[0]["betas"] for one in plain]
    assert len(betas) > 1
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def keeps_options_apart() -> None:
    """What all groups have is in `defaults`; a group that is added takes nothing from there."""
    model = Blocks()
    opt = shardstep.shard(model, groups=both_groups())
    assert "optimizer" not in opt.defaults
    assert "lr" in opt.defaults
    assert "betas" not in opt.defaults, "Muon has a momentum in its place"
    assert "momentum" not in opt.defaults
    optim.lr_scheduler.OneCycleLR(opt, max_lr=[0.02, 0.003], total_steps=8, cycle_momentum=False)
    model.late = nn.Linear(5, 5)
    opt.add_param_group({"params": [model.late.weight], "optimizer": optim.AdamW})
    assert opt.param_groups[2]["lr"] == optim.AdamW([torch.zeros(1)]).defaults["lr"]
    assert opt.param_groups[2]["weight_decay"] == optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    assert "must be one that there is already" in raised(lambda: opt.add_param_group({"params": [model.late.bias]}))[1]


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_one_cycle_over_several_classes_that_have_betas_said_that_momentum_is_not_supported(
    workers, ranks, collectives
):
    workers(ranks).run(cycles, collectives, timeout=60)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_that_is_added_to_several_classes_has_the_options_of_its_own(workers, ranks):
    workers(ranks).run(keeps_options_apart, timeout=60)
