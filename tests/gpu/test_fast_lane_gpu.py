"""shardstep.shard with NCCL: several ranks share one GPU, each as a host of its own."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from fast_lane_training import SMALL_BUCKETS, Net, batch, loss_of
from shardstep import Layout, ShardConfig, ZeroRedundancyOptimizer
from shardstep.stepping import two_streams
from test_call_order import goes_apart
from training import assert_ranks_equal, raised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor], context: str) -> None:
    """Kernels may take an unaligned gradient element by element, and round otherwise than for an aligned one."""
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-5), f"{context}: {(one - other).abs().max()}"


def trains_like_ddp(options: dict[str, Any], config: ShardConfig) -> None:
    model = Net().cuda()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.AdamW(ddp.parameters(), lr=0.05, **options)
    opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05, **options)
    for step in range(5):
        x = batch(step).cuda()
        loss_of(ddp, x).backward()
        loss_of(model, x).backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
        opt.clip_grad_norm_(0.5)
        for optimizer in (plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    opt.synchronize()
    close(list(model.parameters()), list(ddp.parameters()), f"{options} {config}")
    assert_ranks_equal(list(model.parameters()))


CONFIGS = {
    "default": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "whole": ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
    "one bucket": ShardConfig(),
    "ordered": ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True),
    "without the kernel": ShardConfig(bucket_mb=SMALL_BUCKETS, kernel="torch"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("options", [{}, {"fused": True}, {"capturable": True}], ids=["foreach", "fused", "capturable"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_trains_like_ddp(workers, ranks, options, config):
    workers(ranks, backend="nccl").run(trains_like_ddp, options, config, timeout=120)


def replans(options: dict[str, Any]) -> None:
    """Freeze and unfreeze: state moves between ranks, from and to the device."""
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 5)).cuda()
    opt = shardstep.shard(model, optim.AdamW, config=ShardConfig(bucket_mb=SMALL_BUCKETS), lr=0.05, **options)
    twin = copy.deepcopy(model)
    plain = optim.AdamW(twin.parameters(), lr=0.05, **options)
    for step in range(6):
        for net in (model, twin):
            net[0].requires_grad_(step not in (2, 3))
        x = batch(step).cuda()
        loss_of(model, x).backward()
        loss_of(twin, x).backward()
        for param in twin.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        for optimizer in (opt, plain):
            optimizer.step()
            optimizer.zero_grad()
    close(list(model.parameters()), list(twin.parameters()), str(options))
    saved = copy.deepcopy(opt.state_dict())
    opt.load_state_dict(saved)
    loss_of(model, batch(9).cuda()).backward()
    opt.step()
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_freezing_and_loading(workers, ranks, options):
    workers(ranks, backend="nccl").run(replans, options, timeout=120)


def holds_a_share_of_the_gradients() -> tuple[int, int]:
    """Device memory that a backward pass leaves behind, and that of all gradients."""

    def in_use() -> int:  # as it was asked for: the allocator gives a block of up to a megabyte more than that
        torch.cuda.synchronize()
        return int(torch.cuda.memory_stats()["requested_bytes.all.current"])

    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(bucket_mb=3))
    x = batch(1, 512).cuda()
    for _ in range(2):
        loss_of(model, x).backward()
        opt.step()
        opt.zero_grad()
    before = in_use()
    loss_of(model, x).backward()
    opt.clip_grad_norm_(1.0)
    left = in_use() - before
    opt.zero_grad()
    assert in_use() - before < 100_000, "zero_grad gives it back"
    return left, sum(param.nbytes for param in model.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_keeps_its_share_of_the_gradients(workers, ranks):
    for left, gradients in workers(ranks, backend="nccl").run(holds_a_share_of_the_gradients, timeout=120):
        assert left <= 1.05 * gradients / ranks, f"{left / gradients:.2f} of the gradients on one of {ranks} ranks"


def trains_without_elements() -> None:
    """Buckets of which some ranks, or all, hold nothing."""
    model = nn.Linear(7, 3).cuda()
    model.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64, device="cuda"))
    model.scalar = nn.Parameter(torch.tensor(0.5, dtype=torch.float64, device="cuda"))
    for layout in (Layout.FLAT, Layout.WHOLE):
        opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(layout=layout))
        for step in range(2):
            loss = loss_of(model, batch(step).cuda()) * model.scalar.float() + model.nothing.sum().float()
            loss.backward()
            opt.step()
            opt.zero_grad()
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("ranks", [2, 4])
def test_buckets_of_which_ranks_hold_nothing(workers, ranks):
    workers(ranks, backend="nccl").run(trains_without_elements, timeout=120)


def cuda_net() -> nn.Module:
    return Net().cuda()


@pytest.mark.parametrize("config", ["wait", "overlap", "keep"])
@pytest.mark.parametrize("odd", ["no step", "no two steps", "one pass more", "clip", "norms"])
def test_ranks_that_go_apart_all_raise(workers, odd, config):
    if (odd, config) != ("clip", "keep"):  # there it is this rank's own affair
        workers(3, backend="nccl").run(goes_apart, odd, config, cuda_net, timeout=60)


class Layers(nn.Module):
    """Equal layers, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(4)])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        for layer in used:
            x = torch.tanh(self.layers[layer](x))
        return x


