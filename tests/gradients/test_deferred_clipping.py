"""Where the step multiplies by itself, clipping leaves it to the step: nobody may see a gradient that was not clipped.

On the CPU no step does. So it is made to here, and every program must end with the bits of one whose shards were
multiplied at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch
from shardstep import ShardConfig
from shardstep.stepping.local_step import LocalStep
from training import assert_ranks_equal

Opt = shardstep.ShardedOptimizer
LOW = 0.01  # far below the gradients' norm


@contextmanager
def by_the_step() -> Iterator[list[bool]]:
    """Inside, a step multiplies by the factor that it is given; yields whether each was given one."""
    step, given = LocalStep.step, []

    def multiplying(self: LocalStep, group: int, of: Any, scaling: Any = None, factor: Any = None) -> None:
        given.append(factor is not None)

        def multiplied(bucket: int, run: Any) -> Any:
            gradient = of(bucket, run)
            return gradient if gradient is None or factor is None else gradient * factor.to(gradient.dtype)

        step(self, group, multiplied, scaling)

    with mock.patch.object(LocalStep, "step", multiplying), mock.patch.object(LocalStep, "takes_factor", True):
        yield given


def backward(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def clips(model: nn.Module, opt: Opt) -> Any:
    norm = opt.clip_grad_norm_(LOW)
    opt.step()
    return norm.item()


def clips_twice(model: nn.Module, opt: Opt) -> Any:
    norms = [opt.clip_grad_norm_(low).item() for low in (LOW, LOW / 2)]
    opt.step()
    return norms


def looks_at_norms(model: nn.Module, opt: Opt) -> Any:
    opt.clip_grad_norm_(LOW)
    norms = opt.grad_norms()
    opt.step()
    return norms


def clamps(model: nn.Module, opt: Opt) -> Any:
    opt.clip_grad_norm_(LOW)
    opt.clip_grad_value_(LOW / 20)
    opt.step()


def adds_to_it(model: nn.Module, opt: Opt) -> Any:
    opt.clip_grad_norm_(LOW)
    backward(model, 7)
    opt.step()


def steps_twice(model: nn.Module, opt: Opt) -> Any:
    opt.clip_grad_norm_(LOW)
    opt.step()
    opt.step()


def freezes(model: nn.Module, opt: Opt) -> Any:
    opt.clip_grad_norm_(LOW)
    first = next(model.parameters())
    first.requires_grad_(not first.requires_grad)
    opt.step()


def drops(to_none: bool) -> Callable[[nn.Module, Opt], Any]:
    def drops_it(model: nn.Module, opt: Opt) -> Any:
        opt.clip_grad_norm_(LOW)
        opt.zero_grad(set_to_none=to_none)
        backward(model, 8)
        opt.step()

    return drops_it


def recovers(model: nn.Module, opt: Opt) -> Any:
    """The norm is not a number, and what it was divided by must not outlive the gradients."""
    (model(batch(9)).sum() * float("nan")).backward()
    opt.clip_grad_norm_(LOW)
    opt.zero_grad(set_to_none=False)
    backward(model, 8)
    opt.step()
    assert all(param.isfinite().all() for param in model.parameters())


PROGRAMS: dict[str, Callable[[nn.Module, Opt], Any]] = {
    "clips": clips,
    "clips twice": clips_twice,
    "looks at norms": looks_at_norms,
    "clamps": clamps,
    "adds to it": adds_to_it,
    "steps twice": steps_twice,
    "freezes": freezes,
    "drops": drops(True),
    "makes zero": drops(False),
    "recovers": recovers,
}
LEFT_TO_THE_STEP = ("clips", "clips twice", "steps twice", "freezes")


def ends_alike(name: str, collectives: bool) -> None:
    ended = []
    for make in (nullcontext, by_the_step):
        torch.manual_seed(3)
        model = Net()
        with by_collectives() if collectives else nullcontext():
            opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(bucket_mb=SMALL_BUCKETS))
        with make() as given:
            said = []
            for step in range(4):
                backward(model, step)
                said.append(PROGRAMS[name](model, opt))
                opt.zero_grad()
        assert_ranks_equal(list(model.parameters()))
        ended.append((said, [param.detach().clone() for param in model.parameters()]))
        opt.close()
    assert any(given) == (name in LEFT_TO_THE_STEP)
    assert ended[0][0] == ended[1][0]
    assert all(map(torch.equal, ended[0][1], ended[1][1]))


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_that_the_step_clips_is_clipped_for_everyone(workers, name, ranks, collectives):
    workers(ranks).run(ends_alike, name, collectives, timeout=60)
