"""The kernels against torch's optimizers: on a GPU where there is one, else in Triton's interpreter, where there is
Triton.
"""

from __future__ import annotations

import ast
import copy
import os
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, optim

from repository import ROOT
from shardstep.stepping.kernel import (
    BlockShape,
    KernelPiece,
    KernelStep,
    Noise,
    Rule,
    is_available,
    round_to_bfloat16,
    rule_of,
    supports,
)

SOURCE = ROOT / "src" / "shardstep"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = (1, 5, 0, 256, 1_000)  # less than a block, a block, blocks and a rest
SHAPE = BlockShape(256, 4)
STEPS = 4
# The interpreter is numpy: the logarithm of a beta of 0, which the kernel takes, is minus infinity.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
STATE = {"first": ("exp_avg", "momentum_buffer"), "second": ("exp_avg_sq",), "largest": ("max_exp_avg_sq",)}


@pytest.fixture
def triton():
    """Not at the top: other tests of the process should not run in the interpreter."""
    pytest.importorskip("triton")
    if DEVICE.type == "cuda":
        yield
        return
    with mock.patch.dict(os.environ, TRITON_INTERPRET="1"):
        yield


def normal(numel: int, seed: int) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def make_piece(values: Tensor, group: int = 0, **changes: Any) -> KernelPiece:
    moments = {name: torch.zeros_like(values, dtype=torch.float32) for name in STATE}
    return KernelPiece(
        **{"values": values, "step": torch.zeros((), device=DEVICE), "group": group, **moments, **changes}
    )


