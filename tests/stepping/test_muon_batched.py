"""torch's Muon stepped by batches, against the class: on the CPU, where `as_batched` chooses it.

Models are linear in their parameters, so gradients are given and the same for both, whatever was stepped before. What
may differ is how bfloat16 products are summed: each of the fifteen of a step rounds by 2^-9, and of matrices whose
singular values lie within a factor of ten that changes an element by less than `MOST` of the learning rate. An option
that is read wrongly changes it by more, which `test_options_matter` holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_batched import by_batches
from as_collectives import by_collectives
from given_matrices import (
    LR,
    MOST,
    OPTIONS,
    SHAPES,
    SMALL,
    STEPS,
    Given,
    Options,
    assert_near,
    both,
    both_classes,
    gradient_of,
    orthogonal,
    shard,
    train,
)
from shardstep import Layout, ShardConfig
from shardstep.comm import nccl, nccl_gathers
from training import assert_ranks_equal, raised

# -- options -----------------------------------------------------------------------------------------------------------


def steps_like_the_class(options: Options, config: ShardConfig, dtype: torch.dtype, most: float) -> None:
    ours, theirs = both(options, config, dtype)
    assert_near(ours, theirs, most)
    assert_ranks_equal(list(ours.parameters()))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_like_the_class(workers, options):
    workers(1).run(steps_like_the_class, options, ShardConfig(), torch.float32, STEPS * MOST * LR)


def differs_from_default(options: Options) -> float:
    changed, default = both(options, ShardConfig())[0], both({}, ShardConfig())[0]
    pairs = zip(changed.parameters(), default.parameters(), strict=True)
    return max((one - other).abs().max().item() for one, other in pairs)


@pytest.mark.parametrize("name", [
    "momentum", "without nesterov", "weight decay", "ns_steps", "ns_coefficients", "eps", "match_rms_adamw",
])  # fmt: skip
def test_options_matter(workers, name):
    """Or the test above would pass with one that is ignored."""
    (apart,) = workers(1).run(differs_from_default, OPTIONS[name])
    assert apart > STEPS * MOST * LR


CONFIGS = {
    "default": ShardConfig(),
    "small buckets": ShardConfig(bucket_mb=SMALL),
    "overlap": ShardConfig(bucket_mb=SMALL, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL, gradients="keep"),
    "in backward": ShardConfig(bucket_mb=SMALL, step="backward"),
    "wire": ShardConfig(bucket_mb=SMALL, wire="bf16"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_on_several_ranks(workers, ranks, config):
    digit = 2**-8 if config.wire else 0.0  # now and then the next 16-bit number is the nearest
    workers(ranks).run(steps_like_the_class, {}, config, torch.float32, STEPS * MOST * LR + digit)


# Weights of at most 1 in bfloat16 are 2^-8 apart. By chance both neighbours may be taken in each step.
NARROW = {
    "masters": (ShardConfig(bucket_mb=SMALL), torch.bfloat16, 2**-8),
    "masters of fp16": (ShardConfig(bucket_mb=SMALL), torch.float16, 2**-11),
    "by chance": (ShardConfig(bucket_mb=SMALL, master="stochastic"), torch.bfloat16, STEPS * 2**-8),
    "bf16 as it is": (ShardConfig(bucket_mb=SMALL, master="none"), torch.bfloat16, STEPS * 2**-8),
    "fp16 as it is": (ShardConfig(bucket_mb=SMALL, master="none"), torch.float16, STEPS * 2**-11),
    "fp64": (ShardConfig(bucket_mb=SMALL), torch.float64, 0.0),
}


@pytest.mark.filterwarnings("ignore:master=.none")
@pytest.mark.parametrize(("config", "dtype", "digit"), NARROW.values(), ids=NARROW)
@pytest.mark.parametrize("ranks", [1, 2])
def test_dtypes(workers, ranks, config, dtype, digit):
    workers(ranks).run(steps_like_the_class, {}, config, dtype, STEPS * MOST * LR + digit)


def equals_the_plain_optimizer() -> None:
    ours, plain = Given(), Given()
    train(ours, shard(ours, True, {}, ShardConfig(bucket_mb=SMALL)))
    opt = optim.Muon(plain.parameters(), lr=LR)
    for step in range(STEPS):
        plain(step).backward()
        for param in plain.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        opt.step()
        opt.zero_grad()
    assert_near(ours, plain)


def with_collectives() -> None:
    with by_collectives():
        equals_the_plain_optimizer()


@pytest.mark.parametrize("body", [equals_the_plain_optimizer, with_collectives])
@pytest.mark.parametrize("ranks", [2, 3])
def test_equals_the_plain_optimizer_on_the_mean_gradient(workers, ranks, body):
    workers(ranks).run(body)


def collectives_of_a_step() -> list[str]:
    """Of six matrices, three for each rank."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6)))
    with by_collectives():
        opt = shard(model, True, {}, ShardConfig())
    found: list[str] = []
    for name in ("reduce", "broadcast", "_reduce_scatter", "_all_gather"):
        home = dist if hasattr(dist, name) else nccl if hasattr(nccl, name) else nccl_gathers
        own = getattr(home, name)

        def call(*args: Any, name: str = name, own: Any = own, **options: Any) -> Any:
            found.append(name)
            return own(*args, **options)

        mock.patch.object(home, name, call).start()
    try:
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.synchronize()
    finally:
        mock.patch.stopall()
    assert_ranks_equal(list(model.parameters()))
    return found


