"""`no_sync` with a new plan that is made inside its block, and exceptions that pass through it."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Breaks, batch, loss_of
from shardstep import ShardConfig
from training import assert_ranks_equal, raised

WAYS = pytest.mark.parametrize(
    ("ranks", "collectives"), [(1, False), (2, False), (2, True)], ids=["alone", "messages", "collectives"]
)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Breaks.apply(torch.tanh(self.first(x))))


def sharded(collectives: bool) -> tuple[nn.Module, Any]:
    model = Stack()
    with by_collectives() if collectives else nullcontext():
        return model, shardstep.shard(model, optim.AdamW, lr=0.1, config=ShardConfig(bucket_mb=SMALL_BUCKETS))


def accumulates(net: nn.Module, opt: Any, change: str) -> list[torch.Tensor]:
    """A pass inside no_sync, behind a new plan that was made there, and one outside: both count."""
    with opt.no_sync():
        if change == "a group":
            opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        elif change == "frozen":
            net.second.bias.requires_grad_(False)
            opt.step()  # there is no gradient
        loss_of(net, batch(1)).backward()
        assert net.first.weight.grad is not None, "reduced inside no_sync()"
        with opt.no_sync():
            loss_of(net, batch(2)).backward()
        loss_of(net, batch(3)).backward()
    loss_of(net, batch(4)).backward()
    opt.step()
    opt.zero_grad()
    loss_of(net, batch(5)).backward()  # outside again: it is reduced
    opt.step()
    opt.synchronize()
    assert_ranks_equal(list(net.parameters()))
    return [param.detach().clone() for param in net.first.parameters()]


def plans_inside(collectives: bool, change: str) -> None:
    net, opt = sharded(collectives)
    found = accumulates(net, opt, change)
    other, before = sharded(collectives)
    if change == "a group":
        before.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    else:
        other.second.bias.requires_grad_(False)
        before.step()
    assert all(map(torch.equal, found, accumulates(other, before, "")))


@WAYS
@pytest.mark.parametrize("change", ["a group", "frozen"])
def test_a_new_plan_inside_no_sync_reduced_the_passes_behind_it(workers, ranks, collectives, change):
    workers(ranks).run(plans_inside, collectives, change, timeout=60)


def adds_between_local_passes(collectives: bool) -> tuple[str, str]:
    """A group behind a pass inside no_sync, which is refused; then all go on, and add it where it may be added."""
    found = []
    for refuses in (True, False):
        net, opt = sharded(collectives)
        added = nn.Parameter(torch.ones(3))
        loss_of(net, batch(0)).backward()
        opt.step()
        opt.zero_grad()
        with opt.no_sync():
            loss_of(net, batch(1)).backward()
            if refuses:
                before = net.first.weight.grad.clone()
                refusal = raised(partial(opt.add_param_group, {"params": [added]}))
                assert torch.equal(net.first.weight.grad, before)
                assert len(opt.param_groups) == 1
            loss_of(net, batch(2)).backward()
        loss_of(net, batch(3)).backward()
        opt.step()
        opt.zero_grad()
        opt.add_param_group({"params": [added]})  # it is nobody's after the refusal
        loss_of(net, batch(4)).backward()
        opt.step()
        opt.synchronize()
        assert_ranks_equal(list(net.parameters()))
        found.append([param.detach().clone() for param in net.parameters()])
    assert all(map(torch.equal, *found)), "the refusal has changed something"
    return refusal


@WAYS
def test_a_group_added_between_local_passes_said_that_the_backward_pass_failed(workers, ranks, collectives):
    for kind, text in workers(ranks).run(adds_between_local_passes, collectives, timeout=60):
        assert kind == "RuntimeError"
        assert "add_param_group() between passes inside no_sync(): call it before them" in text, text


def calls_after_a_pass_that_raised(collectives: bool, call: str) -> tuple[str, str]:
    """With one bucket: what came of its gradients is still in `param.grad`, as it is between passes in no_sync."""
    net = Stack()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(net, optim.AdamW, lr=0.1)
    Breaks.armed = dist.get_rank() == 0
    with suppress(ArithmeticError):
        loss_of(net, batch(1)).backward()
    Breaks.armed = False
    return raised(opt.report if call == "report" else lambda: opt.add_param_group({"params": [torch.ones(3)]}))


@WAYS
@pytest.mark.parametrize("call", ["report", "add_param_group"])
def test_after_a_pass_that_raised_a_rank_alone_said_no_sync(workers, ranks, collectives, call):
    for kind, text in workers(ranks).run(calls_after_a_pass_that_raised, collectives, call, timeout=30):
        assert kind == "RuntimeError"
        assert "the backward pass failed on ranks [0]" in text, text


def raises_inside(collectives: bool) -> None:
    """On one rank a pass raises, or the program does, inside; who catches it goes on with the next batch."""
    net, opt = sharded(collectives)
    for everywhere in (True, False):
        try:
            with opt.no_sync(), opt.no_sync():
                loss_of(net, batch(1)).backward()
                Breaks.armed = everywhere or dist.get_rank() == 0
                loss_of(net, batch(2)).backward()
        except ArithmeticError:
            pass
        Breaks.armed = False
        opt.zero_grad()
        loss_of(net, batch(3)).backward()
        assert opt.holds_gradient_of(net.first.weight), "not reduced outside no_sync()"
        opt.step()
        opt.synchronize()
        assert_ranks_equal(list(net.parameters()))
        opt.zero_grad()


@WAYS
def test_an_exception_through_no_sync_leaves_no_trace(workers, ranks, collectives):
    workers(ranks).run(raises_inside, collectives, timeout=60)
