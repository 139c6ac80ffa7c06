"""On several hosts parameters go round the ring: same numbers, every link used once, nobody stuck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from fast_lane_training import SMALL_BUCKETS, Net, assert_trains_like_ddp
from shardstep import ShardConfig, ZeroRedundancyOptimizer
from shardstep.comm import gloo, gloo_gathers
from shardstep.comm.channel import open_channel
from shardstep.comm.gloo import GlooMessages
from shardstep.comm.gloo_gathers import DirectGather
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from test_conformance import twenty_steps
from test_overlap_with_ddp import delays, parity
from training import assert_ranks_equal, assert_same, make_params, set_gradients, twins


def on_hosts(body: Callable[..., None], *arguments: Any, **options: Any) -> int:
    """Run `body` as if every rank had a host of its own, in pieces of 16 bytes; how many were passed on here."""
    count = 0
    original = DirectGather.pass_on

    def counted(self: DirectGather, distance: int) -> None:
        nonlocal count
        count += len(self._carried.get((dist.get_rank() - distance) % dist.get_world_size(), ()))
        original(self, distance)

    with (
        mock.patch.object(gloo, "this_host", return_value=bytes([dist.get_rank()]) * 16),
        mock.patch.object(gloo_gathers, "RING_NBYTES", 8),
        mock.patch.object(gloo_gathers, "RING_PIECE_NBYTES", 16),
        mock.patch.object(DirectGather, "pass_on", counted),
    ):
        body(*arguments, **options)
    return count


def drop_in(bucket_view: bool) -> int:
    return on_hosts(twenty_steps, optim.AdamW, {}, bucket_view)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_drop_in_trains_like_the_plain_optimizer(workers, ranks, bucket_view):
    assert all(workers(ranks).run(drop_in, bucket_view))


def fast_lane(config: ShardConfig) -> int:
    return on_hosts(assert_trains_like_ddp, Net, config=config)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("ranks", [3, 4])
def test_the_fast_lane_trains_like_ddp(workers, ranks, gradients):
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    assert all(workers(ranks).run(fast_lane, config))


def overlapping_gather() -> int:
    return on_hosts(assert_trains_like_ddp, Net, config=ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"))


def test_gathers_that_each_rank_finishes_when_it_likes_pass_nothing_on(workers):
    assert workers(4).run(overlapping_gather) == [0, 0, 0, 0]


def in_backward(make_hook: Callable[..., Any]) -> int:
    return on_hosts(parity, optim.AdamW, {"lr": 0.01}, make_hook, shard_buckets=True)


@pytest.mark.parametrize("make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_the_step_inside_backward_trains_like_ddp(workers, make_hook):
    assert all(workers(4).run(in_backward, make_hook))


def with_delays(make_hook: Callable[..., Any]) -> int:
    return on_hosts(delays, make_hook, range(2), 50)


@pytest.mark.parametrize("make_hook", [hook_with_zero_step, hook_with_zero_step_interleaved])
def test_random_delays_never_deadlock(workers, make_hook):
    assert all(workers(4).run(with_delays, make_hook, timeout=120))


def overloaded_on_one_host() -> tuple[bool, int]:
    """One parameter is most of the model: its holder alone would send more than all parameters once."""
    ours = make_params(((1000, 900), (3, 5), (4,), (2, 2)))
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, optim.SGD, lr=0.1)
    plain = optim.SGD(theirs, lr=0.1)
    set_gradients(0, ours, theirs)
    sent = 0
    original = DirectGather._isend

    def counted(self: DirectGather, values: torch.Tensor, to: int, holder: int) -> None:
        nonlocal sent
        sent += values.nbytes
        original(self, values, to, holder)

    with mock.patch.object(DirectGather, "_isend", counted):
        zero.step()
    plain.step()
    assert_same(ours, theirs)
    assert_ranks_equal(ours)
    return GlooMessages(zero._channel)._one_host, sent


def test_nobody_sends_more_than_all_parameters_once(workers):
    for one_host, sent in workers(4).run(overloaded_on_one_host):
        assert one_host
        assert sent <= 1.001 * 1000 * 900 * 4


def hosts_seen() -> tuple[bool, bool]:
    same = GlooMessages(open_channel(None, None))._one_host
    with mock.patch.object(gloo, "this_host", return_value=bytes([dist.get_rank() // 2]) * 16):
        return same, GlooMessages(open_channel(None, None))._one_host


def test_ranks_know_whether_they_share_a_host(workers):
    assert workers(4).run(hosts_seen) == [(True, False)] * 4


def bucket_counts() -> tuple[int, int]:
    """Of 20 MB, on one host and on several."""
    together = shardstep.shard(nn.Linear(2000, 2500, bias=False), optim.SGD, lr=0.1)
    with mock.patch.object(gloo, "this_host", return_value=bytes([dist.get_rank()]) * 16):
        apart = shardstep.shard(nn.Linear(2000, 2500, bias=False), optim.SGD, lr=0.1)
    return len(together._engine.runtime.plan.buckets), len(apart._engine.runtime.plan.buckets)


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_are_smaller_between_hosts(workers, ranks):
    assert workers(ranks).run(bucket_counts) == [(1, 3)] * ranks