def test_equal_ranges_of_whole_matrices_travel_by_one_reduce_scatter_and_one_all_gather(workers):
    assert workers(2).run(collectives_of_a_step) == [["_reduce_scatter", "_all_gather"]] * 2


# -- what changes between steps ----------------------------------------------------------------------------------------


def follows(change: Callable[[nn.Module, Any, int], Any]) -> None:
    """`change` is made to both before each step, and may return parameters that are not used in it."""
    models = Given(), Given()
    for batched, model in zip((True, False), models, strict=True):
        opt = shard(model, batched, {}, ShardConfig(bucket_mb=SMALL))
        for step in range(6):
            without = change(model, opt, step) or ()
            train(model, opt, [step], without=without)
    assert_near(*models, most=6 * MOST * LR)


def sets_the_rate(model: nn.Module, opt: Any, step: int) -> None:
    opt.param_groups[0]["lr"] = LR / (1 + step)


def sets_other_options(model: nn.Module, opt: Any, step: int) -> None:
    opt.param_groups[0].update(momentum=0.5 + 0.05 * step, weight_decay=0.1 * step, nesterov=step != 3, ns_steps=3)


def leaves_some_out(model: nn.Module, opt: Any, step: int) -> tuple[int, ...]:
    return [(), (0,), (0, 2, 3), (4, 5), (), tuple(range(9))][step]


def leaves_some_out_at_first(model: nn.Module, opt: Any, step: int) -> tuple[int, ...]:
    return (0, 3, 4) if step < 2 else ()


def freezes(model: nn.Module, opt: Any, step: int) -> None:
    for place in (1, 2, 4):
        model.matrices[place].requires_grad_(step not in (2, 3))


CHANGES = [sets_the_rate, sets_other_options, leaves_some_out, leaves_some_out_at_first, freezes]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_follows_changes(workers, ranks, change):
    workers(ranks).run(follows, change)


def has_no_state_before_its_first_gradient() -> None:
    model = Given()
    opt = shard(model, True, {}, ShardConfig())
    before = model.matrices[3].detach().clone()
    train(model, opt, without=(3,))
    assert torch.equal(model.matrices[3], before)
    assert sorted(opt.state_dict()["state"]) == [place for place in range(len(SHAPES)) if place != 3]


def test_a_parameter_without_a_gradient_stays_and_has_no_state(workers):
    workers(1).run(has_no_state_before_its_first_gradient)


def refuses_later() -> list[str]:
    model = Given(torch.bfloat16)
    opt = shard(model, True, {}, ShardConfig(master="none"))
    train(model, opt, [0])
    opt.param_groups[0]["nesterov"] = False
    model(1).backward()
    texts = [raised(opt.step)[1]]
    flat = ShardConfig(layout=Layout.FLAT)
    texts.append(raised(lambda: shardstep.shard(Given(), optim.Muon, lr=LR, config=flat))[1])
    return texts


@pytest.mark.filterwarnings("ignore:master=.none")
def test_an_option_that_batches_do_not_reproduce_is_refused_by_name(workers):
    ((later, flat),) = workers(1).run(refuses_later)
    assert "param_groups[0]: without nesterov the class normalises a bfloat16 momentum" in later
    assert 'kernel="torch"' in later
    assert "Layout.FLAT is not safe here" in flat