def nearest(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Triton's interpreter, unlike its compiler, cuts off what bfloat16 does not have."""
    if DEVICE.type == "cpu" and dtype is torch.bfloat16:
        return (values.view(torch.int32) & ~0xFFFF).view(torch.float32).to(dtype)
    return values.to(dtype)


def option_groups(optimizer_class: Any, *differences: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """As an optimizer of that class has them."""
    groups = [{"params": [torch.zeros(1, device=DEVICE)], **difference} for difference in differences or ({},)]
    return [dict(group, params=[]) for group in optimizer_class(groups, **options).param_groups]


def assert_close(ours: Tensor, theirs: Tensor, moved: Tensor, steps: int = STEPS) -> None:
    """Each step rounds the sum once here and once there, and a few times on the way to what is added.

    `moved` is the longest way that an element went: what is added comes from moments, and where these cancel out its
    error is that of their parts.
    """
    bound = steps * 2**-23 * (theirs.abs() + 8 * moved.max())
    assert ((ours - theirs).abs() <= bound).all(), ((ours - theirs).abs() / bound).max()


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.AdamW, {}),
    "adamw betas": (optim.AdamW, {"betas": (0.3, 0.95), "eps": 1e-3, "weight_decay": 0.3}),
    "adamw beta1 = 0": (optim.AdamW, {"betas": (0.0, 0.9)}),
    "adamw amsgrad": (optim.AdamW, {"amsgrad": True}),
    "adamw maximize": (optim.AdamW, {"maximize": True, "weight_decay": 0.0}),
    "adam": (optim.Adam, {"weight_decay": 0.1}),
    "adam amsgrad": (optim.Adam, {"weight_decay": 0.1, "amsgrad": True, "maximize": True}),
    "adam decoupled": (optim.Adam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "sgd": (optim.SGD, {"weight_decay": 0.1}),
    "sgd momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd nesterov": (optim.SGD, {"momentum": 0.9, "nesterov": True, "maximize": True}),
}


@pytest.mark.parametrize(("optimizer_class", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("fused", [False, True])
def test_steps_like_torch(triton, optimizer_class, options, fused):
    """Two groups with rates of their own, one of which a scheduler changes; moments and counts too."""
    theirs = [normal(size, i).requires_grad_() for i, size in enumerate(SIZES)]
    ours = [param.detach().clone() for param in theirs]
    groups = [{"params": theirs[::2]}, {"params": theirs[1::2], "lr": 0.003, "weight_decay": 0.02}]
    plain = optimizer_class(groups, lr=0.01, fused=fused, foreach=False, **options)
    pieces = [make_piece(values, group=index % 2) for index, values in enumerate(ours)]
    kernel = KernelStep(rule_of(optimizer_class), pieces, plain.param_groups, shape=SHAPE)
    moved = [torch.zeros_like(values) for values in ours]
    for step in range(STEPS):
        before = [param.detach().clone() for param in theirs]
        for index, param in enumerate(theirs):
            param.grad = normal(param.numel(), 100 * step + index)
        kernel.step([param.grad for param in theirs])
        plain.step()
        for way, param, old in zip(moved, theirs, before, strict=True):
            way += (param.detach() - old).abs()
        plain.param_groups[0]["lr"] *= 0.7
    for piece, param, way in zip(pieces, theirs, moved, strict=True):
        if not param.numel():
            continue
        assert_close(piece.values, param.detach(), way)
        for name, keys in STATE.items():
            for key in keys:
                if isinstance(plain.state[param].get(key), Tensor):
                    torch.testing.assert_close(getattr(piece, name), plain.state[param][key], rtol=1e-5, atol=1e-6)
        assert piece.step.item() == STEPS


def lion(param: Tensor, gradient: Tensor, average: Tensor, group: dict[str, Any]) -> None:
    beta1, beta2 = group["betas"]
    way = average * beta1 + gradient * (1 - beta1)
    param.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * way.sign())
    average.mul_(beta2).add_(gradient * (1 - beta2))


def test_lion(triton):
    group = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.1}
    theirs, average = normal(1_000, 0), torch.zeros(1_000, device=DEVICE)
    piece = make_piece(theirs.clone(), second=None, largest=None)
    kernel = KernelStep(Rule.LION, [piece], [group], shape=SHAPE)
    for step in range(STEPS):
        gradient = normal(1_000, step + 1)
        gradient[:3] = 0
        kernel.step([gradient])
        lion(theirs, gradient, average, group)
    assert_close(piece.values, theirs, torch.full_like(theirs, STEPS * 0.01))
    torch.testing.assert_close(piece.first, average)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gradient_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_masters_are_stepped_in_float32_and_rounded_to_the_nearest(triton, dtype, gradient_dtype):
    master = normal(1_000, 0)
    theirs = master.clone().requires_grad_()
    plain = optim.AdamW([theirs], lr=0.01)
    piece = make_piece(master.to(dtype), master=master, gradient_dtype=gradient_dtype)
    kernel = KernelStep(Rule.ADAM, [piece], plain.param_groups, shape=SHAPE)
    for step in range(STEPS):
        gradient = normal(1_000, step + 1).to(gradient_dtype)
        theirs.grad = gradient.float()
        kernel.step([gradient])
        plain.step()
    assert_close(master, theirs.detach(), torch.full_like(master, STEPS * 0.01))
    assert torch.equal(piece.values, nearest(master, dtype))


@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16])
def test_without_a_master_half_precision_is_rounded_once_in_a_step(triton, moments):
    values = normal(1_000, 0).bfloat16()
    group = option_groups(optim.AdamW, lr=0.01)
    shadow = make_piece(values.clone(), master=values.float())
    state = {name: torch.zeros(1_000, dtype=moments, device=DEVICE) for name in STATE}
    piece = make_piece(values, **state)
    gradient = normal(1_000, 1).bfloat16()
    for one in (shadow, piece):
        KernelStep(Rule.ADAM, [one], group, shape=SHAPE).step([gradient])
    assert torch.equal(piece.values, shadow.values)
    assert torch.equal(piece.first, nearest(shadow.first, moments))
    assert torch.equal(piece.second, nearest(shadow.second, moments))


def stepped(piece: KernelPiece, gradient: Tensor, **scalars: Tensor) -> KernelPiece:
    piece = copy.deepcopy(piece)
    KernelStep(Rule.ADAM, [piece], option_groups(optim.AdamW, lr=0.1), shape=SHAPE).step([gradient], **scalars)
    return piece


def test_gradients_are_divided_by_the_scale_and_multiplied_by_the_clip_factor_and_left_alone(triton):
    piece, gradient = make_piece(normal(700, 0)), normal(700, 1)
    given = 1_024 * gradient
    scale, clip = torch.tensor(512.0, device=DEVICE), torch.tensor([0.5], device=DEVICE)
    one, other = stepped(piece, given, grad_scale=scale, clip=clip), stepped(piece, gradient)
    assert torch.equal(one.values, other.values)  # powers of two: exact
    assert torch.equal(one.first, other.first)
    assert torch.equal(given, 1_024 * gradient)


