"""The transport of NCCL, on Gloo's collectives: the same promises, few calls, small combined records."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives, open_for_collectives
from fast_lane_training import (
    SMALL_BUCKETS,
    Breaks,
    Matrices,
    Net,
    Normed,
    assert_trains_like_ddp,
    batch,
    loss_of,
)
from shardstep import Layout, ShardConfig, ZeroRedundancyOptimizer
from shardstep.comm import host_groups
from shardstep.comm.control import open_poll
from shardstep.comm.host_groups import hosts_of
from shardstep.comm.nccl import Collectives
from test_call_order import goes_apart, steps
from training import assert_ranks_equal, raised

CONFIGS = {
    "flat": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "whole": ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE),
    "one bucket": ShardConfig(),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
    "ordered": ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True),
    "ordered, whole": ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True, layout=Layout.WHOLE),
}


class Halves(Net):
    """Which half is used depends on the rank; one parameter is used by none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) if dist.get_rank() % 2 else x.new_ones(4, 13)
        return self.second(hidden)


def trains(config: ShardConfig) -> None:
    with by_collectives():
        opt = assert_trains_like_ddp(Net, config=config)
        assert isinstance(opt._engine.context.transport, Collectives)
        assert_trains_like_ddp(Net, optim.SGD, {"momentum": 0.9}, config, accumulate=3)
        assert_trains_like_ddp(Normed, config=config)
        assert_trains_like_ddp(Halves, config=config, find_unused=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_like_ddp(workers, ranks, config):
    workers(ranks).run(trains, config)


def trains_matrices() -> None:
    with by_collectives():
        assert_trains_like_ddp(Matrices, optim.Muon, {"lr": 0.02}, ShardConfig())


def test_whole_matrices(workers):
    workers(3).run(trains_matrices)


def drop_in_trains(as_views: bool) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    with by_collectives():
        zero = ZeroRedundancyOptimizer(
            model.parameters(), optim.AdamW, lr=0.05, parameters_as_bucket_view=as_views
        )  # fmt: skip
    plain = optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(4):
        for net, optimizer in ((model, zero), (twin, plain)):
            net(batch(step)).square().mean().backward()
            for param in net.parameters():
                if param.grad is not None:
                    dist.all_reduce(param.grad)
            optimizer.step()
            optimizer.zero_grad()
    assert all(map(torch.equal, model.parameters(), twin.parameters()))


@pytest.mark.parametrize("as_views", [False, True], ids=["apart", "views"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_the_drop_in_gives_everyone_what_each_has_stepped(workers, ranks, as_views):
    workers(ranks).run(drop_in_trains, as_views, timeout=60)


def replans() -> None:
    """Freeze and unfreeze, with gradients that come for what was frozen: state moves between ranks."""
    with by_collectives():
        model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
        opt = shardstep.shard(model, optim.AdamW, config=ShardConfig(bucket_mb=SMALL_BUCKETS), lr=0.05)
    other = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5))
    other.load_state_dict(model.state_dict())
    plain = shardstep.shard(other, optim.AdamW, config=ShardConfig(bucket_mb=SMALL_BUCKETS), lr=0.05)  # by messages
    for step in range(6):
        for net, optimizer in ((model, opt), (other, plain)):
            net[0].requires_grad_(step not in (2, 3))
            loss_of(net, batch(step)).backward()
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
    assert_ranks_equal(list(model.parameters()))


def test_new_plans(workers):
    workers(2).run(replans)


def apart(odd: str, config: str, make: Callable[[], nn.Module]) -> None:
    with by_collectives():
        goes_apart(odd, config, make)


@pytest.mark.parametrize("config", ["wait", "overlap", "keep"])
@pytest.mark.parametrize("odd", ["no step", "no two steps", "one pass more", "clip", "norms"])
def test_ranks_that_go_apart_all_raise(workers, odd, config):
    if (odd, config) != ("clip", "keep"):  # there it is this rank's own affair
        workers(3).run(apart, odd, config, Net, timeout=30)


def at_different_optimizers() -> str:
    """Rank 0 steps one optimizer, the others another: their records would be mixed up."""
    models = [Net(), Net()]
    with by_collectives():
        opts = [shardstep.shard(model, optim.SGD, lr=0.1) for model in models]
    for model, opt in zip(models, opts, strict=True):
        steps(model, opt)
        opt.zero_grad()
    before = [[param.detach().clone() for param in model.parameters()] for model in models]
    for model in models:
        loss_of(model, batch(1)).backward()
    kind, text = raised(opts[0 if dist.get_rank() == 0 else 1].step)
    assert kind == "RuntimeError"
    for model, values in zip(models, before, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), values, strict=True)), "unharmed"
    return text


