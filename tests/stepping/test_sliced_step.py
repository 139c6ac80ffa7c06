"""Large parameters are stepped in slices: faster, and nobody can tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import optim

from fast_lane_training import assert_trains_like_ddp
from shardstep import ShardConfig, ZeroRedundancyOptimizer
from shardstep.optimizers import sliced_step
from shardstep.optimizers.sliced_step import ElementwiseGroups, SlicedStep
from test_conformance import ROWS
from training import assert_same, assert_states_equal, make_params, set_gradients, twins

IN_SLICES = [
    (cls, options)
    for cls, options in ROWS
    if cls not in (optim.Adafactor, optim.Muon) and not options.get("foreach") and not options.get("fused")
]
AS_THEY_ARE = [row for row in ROWS if row not in IN_SLICES]


@pytest.fixture(autouse=True)
def tiny_slices(monkeypatch):
    """Slices of 64 elements of float32, two to a block: a few rows of the matrices below."""
    monkeypatch.setattr(sliced_step, "SLICE_NBYTES", 256)
    monkeypatch.setattr(sliced_step, "LEAST_NBYTES", 1024)
    monkeypatch.setattr(sliced_step, "_SLICES_PER_BLOCK", 2)


@pytest.fixture
def sliced(monkeypatch) -> list[torch.Size]:
    """The shapes of the parameters that were stepped in slices, one entry per block."""
    seen: list[torch.Size] = []
    original = sliced_step._Block.step

    def watched(self, param, gradient, before):
        seen.append(param.shape)
        original(self, param, gradient, before)

    monkeypatch.setattr(sliced_step._Block, "step", watched)
    return seen


class Pair:
    """The plain optimizer and one that steps in slices, on equal parameters."""

    def __init__(self, cls: Any, options: dict[str, Any], shapes=((50, 16), (8, 7), (37, 11)), dtype=torch.float32):
        generator = torch.Generator().manual_seed(3)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        self.generator = generator
        self.plain_params = [value.clone().requires_grad_() for value in values]
        self.params = [value.clone().requires_grad_() for value in values]
        self.plain = cls(self.plain_params, **options)
        self.whole = cls(self.params, **options)

        def make(groups):
            return cls(groups, **options)

        self.step = SlicedStep(self.whole, make, ElementwiseGroups(make)).step

    def train(self, steps: int) -> None:
        for _ in range(steps):
            for plain, ours in zip(self.plain_params, self.params, strict=True):
                plain.grad = torch.randn(plain.shape, generator=self.generator).to(plain.dtype)
                ours.grad = plain.grad.clone()
            self.plain.step()
            self.step()

    def assert_equal(self) -> None:
        for plain, ours in zip(self.plain_params, self.params, strict=True):
            assert torch.equal(plain, ours)
        ours = self.whole.state_dict()
        ours["state"] = dict(sorted(ours["state"].items()))  # those in slices come last
        assert_states_equal(ours, self.plain.state_dict())


@pytest.mark.parametrize(("cls", "options"), IN_SLICES, ids=lambda value: getattr(value, "__name__", str(value)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_slices_give_the_bits_and_the_state_of_the_whole(sliced, cls, options, dtype):
    pair = Pair(cls, options, dtype=dtype)
    pair.train(6)
    pair.assert_equal()
    # Rows of 16 are cut at every fourth; of rows of 11 it takes 64 to end on a multiple of 64, and there are 37.
    assert set(sliced) == {torch.Size((50, 16))}


@pytest.mark.parametrize(("cls", "options"), AS_THEY_ARE, ids=lambda value: getattr(value, "__name__", str(value)))
def test_what_gives_other_bits_or_gains_nothing_is_stepped_whole(sliced, cls, options):
    pair = Pair(cls, options)
    pair.train(3)
    pair.assert_equal()
    assert not sliced


@pytest.mark.parametrize("change", ["bfloat16", "strided parameter", "strided gradient", "sparse gradient", "complex"])
def test_tensors_that_cannot_be_cut_are_stepped_whole(sliced, change):
    dtype = {"bfloat16": torch.bfloat16, "complex": torch.complex64}.get(change, torch.float32)
    params = [torch.ones(64, 48, dtype=dtype), torch.ones(64, 48, dtype=dtype)]
    if change == "strided parameter":
        params = [torch.ones(48, 64).t() for _ in params]
    for param in params:
        param.requires_grad_()
        param.grad = torch.ones(48, 64).t() if change == "strided gradient" else torch.ones(64, 48, dtype=dtype)
        if change == "sparse gradient":
            param.grad = torch.ones(64, 48).to_sparse()
    plain, whole = (optim.SGD([param], lr=0.1) for param in params)

    def make(groups):
        return optim.SGD(groups, lr=0.1)

    plain.step()
    SlicedStep(whole, make, ElementwiseGroups(make)).step()
    assert torch.equal(*params)
    assert not sliced


def test_a_state_loaded_between_steps_is_the_one_that_is_stepped():
    pair = Pair(optim.AdamW, {})
    pair.train(3)
    saved = copy.deepcopy(pair.plain.state_dict())  # load_state_dict takes the tensors themselves
    pair.train(2)
    for optimizer in (pair.plain, pair.whole):
        optimizer.load_state_dict(copy.deepcopy(saved))
    pair.train(2)
    pair.assert_equal()


def test_options_follow_a_scheduler_and_groups_keep_their_own(sliced):
    shapes = ((50, 16), (40, 16))
    pair = Pair(optim.AdamW, {}, shapes)
    for optimizer in (pair.plain, pair.whole):
        params = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = params[:1]
        optimizer.add_param_group({"params": params[1:], "lr": 0.5, "betas": (0.5, 0.6)})
    for rate in (0.1, 0.01):
        for optimizer in (pair.plain, pair.whole):
            optimizer.param_groups[0]["lr"] = rate
        pair.train(2)
    pair.assert_equal()
    assert set(sliced) == set(map(torch.Size, shapes))


class CountsOnItself(optim.Optimizer):
    """A counter on the instance, one in the group, and a list that it was built with."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})
        self.calls = 0
        self.built_with = [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.calls += 1
        for group in self.param_groups:
            group["count"] += 1
        for param in self.built_with:
            if param.grad is not None:
                param.sub_(param.grad, alpha=0.1 / (self.calls + self.param_groups[0]["count"]))


class ScalesByNorm(CountsOnItself):
    @torch.no_grad()
    def step(self, closure=None):
        for param in self.built_with:
            if param.grad is not None:
                param.sub_(param.grad / param.grad.norm())


class OneStepSizeForAll(CountsOnItself):
    @torch.no_grad()
    def step(self, closure=None):
        norm = sum(param.grad.norm() for param in self.built_with if param.grad is not None)
        for param in self.built_with:
            if param.grad is not None:
                param.sub_(param.grad / norm)


class KeepsLists(optim.Optimizer):
    """Momentum in a list, which no one who looks at tensors would find."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                (momentum,) = self.state[param].setdefault("buffers", [torch.zeros_like(param)])
                param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=0.1)


class DecaysAll(CountsOnItself):
    """Also what has no gradient."""

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.built_with:
            param.mul_(0.9)


class AdamWOfSomeone(optim.AdamW):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for param in self.param_groups[0]["params"]:
            param.mul_(0.99)


@pytest.mark.parametrize(
    "cls", [CountsOnItself, ScalesByNorm, OneStepSizeForAll, KeepsLists, DecaysAll, AdamWOfSomeone]
)
def test_a_class_written_by_a_user_is_stepped_whole(sliced, cls):
    """Whatever it counts, wherever it keeps it, and whichever parameters it touches."""
    pair = Pair(cls, {})
    for _ in range(3):
        pair.train(1)
        for plain, ours in zip(pair.plain_params, pair.params, strict=True):
            assert torch.equal(plain, ours)
    assert not sliced


def test_hooks_on_a_step_see_all_of_it(sliced):
    pair = Pair(optim.SGD, {"lr": 1.0})
    pair.train(1)
    assert sliced
    sliced.clear()
    before = [param.detach().clone() for param in pair.params]
    seen = []
    pair.whole.register_step_pre_hook(lambda *_: seen.append([param.grad is not None for param in pair.params]))
    pair.whole.register_step_post_hook(
        lambda *_: seen.append([not torch.equal(p, b) for p, b in zip(pair.params, before, strict=True)])
    )
    pair.train(1)
    assert seen == [[True] * 3, [True] * 3]
    assert not sliced


def test_an_option_switched_later_counts(sliced):
    pair = Pair(optim.AdamW, {})
    pair.train(1)
    assert sliced
    sliced.clear()
    for optimizer in (pair.plain, pair.whole):
        optimizer.param_groups[0]["foreach"] = True
    pair.train(1)
    pair.assert_equal()
    assert not sliced


def test_nothing_is_kept_alive_between_steps_and_gradients_stay(sliced):
    pair = Pair(optim.AdamW, {})
    pair.train(2)
    assert sliced
    gradient = pair.params[0].grad
    assert gradient is not None
    held = gradient.untyped_storage()._weak_ref()
    del gradient
    pair.params[0].grad = None
    assert torch.UntypedStorage._expired(held)


def test_a_backward_pass_through_stepped_parameters_is_refused_as_ever(sliced):
    pair = Pair(optim.AdamW, {})
    pair.train(1)
    loss = pair.params[0].square().sum()
    pair.train(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_gradients_are_back_when_the_step_fails(sliced):
    pair = Pair(optim.AdamW, {})
    pair.train(1)
    pair.params[1].grad = None
    pair.whole.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        pair.step()
    assert pair.params[0].grad is not None


# -- on several ranks, with parameters that are large indeed -----------------------------------------------------------

LARGE = 1500  # a square of this size is 9 MB, and half of it is still cut


class Wide(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.wide = torch.nn.Linear(LARGE, LARGE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(x)


def blocks_stepped(train: Any, *arguments: Any, **options: Any) -> int:
    """How many blocks of slices this rank stepped in a training that must equal that of the plain optimizer."""
    count = 0
    original = sliced_step._Block.step

    def watched(self, param, gradient, before):
        nonlocal count
        count += 1
        original(self, param, gradient, before)

    sliced_step._Block.step = watched  # type: ignore[method-assign]
    try:
        train(*arguments, **options)
    finally:
        sliced_step._Block.step = original  # type: ignore[method-assign]
    return count


def drop_in(bucket_view: bool) -> int:
    return blocks_stepped(train_drop_in, bucket_view)


def train_drop_in(bucket_view: bool) -> None:
    ours = make_params(((LARGE, LARGE), (3, 5), (LARGE * LARGE,)))
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, optim.AdamW, parameters_as_bucket_view=bucket_view)
    plain = optim.AdamW(theirs)
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        assert_states_equal(zero.state_dict(), plain.state_dict())


def fast_lane() -> int:
    return blocks_stepped(assert_trains_like_ddp, Wide, config=ShardConfig(), steps=3, width=LARGE)


@pytest.mark.parametrize("bucket_view", [False, True])
def test_the_drop_in_steps_large_parameters_in_slices(workers, bucket_view):
    assert all(workers(2).run(drop_in, bucket_view))


def test_the_fast_lane_steps_large_pieces_in_slices(workers):
    assert all(workers(2).run(fast_lane))


def test_a_first_step_that_fails_half_way_leaves_no_garbage_and_holds_nothing(monkeypatch):
    pair = Pair(optim.AdamW, {}, shapes=((50, 16),))
    pair.params[0].grad = torch.ones(50, 16)
    original, calls = sliced_step._Block.step, []

    def failing(self, param, gradient, before):
        calls.append(self)
        if len(calls) == 3:
            raise ArithmeticError
        original(self, param, gradient, before)

    monkeypatch.setattr(sliced_step._Block, "step", failing)

    def unwritten(self, shape):
        """What nobody has written is often zero by chance."""
        return self.new_full((shape,) if isinstance(shape, int) else shape, torch.nan)

    monkeypatch.setattr(torch.Tensor, "new_empty", unwritten)
    with pytest.raises(ArithmeticError):
        pair.step()
    moment = pair.whole.state[pair.params[0]]["exp_avg"]
    assert moment.isfinite().all()
    assert moment[0].count_nonzero() == 16
    assert moment[-1].count_nonzero() == 0
    assert all(tensor.grad is None for tensor in calls[-1]._tensors)
