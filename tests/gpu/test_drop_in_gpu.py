"""The same promises with NCCL on a GPU: several ranks share one device, each as a host of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Muon

from shardstep import ZeroRedundancyOptimizer
from test_better_than_torch import FailsOnRankOne
from test_conformance import ROWS, twenty_steps
from training import (
    all_same,
    assert_same,
    assert_states_equal,
    batches,
    consolidated,
    copies,
    make_params,
    raised,
    set_gradients,
    small_model,
    twins,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]

CAPTURABLE = [
    (cls, {"capturable": True})
    for cls in (optim.Adadelta, optim.Adam, optim.AdamW, optim.Adamax, optim.ASGD, optim.NAdam, optim.RAdam,
                optim.RMSprop, optim.Rprop)
]  # fmt: skip


# torch has no fused Adagrad for CUDA.
ON_CUDA = [row for row in ROWS if row != (optim.Adagrad, {"fused": True})] + CAPTURABLE


def rows(chosen: list[tuple[type[optim.Optimizer], dict[str, Any]]], bucket_view: bool) -> list[str]:
    """One line per row that differs; a job for each row would spend its time on pipes."""
    failures = []
    for cls, options in chosen:
        try:
            twenty_steps(cls, options, bucket_view, device="cuda")
        except AssertionError as error:
            failures.append(f"{cls.__name__} {options}: {error}")
    return failures


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_twenty_steps_equal_the_plain_optimizer(workers, world_size, bucket_view):
    for failures in workers(world_size, "nccl").run(rows, ON_CUDA, bucket_view, timeout=110):
        assert failures == []


def with_ddp(bucket_view: bool) -> None:
    ours, theirs = (model.cuda() for model in copies(small_model(), 2))
    ddp_ours, ddp_theirs = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    zero = ZeroRedundancyOptimizer(
        ddp_ours.parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01, fused=True
    )
    plain = AdamW(ddp_theirs.parameters(), lr=0.01, fused=True)
    for batch in batches(6, rank=dist.get_rank()):
        for ddp, optimizer in ((ddp_ours, zero), (ddp_theirs, plain)):
            optimizer.zero_grad()
            ddp(batch.cuda()).square().mean().backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            optimizer.step()
    assert_same(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_trains_like_ddp_with_the_plain_optimizer(workers, world_size, bucket_view):
    workers(world_size, "nccl").run(with_ddp, bucket_view)


def fused_reload() -> None:
    ours = make_params(device="cuda")
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours, AdamW, lr=0.1, fused=True), AdamW(theirs, lr=0.1, fused=True)
    for step in range(4):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
        saved = consolidated(zero, to=1)
        assert_states_equal(saved, plain.state_dict())
        zero.load_state_dict(saved)
    assert_same(ours, theirs)
    assert all(entry["step"].is_cuda for entry in zero.state.values())


def test_14_fused_adamw_is_reloaded_with_its_step_counter_on_the_device(workers):
    workers(2, "nccl").run(fused_reload)


def device_memory_of_consolidation() -> tuple[int, int]:
    params = [nn.Parameter(torch.zeros(40_000_000, device="cuda")) for _ in range(dist.get_world_size())]
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    set_gradients(0, params)
    zero.step()
    zero.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    zero.consolidate_state_dict()
    return torch.cuda.max_memory_allocated() - before, 2 * params[0].nbytes


@pytest.mark.parametrize("world_size", [2, 4])
def test_consolidation_needs_one_chunk_of_device_memory(workers, world_size):
    for extra, state in workers(world_size, "nccl").run(device_memory_of_consolidation, timeout=100):
        assert extra <= 64 * 2**20 < state


def muon_and_a_bias() -> tuple[str, str]:
    params = [nn.Parameter(torch.ones(shape, device="cuda")) for shape in ((4, 4), (3, 3), (3,))]
    return raised(lambda: ZeroRedundancyOptimizer(params, Muon, lr=0.1))


def test_07_a_refused_parameter_raises_on_all_ranks(workers):
    kind, text = all_same(workers(3, "nccl").run(muon_and_a_bias, timeout=30))
    assert kind == "ValueError"
    assert "rank 2: Muon refuses param_groups[0]['params'][2]" in text


def failing_step() -> tuple[str, str]:
    params = make_params(device="cuda")
    zero = ZeroRedundancyOptimizer(params, FailsOnRankOne, lr=0.1)
    zero.param_groups[0]["explode"] = True
    set_gradients(0, params)
    error = raised(zero.step)
    zero.param_groups[0]["explode"] = False
    zero.step()
    return error


def test_07_a_failure_in_step_reaches_all_ranks_in_the_same_step(workers):
    kind, text = all_same(workers(3, "nccl").run(failing_step, timeout=30))
    assert kind == "RuntimeError"
    assert "step failed on rank 1: ZeroDivisionError: one over nothing" in text


def frozen_on_one_rank() -> tuple[str, str]:
    params = make_params(device="cuda")
    zero = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    if dist.get_rank() == 1:
        params[1].requires_grad_(False)
    set_gradients(0, params)
    return raised(zero.step)


def test_08_a_parameter_frozen_on_one_rank_only_raises_on_all_in_the_same_step(workers):
    kind, text = all_same(workers(3, "nccl").run(frozen_on_one_rank, timeout=30))
    assert kind == "RuntimeError"
    assert "step: the ranks do not agree. Rank 1: it has <param_groups[0]['params'][1]" in text


def freezing(bucket_view: bool) -> None:
    ours = make_params(device="cuda")
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    for step, frozen in enumerate([(), (0,), (0, 2), (2,), (0, 1, 2, 3, 4), ()]):
        for params in (ours, theirs):
            for index, param in enumerate(params):
                param.requires_grad_(index not in frozen)
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
        assert_same(ours, theirs)


@pytest.mark.parametrize("bucket_view", [False, True])
def test_parameters_may_be_frozen_and_unfrozen_between_steps(workers, bucket_view):
    workers(2, "nccl").run(freezing, bucket_view)


def several_devices(bucket_view: bool) -> None:
    on_cpu, on_gpu = make_params(((4, 3), (5,))), make_params(((3, 3), (2,)), device="cuda")
    ours = [on_gpu[0], on_cpu[0], on_gpu[1], on_cpu[1]]
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    assert zero._device_to_device_index == {torch.device("cuda:0"): 0, torch.device("cpu"): 1}
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    assert [param.device for param in ours] == [param.device for param in theirs]
    if bucket_view:
        assert [row[0].device.type for row in zero._buckets] == ["cuda", "cpu"]
    assert_states_equal(consolidated(zero), plain.state_dict())


@pytest.mark.parametrize("bucket_view", [False, True])
def test_parameters_on_several_devices(workers, bucket_view):
    workers(2, "cpu:gloo,cuda:nccl").run(several_devices, bucket_view)


def gloo_with_gpu_parameters(bucket_view: bool) -> None:
    ours = make_params(device="cuda")
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    assert_states_equal(consolidated(zero), plain.state_dict())


def test_gpu_parameters_over_gloo(workers):
    for bucket_view in (False, True):
        workers(2).run(gloo_with_gpu_parameters, bucket_view)
