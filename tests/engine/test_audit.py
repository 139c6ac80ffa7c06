"""ShardConfig(audit=K): ranks that no longer hold the same find out, and say where."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import batch, loss_of
from shardstep import ShardConfig
from shardstep.state.audit import checksum
from training import raised


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.BatchNorm1d(9), nn.Linear(9, 5))


def one_bit(model: nn.Module, opt: Any) -> None:
    with torch.no_grad():
        model[2].weight.view(torch.int32)[3, 4] ^= 1


def buffer(model: nn.Module, opt: Any) -> None:
    """Written after it followed rank 0."""
    opt._engine._sync_buffers = lambda buffers: model[1].running_mean.add_(dist.get_rank())


CHANGES = {"2.weight": one_bit, "1.running_mean": buffer}


def goes_its_own_way(change: str, gather: Any, collectives: bool) -> list[str]:
    """On the last rank, before the third step, at which is the audit."""
    model = net()
    config = ShardConfig(audit=3, gather=gather)
    if collectives:
        with by_collectives():
            opt = shardstep.shard(model, optim.SGD, lr=0.0, config=config)
    else:
        opt = shardstep.shard(model, optim.SGD, lr=0.0, config=config)
    told = []
    for step in range(3):
        loss_of(model, batch(step)).backward()
        if step == 2 and (change == "1.running_mean" or dist.get_rank() == dist.get_world_size() - 1):
            CHANGES[change](model, opt)
        told.append(raised(opt.step)[1] if step == 2 else str(opt.step()))
        opt.zero_grad()
    return told


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_a_bit_that_flips_on_one_rank_is_found(workers, gather, collectives):
    for told in workers(3).run(goes_its_own_way, "2.weight", gather, collectives, timeout=40):
        assert told[:2] == ["None", "None"]
        assert "First in: 2.weight; ranks that differ from the others: [2]" in told[2]


def test_a_buffer_that_differs_is_named(workers):
    for told in workers(3).run(goes_its_own_way, "1.running_mean", "wait", False, timeout=40):
        assert "First in: 1.running_mean" in told[2]


def agrees() -> float:
    model = net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=ShardConfig(audit=1))
    for step in range(4):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    start = time.perf_counter()
    opt._engine._audit.check(opt._engine._replicated(opt.param_groups), [])
    return time.perf_counter() - start


def test_ranks_that_agree_go_on(workers):
    workers(2).run(agrees)


def test_every_bit_and_its_place_count():
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.uint8, torch.bool):
        values = (torch.arange(1000) % 7).to(dtype)
        other = values.clone()
        assert checksum(values) == checksum(other)
        other[[0, 1]] = other[[1, 0]]
        assert checksum(values) != checksum(other), dtype
    assert checksum(torch.empty(0)) == 0
    assert checksum(torch.tensor(1.0)) != checksum(torch.tensor(2.0))


def test_an_audit_is_every_so_many_steps():
    for bad in (0, -1, 2.5):
        with pytest.raises(ValueError, match="audit must be a number of steps"):
            ShardConfig(audit=bad)  # type: ignore[arg-type]
