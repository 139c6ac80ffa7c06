"""`reduce_to_holders` in place of `allreduce_hook`: gradients go to one rank only, and training is the same."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import gloo_gathers
from shardstep.comm.gloo_gathers import ChainedReduction
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved, reduce_to_holders
from test_overlap_with_ddp import batches, delays, model_for, parity, unused_parameters, wrapped

HOOKS = [hook_with_zero_step, hook_with_zero_step_interleaved]


def trains(make_hook: Callable[..., Any]) -> list[str]:
    """In pieces of 16 bytes, so that even these parameters take several."""
    failures = []
    with mock.patch.object(gloo_gathers, "RING_PIECE_NBYTES", 16):
        for shard, static, view, first in itertools.product([False, True], repeat=4):
            options = {
                "shard_buckets": shard,
                "static_graph": static,
                "gradient_as_bucket_view": view,
                "train_from_first_step": first,
            }
            try:
                parity(AdamW, {"lr": 0.01}, make_hook, reduce=reduce_to_holders, **options)
            except AssertionError as error:
                failures.append(f"{options}: {error}")
    return failures


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_ten_updates_equal_ddp_with_the_plain_optimizer(workers, ranks, make_hook):
    for failures in workers(ranks).run(trains, make_hook, timeout=120):
        assert failures == []


def in_subgroup(make_hook: Callable[..., Any]) -> None:
    group = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        parity(SGD, {"lr": 0.1, "momentum": 0.9}, make_hook, shard_buckets=True, group=group, reduce=reduce_to_holders)


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_subgroup_trains(workers, make_hook):
    workers(4).run(in_subgroup, make_hook)


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_random_delays_never_deadlock(workers, make_hook):
    workers(4).run(delays, make_hook, range(4), 100, reduce_to_holders, timeout=120)


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_parameters_that_no_rank_used_are_not_stepped(workers, make_hook):
    workers(2).run(unused_parameters, make_hook, True, reduce_to_holders)


def one_pass() -> tuple[int, int, bool]:
    """(bytes of gradients sent, bytes of the parameters that others step, whether own gradients are the mean)."""
    model = model_for(SGD)
    ddp = wrapped(model)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(reduce_to_holders, ddp, zero, shard_buckets=True))
    inputs = list(batches(4, rank=dist.get_rank()))
    for batch in inputs[:3]:
        ddp(batch).square().mean().backward()
        zero.zero_grad()
    expected = [torch.zeros_like(param) for param in model.parameters()]
    loss = model(inputs[3]).square().mean()
    for mean, gradient in zip(expected, torch.autograd.grad(loss, list(model.parameters())), strict=True):
        mean.copy_(gradient / dist.get_world_size())
        dist.all_reduce(mean)

    sent = 0
    original = ChainedReduction._isend

    def counted(self: ChainedReduction, piece: torch.Tensor, holder: int) -> None:
        nonlocal sent
        sent += piece.nbytes
        original(self, piece, holder)

    with mock.patch.object(ChainedReduction, "_isend", counted):
        ddp(inputs[3]).square().mean().backward()
    own = set(zero._overlap_info.params_per_rank[zero.rank])
    mine = [(param.grad, mean) for param, mean in zip(model.parameters(), expected, strict=True) if param in own]
    right = all(torch.allclose(gradient, mean, rtol=1e-5, atol=1e-7) for gradient, mean in mine)
    others = sum(param.nbytes for param in model.parameters() if param not in own)
    return sent, others, right


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_sends_each_gradient_that_others_step_once(workers, ranks):
    for sent, others, right in workers(ranks).run(one_pass):
        assert sent == others
        assert right, "the rank that steps a parameter has the mean of its gradient"


def alone() -> str:
    ddp = wrapped(model_for(SGD))
    ddp.register_comm_hook(None, reduce_to_holders)
    with pytest.raises(RuntimeError, match="hook_with_zero_step") as caught:
        ddp(next(iter(batches(1, rank=0)))).sum().backward()
    return str(caught.value)


def test_used_alone_it_says_how_to_use_it(workers):
    assert "in place of allreduce_hook" in workers(1).run(alone)[0]
