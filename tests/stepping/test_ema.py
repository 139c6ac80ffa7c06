"""ShardConfig(ema=...): an average of the weights, in shares."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch
from shardstep import Layout, ShardConfig
from shardstep.stepping.masters import AVERAGE
from training import assert_ranks_equal, raised

DECAY = 0.9


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    param = next(model.parameters())
    return model(batch(step).to(param.device, param.dtype)).float().square().mean()


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def is_the_average(dtype: torch.dtype, config: ShardConfig, collectives: bool) -> None:
    model = Net().to(dtype)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config)
    average = [value.float() for value in values_of(model)]
    for step in range(5):
        model.second.requires_grad_(step != 2)
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
        now = values_of(model)
        trains = [param.requires_grad for param in model.parameters()]
        for one, other, moves in zip(average, now, trains, strict=True):
            if moves or step == 2:  # frozen since: it has a place in this step's plan, and none in the next one's
                one.lerp_(other.float(), 1 - DECAY)
        with opt.ema():
            if dtype is torch.float32:
                shown = [one if moves else other for one, other, moves in zip(average, now, trains, strict=True)]
                assert all(map(torch.equal, shown, model.parameters())), step
            else:
                assert any(not torch.equal(one, other) for one, other in zip(now, model.parameters(), strict=True))
            loss_of(model, step)
            assert "inside ema()" in raised(opt.step)[1]
            assert "inside ema()" in raised(lambda: opt.ema().__enter__())[1]
            assert_ranks_equal(list(model.parameters()))
        assert all(map(torch.equal, now, model.parameters()))
    opt.synchronize()


CONFIGS = {
    "default": ShardConfig(bucket_mb=SMALL_BUCKETS, ema=DECAY),
    "whole": ShardConfig(bucket_mb=SMALL_BUCKETS, ema=DECAY, layout=Layout.WHOLE),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, ema=DECAY, gather="overlap"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_inside_ema_the_model_has_the_average(workers, ranks, dtype, config):
    workers(ranks).run(is_the_average, dtype, config, False)


def test_an_average_with_collectives(workers):
    workers(2).run(is_the_average, torch.float32, CONFIGS["default"], True)


def is_saved() -> tuple[int, int]:
    def trained(net: nn.Module, o: Any, steps: range) -> None:
        for step in steps:
            loss_of(net, step).backward()
            o.step()
            o.zero_grad()

    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=CONFIGS["default"])
    trained(model, opt, range(3))
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    trained(model, opt, range(3, 5))
    other = Net()
    resumed = shardstep.shard(other, optim.AdamW, lr=0.01, config=CONFIGS["default"])
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    trained(other, resumed, range(3, 5))
    with opt.ema(), resumed.ema():
        assert all(map(torch.equal, model.parameters(), other.parameters()))
    assert (
        "pass config=ShardConfig(ema=0.999)"
        in raised(lambda: shardstep.shard(Net(), optim.SGD, lr=0.1).ema().__enter__())[1]
    )
    held = sum(entry[AVERAGE].numel() for entry in copy.copy(resumed.state).values())
    return held, sum(param.numel() for param in model.parameters())


def test_an_average_is_saved_in_shares_and_loaded(workers):
    found = workers(2).run(is_saved)
    assert sum(held for held, _ in found) == found[0][1]


def begins_late() -> None:
    """With weights that are loaded after shard()."""
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.0, config=CONFIGS["default"])
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(2.0)
    loss_of(model, 0).backward()
    opt.step()
    with opt.ema():
        assert all((param == 2.0).all() for param in model.parameters())


def test_an_average_begins_with_the_weights_of_the_first_step(workers):
    workers(2).run(begins_late)
