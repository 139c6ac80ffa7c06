"""torch's Join round the fast lane: ranks with different numbers of batches train as under DDP, and nobody waits."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp import GradScaler
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, Normed, batch, loss_of
from shardstep import Layout, ShardConfig
from shardstep.comm import gloo
from training import assert_ranks_equal, raised

CONFIGS = {
    "wait": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "whole": ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE),
    "one bucket": ShardConfig(),
    "audited": ShardConfig(bucket_mb=SMALL_BUCKETS, audit=1),
}


def make_sharded(way: str, model: nn.Module, config: str = "wait", **options: Any) -> Any:
    with by_collectives() if way == "collectives" else nullcontext():
        return shardstep.shard(model, optim.AdamW, config=CONFIGS[config], **{"lr": 0.05, **options})


def mine(most: str, count: int = 4) -> range:
    """This rank's batches. The rank with the `most` has two more than the last to come to an end."""
    rank = dist.get_rank()
    return range(count - rank if most == "the first" else count - dist.get_world_size() + 1 + rank)


def assert_like(model: nn.Module, ddp: DistributedDataParallel, *, exact: bool) -> None:
    named, theirs = list(model.named_parameters()), list(ddp.module.parameters())
    for (name, one), other in zip(named, theirs, strict=True):
        same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert same, f"{name} differs by {(one - other).abs().max()}"
    assert_ranks_equal([*model.parameters(), *model.buffers()])