@pytest.mark.parametrize("found", [1.0, 2.0, float("nan"), float("inf")])
def test_nothing_changes_where_a_gradient_is_not_finite(triton, found):
    piece = make_piece(normal(700, 0))
    gradient = torch.full((700,), float("inf"), device=DEVICE)
    after = stepped(piece, gradient, found_inf=torch.tensor(found, device=DEVICE))
    assert after.step.item() == 0
    for (_, one), (_, other) in zip(piece.tensors(), after.tensors(), strict=True):
        assert torch.equal(one, other)


def test_momentum_begins_with_the_first_step_that_is_not_skipped(triton):
    groups = option_groups(optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    piece, gradient = make_piece(normal(10, 0)), normal(10, 1)
    kernel = KernelStep(Rule.SGD, [piece], groups)
    kernel.step([gradient], found_inf=torch.ones((), device=DEVICE))
    kernel.step([gradient])
    assert torch.equal(piece.first, gradient)


def test_a_piece_without_a_gradient_is_not_stepped(triton):
    pieces = [make_piece(normal(300, index)) for index in range(2)]
    before = [piece.values.clone() for piece in pieces]
    kernel = KernelStep(Rule.ADAM, pieces, option_groups(optim.AdamW), shape=SHAPE)
    kernel.step([None, normal(300, 2)])
    assert torch.equal(pieces[0].values, before[0])
    assert not torch.equal(pieces[1].values, before[1])
    assert [piece.step.item() for piece in pieces] == [0, 1]


def test_gradients_may_move_and_begin_anywhere(triton):
    """At an address that is no multiple of sixteen bytes, elements are read one by one."""
    pieces = [make_piece(normal(300, 0)) for _ in range(2)]
    kernels = [KernelStep(Rule.ADAM, [piece], option_groups(optim.AdamW), shape=SHAPE) for piece in pieces]
    buffers = []
    for step in range(STEPS):
        buffers.append(normal(300 + step, step))
        moved = buffers[-1][step:]
        kernels[0].step([moved])
        kernels[1].step([moved.clone()])
    assert torch.equal(pieces[0].values, pieces[1].values)


@pytest.mark.parametrize("place", ["cpu", DEVICE])
def test_a_learning_rate_may_be_a_tensor_that_is_changed_in_place(triton, place):
    lr = torch.tensor(0.5, device=place, dtype=torch.float64)
    groups = [option_groups(optim.AdamW, lr=0.5)[0] | {"lr": lr}, option_groups(optim.AdamW, lr=0.5)[0]]
    pieces = [make_piece(normal(20, 0), group=index) for index in range(2)]
    kernel = KernelStep(Rule.ADAM, pieces, groups, shape=SHAPE)
    for step in range(3):
        kernel.step([normal(20, step), normal(20, step)])
        lr.mul_(0.5)
        groups[1]["lr"] *= 0.5
    assert torch.equal(pieces[0].values, pieces[1].values)


def test_autograd_sees_that_values_were_written(triton):
    piece = make_piece(normal(10, 0))
    before = piece.values._version
    KernelStep(Rule.ADAM, [piece], option_groups(optim.AdamW)).step([normal(10, 1)])
    assert piece.values._version > before


# -- rounding by chance ------------------------------------------------------------------------------------------------


def stepped_by_chance(cuts: list[int], start: int, seed: int) -> Tensor:
    """A parameter of a thousand elements, in pieces that end at these; two steps."""
    values, groups = normal(1_000, 0).bfloat16(), option_groups(optim.AdamW, lr=1e-4)
    parts = values.tensor_split(cuts)
    places = [0, *cuts]
    pieces = [
        make_piece(part.clone(), param=17, start=start + place) for part, place in zip(parts, places, strict=True)
    ]
    kernel = KernelStep(Rule.ADAM, pieces, groups, seed=seed, shape=SHAPE)
    for step in range(2):
        kernel.step([part.clone() for part in normal(1_000, 1 + step).bfloat16().tensor_split(cuts)])
    return torch.cat([piece.values for piece in pieces])


@pytest.mark.parametrize("start", [0, (1 << 32) - 500])
@pytest.mark.parametrize("seed", [0, 12_345, (5 << 32) + 1])
def test_the_kernel_rounds_by_chance_as_torch_operations_do(triton, start, seed):
    values, groups = normal(1_000, 0).bfloat16(), option_groups(optim.AdamW, lr=1e-3)
    shadow = make_piece(values.clone(), master=values.float())
    piece = make_piece(values, param=9, start=start)
    kernel = KernelStep(Rule.ADAM, [piece], groups, seed=seed, shape=SHAPE)
    exact = KernelStep(Rule.ADAM, [shadow], groups, shape=SHAPE)
    for step in range(1, 4):
        gradient = normal(1_000, step).bfloat16()
        kernel.step([gradient])
        exact.step([gradient])
        expected = round_to_bfloat16(shadow.master, Noise(seed, step, 9), start)
        assert torch.equal(piece.values, expected)
        assert not torch.equal(piece.values, shadow.values)
        shadow.master.copy_(piece.values)


def test_rounding_by_chance_does_not_depend_on_pieces(triton):
    whole = stepped_by_chance([], 0, seed=3)
    assert torch.equal(whole, stepped_by_chance([8, 300, 301], 0, seed=3))
    assert not torch.equal(whole, stepped_by_chance([], 0, seed=4))


# -- what is refused ---------------------------------------------------------------------------------------------------


class Subclass(optim.AdamW):
    pass


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}, {"capturable": True}, {"amsgrad": True}])
def test_supports_torch_adam_with_any_way_to_run_it(options):
    for optimizer_class in (optim.AdamW, optim.Adam, partial(optim.AdamW, lr=0.1)):
        group = optim.AdamW([torch.zeros(1)]).param_groups[0] | options
        assert supports(optimizer_class, group) is None
    assert supports(optim.SGD, optim.SGD([torch.zeros(1)], lr=torch.tensor(0.1)).param_groups[0]) is None


