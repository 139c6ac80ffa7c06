"""ShardConfig(step="backward"): buckets are stepped as they are reduced, and the result is that of the plain step."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, NormScaled, batch, loss_of
from shardstep import Layout, ShardConfig
from shardstep.gradients.passes import GradientPass
from training import assert_ranks_equal, raised


def loss_without(model: nn.Sequential, x: torch.Tensor, skips: bool) -> torch.Tensor:
    hidden = model[0](x)
    return (hidden if skips else model[1:](hidden)).float().square().mean()


def trains_alike(options: dict[str, Any], settings: dict[str, Any], dtype: torch.dtype, collectives: bool) -> int:
    """With and without; returns how many buckets were stepped early."""
    results, early = [], 0
    for step_in in ("after", "backward"):
        torch.manual_seed(1)
        model = nn.Sequential(Net(), nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 4)).to(dtype)
        config = ShardConfig(bucket_mb=SMALL_BUCKETS, step=step_in, **settings)
        with by_collectives() if collectives else nullcontext():
            opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config, **options)
        scheduler = optim.lr_scheduler.ExponentialLR(opt, 0.9)
        for step in range(6):
            model[3].requires_grad_(step != 3)
            skips = step == 4 and dist.get_rank() == 0  # a layer that one rank does not use

            for _ in range(2 if step == 2 else 1):
                with opt.no_sync() if step == 2 else nullcontext():
                    loss_without(model, batch(step).to(dtype), skips).backward()
            if step == 2:
                loss_without(model, batch(step).to(dtype), skips).backward()
            early += len(opt._engine.runtime.timing.stepped)
            opt.step()
            opt.zero_grad()
            scheduler.step()
        opt.synchronize()
        results.append([param.detach().clone() for param in model.parameters()])
        opt.close()
    assert all(map(torch.equal, *results))
    assert_ranks_equal(results[1])
    return early


SETTINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "whole": {"layout": Layout.WHOLE},
    "overlap": {"gather": "overlap"},
    "ema": {"ema": 0.9},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_step_inside_backward_equals_the_one_after_it(workers, ranks, settings):
    for early in workers(ranks).run(trains_alike, {}, settings, torch.float32, False):
        assert early > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_step_inside_backward_with_collectives(workers, dtype):
    for early in workers(2).run(trains_alike, {"foreach": True}, {}, dtype, True):
        assert early > 0


def holds_few_gradients() -> tuple[int, int]:
    """The most bytes of reduced gradients at a time, and all of them."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(12)])
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(step="backward", bucket_mb=64 * 65 * 4 / 1e6))
    current = opt._engine.runtime.gradients.current
    most = 0
    launch = current._launch

    def watched(*args: Any) -> None:
        nonlocal most
        launch(*args)
        most = max(most, sum(shard.nbytes for shard in current.shards if shard is not None))

    current._launch = watched
    for step in range(2):
        loss_of(model, batch(step, 64)).backward()
        opt.step()
        opt.zero_grad()
    return most, sum(bucket.own.nbytes for bucket in opt._engine.runtime.memory.buckets)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_never_all_alive(workers, ranks):
    for most, everything in workers(ranks).run(holds_few_gradients):
        assert most <= everything / 4


def is_refused() -> None:
    model = nn.Sequential(*[nn.Linear(7, 7) for _ in range(6)])
    config = ShardConfig(step="backward", bucket_mb=0.0002)
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=config)
    loss_of(model, batch(0)).backward()
    for call in (lambda: opt.clip_grad_norm_(1.0), opt.grad_norms, lambda: opt.clip_grad_value_(1.0)):
        assert "before those of other buckets are" in raised(call)[1]
    assert "has stepped already" in raised(opt.zero_grad)[1]
    opt.step()
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    assert "is a step: call step() before the next one" in raised(lambda: loss_of(model, batch(2)).backward())[1]
    assert "torch's optimizers" in raised(lambda: shardstep.shard(Net(), NormScaled, lr=0.1, config=config))[1]
    with pytest.raises(ValueError, match="keeps them"):
        ShardConfig(step="backward", gradients="keep")


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_needs_all_gradients_is_refused(workers, ranks):
    workers(ranks).run(is_refused, timeout=40)


def six_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(7, 7) for _ in range(6)])


def both_ways(program: Any) -> list[list[torch.Tensor]]:
    results = []
    for step in ("after", "backward"):
        model = six_layers()
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(step=step, bucket_mb=0.0002))
        program(model, opt)
        results.append([param.detach().clone() for param in model.parameters()])
        opt.close()
    return results


def gives_other_memory() -> None:
    def program(model: nn.Module, opt: Any) -> None:
        for step in range(2):
            for param in model.parameters():
                param.data = param.detach() * 0.5
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()

    assert all(map(torch.equal, *both_ways(program)))


def test_parameters_that_got_other_memory_are_stepped_where_they_are(workers):
    workers(2).run(gives_other_memory)


def never_zeroes() -> None:
    """Nothing is kept from one pass to the next, as if all of it had been dropped."""

    def program(model: nn.Module, opt: Any) -> None:
        for step in range(3):
            loss_of(model, batch(step)).backward()
            opt.step()
            if opt.config.step == "after":
                opt.zero_grad()
            elif step == 1:
                before = [param.detach().clone() for param in model.parameters()]
                opt.report()
                assert all(map(torch.equal, before, model.parameters()))

    assert all(map(torch.equal, *both_ways(program)))


def test_without_zero_grad_no_bucket_accumulates(workers):
    workers(2).run(never_zeroes)


def needs_a_weight_later() -> str:
    """The first layer's gradient goes through the last one's weight, which has stepped by then."""
    model = six_layers()
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(step="backward", bucket_mb=0.0002))
    hidden = nn.functional.linear(model[0](batch(0)), model[5].weight.detach())
    loss = model[1:](hidden).square().mean()
    text = raised(loss.backward)[1]
    assert "load a checkpoint" in raised(opt.step)[1]
    opt.load_state_dict(opt.state_dict())
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    opt.step()
    return text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_weight_that_backward_still_needs_raises(workers, ranks):
    for text in workers(ranks).run(needs_a_weight_later, timeout=40):
        assert "modified by an inplace operation" in text


def lets_go_of_the_old_plan() -> None:
    model = six_layers()
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(step="backward", bucket_mb=0.0002))
    old = weakref.ref(opt._engine.runtime.memory)
    gc.disable()
    try:
        for step in range(2):
            model[2].requires_grad_(step == 0)
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
        assert old() is None
    finally:
        gc.enable()


def test_an_old_plan_is_not_kept(workers):
    workers(2).run(lets_go_of_the_old_plan)


def keeps_as_many_shards_as_predicted(collectives: bool) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
    config = ShardConfig(bucket_mb=16 * 17 * 4 / 1e6, step="backward")
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config)
    most, launch = 0, GradientPass._launch

    def watched(self: GradientPass, *args: Any) -> None:
        nonlocal most
        launch(self, *args)
        most = max(most, sum(shard.nbytes for shard in self.shards if shard is not None))

    with mock.patch.object(GradientPass, "_launch", watched):
        for step in range(3):
            model(torch.full((2, 16), 0.1 * step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    assert (
        most
        == opt._engine.runtime.gradient_nbytes()
        < sum(bucket.own.nbytes for bucket in opt._engine.runtime.memory.buckets) / 3
    )


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_as_many_shards_are_alive_as_is_predicted(workers, ranks, collectives):
    workers(ranks).run(keeps_as_many_shards_as_predicted, collectives, timeout=60)
