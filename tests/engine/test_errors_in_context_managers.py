"""Errors that pass through our context managers: they are raised at once, and what follows is as if none had come."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join

import shardstep
from as_collectives import by_collectives
from fast_lane_training import batch
from shardstep import ShardConfig
from test_overlapped_gather import TINY_BUCKETS, small_net
from training import assert_ranks_equal

CONFIGS = {
    "wait": ShardConfig(bucket_mb=TINY_BUCKETS, ema=0.9),
    "overlap": ShardConfig(bucket_mb=TINY_BUCKETS, ema=0.9, gather="overlap"),
}


class SomeError(Exception):
    pass


def sharded(config: ShardConfig, collectives: bool) -> tuple[nn.Module, Any]:
    model = small_net()
    with by_collectives() if collectives else nullcontext():
        return model, shardstep.shard(model, optim.SGD, lr=0.5, config=config)


def iterate(model: nn.Module, opt: Any, step: int) -> None:
    model(batch(step)).square().mean().backward()
    opt.step()
    opt.zero_grad()


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def fails_inside_ema(config: ShardConfig, collectives: bool, who: list[int], then: str) -> None:
    """`who` raise inside the block. Rank 1, if it does not, leaves only when rank 0 has its error."""
    model, opt = sharded(config, collectives)
    plain, other = sharded(config, collectives)
    store: Any = dist.distributed_c10d._get_default_store()
    for step in range(4):
        iterate(model, opt, step)
        iterate(plain, other, step)
        key = f"left {config.gather} {collectives} {who} {then} {step}"
        began = time.monotonic()
        with suppress(SomeError), opt.ema():
            if dist.get_rank() in who:
                raise SomeError
            store.wait([key], timedelta(seconds=20))
        if dist.get_rank() in who:
            assert time.monotonic() - began < 5, "at once"
        store.set(key, "rank 0 has its error")
        with other.ema():
            pass
        if then == "reads":
            assert all(map(torch.equal, values(model), values(plain)))
        elif then == "saves":
            assert opt.consolidate_state_dict(to=0) is None
        elif then == "talks":  # of its own, before it comes back to the model
            dist.barrier()
        elif then == "averages":
            with opt.ema(), other.ema():
                assert all(map(torch.equal, values(model), values(plain)))
    opt.synchronize()
    other.synchronize()
    assert all(map(torch.equal, values(model), values(plain)))
    assert_ranks_equal(list(model.parameters()))
    assert type(next(model.parameters())) is type(next(plain.parameters()))
    opt.close()
    other.close()


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("gather", CONFIGS)
@pytest.mark.parametrize("who", [[0], [0, 1]])
def test_an_error_inside_ema_is_raised_at_once(workers, who, gather, collectives):
    for then in ("trains", "reads", "saves", "talks", "averages"):
        workers(2).run(fails_inside_ema, CONFIGS[gather], collectives, who, then, timeout=60)


def test_an_error_inside_ema_of_one_rank(workers):
    workers(1).run(fails_inside_ema, CONFIGS["wait"], False, [0], "reads", timeout=60)


def fails_inside_join() -> None:
    """After it the optimizer is outside of Join, as its program is."""
    model, opt = sharded(CONFIGS["wait"], False)
    iterate(model, opt, 0)
    with suppress(SomeError), Join([opt]):
        iterate(model, opt, 1)
        raise SomeError
    opt.load_state_dict(opt.state_dict())
    began = time.monotonic()
    for step in range(2, 4):
        iterate(model, opt, step)
    opt.report()
    assert opt._engine.call_order.notify is None
    assert time.monotonic() - began < 5
    with Join([opt]):  # and again
        for step in range(4, 5 + dist.get_rank()):
            iterate(model, opt, step)
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))


def test_an_error_inside_join_ends_it(workers):
    workers(2).run(fails_inside_join, timeout=60)


def is_dropped_after_an_error(config: ShardConfig) -> float:
    """As when a program ends by an error: nobody waits for ranks that have other things to do."""
    model, opt = sharded(config, False)
    iterate(model, opt, 0)
    if dist.get_rank() == 0:
        with suppress(SomeError), opt.ema():
            raise SomeError
        began = time.monotonic()
        del opt
        return time.monotonic() - began
    with opt.ema():
        pass
    return 0.0


@pytest.mark.parametrize("gather", CONFIGS)
def test_an_optimizer_that_is_dropped_after_an_error_inside_ema_waits_for_nobody(workers, gather):
    assert max(workers(2).run(is_dropped_after_an_error, CONFIGS[gather], timeout=60)) < 5
