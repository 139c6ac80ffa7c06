"""The kernels compiled: against torch's optimizers on a GPU, in a CUDA graph, and without a host that waits.

tests/stepping/test_kernel.py runs compiled too, where there is a GPU.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, optim

from shardstep.stepping.kernel import KernelPiece, KernelStep, Noise, Rule, is_available, round_to_bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and is_available(torch.device("cuda"))), reason="needs a CUDA device and Triton"
    ),
]

SIZES = (1, 1_024, 5_000, 1_000_003)
STEPS = 5


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).cuda()


def make_piece(values: Tensor, **changes: Any) -> KernelPiece:
    def zeros() -> Tensor:
        return torch.zeros_like(values, dtype=torch.float32)

    given = {"values": values, "step": torch.zeros((), device="cuda"), "first": zeros(), "second": zeros()}
    return KernelPiece(**{**given, **changes})


def options(**changes: Any) -> list[dict[str, Any]]:
    return [dict(optim.AdamW([torch.zeros(1)], **{"lr": 0.01, **changes}).param_groups[0])]


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode itself is a prototype: said whenever it is set
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("way", [{"foreach": False}, {"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_steps_like_torch(way):
    theirs = [normal(size, i).requires_grad_() for i, size in enumerate(SIZES)]
    pieces = [make_piece(param.detach().clone()) for param in theirs]
    plain = optim.AdamW(theirs, lr=0.01, weight_decay=0.1, **way)
    kernel = KernelStep(Rule.ADAM, pieces, plain.param_groups)
    for step in range(STEPS):
        for index, param in enumerate(theirs):
            param.grad = normal(param.numel(), 100 * step + index)
        kernel.step([param.grad for param in theirs])
        plain.step()
    for piece, param in zip(pieces, theirs, strict=True):
        # Each rounds the sum once in a step. What is added is about the rate; torch's fused and capturable kernels work
        # out the bias corrections in float32, from powers of beta that are off by a few units: 2^-20 of what is added.
        bound = STEPS * (2**-23 * param.detach().abs() + 2**-20 * 0.1)
        assert ((piece.values - param.detach()).abs() <= bound).all(), (piece.values - param).abs().max()
        torch.testing.assert_close(piece.second, plain.state[param]["exp_avg_sq"], rtol=1e-4, atol=1e-6)


def test_masters_round_to_the_nearest():
    master = normal(100_000, 0)
    piece = make_piece(master.bfloat16(), master=master)
    kernel = KernelStep(Rule.ADAM, [piece], options())
    for step in range(STEPS):
        kernel.step([normal(100_000, step).bfloat16()])
    assert torch.equal(piece.values, master.bfloat16())


def test_rounding_by_chance_is_the_same_as_on_the_cpu():
    values = normal(100_000, 0).bfloat16()
    shadow, piece = make_piece(values.clone(), master=values.float()), make_piece(values, param=3, start=77)
    groups, gradient = options(lr=1e-3), normal(100_000, 1).bfloat16()
    KernelStep(Rule.ADAM, [shadow], groups).step([gradient])
    KernelStep(Rule.ADAM, [piece], groups, seed=5).step([gradient])
    assert shadow.master is not None
    expected = round_to_bfloat16(shadow.master.cpu(), Noise(5, 1, 3), start=77)
    assert torch.equal(piece.values.cpu(), expected)
    assert not torch.equal(piece.values, shadow.values)


@pytest.mark.parametrize("kind", ["float32", "master", "by chance"])
def test_a_cuda_graph_replays_steps(kind):
    """With gradients that stay where they are, and a rate, a scale and a flag on the device that change."""

    def build() -> tuple[list[KernelPiece], KernelStep, list[Tensor], dict[str, Tensor]]:
        scalars = {
            "grad_scale": torch.full((), 4.0, device="cuda"),
            "clip": torch.full((), 0.5, device="cuda"),
            "found_inf": torch.zeros((), device="cuda"),
        }
        groups = [{**options()[0], "lr": torch.tensor(0.01, device="cuda")}]
        values = [normal(size, i) for i, size in enumerate(SIZES)]
        if kind == "float32":
            pieces = [make_piece(value) for value in values]
        else:
            masters = values if kind == "master" else [None] * len(values)
            pieces = [make_piece(v.bfloat16(), master=m) for v, m in zip(values, masters, strict=True)]
        kernel = KernelStep(Rule.ADAM, pieces, groups, seed=1 if kind == "by chance" else None)
        gradients = [torch.zeros_like(piece.values) for piece in pieces]
        return pieces, kernel, gradients, {**scalars, "lr": groups[0]["lr"]}

    def set_up(step: int, gradients: list[Tensor], scalars: dict[str, Tensor]) -> None:
        for index, gradient in enumerate(gradients):
            gradient.copy_(normal(gradient.numel(), 10 * step + index))
        scalars["lr"].fill_(0.01 / (step + 1))
        scalars["found_inf"].fill_(float(step == 2))

    def without_lr(scalars: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value for name, value in scalars.items() if name != "lr"}

    pieces, kernel, gradients, scalars = build()
    others, eager, their_gradients, their_scalars = build()
    set_up(0, gradients, scalars)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and sends addresses and options
        kernel.step(gradients, **without_lr(scalars))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.step(gradients, **without_lr(scalars))
    for step in range(STEPS):
        if step:
            set_up(step, gradients, scalars)
            graph.replay()
        set_up(step, their_gradients, their_scalars)
        eager.step(their_gradients, **without_lr(their_scalars))
    for one, other in zip(pieces, others, strict=True):
        assert one.step.item() == other.step.item() == STEPS - 1  # one was skipped
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.first, other.first)


def test_gradients_elsewhere_are_refused_in_a_capture():
    kernel = KernelStep(Rule.ADAM, [make_piece(normal(100, 0))], options())
    kept = normal(100, 1)  # or the next would get its memory
    kernel.step([kept])
    elsewhere = normal(100, 2)
    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        elsewhere += 1  # a graph of nothing would warn
        with pytest.raises(RuntimeError, match="while a CUDA graph is captured"):
            kernel.step([elsewhere])
    torch.cuda.synchronize()


def test_the_host_never_waits():
    groups = options()
    pieces = [make_piece(normal(size, i)) for i, size in enumerate(SIZES)]
    kernel = KernelStep(Rule.ADAM, pieces, groups)
    scale, found = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    gradients = [[normal(size, i) for i, size in enumerate(SIZES)] for _ in range(3)]
    kernel.step(gradients[0])
    with no_waiting():
        for chosen in (*gradients, [None, *gradients[0][1:]]):
            kernel.step(chosen, grad_scale=scale, found_inf=found)
            groups[0]["lr"] *= 0.5
    assert pieces[1].step.item() == 5
    assert pieces[0].step.item() == 4


def test_tables_that_change_faster_than_the_device_steps_arrive_in_order():
    """The device is busy while the host sends rates for twenty steps."""
    piece = make_piece(torch.zeros(4, device="cuda"), first=None, second=None)
    sgd = [{"lr": 1.0, "weight_decay": 0.0}]
    kernel = KernelStep(Rule.SGD, [piece], sgd)
    gradients = [torch.ones(4, device="cuda") for _ in range(20)]
    kernel.step([torch.zeros(4, device="cuda")])
    torch.cuda._sleep(200_000_000)
    for step, gradient in enumerate(gradients):
        sgd[0]["lr"] = float(2**step)
        kernel.step([gradient])
    assert piece.values.tolist() == [-float(2**20 - 1)] * 4
