"""torch.amp.GradScaler with gradients in shards: the same weights and scales as with DDP and the plain optimizer."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch, loss_of
from shardstep import Layout, ShardConfig
from training import assert_ranks_equal, raised

CONFIGS = {
    "shard": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
    "whole": ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE),
    "one bucket": ShardConfig(),
}
CLASSES: dict[str, tuple[type[optim.Optimizer], dict[str, Any]]] = {
    "AdamW": (optim.AdamW, {}),
    "AdamW, fused": (optim.AdamW, {"fused": True}),
    "Adagrad, fused": (optim.Adagrad, {"fused": True}),
    "SGD, fused": (optim.SGD, {"fused": True}),
    "SGD": (optim.SGD, {"momentum": 0.9}),
}
STEPS, BAD = 6, {2: float("inf"), 4: float("nan")}  # steps in which one rank has that in its gradient


def a_scaler() -> GradScaler:
    return GradScaler("cpu", init_scale=1024.0, growth_interval=1)


def loss_in(model: nn.Module, step: int, *, bad_rank: int, autocast: bool) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16) if autocast else nullcontext():
        loss = loss_of(model, batch(step))
    return loss * BAD[step] if step in BAD and dist.get_rank() == bad_rank else loss


def trains_like_ddp(kind: str, config: str, unscales: bool, autocast: bool = False) -> None:
    chosen, options = CLASSES[kind]
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain, theirs = chosen(ddp.parameters(), lr=0.05, **options), a_scaler()
    opt, ours = shardstep.shard(model, chosen, lr=0.05, config=CONFIGS[config], **options), a_scaler()
    last = dist.get_world_size() - 1
    for step in range(STEPS):
        for net, optimizer, scaler in ((ddp, plain, theirs), (model, opt, ours)):
            scaler.scale(loss_in(net, step, bad_rank=last, autocast=autocast)).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert ours.get_scale() == theirs.get_scale(), f"step {step}"
        assert_ranks_equal([torch.tensor(ours.get_scale())])
    assert ours.get_scale() == 1024.0 * 2 ** (STEPS - len(BAD)) / 2 ** len(BAD), "the bad steps were skipped"
    opt.synchronize()
    exact = dist.get_world_size() <= 2
    for (name, one), other in zip(model.named_parameters(), ddp.module.parameters(), strict=True):
        same = torch.equal(one, other) if exact else torch.allclose(one, other, rtol=1e-5, atol=1e-5)
        assert same, f"{kind}, {config}: {name} differs by {(one - other).abs().max()}"
    assert_ranks_equal(list(model.parameters()))
    if config != "overlap":
        counts = {float(entry["step"]) for entry in opt.state.values() if "step" in entry}
        assert counts <= {STEPS - len(BAD)}, "a step that is skipped is not counted"


def by_way_of(way: str, body: Any, *args: Any) -> None:
    with by_collectives() if way == "collectives" else nullcontext():
        body(*args)


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step alone"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_step_with_an_inf_on_one_rank_is_skipped_on_all_as_under_ddp(workers, ranks, unscales, way):
    workers(ranks).run(every_class, way, unscales)


def every_class(way: str, unscales: bool) -> None:
    for kind in CLASSES:
        by_way_of(way, trains_like_ddp, kind, "shard", unscales)


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_scaler_with_other_ways_to_hold_gradients_and_weights(workers, config, way):
    workers(2).run(every_way_to_hold, config, way)


def every_way_to_hold(config: str, way: str) -> None:
    for kind in ("AdamW", "AdamW, fused"):
        for unscales in (True, False):
            by_way_of(way, trains_like_ddp, kind, config, unscales)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_scaler_under_autocast(workers, ranks):
    workers(ranks).run(trains_like_ddp, "AdamW", "shard", True, True)


# -- clipping ----------------------------------------------------------------------------------------------------------


def clips_what_is_unscaled(way: str) -> None:
    """The norm is that of the unscaled gradients, and 1e-8 of it off torch's: see docs/limits.md."""
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain, theirs = optim.SGD(ddp.parameters(), lr=0.05), a_scaler()
    with by_collectives() if way == "collectives" else nullcontext():
        opt, ours = shardstep.shard(model, optim.SGD, lr=0.05, config=CONFIGS["shard"]), a_scaler()
    for step in range(STEPS):
        theirs.scale(loss_in(ddp, step, bad_rank=0, autocast=False)).backward()
        theirs.unscale_(plain)
        norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        ours.scale(loss_in(model, step, bad_rank=0, autocast=False)).backward()
        ours.unscale_(opt)
        own = opt.clip_grad_norm_(0.1)
        assert torch.allclose(own, norm, rtol=1e-6, equal_nan=True) or not norm.isfinite()
        assert own.isfinite() == norm.isfinite()
        for optimizer, scaler in ((plain, theirs), (opt, ours)):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert ours.get_scale() == theirs.get_scale()
    for one, other in zip(model.parameters(), ddp.module.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_clipping_comes_after_unscaling(workers, ranks, way):
    workers(ranks).run(clips_what_is_unscaled, way)


# -- ranks that hold little -------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Fewer elements than ranks."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5], dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def holds_nothing(unscales: bool, bad_rank: int) -> int:
    model, scaler = Small(), a_scaler()
    opt = shardstep.shard(model, optim.SGD, lr=0.05)
    for step in range(STEPS):
        scaler.scale(loss_in(model, step, bad_rank=bad_rank, autocast=False)).backward()
        if unscales:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 4096.0
    assert model.weight.isfinite().all()
    assert_ranks_equal(list(model.parameters()))
    return sum(bucket.own.numel() for bucket in opt._engine.runtime.memory.buckets if bucket.placed)


@pytest.mark.parametrize("bad_rank", [0, 2])
@pytest.mark.parametrize("unscales", [True, False])
def test_a_rank_that_holds_nothing_is_told_of_an_inf(workers, unscales, bad_rank):
    held = workers(3).run(holds_nothing, unscales, bad_rank)
    assert 0 in held, "a rank without an element: its scaler would find no gradient at all"


def has_no_batch(way: str) -> None:
    """A rank that made no pass has no gradient of its own, but holds a part of the others'."""
    model, scaler = Net(), a_scaler()
    with by_collectives() if way == "collectives" else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=CONFIGS["shard"])
    for step in range(3):
        loss = scaler.scale(loss_of(model, batch(step)))
        if not (step == 1 and dist.get_rank() == 1):
            loss.backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    assert scaler.get_scale() == 8192.0
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("way", ["messages", "collectives"])
def test_a_rank_without_a_batch_unscales_its_part(workers, way):
    workers(2).run(has_no_batch, way)


