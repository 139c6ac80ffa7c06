"""opt.report(), opt.measured(), and the names in a profile."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import FrozenInstanceError
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.profiler import ProfilerActivity, profile

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch
from shardstep import Layout, ShardConfig
from shardstep.comm import gloo, idle_check
from shardstep.comm.comm_timing import Clock, Covered, Tally
from shardstep.engine.report import Group, Holding, Report, Times
from shardstep.gradients.passes import GradientPass
from shardstep.planning import EqualRanges, ParamSpec, make_plan
from shardstep.stepping.masters import AVERAGE, MASTER
from test_several_classes import Blocks, both_groups
from training import all_same, assert_ranks_equal, raised


def iterate(model: nn.Module, opt: Any, steps: int = 1) -> None:
    for step in range(steps):
        param = next(model.parameters())
        model(batch(step).to(param.device, param.dtype)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def storage_of(tensors: list[torch.Tensor]) -> int:
    """Bytes of the memory in which they lie, each counted once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def reports(dtype: torch.dtype, config: ShardConfig, collectives: bool) -> Report:
    model = Net().to(dtype)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config)
    assert opt.report().ranks[0].state == 0, "before the first step"
    iterate(model, opt, 2)
    model(batch(2).to(next(model.parameters()).device, dtype)).float().square().mean().backward()
    report = opt.report()
    own = report.ranks[dist.get_rank()]
    entries = list(opt.state.values())

    def held(key: str) -> int:
        return sum(entry[key].nbytes for entry in entries if key in entry)

    unused = 64 * len(report.buckets) * 8  # padding: at most so much in each bucket, and each of its ranges
    memory, gradients = opt._engine.runtime.memory, opt._engine.runtime.gradients
    assert sum(param.nbytes for param in model.parameters()) <= own.parameters
    assert own.parameters == storage_of([bucket.values for bucket in memory.buckets])
    if config.gradients == "keep":
        assert own.gradients == storage_of([bucket.values for bucket in gradients._mean_memory.buckets])
    else:
        assert own.gradients == sum(shard.nbytes for shard in gradients.shards())
    assert held(MASTER) <= own.masters <= held(MASTER) + unused * (held(MASTER) > 0)
    assert held(AVERAGE) <= own.average <= held(AVERAGE) + unused * (held(AVERAGE) > 0)
    local = opt._engine.runtime.local_step.local.state.values()
    assert own.state == sum(value.nbytes for entry in local for value in entry.values())
    assert held("exp_avg") + held("exp_avg_sq") <= own.state
    assert own.held == own.parameters + own.gradients + own.masters + own.state + own.average
    assert report.buckets == tuple(opt.bucket_nbytes())
    opt.step()
    opt.zero_grad()
    assert opt.report().ranks == report.ranks, "as after the step before"
    return report