def trains_two_in_one_backward() -> None:
    """Ranks skip different layers, so the buckets of two models fill in different orders; the buckets are equal."""
    pairs = [(Layers().cuda(), Layers().cuda()) for _ in range(2)]
    config = ShardConfig(bucket_mb=64 * 65 * 4 / 1e6)  # one layer
    opts = [shardstep.shard(model, optim.SGD, lr=0.1, config=config) for model in pairs[0]]
    plain = [DistributedDataParallel(model, find_unused_parameters=True) for model in pairs[1]]
    others = [optim.SGD(model.parameters(), lr=0.1) for model in plain]
    for step in range(6):
        first, second = ((0, 1, 2, 3), (3,)) if (step + dist.get_rank()) % 2 else ((1,), (0, 1, 2, 3))
        x = batch(step, 64).cuda()
        one, other = pairs[0]
        (one(x, first).square().mean() + 3 * other(x + 1, second).square().mean()).backward()
        for model, used, scale, shift in ((plain[0], first, 1, 0), (plain[1], second, 3, 1)):
            (scale * model(x + shift, used).square().mean()).backward()  # DDP takes one at a time
        for optimizer in (*opts, *others):
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(pairs[0], pairs[1], strict=True):
        close(list(ours.parameters()), list(theirs.parameters()), "two models in one backward")
        assert_ranks_equal(list(ours.parameters()))


def test_two_sharded_models_in_one_backward_on_which_ranks_skip_different_layers(workers):
    workers(2, backend="nccl").run(trains_two_in_one_backward, timeout=60)


def scales_like_ddp(options: dict[str, Any], config: ShardConfig, unscales: bool) -> None:
    """An inf on the last rank in one step, and nan in another: no rank steps, and all scales go down.

    Forward is in fp16, but not where the kernel steps like torch's fused one: these differ in the last bit of fp32,
    and weights that differ in it round to other numbers in fp16, a thousand times as far apart.
    """
    half = "fused" not in options or config.kernel == "torch"
    model = Net().cuda()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.AdamW(ddp.parameters(), lr=0.05, **options)
    opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05, **options)
    theirs, ours = (torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=1) for _ in range(2))
    bad, last = {2: float("inf"), 4: float("nan")}, dist.get_world_size() - 1
    for step in range(6):
        x = batch(step).cuda()
        for net, optimizer, scaler in ((ddp, plain, theirs), (model, opt, ours)):
            with torch.autocast("cuda", dtype=torch.float16, enabled=half):
                loss = loss_of(net, x)
            scaler.scale(loss * bad[step] if step in bad and dist.get_rank() == last else loss).backward()
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert ours.get_scale() == theirs.get_scale(), f"step {step}"
    opt.synchronize()
    assert ours.get_scale() == 4096.0
    close(list(model.parameters()), list(ddp.parameters()), f"{options} {config}")
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("config", ["default", "overlap", "keep", "without the kernel"])
@pytest.mark.parametrize("options", [{}, {"fused": True}], ids=["foreach", "fused"])
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step alone"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_scaler_skips_a_step_on_all_ranks_as_under_ddp(workers, ranks, unscales, options, config):
    workers(ranks, backend="nccl").run(scales_like_ddp, options, CONFIGS[config], unscales, timeout=120)