def test_ranks_that_step_different_optimizers_all_raise(workers):
    (text,) = set(workers(2).run(at_different_optimizers, timeout=30))
    assert "the ranks do not go on alike" in text


class Breaking(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Breaks.apply(torch.tanh(self.first(x))))


def fails_in_backward() -> None:
    with by_collectives():
        model = Breaking()
        opt = shardstep.shard(model, optim.AdamW, config=ShardConfig(bucket_mb=SMALL_BUCKETS), lr=0.05)
    Breaks.armed = dist.get_rank() == 1
    if Breaks.armed:
        assert raised(lambda: loss_of(model, batch(0)).backward())[0] == "ArithmeticError"
    else:
        loss_of(model, batch(0)).backward()
    Breaks.armed = False
    assert "the backward pass failed on ranks [1]" in raised(opt.step)[1]
    opt.zero_grad()
    steps(model, opt)
    assert_ranks_equal(list(model.parameters()))


def test_a_backward_pass_that_fails_on_one_rank(workers):
    workers(3).run(fails_in_backward, timeout=30)


GATHERS_TOGETHER = "allgather_into_tensor_coalesced_"


def count_calls() -> dict[str, dict[str, int]]:
    """Calls of torch.distributed and bytes of records in one iteration, by the number of buckets."""
    found = {}
    for bucket_mb in (1.0, 0.001, 0.0001):
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)])
        with by_collectives():
            opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=ShardConfig(bucket_mb=bucket_mb))
        for _ in range(2):
            steps_and_clears(model, opt)
        calls: Counter[str] = Counter()
        told = opt._channel.hosts
        with (
            torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile,
            mock.patch.object(told, "send", side_effect=told.send) as send,
        ):
            steps_and_clears(model, opt)
        calls["records"] = send.call_count
        for event in profile.events():
            if event.name.startswith("c10d::"):
                calls[event.name.removeprefix("c10d::")] += 1
        found[str(len(opt.bucket_nbytes()))] = dict(calls)
    return found


def steps_and_clears(model: nn.Module, opt: Any) -> None:
    loss_of(model, batch(0, 16)).backward()
    opt.step()
    opt.zero_grad()


@pytest.mark.parametrize("ranks", [2, 3])
def test_two_collectives_for_a_bucket_and_two_small_records(workers, ranks):
    for found in workers(ranks).run(count_calls):
        assert len(found) == 3
        for buckets, calls in found.items():
            assert calls == {
                "_reduce_scatter_base_": int(buckets),
                # Of many buckets several go in one call.
                **({"_allgather_base_": int(buckets)} if int(buckets) <= 6 else {GATHERS_TOGETHER: 3}),
                "records": 2,  # between hosts
            }