FLAT = ShardConfig(bucket_mb=SMALL_BUCKETS)
CONFIGS = {
    "flat": (torch.float32, FLAT),
    "whole": (torch.float32, ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE)),
    "keep": (torch.float32, ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep")),
    "bf16 with masters and an average": (torch.bfloat16, ShardConfig(bucket_mb=SMALL_BUCKETS, ema=0.9)),
    "overlap": (torch.float32, ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap", ema=0.9)),
    "reduced in bf16": (torch.float32, ShardConfig(bucket_mb=SMALL_BUCKETS, reduce_dtype=torch.bfloat16)),
}


def check_traffic(report: Report, name: str, ranks: int) -> None:
    total = sum(report.buckets)
    assert (
        report.sent_by_ddp == 2 * (ranks - 1) * sum(p.nbytes for p in Net().to(CONFIGS[name][0]).parameters()) // ranks
    )
    # Every byte comes to its holder from all others, and goes to all others.
    assert sum(rank.sent_gathering for rank in report.ranks) == (ranks - 1) * total
    reduced = {"keep": 2.0, "reduced in bf16": 0.5}.get(name, 1.0)
    assert sum(rank.sent_reducing for rank in report.ranks) == reduced * (ranks - 1) * total
    if name in ("flat", "overlap"):
        assert {(rank.sent_reducing, rank.sent_gathering) for rank in report.ranks} == {
            ((ranks - 1) * total // ranks, (ranks - 1) * total // ranks)
        }


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_report_says_what_every_rank_holds_and_sends(workers, ranks, name):
    report = all_same(workers(ranks).run(reports, *CONFIGS[name], False))
    assert len(report.ranks) == ranks
    check_traffic(report, name, ranks)
    (group,) = report.groups
    assert group.optimizer == "torch.optim.adamw.AdamW"
    assert group.layout is (Layout.WHOLE if name == "whole" else Layout.FLAT)
    assert (group.params, group.numel) == (6, sum(param.numel() for param in Net().parameters()))
    lines = str(report).splitlines()
    assert lines[0].startswith(f"{ranks} rank")
    assert sum(line.startswith("rank ") for line in lines) == 2 * ranks
    with pytest.raises(FrozenInstanceError):
        report.steps = 3


@pytest.mark.parametrize("name", ["flat", "whole", "keep"])
def test_a_report_with_collectives(workers, name):
    report = all_same(workers(2).run(reports, *CONFIGS[name], True))
    check_traffic(report, name, 2)


def reports_two_classes() -> Report:
    model = Blocks()
    opt = shardstep.shard(model, groups=both_groups(), config=FLAT)
    model.embed.requires_grad_(False)
    iterate(model, opt, 2)
    report = opt.report()
    frozen, moving = model.embed.parameters(), opt._engine.runtime.memory.buckets
    held = storage_of([bucket.values for bucket in moving]) + sum(param.nbytes for param in frozen)
    assert report.ranks[dist.get_rank()].parameters == held
    return report


def test_a_report_of_two_classes_and_frozen_parameters(workers):
    report = all_same(workers(2).run(reports_two_classes))
    assert [(group.optimizer, group.layout) for group in report.groups] == [
        ("torch.optim.Muon", Layout.WHOLE),
        ("torch.optim.adamw.AdamW", Layout.FLAT),
    ]
    assert "group 0: torch.optim.Muon, WHOLE, 6 parameters of 1,440 elements" in str(report)


def test_ten_elements_over_four_ranks_by_hand():
    spec = ParamSpec("w", (10,), "float32", "cpu:0", 0)
    (flat,) = make_plan([spec], Layout.FLAT, world_size=4).buckets
    assert isinstance(flat.ranges, EqualRanges)
    assert [flat.sent(rank) for rank in range(4)] == [(9, 9)] * 4  # 3 of 12 each, two of them padding
    (whole,) = make_plan([spec], Layout.WHOLE, world_size=4).buckets
    assert [whole.sent(rank) for rank in range(4)] == [(0, 30), (10, 0), (10, 0), (10, 0)]


def test_a_report_is_a_table():
    row = Holding(20_000_000, 5_000_000, 0, 10_000_000, 0, 15_000_000, 15_000_000)
    times = Times(0.08, Covered(0.04, 0.001), Covered(0.01, 0.01))
    group = Group("torch.optim.adamw.AdamW", Layout.FLAT, 12, 5_000_000)
    assert str(Report((row, row), (8_000_000, 12_000_000), (group,), 20_000_000, 3, (times, times))) == (
        "2 ranks, 2 buckets of 8.0 MB to 12.0 MB\n"
        "group 0: torch.optim.adamw.AdamW, FLAT, 12 parameters of 5,000,000 elements\n"
        "\n"
        "held by  parameters  gradients  masters    state  average      all\n"
        "rank 0      20.0 MB     5.0 MB      0 B  10.0 MB      0 B  35.0 MB\n"
        "rank 1      20.0 MB     5.0 MB      0 B  10.0 MB      0 B  35.0 MB\n"
        "\n"
        "sent in a step by  reducing  gathering      all\n"
        "rank 0              15.0 MB    15.0 MB  30.0 MB\n"
        "rank 1              15.0 MB    15.0 MB  30.0 MB\n"
        "each under DDP                          20.0 MB\n"
        "\n"
        "mean of 2 ranks and 3 steps  under way  waited for  hidden\n"
        "a step                        80.00 ms\n"
        "reducing                      40.00 ms     1.00 ms     98%\n"
        "gathering                     10.00 ms    10.00 ms      0%"
    )
    many = str(Report((row,) * 1024, (), (), 0, 0, ()))
    assert "a rank at most" in many
    assert len(many.splitlines()) < 20


# -- ranks that do something else -------------------------------------------------------------------------------------


def reports_alone(collectives: bool, has_gradients: bool, step: Any = "after") -> tuple[str, str]:
    model = Net()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, step=step)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config)
    iterate(model, opt)
    if has_gradients:
        model(batch(1)).square().mean().backward()
    if dist.get_rank() == 0:
        return raised(opt.report)
    return raised(lambda: iterate(model, opt) if not has_gradients else opt.step())


