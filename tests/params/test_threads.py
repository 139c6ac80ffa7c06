"""Threads beside the one that trains: they may call the model and read its weights, as under DDP."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import Breaks, batch
from shardstep import ShardConfig
from test_overlapped_gather import TINY_BUCKETS, sends_late, small_net
from training import raised

CONFIGS = {
    "shard": ShardConfig(bucket_mb=TINY_BUCKETS),
    "keep": ShardConfig(bucket_mb=TINY_BUCKETS, gradients="keep"),
    "overlap": ShardConfig(bucket_mb=TINY_BUCKETS, gather="overlap"),
}


class Other:
    """A thread that does something again and again, as long as the block runs; what it raises, the block raises."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action, self.count = action, 0
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._action()
                self.count += 1
        except BaseException as error:
            self._failure = error

    def __enter__(self) -> Other:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(20)
        assert not self._thread.is_alive(), "the other thread waits for ever"
        if self._failure is not None:
            raise self._failure


class Slow(torch.autograd.Function):
    """A backward pass in which other threads get their turn, again and again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(0.004)
        return gradient


class SlowNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = small_net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = Slow.apply(layer(x))
        return x


def trains(config: ShardConfig, collectives: bool, beside: Callable[[nn.Module], Any] | None) -> list[torch.Tensor]:
    model = SlowNet()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.SGD, lr=0.5, config=config)
    if config.gather == "overlap" and not collectives:
        sends_late(opt)
    other = Other(lambda: beside(model)) if beside is not None else None
    with other or nullcontext():
        for step in range(6):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
    assert other is None or other.count > 5
    opt.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return str(error)
    return ""


def evaluates(model: nn.Module) -> None:
    """Without gradients and with them: nothing of it is ever followed by a backward pass."""
    time.sleep(0.001)
    with torch.no_grad():
        model(torch.ones(2, 7))
    model(torch.ones(2, 7))


def reads(model: nn.Module) -> None:
    assert all(bool(param.detach().isfinite().all()) for param in model.parameters())
    time.sleep(0.001)


def trains_beside(config: ShardConfig, collectives: bool, beside: Callable[[nn.Module], Any]) -> None:
    alone = trains(config, collectives, None)
    assert all(map(torch.equal, alone, trains(config, collectives, beside)))


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_an_evaluation_in_another_thread_breaks_no_backward_pass(workers, name, ranks, collectives):
    workers(ranks).run(trains_beside, CONFIGS[name], collectives, evaluates, timeout=60)


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thread_that_reads_weights_in_flight_breaks_no_step(workers, ranks, collectives):
    workers(ranks).run(trains_beside, CONFIGS["overlap"], collectives, reads, timeout=60)


# -- passes that fail --------------------------------------------------------------------------------------------------


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(7, 9), nn.Linear(9, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Breaks.apply(self.first(x)))


def fails_beside_an_evaluation(collectives: bool) -> list[str]:
    """Rank 0's pass raises: it is ended by the thread that trains, and by no other, and all ranks hear of it."""
    model = Fragile()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.SGD, lr=0.5, config=CONFIGS["shard"])
    ends, end = [], opt._engine.runtime.gradients.current.end

    def noted(**options: Any) -> None:
        ends.append(threading.current_thread() is threading.main_thread())
        end(**options)

    opt._engine.runtime.gradients.current.end = noted
    found = []
    with Other(lambda: evaluates(model)):
        for step in range(4):
            loss = model(batch(step)).square().mean()
            Breaks.armed = dist.get_rank() == 0 and step % 2 == 0
            with suppress(ArithmeticError):
                loss.backward()
            Breaks.armed = False
            time.sleep(0.02)  # the other thread calls the model meanwhile
            found.append(error_of(opt.step))
            opt.zero_grad()
    assert all(ends)
    return found


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_failed_pass_is_ended_by_the_thread_that_trains(workers, ranks, collectives):
    for found in workers(ranks).run(fails_beside_an_evaluation, collectives, timeout=60):
        assert ["the backward pass failed on ranks [0]" in text for text in found] == [True, False, True, False]


def steps_while_another_thread_is_in_backward() -> str:
    model, reached, over = small_net(), threading.Event(), threading.Event()
    opt = shardstep.shard(model, optim.SGD, lr=0.5, config=CONFIGS["shard"])

    def hold(gradient: torch.Tensor) -> None:
        reached.set()
        over.wait(20)

    output = model(batch(0))
    output.register_hook(hold)
    thread = threading.Thread(target=output.sum().backward)
    thread.start()
    assert reached.wait(20)
    with mock.patch("shardstep.gradients.hooks.PATIENCE", 0.05):
        text = raised(opt.step)[1]
    over.set()
    thread.join()
    opt.step()  # now it is over
    opt.zero_grad()
    return text


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_during_the_backward_pass_of_another_thread_raises(workers, ranks):
    for text in workers(ranks).run(steps_while_another_thread_is_in_backward, timeout=60):
        assert "still runs" in text
