"""Muon by batches on a GPU: against the class, without a host that waits, with few launches, and in a CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import optim

import shardstep
from given_matrices import (
    LR,
    MOST,
    OPTIONS,
    SHAPES,
    SMALL,
    STEPS,
    Given,
    assert_near,
    both_classes,
    gradient_of,
    orthogonal,
    rows_of,
    stepper_of,
)
from shardstep import ShardConfig
from shardstep.stepping.batched_muon import BatchedMuon
from shardstep.stepping.steppers import KernelStepper, Scaling
from test_kernel_gpu import no_waiting
from training import assert_ranks_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]


def in_one_buffer(shapes: list[tuple[int, int]]) -> list[torch.Tensor]:
    """Matrices that lie side by side, as in a bucket."""
    flat = torch.cat([orthogonal(shape, 50 + place).flatten() for place, shape in enumerate(shapes)]).cuda()
    parts = flat.split([rows * columns for rows, columns in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def given(shapes: list[tuple[int, int]], step: int) -> list[torch.Tensor]:
    return [gradient_of(place, shape, step, 0).cuda() for place, shape in enumerate(shapes)]


@pytest.mark.parametrize("shapes", [SHAPES, [(96, 32), (32, 96), (64, 64)] * 4], ids=["small", "aligned"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_steps_like_the_class(options, shapes):
    ours = in_one_buffer(shapes)
    theirs = [values.clone().requires_grad_() for values in ours]
    stepper, state, _ = stepper_of(rows_of(ours), **options)
    plain = optim.Muon(theirs, **{"lr": LR, **options})
    for step in range(STEPS):
        gradients = given(shapes, step)
        for param, gradient in zip(theirs, gradients, strict=True):
            param.grad = gradient
        stepper.step(0, [gradient.flatten() for gradient in gradients], None)
        plain.step()
    # match_rms_adamw multiplies the rate by less than 2 here, tall matrices of `original` by less than 2 as well.
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).abs().max() <= 2 * STEPS * MOST * LR
        momentum = state[one]["momentum_buffer"]
        torch.testing.assert_close(momentum, plain.state[other]["momentum_buffer"], rtol=1e-5, atol=1e-6)


def test_the_host_never_waits():
    tensors = in_one_buffer(SHAPES)
    stepper, _, groups = stepper_of(rows_of(tensors), lr=torch.tensor(LR, device="cuda"), weight_decay=0.1)
    factor, found, scale = (torch.full((), value, device="cuda") for value in (0.5, 0.0, 4.0))
    gradients = [gradient.flatten() for gradient in given(SHAPES, 0)]
    stepper.step(0, gradients, None)
    before = [tensor.clone() for tensor in tensors]
    with no_waiting():
        stepper.begin(groups)
        stepper.step(0, gradients, Scaling(found, scale), factor)
        stepper.step(0, [None, *gradients[1:]], None)
    assert all((tensor - old).abs().max() > LR / 100 for tensor, old in zip(tensors, before, strict=True))


def test_a_step_is_skipped_on_the_device():
    tensors = in_one_buffer(SHAPES)
    stepper, state, _ = stepper_of(rows_of(tensors))
    stepper.step(0, [gradient.flatten() for gradient in given(SHAPES, 0)], None)
    kept = [(tensor.clone(), state[tensor]["momentum_buffer"].clone()) for tensor in tensors]
    bad = [torch.full_like(tensor.flatten(), float("inf")) for tensor in tensors]
    stepper.step(0, bad, Scaling(torch.ones((), device="cuda"), torch.full((), 8.0, device="cuda")))
    for tensor, (values, momentum) in zip(tensors, kept, strict=True):
        assert torch.equal(tensor, values)
        assert torch.equal(state[tensor]["momentum_buffer"], momentum)


def kernels_of(call: Callable[[], object]) -> int:
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return len([event for event in profiler.events() if event.device_type is torch.autograd.DeviceType.CUDA])


def test_a_step_of_48_matrices_takes_few_launches():
    """Of four shapes, as in a GPT of twelve layers: 132, and what cuBLAS adds. The class makes a thousand."""
    shapes = [(96, 32), (32, 32), (128, 32), (32, 128)]
    in_order = [shape for shape in shapes for _ in range(12)]  # as the pieces of a bucket lie
    stepper, _, _ = stepper_of(rows_of(in_one_buffer(in_order)))
    buffer = torch.randn(sum(rows * columns for rows, columns in in_order), device="cuda")
    gradients = list(buffer.split([rows * columns for rows, columns in in_order]))
    assert kernels_of(lambda: stepper.step(0, gradients, None)) <= 200


def test_a_cuda_graph_replays_steps():
    """With a rate and a verdict on the device that change."""

    def build() -> tuple[list[torch.Tensor], BatchedMuon, list[torch.Tensor], torch.Tensor, Scaling]:
        lr, found = torch.tensor(LR, device="cuda"), torch.zeros((), device="cuda")
        tensors = in_one_buffer(SHAPES)
        stepper, _, _ = stepper_of(rows_of(tensors), lr=lr)
        return tensors, stepper, [torch.zeros_like(tensor.flatten()) for tensor in tensors], lr, Scaling(found, None)

    def set_up(step: int, gradients: list[torch.Tensor], lr: torch.Tensor, scaling: Scaling) -> None:
        for gradient, new in zip(gradients, given(SHAPES, step), strict=True):
            gradient.copy_(new.flatten())
        lr.fill_(LR / (step + 1))
        scaling.found_inf.fill_(float(step == 2))

    tensors, stepper, gradients, lr, scaling = build()
    others, eager, their_gradients, their_lr, their_scaling = build()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    set_up(0, gradients, lr, scaling)
    with torch.cuda.stream(stream):  # allocates momenta, and cuBLAS its workspace
        stepper.step(0, gradients, scaling)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stepper.step(0, gradients, scaling)
    for step in range(STEPS):
        if step:
            set_up(step, gradients, lr, scaling)
            graph.replay()
        set_up(step, their_gradients, their_lr, their_scaling)
        eager.step(0, their_gradients, their_scaling)
    torch.cuda.synchronize()
    for one, other in zip(tensors, others, strict=True):
        assert (one - other).abs().max() <= STEPS * MOST * LR


# -- in shard() --------------------------------------------------------------------------------------------------------


class OnGpu(Given):
    """The gradients that it is called with are on its device."""

    def forward(self, step: int, without: tuple[int, ...] = ()) -> torch.Tensor:
        assert not without
        total = sum(bias.float().square().sum() for bias in self.biases)
        for place, (param, shape) in enumerate(zip(self.matrices, SHAPES, strict=True)):
            gradient = gradient_of(place, shape, step, dist.get_rank()).to(param.device, param.dtype)
            total = total + (param * gradient).sum().float()
        return total


def trains_like_the_classes(config: ShardConfig, dtype: torch.dtype) -> list[str]:
    """Muon by batches and AdamW by the kernel, in one optimizer; against the same without either."""
    models = OnGpu(dtype, biases=True).cuda(), OnGpu(dtype, biases=True).cuda()
    kinds: list[str] = []
    for model, kernel in zip(models, ("auto", "torch"), strict=True):
        opt = shardstep.shard(model, groups=both_classes(), config=replace(config, kernel=kernel))
        kinds += [type(one).__name__ for one in opt._engine.runtime.local_step.steppers]
        for step in range(STEPS):
            model(step).backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
        opt.synchronize()
    assert_near(*models, most=2 * STEPS * MOST * LR + (STEPS * 2**-8 if dtype is torch.bfloat16 else 0.0))
    assert_ranks_equal(list(models[0].parameters()))
    return kinds


CONFIGS = {
    "default": (ShardConfig(), torch.float32),
    "small buckets": (ShardConfig(bucket_mb=SMALL), torch.float32),
    "overlap": (ShardConfig(bucket_mb=SMALL, gather="overlap"), torch.float32),
    "masters": (ShardConfig(bucket_mb=SMALL), torch.bfloat16),
    "by chance": (ShardConfig(bucket_mb=SMALL, master="stochastic"), torch.bfloat16),
}


@pytest.mark.parametrize(("config", "dtype"), CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_both_classes_in_one_optimizer(workers, ranks, config, dtype):
    for kinds in workers(ranks, backend="nccl").run(trains_like_the_classes, config, dtype, timeout=120):
        assert kinds == [BatchedMuon.__name__, KernelStepper.__name__]


def steps_without_waiting() -> None:
    model = OnGpu(biases=True).cuda()
    opt = shardstep.shard(model, groups=both_classes(), config=ShardConfig(bucket_mb=SMALL))
    gradients = [
        [gradient_of(place, shape, step, dist.get_rank()).cuda() for place, shape in enumerate(SHAPES)]
        for step in range(STEPS)
    ]

    def iterate(step: int) -> None:
        products = [(p * g).sum() for p, g in zip(model.matrices, gradients[step], strict=True)]
        loss = torch.stack([*products, *(bias.square().sum() for bias in model.biases)]).sum()
        loss.backward()
        opt.step()
        opt.zero_grad()

    for step in range(2):
        iterate(step)
    with no_waiting():
        for step in range(2, STEPS):
            for group in opt.param_groups:
                group["lr"] *= 0.9
            iterate(step)
    opt.synchronize()


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_host_waits_in_an_iteration(workers, ranks):
    workers(ranks, backend="nccl").run(steps_without_waiting, timeout=120)