@pytest.mark.parametrize("has_gradients", [True, False])
@pytest.mark.parametrize("collectives", [False, True])
def test_a_rank_that_reports_alone_raises_as_all_do(workers, collectives, has_gradients):
    for ranks in (2, 3):
        for kind, text in workers(ranks).run(reports_alone, collectives, has_gradients, timeout=60):
            assert kind == "RuntimeError"
            assert "ranks [0] call report()" in text, text


@pytest.mark.parametrize("collectives", [False, True])
def test_a_rank_that_reports_alone_raises_as_all_do_that_step_in_backward(workers, collectives):
    for kind, text in workers(2).run(reports_alone, collectives, False, "backward", timeout=60):
        assert kind == "RuntimeError"
        assert "ranks [0] call report()" in text, text


def reports_now_and_then(config: ShardConfig, collectives: bool) -> None:
    with by_collectives() if collectives else nullcontext():
        pairs = [(model, shardstep.shard(model, optim.AdamW, lr=0.01, config=config)) for model in (Net(), Net())]
    for step in range(5):
        for number, (model, opt) in enumerate(pairs):
            look = opt.report if number else nullcontext
            look()
            with opt.no_sync():
                model(batch(step)).square().mean().backward()
            if number and step == 4 and config.gradients == "shard":
                assert "no_sync" in raised(opt.report)[1]
            for micro in (7, 8):
                model(batch(step + micro)).square().mean().backward()
                look()
            opt.step()
            look()
            if step != 2:  # then gradients go on adding up
                opt.zero_grad()
            look()
    for _, opt in pairs:
        opt.synchronize()
    assert all(map(torch.equal, pairs[0][0].parameters(), pairs[1][0].parameters()))


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("name", ["flat", "keep", "overlap"])
def test_reports_change_nothing(workers, name, collectives):
    workers(2).run(reports_now_and_then, CONFIGS[name][1], collectives)


def test_reports_of_one_rank_change_nothing(workers):
    workers(1).run(reports_now_and_then, FLAT, False)


def pair_of(config: ShardConfig, collectives: bool) -> list[tuple[nn.Module, Any]]:
    with by_collectives() if collectives else nullcontext():
        return [(model, shardstep.shard(model, optim.AdamW, lr=0.01, config=config)) for model in (Net(), Net())]


@contextmanager
def counted_reductions() -> Iterator[list[int]]:
    """A list that gets the number of each bucket that a pass reduces inside."""
    launched: list[int] = []
    launch = GradientPass._launch

    def counted(self: GradientPass, bucket: int, parts: Any) -> None:
        launched.append(bucket)
        launch(self, bucket, parts)

    with mock.patch.object(GradientPass, "_launch", counted):
        yield launched


def reports_between_steps(config: ShardConfig, collectives: bool, in_flight: int) -> list[int]:
    """How many buckets are reduced in a report after a step; and one report finds a pass on the last rank alone."""
    pair, found = pair_of(config, collectives), []
    last = dist.get_rank() == dist.get_world_size() - 1
    with mock.patch.object(gloo, "IN_FLIGHT_NBYTES", in_flight), counted_reductions() as launched:
        for step in range(3):
            for number, (model, opt) in enumerate(pair):
                if last:  # the others have no batch
                    model(batch(step)).square().mean().backward()
                if not number and config.step != "backward":
                    with mock.patch.object(idle_check, "PATIENCE", 0.1):
                        opt.report()
                opt.step()
                opt.zero_grad()
            launched.clear()
            first = pair[0][1].report()
            found.append(len(launched))
            assert pair[0][1].report() == first
    for _, opt in pair:
        opt.synchronize()
    assert all(map(torch.equal, pair[0][0].parameters(), pair[1][0].parameters()))
    assert_ranks_equal(list(pair[0][0].parameters()))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(
    ("collectives", "in_flight"),
    [(False, 105_000_000), (False, 0), (True, 0)],
    ids=["messages", "messages one by one", "collectives"],
)
@pytest.mark.parametrize("name", ["flat", "keep", "overlap", "backward"])
def test_a_report_between_steps_reduces_nothing(workers, name, collectives, in_flight, ranks):
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, step="backward") if name == "backward" else CONFIGS[name][1]
    found = workers(ranks).run(reports_between_steps, config, collectives, in_flight, timeout=60)
    assert found == [[0, 0, 0]] * ranks