def never_waits_with_a_scaler(config: ShardConfig, unscales: bool) -> None:
    """Not even where a step is skipped: the fused kernels find that out on the device."""
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01, fused=True, config=config)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    x = torch.randn(8, 256, device="cuda")
    bad = torch.full((), float("inf") if dist.get_rank() == 1 else 1.0, device="cuda")

    def iterate(factor: torch.Tensor | float) -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).square().mean()
        scaler.scale(loss * factor).backward()
        if unscales:
            scaler.unscale_(opt)
            opt.clip_grad_norm_(1.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    for _ in range(3):
        iterate(1.0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for factor in (1.0, bad, 1.0):
            iterate(factor)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert scaler.get_scale() == 512.0
    assert_ranks_equal(list(model.parameters()))
    assert {float(entry["step"]) for entry in opt.state.values()} == {5.0}, "a step that is skipped is not counted"


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("unscales", [True, False], ids=["unscale_", "step alone"])
@pytest.mark.parametrize("config", ["one bucket", "overlap", "keep"])
def test_no_host_waits_for_the_device_with_a_scaler(workers, config, unscales):
    workers(2, backend="nccl").run(never_waits_with_a_scaler, CONFIGS[config], unscales, timeout=60)


def never_waits_for_the_device(kind: str) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Linear(256, 256)).cuda()
    x = torch.randn(8, 256, device="cuda")
    if kind.startswith("drop-in"):
        trained: nn.Module = DistributedDataParallel(model)
        opt: Any = ZeroRedundancyOptimizer(
            trained.parameters(), optim.AdamW, parameters_as_bucket_view="views" in kind, lr=0.01, fused=True
        )
    else:
        trained = model
        config = ShardConfig(bucket_mb=0.1, gather="overlap" if kind == "overlap" else "wait")
        opt = shardstep.shard(model, optim.AdamW, lr=0.01, fused=True, config=config)

    def iterate() -> None:
        trained(x).square().mean().backward()
        if not kind.startswith("drop-in"):
            norm = opt.clip_grad_norm_(1.0)
            assert norm.is_cuda
        opt.step()
        opt.zero_grad()

    for _ in range(3):
        iterate()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            iterate()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("kind", ["wait", "overlap", "drop-in", "drop-in, views"])
def test_no_host_waits_for_the_device_in_an_iteration(workers, kind):
    workers(2, backend="nccl").run(never_waits_for_the_device, kind, timeout=60)


def keeps_its_memory() -> tuple[int, int]:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).cuda()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01, fused=True, config=ShardConfig(bucket_mb=2))
    reserved = []
    for step in range(220):
        loss_of(model, batch(step, 512)).backward()
        opt.step()
        opt.zero_grad()
        if step in (19, 219):
            reserved.append(torch.cuda.memory_reserved())
    return reserved[0], reserved[1]


def test_reserved_memory_does_not_grow(workers):
    for early, late in workers(2, backend="nccl").run(keeps_its_memory, timeout=60):
        assert late == early


def moves_in_bucket_by_bucket() -> tuple[int, int, int]:
    """Memory that shard() takes beyond the model, at its peak; the model; the largest bucket."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(16)]).cuda()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    opt = shardstep.shard(model, optim.SGD, lr=0.01, config=ShardConfig(bucket_mb=5))
    peak = torch.cuda.max_memory_allocated() - before
    return peak, sum(param.nbytes for param in model.parameters()), max(opt.bucket_nbytes())


def test_shard_needs_at_most_two_buckets_beyond_the_model(workers):
    for peak, model, bucket in workers(2, backend="nccl").run(moves_in_bucket_by_bucket, timeout=60):
        assert peak <= 2 * bucket, f"{peak} beyond a model of {model}"


def steps_on_two_streams(layout: Layout) -> None:
    """Against the plain optimizer, with a first step that makes the state and gradients that are freed at once."""
    models = [nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)]).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    config = ShardConfig(bucket_mb=9, layout=layout, kernel="torch")  # ours needs one stream
    opt = shardstep.shard(models[0], optim.AdamW, lr=1e-3, fused=True, config=config)
    streams, groups = opt._engine.runtime.streams, opt._engine.runtime.step_order
    assert (streams is None) == (sum(bucket.own.nbytes for bucket in opt._engine.runtime.memory.buckets) < 10e6)
    assert len(groups) > 1 or streams is None
    plain = optim.AdamW(models[1].parameters(), lr=1e-3, fused=True)
    for step in range(6):
        for model, optimizer in zip(models, (opt, plain), strict=True):
            loss_of(model, batch(step, 1024)).backward()
            if optimizer is plain:
                for param in model.parameters():
                    dist.all_reduce(param.grad, op=dist.ReduceOp.AVG)
            optimizer.step()
            optimizer.zero_grad()
            torch.full((4_000_000,), float("nan"), device="cuda")  # in what was just given back
    close(list(models[0].parameters()), list(models[1].parameters()), "two streams")


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE])
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_of_buckets_are_stepped_on_two_streams(workers, ranks, layout):
    workers(ranks, backend="nccl").run(with_small_limit, steps_on_two_streams, layout, timeout=60)


def with_small_limit(body: Any, *args: Any) -> None:
    with mock.patch.object(two_streams, "LEAST_NBYTES", 10e6):
        body(*args)


def fails_on_one_rank() -> str:
    model = cuda_net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        if step and dist.get_rank() == 1:
            opt._engine.runtime.local_step.step = broken
        if step:
            return raised(opt.step)[1]
        opt.step()
        opt.zero_grad()
    return ""


def broken(*_: Any) -> None:
    raise ArithmeticError("this share cannot be stepped")


def test_a_step_that_fails_on_one_rank_raises_on_all(workers):
    (text,) = set(workers(3, backend="nccl").run(fails_on_one_rank, timeout=60))
    assert "step failed on rank 1: ArithmeticError: this share cannot be stepped" in text
