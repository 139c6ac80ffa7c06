"""A program may set torch's default device and dtype: what shardstep makes for itself does not follow them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, batch, loss_of
from shardstep import Layout, ShardConfig, ZeroRedundancyOptimizer
from training import assert_ranks_equal


@contextmanager
def elsewhere() -> Iterator[None]:
    """What is made without saying where or of what kind cannot be computed with."""
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


def net() -> nn.Module:
    torch.manual_seed(0)
    kind: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    return nn.Sequential(nn.Linear(7, 9, **kind), nn.BatchNorm1d(9, **kind), nn.Linear(9, 5, **kind))


def trains(config: ShardConfig, collectives: bool) -> None:
    results = []
    for defaults in (nullcontext(), elsewhere()):
        with defaults, by_collectives() if collectives else nullcontext():
            model = net()
            opt = shardstep.shard(model, optim.SGD, lr=0.1, momentum=0.9, config=config)
            for step in range(4):
                model[0].requires_grad_(step != 2)
                loss_of(model, batch(step)).backward()
                opt.clip_grad_norm_(0.5)
                opt.grad_norms()
                opt.step()
                opt.zero_grad()
            opt.load_state_dict(opt.state_dict())
            opt.synchronize()
        results.append([param.detach().clone() for param in model.parameters()])
        opt.close()
    assert all(map(torch.equal, *results))
    assert_ranks_equal(results[1])


CONFIGS = {
    "default": ShardConfig(bucket_mb=SMALL_BUCKETS, audit=2),
    "whole, overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
}


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_fast_lane_trains_whatever_the_default_device_and_dtype_are(workers, config, collectives):
    workers(2).run(trains, config, collectives)


def trains_by_the_drop_in(views: bool) -> None:
    results = []
    for defaults in (nullcontext(), elsewhere()):
        with defaults:
            model = net()
            opt = ZeroRedundancyOptimizer(
                model.parameters(), optim.SGD, parameters_as_bucket_view=views, lr=0.1, momentum=0.9
            )
            for step in range(3):
                loss_of(model, batch(step)).backward()
                for param in model.parameters():
                    dist.all_reduce(param.grad)
                opt.step()
                opt.zero_grad()
            opt.consolidate_state_dict(to=1)
            if dist.get_rank() == 1:
                opt.state_dict()
        results.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("views", [False, True])
def test_the_drop_in_trains_whatever_the_default_device_and_dtype_are(workers, views):
    workers(2).run(trains_by_the_drop_in, views)
