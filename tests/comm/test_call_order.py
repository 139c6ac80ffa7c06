"""Ranks that do different things raise, all of them, and nobody waits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import open_for_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch, loss_of
from shardstep import ShardConfig
from shardstep.comm import gloo
from shardstep.comm.control import open_poll
from shardstep.comm.host_groups import Combined
from training import raised


def steps(model: nn.Module, opt: Any) -> None:
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.synchronize()


def leaves_out_the_step(model: nn.Module, opt: Any) -> None:
    loss_of(model, batch(0)).backward()
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    opt.step()


def leaves_out_two_steps(model: nn.Module, opt: Any) -> None:
    for number in range(2):
        loss_of(model, batch(number)).backward()
        opt.zero_grad()
    loss_of(model, batch(2)).backward()


def makes_one_pass_more(model: nn.Module, opt: Any) -> None:
    loss_of(model, batch(0)).backward()
    loss_of(model, batch(1)).backward()
    opt.step()


def clips_alone(model: nn.Module, opt: Any) -> None:
    loss_of(model, batch(0)).backward()
    opt.clip_grad_norm_(1.0)
    opt.step()


def asks_for_norms_alone(model: nn.Module, opt: Any) -> None:
    loss_of(model, batch(0)).backward()
    opt.grad_norms()
    opt.step()


ODD: dict[str, tuple[Callable[[nn.Module, Any], None], str]] = {
    "no step": (leaves_out_the_step, "make another backward pass"),
    "no two steps": (leaves_out_two_steps, "make another backward pass"),
    "one pass more": (makes_one_pass_more, "make another backward pass"),
    "clip": (clips_alone, "call clip_grad_norm_()"),
    "norms": (asks_for_norms_alone, "call grad_norms()"),
}
CONFIGS: dict[str, ShardConfig] = {
    "wait": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
}


class Normalized(nn.Module):
    """Its buffers follow rank 0 in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Net(), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.inner(x))


def goes_apart_early(odd: str, make: Callable[[], nn.Module]) -> None:
    with mock.patch.object(gloo, "IN_FLIGHT_NBYTES", 100):
        goes_apart(odd, "wait", make)


def goes_apart(odd: str, config: str, make: Callable[[], nn.Module]) -> None:
    model = make()
    opt = shardstep.shard(model, optim.AdamW, config=CONFIGS[config], lr=0.05)
    last = dist.get_world_size() - 1
    does, words = ODD[odd]
    for _ in range(2):
        steps(model, opt)
        opt.zero_grad()
    kind, text = raised(lambda: (does if dist.get_rank() == last else steps)(model, opt))
    assert kind == "RuntimeError"
    assert f"ranks [{last}] {words}" in text
    assert f"ranks {list(range(last))} call step()" in text
    assert raised(opt.step)[1] == text, "it never works again, and never waits"
    assert raised(opt.zero_grad)[1] == text
    again = shardstep.shard(model, optim.AdamW, config=CONFIGS[config], lr=0.05)
    steps(model, again)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("odd", ODD)
def test_ranks_that_go_apart_all_raise(workers, odd, config):
    if (odd, config) != ("clip", "keep"):  # there it is this rank's own affair
        workers(3).run(goes_apart, odd, config, Net)


@pytest.mark.parametrize("make", [Net, Normalized])
@pytest.mark.parametrize("odd", ["no step", "one pass more"])
def test_also_where_a_pass_or_a_step_waits_early(workers, odd, make):
    """Little may be in flight, so the odd pass waits for its first buckets; with buffers, the step for rank 0's."""
    workers(2).run(goes_apart_early, odd, make)


def looks_in_two_ways() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    loss_of(model, batch(0)).backward()
    text = raised(opt.grad_norms if dist.get_rank() else lambda: opt.clip_grad_norm_(1.0))[1]
    assert "ranks [0] call clip_grad_norm_(); ranks [1] call grad_norms()" in text


def test_two_ways_to_look_at_gradients_are_told_apart(workers):
    workers(2).run(looks_in_two_ways)


def clips_what_it_keeps() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, config=CONFIGS["keep"], lr=0.05)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        if dist.get_rank() == 1:
            opt.clip_grad_norm_(float("inf"))  # only to look at it
            opt.clip_grad_value_(float("inf"))
        opt.step()
        opt.zero_grad()


def test_a_rank_may_clip_alone_what_it_keeps(workers):
    workers(2).run(clips_what_it_keeps)


def makes_no_pass_after_a_new_plan() -> None:
    """A rank without a batch: the others' pass is made up for, also in the first step of a new plan."""
    model = Net()
    opt = shardstep.shard(model, optim.SGD, config=CONFIGS["wait"], lr=0.05)
    steps(model, opt)
    opt.zero_grad()
    model.first.requires_grad_(False)
    steps(model, opt)
    opt.zero_grad()
    if dist.get_rank() != 1:
        loss_of(model, batch(1)).backward()
    opt.step()


def test_a_rank_without_a_batch_after_a_new_plan(workers):
    workers(3).run(makes_no_pass_after_a_new_plan)


def syncs_on_one_rank_only() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, config=CONFIGS["wait"], lr=0.05)
    odd = dist.get_rank() == 1
    with opt.no_sync() if odd else nullcontext():
        loss_of(model, batch(0)).backward()
    text = raised(opt.step)[1]
    assert ("never reduced" if odd else "the backward pass failed on ranks [1]") in text
    left = [param.grad is not None for param in model.parameters() if param.numel()]
    assert all(left) if odd else not any(left), "what was never reduced is not lost"
    opt.zero_grad()
    steps(model, opt)


def test_a_rank_whose_passes_are_all_inside_no_sync_hangs_nobody(workers):
    workers(2).run(syncs_on_one_rank_only)


def goes_on_alike() -> None:
    """What looks different and is not."""
    model, twin = Net(), Net()
    opt, other = (shardstep.shard(net, optim.AdamW, config=CONFIGS["wait"], lr=0.05) for net in (model, twin))
    odd = dist.get_rank() == 1
    for step in range(4):
        if odd:  # sends nothing
            with opt.no_sync():
                (0 * loss_of(model, batch(step))).backward()
        for net, optimizer in ((model, opt), (twin, other)):
            for micro in range(1 + step % 2):
                loss_of(net, batch(10 * step + micro)).backward()
            if step % 2:
                optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_ranks_that_send_the_same_may_differ(workers):
    workers(2).run(goes_on_alike)


def asks_long_questions() -> int:
    """As plans do that are replaced: of each the last record was kept with the hosts, for the life of the job."""
    channel = open_for_collectives(dist.group.WORLD, None)

    def kept() -> int:
        gc.collect()
        return sum(isinstance(one, Combined) for one in gc.get_objects())

    before = kept()
    for number in range(20):
        poll = open_poll(channel)
        for record in (bytes([number]) * 1000, bytes([number]) * 1000, bytes(1000)):
            poll.ask(record)
            assert poll.answer().any == record
        del poll
    return kept() - before


def test_hosts_kept_the_last_records_of_every_plan_that_was_replaced(workers):
    assert workers(2).run(asks_long_questions, timeout=60) == [0, 0]