def trains_like_ddp(way: str, config: str, most: str, make: Any = Net, zero_first: bool = False) -> None:
    """Twice, one context after the other; and a scheduler, which stands still on ranks without inputs."""
    model = make()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.AdamW(ddp.parameters(), lr=0.05)
    opt = make_sharded(way, model, config)
    schedules = [optim.lr_scheduler.StepLR(one, 1, 0.8) for one in (plain, opt)]
    for net, joined, optimizer, schedule in ((ddp, ddp, plain, schedules[0]), (model, opt, opt, schedules[1])):
        with Join([joined]):
            for step in mine(most):
                if zero_first:
                    optimizer.zero_grad()
                loss_of(net, batch(step)).backward()
                optimizer.step()
                schedule.step()
                if not zero_first:
                    optimizer.zero_grad()
    assert_like(model, ddp, exact=dist.get_world_size() <= 2)
    rates = [group["lr"] for group in opt.param_groups]
    assert_ranks_equal([torch.tensor(rates)])
    for step in range(2):  # it is over: no rank waits for another to say that it has inputs
        opt.zero_grad()
        loss_of(model, batch(step)).backward()
        opt.clip_grad_value_(0.5)
        opt.step()
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("most", ["the first", "the last"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_with_different_numbers_of_batches_train_as_under_ddp(workers, ranks, most, way):
    workers(ranks).run(trains_like_ddp, way, "wait", most)


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("config", [name for name in CONFIGS if name != "wait"])
def test_uneven_inputs_with_other_ways_to_send_and_to_hold(workers, config, way):
    workers(3).run(trains_like_ddp, way, config, "the last")


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_gradients_of_its_last_batch_do_not_stay_with_a_rank_without_inputs(workers, way):
    """The others call zero_grad() at the beginning of an iteration that this rank does not have."""
    workers(2).run(trains_like_ddp, way, "wait", "the first", Net, True)


def trains_several_epochs(way: str, most: str, to_none: bool) -> None:
    """Without state: under DDP a rank without inputs does not step, and its own copy of it would stay behind."""
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.SGD(ddp.parameters(), lr=0.05)
    with by_collectives() if way == "collectives" else nullcontext():
        opt = shardstep.shard(model, optim.SGD, config=CONFIGS["wait"], lr=0.05)
    for net, joined, optimizer in ((ddp, ddp, plain), (model, opt, opt)):
        for _ in range(3):
            with Join([joined]):
                for step in mine(most):
                    loss_of(net, batch(step)).backward()
                    optimizer.step()
                    optimizer.zero_grad(set_to_none=to_none)
    assert_like(model, ddp, exact=True)


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("most", ["the first", "the last"])
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_of_the_last_step_in_join_are_not_added_to_in_the_next_epoch(workers, to_none, most, way):
    """They stayed with a rank without inputs, which does not call zero_grad() after a step that it only follows."""
    workers(2).run(trains_several_epochs, way, most, to_none)


def has_buffers(way: str, most: str) -> None:
    """Means that a rank without inputs no longer computes; the highest rank with inputs has the say, as under DDP."""
    model = Normed()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain, opt = optim.AdamW(ddp.parameters(), lr=0.05), make_sharded(way, model)
    for net, joined, optimizer in ((ddp, ddp, plain), (model, opt, opt)):
        with Join([joined]):
            for step in mine(most):
                loss_of(net, batch(step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    assert_like(model, ddp, exact=True)
    assert int(model.layers[1].num_batches_tracked) == 4
    if most == "the last":  # else it has the say until it ends; under DDP another rank for its last batch
        assert all(map(torch.equal, model.buffers(), ddp.module.buffers()))


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("most", ["the first", "the last"])
def test_buffers_follow_a_rank_that_still_has_inputs(workers, most, way):
    workers(2).run(has_buffers, way, most)


def waits_early(most: str) -> None:
    """Little may be in flight: a backward pass waits for others' parts, also for those of ranks without inputs."""
    gloo.IN_FLIGHT_NBYTES, before = 100, gloo.IN_FLIGHT_NBYTES
    try:
        trains_like_ddp("messages", "wait", most)
    finally:
        gloo.IN_FLIGHT_NBYTES = before


def test_a_backward_pass_that_waits_for_a_rank_without_inputs(workers):
    workers(3).run(waits_early, "the first")


# -- what else a loop does ---------------------------------------------------------------------------------------------


def clips_like_ddp(way: str, how: str) -> None:
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain, opt = optim.SGD(ddp.parameters(), lr=0.5), None
    with by_collectives() if way == "collectives" else nullcontext():
        opt = shardstep.shard(model, optim.SGD, lr=0.5, config=CONFIGS["wait"])
    norms: list[list[torch.Tensor]] = [[], []]
    with Join([ddp]):
        for step in mine("the first"):
            loss_of(ddp, batch(step)).backward()
            if how == "value":
                torch.nn.utils.clip_grad_value_(ddp.parameters(), 0.01)
            else:
                order = float("inf") if how == "highest" else 2.0
                filled = [param for param in ddp.parameters() if param.numel()]  # torch knows no highest of nothing
                norms[0].append(torch.nn.utils.clip_grad_norm_(filled, 0.05, order))
            plain.step()
            plain.zero_grad()
    with Join([opt]):
        for step in mine("the first"):
            loss_of(model, batch(step)).backward()
            if how == "value":
                opt.clip_grad_value_(0.01)
            else:
                opt.grad_norms()
                norms[1].append(opt.clip_grad_norm_(0.05, float("inf") if how == "highest" else 2.0))
            opt.step()
            opt.zero_grad()
    for theirs, ours in zip(*norms, strict=True):
        assert torch.allclose(theirs, ours, rtol=1e-5)
    assert_like(model, ddp, exact=False)


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("how", ["norm", "highest", "value"])
def test_ranks_without_inputs_clip_their_part_too(workers, how, way):
    workers(3).run(clips_like_ddp, way, how)


def leaves_between_two_passes(way: str, passes: tuple[int, int]) -> None:
    """Two backward passes make a step; a rank that runs out between them has made one, which counts."""
    model, twin = Net(), Net()
    opt, plain = make_sharded(way, model), optim.AdamW(twin.parameters(), lr=0.05)
    count = passes[dist.get_rank()]
    with Join([opt]):
        for number in range(count):
            loss_of(model, batch(number)).backward()
            if number % 2 or number == max(passes) - 1:
                opt.step()
                opt.zero_grad()
    for number in range(max(passes)):
        loss = loss_of(twin, batch(number))
        (loss if number < count else 0 * loss).backward()
        if number % 2 or number == max(passes) - 1:
            for param in twin.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            plain.step()
            plain.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("passes", [(4, 3), (3, 4), (6, 1), (4, 0), (5, 2)])
def test_a_rank_may_run_out_of_inputs_between_two_passes(workers, passes, way):
    workers(2).run(leaves_between_two_passes, way, passes)


def drops_a_batch(way: str) -> None:
    """The ranks with inputs leave out a step: so does the one without."""
    model, twin = Net(), Net()
    opt, plain = make_sharded(way, model), optim.AdamW(twin.parameters(), lr=0.05)
    with Join([opt]):
        for number in range(4 if dist.get_rank() == 0 else 1):
            loss_of(model, batch(number)).backward()
            if number != 1:
                opt.step()
            opt.zero_grad()
    for number in (0, 2, 3):
        loss = loss_of(twin, batch(number))
        (loss if number == 0 or dist.get_rank() == 0 else 0 * loss).backward()
        for param in twin.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        plain.step()
        plain.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_a_step_that_is_left_out_while_a_rank_has_no_inputs(workers, way):
    workers(2).run(drops_a_batch, way)


def has_unused_layers(way: str) -> None:
    """A rank without inputs steps what others have used, and leaves alone what nobody has."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList([nn.Linear(7, 7) for _ in range(2)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[int(x.sum() > 0)](x)

    model = Two()
    opt = make_sharded(way, model, weight_decay=0.5)
    with Join([opt]):
        for _ in range(3 if dist.get_rank() == 1 else 1):
            before = [param.detach().clone() for param in model.layers[0].parameters()]
            loss_of(model, torch.ones(2, 7)).backward()
            opt.step()
            opt.zero_grad()
    assert all(map(torch.equal, model.layers[0].parameters(), before))
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_what_no_rank_has_used_rests_while_one_has_no_inputs(workers, way):
    workers(2).run(has_unused_layers, way)


# -- what is refused ---------------------------------------------------------------------------------------------------


def scales(way: str) -> str:
    model, scaler = Net(), GradScaler("cpu")
    opt = make_sharded(way, model)

    def loop() -> None:
        with Join([opt]):
            for step in mine("the first"):
                scaler.scale(loss_of(model, batch(step))).backward()
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()

    return raised(loop)[1]


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_a_scaler_whose_scale_would_stand_still_raises_on_all_ranks(workers, way):
    for text in workers(2).run(scales, way):
        assert "a GradScaler cannot go on inside Join when ranks have run out of inputs ([1])" in text


def goes_apart(way: str) -> str:
    """Of two ranks with inputs one clips; the third has none."""
    model = Net()
    opt = make_sharded(way, model)

    def loop() -> None:
        with Join([opt]):
            for step in range(1 if dist.get_rank() == 2 else 3):
                loss_of(model, batch(step)).backward()
                if step == 1 and dist.get_rank() == 1:
                    opt.clip_grad_norm_(1.0)
                opt.step()
                opt.zero_grad()

    return raised(loop)[1]


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_ranks_that_go_apart_all_raise_also_the_one_without_inputs(workers, way):
    for text in workers(3).run(goes_apart, way):
        assert "ranks [1] call clip_grad_norm_(); ranks [0] call step(); ranks [2] have no inputs left" in text


def has_another_rate(way: str) -> str:
    model = Net()
    opt = make_sharded(way, model)

    def loop() -> None:
        with Join([opt]):
            for step in range(1 if dist.get_rank() == 2 else 3):
                opt.param_groups[0]["lr"] = 0.1 if step == 1 and dist.get_rank() == 1 else 0.05
                loss_of(model, batch(step)).backward()
                opt.step()
                opt.zero_grad()

    return raised(loop)[1]


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_ranks_with_inputs_and_different_rates_raise(workers, way):
    for text in workers(3).run(has_another_rate, way):
        assert "step: the ranks do not agree" in text


def ends_early(way: str) -> str:
    model = Net()
    opt = make_sharded(way, model)

    def loop() -> None:
        with Join([opt], throw_on_early_termination=True):
            for step in mine("the first"):
                loss_of(model, batch(step)).backward()
                opt.step()
                opt.zero_grad()

    return raised(loop)[1]


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_early_termination_raises_on_all_ranks(workers, way):
    texts = workers(2).run(ends_early, way)
    assert "exhausted inputs" in texts[0]
    assert "Rank 1 exhausted all inputs" in texts[1]


def is_refused() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    other = DistributedDataParallel(nn.Linear(2, 2))
    assert "by itself" in raised(lambda: Join([opt, other]))[1]
    assert "by itself" in raised(lambda: Join([other, opt]))[1]
    assert "the number of all ranks" in raised(lambda: Join([opt], divide_by_initial_world_size=False))[1]
    with Join([opt]):
        assert "call it outside" in raised(lambda: opt.load_state_dict(opt.state_dict()))[1]
    opt.load_state_dict(opt.state_dict())
    kept = shardstep.shard(Net(), optim.AdamW, lr=0.05, config=ShardConfig(gradients="keep"))
    assert 'gradients="keep"' in raised(lambda: Join([kept]))[1]
    with Join([opt], enable=False):
        loss_of(model, batch(0)).backward()
        opt.step()


def test_what_cannot_be_joined_says_so_before_anything_is_sent(workers):
    workers(2).run(is_refused)