def reports_at_different_times(collectives: bool) -> list[int]:
    """Ranks come to a report about when others stop waiting for them. Returns what each report has reduced."""
    pair, found = pair_of(FLAT, collectives), []
    waits = random.Random(dist.get_rank())
    with counted_reductions() as launched:
        for step in range(20):
            for model, opt in pair:
                iterate(model, opt)
                opt.synchronize()
            launched.clear()
            # The first time one rank comes when all others have stopped waiting, the last time nobody stops.
            patience = 30.0 if step == 19 else 0.02
            time.sleep(0.2 if step == 0 and dist.get_rank() == 0 else waits.uniform(0, 0.04))
            with mock.patch.object(idle_check, "PATIENCE", patience):
                pair[0][1].report()
            found.append(len(launched))
    assert all(map(torch.equal, pair[0][0].parameters(), pair[1][0].parameters()))
    return found


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("collectives", [False, True])
def test_ranks_that_come_late_to_a_report_reduce_as_all_do(workers, collectives, ranks):
    found = all_same(workers(ranks).run(reports_at_different_times, collectives, timeout=60))
    assert found[0] > 0
    assert found[-1] == 0


def reports_when_closed() -> tuple[str, str]:
    opt = shardstep.shard(Net(), optim.AdamW, lr=0.01)
    opt.close()
    return raised(opt.report)


def test_a_closed_optimizer_reports_nothing(workers):
    (found,) = workers(1).run(reports_when_closed)
    assert "closed" in found[1]


# -- times ------------------------------------------------------------------------------------------------------------


def measures(config: ShardConfig, collectives: bool) -> Report:
    model = Net()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config)
    plain, weights = Net(), opt._engine.runtime.weights
    other = shardstep.shard(plain, optim.AdamW, lr=0.01, config=config)
    before = weights.sender
    with opt.measured():
        iterate(model, opt, 3)
        opt.synchronize()
    assert weights.sender is before, "what measures is gone"
    iterate(model, opt, 2)
    for steps in (3, 2):
        iterate(plain, other, steps)
    other.synchronize()
    opt.synchronize()
    assert all(map(torch.equal, model.parameters(), plain.parameters())), "measuring changes nothing"
    return opt.report()


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("name", ["flat", "whole", "keep", "overlap"])
def test_measured_steps_have_times_in_the_report(workers, name, collectives):
    report = all_same(workers(2).run(measures, CONFIGS[name][1], collectives))
    assert report.steps == 3
    for times in report.times:
        for covered in (times.reducing, times.gathering):
            assert 0 < covered.waited <= covered.under_way < times.seconds
            assert covered.hidden is not None
            assert 0 <= covered.hidden < 1


def test_one_rank_waits_for_nobody(workers):
    (report,) = workers(1).run(measures, FLAT, False)
    (times,) = report.times
    assert times.gathering == Covered(0.0, 0.0)
    assert "n/a" in str(report)


def measures_a_new_plan() -> Report:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=FLAT)
    with opt.measured():
        iterate(model, opt)
        model.first.requires_grad_(False)
        iterate(model, opt, 2)
    iterate(model, opt)
    return opt.report()


def test_a_new_plan_inside_measured_leaves_nothing_measured(workers):
    report = all_same(workers(2).run(measures_a_new_plan))
    assert report.times == ()
    assert "nothing was measured" in str(report)


def test_what_is_under_way_at_the_same_time_counts_once():
    tally = Tally(Clock(torch.device("cpu")))
    tally.landed((1.0, 1.1), (4.0, 4.4))
    tally.landed((2.0, 2.1), (4.4, 5.0))
    tally.landed((7.0, 7.1), (7.9, 8.0))
    found = tally.read(1.0)
    assert found.under_way == pytest.approx(5.0)  # from 1 to 5, and from 7 to 8
    assert found.waited == pytest.approx(1.4)


# -- in a profile -----------------------------------------------------------------------------------------------------


def profiles(config: ShardConfig, collectives: bool) -> list[str]:
    model = Net()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=config)
    iterate(model, opt)
    assert not opt._engine.runtime.memory.titles._made, "nobody looks"
    with profile(activities=[ProfilerActivity.CPU]) as found:
        iterate(model, opt)
        opt.synchronize()
    return [event.name for event in found.events() if event.name.startswith("shardstep: ")]


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("name", ["flat", "whole", "overlap"])
def test_a_profile_names_buckets_and_parameters(workers, name, collectives):
    for found in workers(2).run(profiles, CONFIGS[name][1], collectives):
        for verb in ("reduce", "wait for gradients of", "step", "gather", "wait for weights of"):
            own = [title for title in found if title.startswith(f"shardstep: {verb} bucket")]
            text = " ".join(own)
            assert "second.bias" in text, (verb, found)
            assert "scale" in text, (verb, found)


def test_one_bucket_is_named_after_its_first_and_its_last(workers):
    (found,) = workers(1).run(profiles, ShardConfig(), False)
    assert found[0] == "shardstep: reduce bucket 0 (second.bias ... scale)"