@pytest.mark.parametrize(
    ("optimizer_class", "options", "words"),
    [
        (Subclass, {}, "Subclass is not one of"),
        (optim.Adagrad, {}, "Adagrad is not one of"),
        (optim.AdamW, {"differentiable": True}, "differentiable"),
        (optim.AdamW, {"betas": (torch.tensor(0.9), torch.tensor(0.9))}, "not betas"),
        (optim.AdamW, {"weight_decay": torch.tensor(0.9)}, "only lr may be a tensor"),
        (optim.AdamW, {"lr": torch.ones(2)}, "one element"),
        (partial(optim.AdamW, differentiable=True), {}, "differentiable"),
    ],
)
def test_says_what_it_does_not_support(optimizer_class, options, words):
    reason = supports(optimizer_class, options)
    assert reason is not None
    assert words in reason


def test_says_all_that_is_wrong_with_its_pieces():
    one = make_piece(normal(10, 0))
    two = make_piece(normal(10, 1), second=None, step=one.step)
    odd = make_piece(normal(10, 1).double(), group=3, first=torch.zeros(20, device=DEVICE)[::2])
    with pytest.raises(ValueError, match="piece 1: second is missing") as found:
        KernelStep(Rule.ADAM, [one, two, odd], option_groups(optim.AdamW))
    for words in (
        "piece 2: values is torch.float64",
        "piece 2: there is no group 3",
        "piece 2: first must be contiguous",
    ):
        assert words in str(found.value)
    assert "share a step count" in str(found.value)
    with pytest.raises(ValueError, match="no piece"):
        KernelStep(Rule.ADAM, [], [])
    with pytest.raises(ValueError, match="for bfloat16 values"):
        KernelStep(Rule.ADAM, [one], option_groups(optim.AdamW), seed=1)


def test_refuses_other_gradients_and_options_that_need_another_kernel(triton):
    groups = option_groups(optim.AdamW)
    kernel = KernelStep(Rule.ADAM, [make_piece(normal(10, 0))], groups)
    for gradient in (normal(11, 0), normal(10, 0).bfloat16(), normal(20, 0)[::2]):
        with pytest.raises(ValueError, match="the gradient of piece 0 must be contiguous, 10 elements"):
            kernel.step([gradient])
    with pytest.raises(ValueError, match="1 pieces, and 2 gradients"):
        kernel.step([normal(10, 0)] * 2)
    groups[0]["amsgrad"] = True
    groups[0]["lr"] = 0.5
    with pytest.raises(RuntimeError, match="make a new KernelStep"):
        kernel.step([normal(10, 0)])


def test_only_one_file_needs_triton():
    needy = set()
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            needy |= {path.name for name in names if name.split(".")[0] == "triton" or "device_code" in name}
    assert needy == {"device_code.py"}
    assert not is_available(torch.device("cpu"))
