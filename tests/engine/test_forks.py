"""Processes forked from one that trains (DataLoader workers, multiprocessing): they have no ranks to talk to."""

from __future__ import annotations

import os
import pickle
import select
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from as_collectives import by_collectives
from fast_lane_training import batch
from shardstep import ShardConfig, ZeroRedundancyOptimizer
from test_overlapped_gather import TINY_BUCKETS, sends_late, small_net
from training import assert_ranks_equal, raised

SECONDS = 20  # for a child that must not wait for anybody


def in_child(action: Callable[[], Any]) -> Any:
    """What `action` returns in a forked process; that ends as a child of multiprocessing does."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = action()
        except BaseException:
            answer = AssertionError(traceback.format_exc())
        os.write(writing, pickle.dumps(answer))
        os._exit(0)
    ready, _, _ = select.select([reading], [], [], SECONDS)
    if not ready:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert ready, "the child waits for ever"
    answer = pickle.loads(os.read(reading, 1 << 16))
    os.close(reading)
    os.close(writing)
    if isinstance(answer, AssertionError):
        raise answer
    return answer


def sums(model: nn.Module) -> list[float]:
    return [float(param.detach().double().sum()) for param in model.parameters()]


def uses_model(model: nn.Module, opt: Any) -> tuple[list[float], list[str]]:
    """What a program may do with a model in a child, and what the optimizer says of itself there."""
    began = time.monotonic()
    with torch.no_grad():
        model(torch.ones(2, 7))
    model(torch.ones(2, 7)).sum().backward()  # a gradient of this process alone
    gradients = [param.grad for param in model.parameters()]
    assert all(gradient is not None and bool(gradient.isfinite().all()) for gradient in gradients)
    model.zero_grad()
    calls: list[Callable[[], Any]] = [opt.step]
    if not isinstance(opt, ZeroRedundancyOptimizer):
        calls += [opt.zero_grad, opt.synchronize, opt.state_dict, opt.report, lambda: opt.clip_grad_norm_(1.0)]
        calls += [lambda: shardstep.save("nowhere", model, opt), opt.ema().__enter__]
    texts = [raised(call)[1] for call in calls]
    assert time.monotonic() - began < 5, "at once"
    return sums(model), texts


def forks(config: ShardConfig, collectives: bool) -> list[list[str]]:
    model = small_net()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.SGD, lr=0.5, config=config)
    if config.gather == "overlap" and not collectives:
        sends_late(opt)
    found = []
    for step in range(4):
        model(batch(step)).square().mean().backward()
        if step == 1:  # between a pass and its step
            found.append(in_child(lambda: uses_model(model, opt)))
        opt.step()
        if step == 2:  # weights are in flight
            child = in_child(lambda: uses_model(model, opt))
            assert child[0] == sums(model)
            found.append(child)
        opt.zero_grad()
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))
    opt.close()
    return [texts for _, texts in found]


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_a_forked_child_has_finished_weights_and_waits_for_nobody(workers, gather, ranks, collectives):
    config = ShardConfig(bucket_mb=TINY_BUCKETS, gather=gather)
    for found in workers(ranks).run(forks, config, collectives, timeout=90):
        assert all("was forked" in text for texts in found for text in texts), found


def forks_the_drop_in(collectives: bool) -> list[str]:
    model = DistributedDataParallel(small_net())
    with by_collectives() if collectives else nullcontext():
        zero = ZeroRedundancyOptimizer(model.parameters(), optim.SGD, lr=0.5)
    found = []
    for step in range(3):
        model(batch(step)).square().mean().backward()
        found.append(in_child(lambda: raised(zero.step)[1]))
        zero.step()
        zero.zero_grad()
    assert_ranks_equal(list(model.parameters()))
    return found


@pytest.mark.parametrize("collectives", [False, True])
def test_a_step_of_the_drop_in_in_a_forked_child_raises_at_once(workers, collectives):
    for found in workers(2).run(forks_the_drop_in, collectives, timeout=90):
        assert all("was forked" in text for text in found), found


def trains_in_a_child() -> None:
    """A child may make a process group of its own, and train with it."""
    opt = shardstep.shard(small_net(), optim.SGD, lr=0.5)
    opt.close()

    def train() -> bool:
        group = dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)
        model = small_net()
        own = shardstep.shard(model, optim.SGD, lr=0.5, process_group=group)
        model(torch.ones(2, 7)).sum().backward()
        own.step()
        own.close()
        return True

    assert in_child(train)


def test_a_forked_child_trains_by_itself(workers):
    workers(1).run(trains_in_a_child, timeout=60)