def grows() -> None:
    """A group with other options that is added later: it is a batch of its own."""
    models = Given(), Given()
    for batched, model in zip((True, False), models, strict=True):
        late = [f"matrices.{place}" for place in (2, 5)]
        early = [name for name, _ in model.named_parameters() if name not in late]
        for name in late:
            model.get_parameter(name).requires_grad_(False)
        opt = shard(model, batched, {}, ShardConfig(bucket_mb=SMALL), groups=[{"params": early}])
        train(model, opt)
        for name in late:
            model.get_parameter(name).requires_grad_(True)
        opt.add_param_group({"params": [model.get_parameter(name) for name in late], "momentum": 0.5, "lr": LR / 2})
        train(model, opt)
    assert_near(*models, most=2 * STEPS * MOST * LR)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_that_is_added(workers, ranks):
    workers(ranks).run(grows)


def steps_groups() -> None:
    """Groups of one class with options of their own."""
    models = Given(), Given()
    for batched, model in zip((True, False), models, strict=True):
        names = [name for name, _ in model.named_parameters()]
        groups: list[Options] = [
            {"params": names[::2], "momentum": 0.5, "adjust_lr_fn": "match_rms_adamw"},
            {"params": names[1::2], "lr": LR / 3, "ns_steps": 3, "weight_decay": 1.0},
        ]
        train(model, shard(model, batched, {}, ShardConfig(), groups=groups))
    assert_near(*models)


def test_groups_with_other_options(workers):
    workers(2).run(steps_groups)


# -- beside other classes, scaling, averages ---------------------------------------------------------------------------