def tells_by_a_tree() -> None:
    """Five ranks in groups of two: three levels."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    with mock.patch.object(host_groups, "FAN", 2), mock.patch.dict(host_groups._known, clear=True):
        found = hosts_of(dist.group.WORLD, {"cpu": "gloo"})
        connections = sum(dist.get_world_size(group) - 1 for group in [*found._below, found._top] if group is not None)
        assert connections <= 3
        came = found.combine(bytes([rank, 7, 100 - rank]))
        assert came.highest == bytes([world_size - 1, 7, 100])
        assert came.lowest == bytes([0, 7, 101 - world_size])
        assert found.rows(bytes([rank, 1])) == [bytes([other, 1]) for other in range(world_size)]


def test_hosts_combine_by_a_tree_of_small_groups(workers):
    workers(5).run(tells_by_a_tree)


def says_the_same_again() -> list[int]:
    """Bytes that are combined when long records are as they were, when one changes, and when they stay so."""
    channel = open_for_collectives(None, None)
    assert channel.hosts is not None
    poll = open_poll(channel)
    sent = []
    send = channel.hosts.send
    for changes in (False, False, True, False):
        sizes: list[int] = []
        with mock.patch.object(
            channel.hosts,
            "send",
            side_effect=lambda record, sizes=sizes: (sizes.append(len(record)), send(record))[1],
        ):
            poll.ask(bytes([changes and dist.get_rank() == 1]) * 1000)
            answer = poll.answer()
        assert answer.any == bytes([changes]) * 1000
        assert answer.equal == (not changes)
        sent.append(sum(sizes))
    return sent


def test_a_long_record_that_has_not_changed_is_one_small_number(workers):
    for first, again, changed, back in workers(2).run(says_the_same_again):
        assert again == 128
        assert first == changed == back == 128 + 1000


def reads_what_was_sent_before() -> None:
    """A question that is under way, others that are asked meanwhile, and one that nobody wants any more."""
    channel = open_for_collectives(None, None)
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    first, second = open_poll(channel), open_poll(channel)
    first.ask(bytes([rank]), soon=True)
    second.ask(bytes([10 + rank]))
    assert second.answer().any == bytes([10 + last])
    assert first.answer().any == bytes([last])
    first.ask(bytes([20 + rank]), soon=True)
    first.ask(bytes([30 + rank]))  # the last counts
    assert first.answer().any == bytes([30 + last])
    first.ask(bytes([rank]), soon=True)
    first.forget()
    assert channel.hosts is not None
    assert channel.hosts.rows(bytes([rank])) == [bytes([other]) for other in range(last + 1)]
    second.ask(bytes([rank]))
    assert second.answer().any == bytes([last])


def test_what_is_under_way_is_read_before_what_is_sent_next(workers):
    workers(3).run(reads_what_was_sent_before, timeout=30)


def takes_communicators() -> None:
    """Two that live at a time have one each; one that is closed leaves it to the next."""
    with by_collectives():
        first = shardstep.shard(Net(), optim.SGD, lr=0.1)
        model = Net()
        second = shardstep.shard(model, optim.SGD, lr=0.1)
        groups = [opt._engine.context.transport._group for opt in (first, second)]
        assert groups[0] is dist.group.WORLD
        assert groups[1] is not dist.group.WORLD
        third = shardstep.shard(model, optim.SGD, lr=0.1)  # closes the second
        assert third._engine.context.transport._group is groups[1]
        if dist.get_rank() == 0:
            del first  # gone here and alive elsewhere: it is not free
        fourth = shardstep.shard(Net(), optim.SGD, lr=0.1)
        assert fourth._engine.context.transport._group not in groups


def test_every_optimizer_has_a_communicator_of_its_own(workers):
    workers(2).run(takes_communicators)


def takes_communicators_after_a_group_was_destroyed() -> None:
    with by_collectives():
        models = [nn.Linear(2, 2) for _ in range(12)]
        kept = [shardstep.shard(model, optim.SGD, lr=0.1) for model in models[:6]]  # more than were made before
        earlier = dist.new_group()
        kept += [shardstep.shard(model, optim.SGD, lr=0.1) for model in models[6:9]]
        dist.destroy_process_group(earlier)  # torch counts one group fewer from here on
        kept += [shardstep.shard(model, optim.SGD, lr=0.1) for model in models[9:]]
        for opt in kept:
            opt.close()


def test_a_communicator_after_a_destroyed_group_had_the_name_of_another(workers):
    workers(2).run(takes_communicators_after_a_group_was_destroyed)


def clips_in_its_dtype() -> None:
    for dtype in (torch.float64, torch.float32):
        for config in (ShardConfig(), ShardConfig(gradients="keep")):
            with by_collectives():
                model = Net().to(dtype)
                opt = shardstep.shard(model, optim.SGD, lr=0.1, config=config)
            loss_of(model, batch(0).to(dtype)).backward()
            assert opt.clip_grad_norm_(0.5).dtype is dtype


def test_the_norm_has_the_dtype_of_the_gradients(workers):
    workers(2).run(clips_in_its_dtype)
    workers(1).run(clips_in_its_dtype)


def trains_where_ranks_are_in_different_numbers_of_groups() -> None:
    """torch names a group after how many a rank is in; ranks would wait for each other under different names."""
    alone = dist.new_group([0])  # rank 1 has one group less
    with by_collectives(), mock.patch.dict(host_groups._known, clear=True):
        first = shardstep.shard(Net(), optim.SGD, lr=0.1)
        second = shardstep.shard(Net(), optim.SGD, lr=0.1)
    assert first._engine.context.transport._group is not second._engine.context.transport._group
    steps(second.model, second)
    if dist.get_rank() == 0:
        dist.destroy_process_group(alone)


def test_ranks_in_different_numbers_of_groups(workers):
    workers(2).run(trains_where_ranks_are_in_different_numbers_of_groups, timeout=30)


def reads_weights_on_rank_zero_alone() -> None:
    """With overlap: a checkpoint, and an evaluation, that the other ranks know nothing of."""
    with by_collectives():
        model = Net()
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"))
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        if dist.get_rank() == 0:
            model.state_dict()
            with torch.no_grad():
                model(batch(step))
        opt.zero_grad()
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))


def test_weights_that_arrive_may_be_read_on_one_rank_alone(workers):
    workers(2).run(reads_weights_on_rank_zero_alone, timeout=30)


class Refuses(optim.SGD):
    def step(self, closure: Any = None) -> None:
        del closure
        if dist.get_rank() == 1 and self.param_groups[0].get("explode"):
            raise ArithmeticError("not this time")
        super().step()


def fails_in_step(gather: Any) -> str:
    with by_collectives():
        model = Net()
        opt = shardstep.shard(model, Refuses, lr=0.1, config=ShardConfig(gather=gather, layout=Layout.WHOLE))
    steps(model, opt)
    opt.zero_grad()
    opt.param_groups[0]["explode"] = True
    loss_of(model, batch(1)).backward()
    return raised(opt.step)[1]


@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_a_step_that_fails_on_one_rank_raises_on_all_in_the_same_step(workers, gather):
    (text,) = set(workers(2).run(fails_in_step, gather, timeout=30))
    assert "step failed on rank 1: ArithmeticError: not this time" in text


def cannot_take_its_parameters_back() -> str:
    """On one rank a parameter was given memory of another dtype, which cannot be made a view of a bucket again."""
    with by_collectives():
        model = Net()
        opt = shardstep.shard(model, optim.SGD, lr=0.1)
    steps(model, opt)
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    if dist.get_rank() == 1:
        model.first.weight.data = model.first.weight.data.double()
    return raised(opt.step)[1]


def test_a_parameter_moved_away_on_one_rank_raises_on_all_in_the_same_step(workers):
    (text,) = set(workers(2).run(cannot_take_its_parameters_back, timeout=30))
    assert "step failed on rank 1" in text
    assert "call shard(...) after model.to(...)" in text


def trains_many_small_models_in_one_backward() -> None:
    """Each has a record of its own open: together they are more than one message holds."""
    with by_collectives():
        models = [nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(22)]) for _ in range(4)]
        opts = [shardstep.shard(model, optim.SGD, lr=0.1) for model in models]
    for _ in range(2):
        sum(param.square().sum() for model in models for param in model).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    for model in models:
        assert all(torch.allclose(param, torch.full((3,), 0.64)) for param in model)


def test_many_small_models_in_one_backward(workers):
    workers(2).run(trains_many_small_models_in_one_backward, timeout=30)