# -- what is refused, and what goes on --------------------------------------------------------------------------------


def unscales_alone(config: str, way: str) -> None:
    model, scaler = Net(), a_scaler()
    with by_collectives() if way == "collectives" else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=CONFIGS[config])
    scaler.scale(loss_of(model, batch(0))).backward()
    odd = dist.get_rank() == 1
    text = raised(lambda: scaler.step(opt) if odd else opt.step())[1]
    assert "ranks [0] call step(); ranks [1] unscale gradients with a GradScaler" in text


@pytest.mark.parametrize("way", ["messages", "collectives"])
@pytest.mark.parametrize("config", ["shard", "keep"])
def test_a_rank_that_unscales_alone_makes_all_raise(workers, config, way):
    workers(2).run(unscales_alone, config, way)


def has_half_precision() -> None:
    model, scaler = nn.Linear(7, 5).half(), a_scaler()
    opt = shardstep.shard(model, optim.SGD, lr=0.05, config=ShardConfig(master="none"))
    scaler.scale(model(batch(0).half()).float().square().mean()).backward()
    assert raised(lambda: scaler.unscale_(opt)) == ("ValueError", "Attempting to unscale FP16 gradients.")
    opt.zero_grad()
    model(batch(0).half()).float().square().mean().backward()
    opt.step()
    assert_ranks_equal(list(model.parameters()))


def test_gradients_in_float16_are_refused_as_by_torch(workers):
    workers(3).run(has_half_precision)


def uses_other_dtypes() -> None:
    """Of which the scaler's own kernel knows not all."""
    for dtype in (torch.bfloat16, torch.float64, torch.complex64):
        model, scaler = Small(dtype), a_scaler()
        opt = shardstep.shard(model, optim.SGD, lr=0.05)
        for step in range(2):
            loss = model(batch(step).to(dtype)).abs().float().mean()
            scaler.scale(loss * float("inf") if step and dist.get_rank() == 1 else loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
        assert scaler.get_scale() == 1024.0
        assert_ranks_equal([torch.view_as_real(p) if p.is_complex() else p for p in model.parameters()])


def test_dtypes_that_the_scalers_kernel_does_not_know(workers):
    workers(3).run(uses_other_dtypes)


def is_asked_for_by_another_optimizer() -> None:
    model, scaler = Net(), a_scaler()
    opt = shardstep.shard(model, optim.SGD, lr=0.05)
    other = optim.SGD(model.parameters(), lr=0.05)
    scaler.scale(loss_of(model, batch(0))).backward()
    assert "_unscale_grads_ reads it" in raised(lambda: scaler.unscale_(other))[1]
    scaler.unscale_(opt)
    assert raised(lambda: scaler.unscale_(opt))[0] == "RuntimeError", "torch's own: once for a step"
    scaler.step(opt)


def test_gradients_in_shards_are_unscaled_for_their_own_optimizer_only(workers):
    workers(2).run(is_asked_for_by_another_optimizer)


def finds_no_gradients() -> None:
    model, scaler = Net(), a_scaler()
    opt = shardstep.shard(model, optim.SGD, lr=0.05)
    scaler.scale(torch.ones(1))
    assert "No inf checks were recorded" in raised(lambda: scaler.step(opt))[1]


def test_without_any_gradient_the_scaler_says_so_as_with_torch(workers):
    workers(2).run(finds_no_gradients)


def skips_the_first_step() -> None:
    """Large scales overflow in the first steps: that is how a scaler finds the right one."""
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9}
    model = Net()
    twin = copy.deepcopy(model)
    opt = shardstep.shard(model, optim.SGD, fused=True, **options)
    plain, scaler = optim.SGD(twin.parameters(), **options), a_scaler()
    for step in range(3):
        bad = torch.full((), float("inf")) if step == 0 else 1.0
        scaler.scale(loss_of(model, batch(step)) * bad).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if step:
            loss_of(twin, batch(step)).backward()
            for param in twin.parameters():
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            plain.step()
            plain.zero_grad()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_first_step_that_is_skipped_leaves_no_garbage_in_the_momentum(workers):
    workers(2).run(skips_the_first_step)