def steps_beside_another_class(dtype: torch.dtype) -> None:
    models = Given(dtype, biases=True), Given(dtype, biases=True)
    for batched, model in zip((True, False), models, strict=True):
        with by_batches() if batched else nullcontext():
            opt = shardstep.shard(model, groups=both_classes(), config=ShardConfig(bucket_mb=SMALL))
        assert [list(one.groups) for one in opt._engine.runtime.local_step.steppers] == ([[0]] if batched else [])
        train(model, opt)
        keys = {key for place, entry in opt.state_dict()["state"].items() if place < len(SHAPES) for key in entry}
        assert keys - {"shardstep.master"} <= {"momentum_buffer"}
    assert_near(*models, most=STEPS * MOST * LR + (2**-8 if dtype is torch.bfloat16 else 0.0))
    for ours, theirs in zip(models[0].biases, models[1].biases, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_beside_adamw(workers, ranks, dtype):
    workers(ranks).run(steps_beside_another_class, dtype)


def scales(dtype: torch.dtype) -> None:
    """With a GradScaler: a gradient of inf on one rank skips the step on all, momenta and weights stay, nobody asks."""
    ours, theirs = Given(dtype), Given(dtype)
    opt = shard(ours, True, {}, ShardConfig(bucket_mb=SMALL))
    other = shard(theirs, False, {}, ShardConfig(bucket_mb=SMALL))
    assert opt._step_supports_amp_scaling
    assert not other._step_supports_amp_scaling
    for one, model in ((opt, ours), (other, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(STEPS):
            loss = scaler.scale(model(step))
            if step == 1 and dist.get_rank() == 0:
                loss = loss * float("inf")
            loss.backward()
            before = [param.detach().clone() for param in model.parameters()]
            if step == 2:
                scaler.unscale_(one)
                one.clip_grad_norm_(0.5)
            scaler.step(one)
            one.synchronize()
            same = [torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True)]
            assert all(same) if step == 1 else not any(same)
            scaler.update()
            one.zero_grad()
    assert_near(ours, theirs, most=STEPS * MOST * LR + 2**-11)
    momenta = [by_name(one) for one in (opt, other)]
    common = momenta[0].keys() & momenta[1].keys()  # both are dealt by cost, which is another in a batch
    assert common
    for name in common:
        torch.testing.assert_close(momenta[0][name], momenta[1][name], rtol=1e-3, atol=1e-4)


def by_name(opt: Any) -> dict[str, torch.Tensor]:
    """Momenta of this rank."""
    entries, params = opt._engine.runtime.local_step.entries(), opt._engine.runtime.plan.params
    return {params[piece.param].name: entry["momentum_buffer"] for piece, entry in entries.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_with_a_grad_scaler(workers, ranks, dtype):
    workers(ranks).run(scales, dtype)


def clips() -> None:
    models = Given(), Given()
    norms = []
    for batched, model in zip((True, False), models, strict=True):
        opt = shard(model, batched, {"nesterov": False, "momentum": 0.0}, ShardConfig(bucket_mb=SMALL))
        assert opt._engine.runtime.local_step.takes_factor is batched
        for step in range(STEPS):
            model(step).backward()
            norms.append(opt.clip_grad_norm_(0.1).item())
            opt.step()
            opt.zero_grad()
    assert norms[:STEPS] == norms[STEPS:]
    assert_near(*models)


def test_clipping_is_done_by_the_step(workers):
    workers(2).run(clips)


def averages() -> None:
    models = Given(), Given()
    for batched, model in zip((True, False), models, strict=True):
        opt = shard(model, batched, {}, ShardConfig(bucket_mb=SMALL, ema=0.5))
        train(model, opt)
        with opt.ema():
            model.kept = [param.detach().clone() for param in model.parameters()]
    for ours, theirs in zip(models[0].kept, models[1].kept, strict=True):
        assert (ours - theirs).abs().max() <= STEPS * MOST * LR


def test_an_average_follows(workers):
    workers(2).run(averages)


class Lying(nn.Module):
    """One matrix, whose columns may lie one behind the other."""

    def __init__(self, by_columns: bool) -> None:
        super().__init__()
        values = orthogonal((8, 12), 3).bfloat16()
        self.matrix = nn.Parameter(values.T.contiguous().T if by_columns else values)

    def forward(self, step: int) -> torch.Tensor:
        return (self.matrix * gradient_of(1, (8, 12), step, 0).bfloat16()).sum().float()


def steps_it_as_it_lies(batched: bool, config: ShardConfig) -> None:
    models = Lying(False), Lying(True)
    for model in models:
        opt = shard(model, batched, {}, config)
        train(model, opt, range(2))
        opt.load_state_dict(copy.deepcopy(opt.state_dict()))
        train(model, opt, range(2, STEPS))
    assert models[1].matrix.stride() == (1, 8)
    assert_near(*models, most=STEPS * (MOST * LR + 2**-8))


@pytest.mark.parametrize("master", ["fp32", "stochastic"])
@pytest.mark.parametrize("batched", [False, True])
def test_a_matrix_by_columns_was_stepped_as_another_one_when_rounded_by_chance(workers, batched, master):
    workers(1).run(steps_it_as_it_lies, batched, ShardConfig(master=master))


# -- state -------------------------------------------------------------------------------------------------------------


def goes_on(first: bool, second: bool, folder: Path) -> None:
    """Stepped by batches or by the class, saved, and gone on with by the other; by state_dict and by a folder."""
    whole = Given()
    train(whole, shard(whole, False, {}, ShardConfig()), range(2 * STEPS))
    model = Given()
    opt = shard(model, first, {}, ShardConfig(bucket_mb=SMALL))
    train(model, opt)
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    shardstep.save(folder, model, opt)
    for by_folder in (False, True):
        other = Given()
        resumed = shard(other, second, {}, ShardConfig())
        train(other, resumed, range(1))  # has momenta already, which are replaced
        if by_folder:
            shardstep.load(folder, other, resumed)
        else:
            other.load_state_dict(weights)
            resumed.load_state_dict(saved)
        train(other, resumed, range(STEPS, 2 * STEPS))
        assert_near(other, whole, most=2 * STEPS * MOST * LR)


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_state_goes_between_batches_and_the_class(workers, tmp_path, ranks, first, second):
    workers(ranks).run(goes_on, first, second, tmp_path)


def has_the_plain_state() -> None:
    model, plain = Given(), Given()
    opt, theirs = shard(model, True, {}, ShardConfig()), optim.Muon(plain.parameters(), lr=LR)
    train(model, opt)
    train(plain, mock.Mock(step=theirs.step, zero_grad=theirs.zero_grad))
    ours = opt.state_dict()["state"]
    assert list(ours) == list(theirs.state_dict()["state"])
    for key, entry in theirs.state_dict()["state"].items():
        assert list(ours[key]) == list(entry)
        assert torch.equal(ours[key]["momentum_buffer"], entry["momentum_buffer"])
    theirs.load_state_dict({**theirs.state_dict(), "state": ours})


def test_state_is_that_of_the_plain_optimizer(workers):
    workers(1).run(has_the_plain_state)
