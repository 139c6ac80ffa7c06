"""Faults that reviews of the fast lane found, each with the case that showed it."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import (
    SMALL_BUCKETS,
    Breaks,
    Matrices,
    Net,
    Normed,
    NormScaled,
    assert_trains_like_ddp,
    batch,
    loss_of,
)
from shardstep import Layout, ShardConfig
from training import assert_ranks_equal, raised


def shards_twice() -> None:
    model, twin = Net(), Net()
    first = shardstep.shard(model, optim.SGD, lr=0.1)
    second = shardstep.shard(model, optim.SGD, lr=0.1)
    other = shardstep.shard(twin, optim.SGD, lr=0.1)
    for net, opt in ((model, second), (twin, other)):
        loss_of(net, batch(0)).backward()
        opt.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert "closed" in raised(first.step)[1]


def test_a_second_shard_of_a_model_takes_over(workers):
    workers(2).run(shards_twice)


class LateBreak(nn.Module):
    """Breaks in backward after the output's gradient and before any parameter's."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Breaks.apply(self.layer(x)) * 2


def breaks_after_the_output() -> None:
    model = LateBreak()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    Breaks.armed = dist.get_rank() == 1
    loss = loss_of(model, batch(0))
    if Breaks.armed:
        assert raised(loss.backward)[0] == "ArithmeticError"
    else:
        loss.backward()
    Breaks.armed = False
    assert "failed on ranks [1]" in raised(opt.step)[1]
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    opt.step()


def test_a_backward_that_raises_before_the_first_gradient_hangs_nobody(workers):
    workers(2).run(breaks_after_the_output)


class Attending(nn.Module):
    """nn.MultiheadAttention uses the weights of its out_proj without calling it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(12)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x[None], x[None], x[None])[0]


def attends() -> None:
    assert_trains_like_ddp(Attending, config=ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"), width=8)


def test_overlap_waits_for_weights_that_are_used_without_a_call(workers):
    workers(2).run(attends)


class GlobalNorm(NormScaled):
    """Couples all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for group in self.param_groups for param in group["params"] if param.grad is not None]
        norm = torch.stack([param.grad.norm() for param in params]).norm() if params else 1.0
        for param in params:
            param.sub_(param.grad / norm, alpha=self.defaults["lr"])


def probes_what_does_not_move_yet() -> None:
    assert shardstep.shard(Matrices(), optim.Adafactor, lr=0.0)._engine.runtime.recipe.layouts[0] is Layout.WHOLE
    assert shardstep.shard(Matrices(), NormScaled, lr=1e-9)._engine.runtime.recipe.layouts[0] is Layout.WHOLE
    assert shardstep.shard(Matrices(), optim.AdamW, lr=0.0)._engine.runtime.recipe.layouts[0] is Layout.FLAT
    assert "treats all parameters together" in raised(lambda: shardstep.shard(Matrices(), GlobalNorm, lr=0.1))[1]


def test_the_probe_sees_through_a_learning_rate_of_zero_and_coupled_parameters(workers):
    workers(2).run(probes_what_does_not_move_yet)


def loads_channels_last() -> None:
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    plain = optim.AdamW(twin.parameters(), lr=0.1)
    x = torch.randn(2, 3, 5, 5, generator=torch.Generator().manual_seed(1))
    twin(x).square().mean().backward()
    plain.step()
    model.load_state_dict(twin.state_dict())
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    opt.load_state_dict(plain.state_dict())
    for net, o in ((twin, plain), (model, opt)):
        o.zero_grad()
        net(x).square().mean().backward()
        o.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_plain_state_of_channels_last_parameters_loads(workers):
    workers(2).run(loads_channels_last)


class Wide(optim.SGD):
    """Keeps wider state than its parameters, and a counter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state.setdefault("master", param.float())
                    state.setdefault("count", torch.zeros((), dtype=torch.int64)).add_(1)
                    state["master"].sub_(param.grad.float(), alpha=group["lr"])
                    param.copy_(state["master"])


def keeps_wide_state() -> None:
    model = Matrices().bfloat16()
    opt = shardstep.shard(model, Wide, lr=0.1)
    for step in range(3):
        model.first.requires_grad_(step != 1)
        model(batch(step).bfloat16()).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    for entry in opt.state.values():
        assert entry["master"].dtype == torch.float32
        assert entry["count"].dtype == torch.int64


def test_a_new_plan_does_not_narrow_the_state(workers):
    workers(2).run(keeps_wide_state)


def refuses_a_bias_on_one_rank() -> None:
    kind, text = raised(lambda: shardstep.shard(nn.Linear(7, 5), optim.Muon, lr=0.1))
    assert kind in ("ValueError", "RuntimeError")
    assert "bias" in text


def test_a_parameter_that_one_rank_is_refused_raises_on_all(workers):
    workers(2).run(refuses_a_bias_on_one_rank)


def evaluates_alone() -> None:
    model = Normed()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        if dist.get_rank() == 0:
            model.eval()
            with torch.no_grad():
                model(batch(step))
            model.train()
    assert_ranks_equal([*model.parameters(), *model.buffers()])


def test_one_rank_may_evaluate_alone(workers):
    workers(2).run(evaluates_alone)


def sends_a_strided_scalar() -> None:
    """autograd may hand out a gradient of one element with any stride."""

    class Stacked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.ones(1)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x[:, :3] * torch.stack([self.a, self.b, self.c], dim=1)

    model = Stacked()
    opt = shardstep.shard(model, optim.SGD, lr=1.0, config=ShardConfig(bucket_mb=0.000004))
    model(torch.ones(1, 7)).sum().backward()
    opt.step()
    assert torch.equal(model.b, torch.zeros(1))


def test_gradients_of_one_element_and_any_stride(workers):
    workers(2).run(sends_a_strided_scalar)


def copies_a_sharded_model() -> None:
    """A copy (an average of weights, a teacher) computes gradients of its own; they are nobody's business."""
    model = Matrices()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    twin = copy.deepcopy(model)
    plain = optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(6):
        for net in (model, twin):
            net.first.requires_grad_(step not in (2, 3))
            loss_of(net, batch(step)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        for optimizer in (opt, plain):
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_copy_of_a_sharded_model_is_left_alone(workers):
    workers(2).run(copies_a_sharded_model)


class Halves(nn.Module):
    """Two parameters, of which the second is frozen at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(4))
        self.second = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.first).sum() + (x * self.second).sum()


def clips_what_was_just_unfrozen() -> tuple[float, float]:
    model = Halves()
    opt = shardstep.shard(model, optim.SGD, lr=1.0, config=ShardConfig(gradients="keep"))
    model(torch.ones(4)).backward()
    opt.step()
    opt.zero_grad()
    model.second.requires_grad_()
    model(torch.full((4,), 1.0 + 8 * dist.get_rank())).backward()
    norm = opt.clip_grad_norm_(1.0)
    before = model.second.detach().clone()
    opt.step()
    return norm.item(), (before - model.second.detach())[0].item()


def test_kept_gradients_of_what_was_just_unfrozen_are_clipped_by_one_norm(workers):
    for norm, moved in workers(2).run(clips_what_was_just_unfrozen):
        assert norm == pytest.approx(5 * 8**0.5)  # eight elements of the mean of 1 and 9
        assert moved == pytest.approx(1 / 8**0.5, rel=1e-5)


class CountsSteps(optim.SGD):
    """A counter on the optimizer itself, of which a new instance would know nothing."""

    calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=0.1 / self.calls)


class TwoVectors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(5))
        self.sometimes = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        return (self.used.square().sum() + (self.sometimes.square().sum() if both else 0.0)) * x


def counts_on_through_unused_parameters() -> None:
    model, plain_model = TwoVectors(), TwoVectors()
    opt, plain = shardstep.shard(model, CountsSteps, lr=1.0), CountsSteps(plain_model.parameters(), lr=1.0)
    for both in (True, True, False, True):
        for net, optimizer in ((model, opt), (plain_model, plain)):
            net(torch.tensor(1.0), both).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_counter_on_the_optimizer_survives_a_step_without_some_gradients(workers):
    workers(2).run(counts_on_through_unused_parameters)


def reaches_no_parameter(gradients: Any, clip: bool) -> None:
    """On rank 1 the loss of the second batch does not depend on the model."""
    model, plain_model = Net(), Net()
    config = ShardConfig(gradients=gradients, bucket_mb=SMALL_BUCKETS)
    opt, plain = (
        shardstep.shard(model, optim.AdamW, lr=0.1, config=config),
        optim.AdamW(plain_model.parameters(), lr=0.1),
    )
    for step in range(3):
        alone = step == 1
        if alone and dist.get_rank() == 1:
            torch.ones(2, requires_grad=True).sum().backward()
        else:
            loss_of(model, batch(step)).backward()
        if clip:
            opt.clip_grad_norm_(1e6)
        opt.step()
        opt.zero_grad()
        loss_of(plain_model, batch(step)).backward()
        for param in plain_model.parameters():
            if alone and dist.get_rank() == 1:
                param.grad.zero_()
            dist.all_reduce(param.grad)
            param.grad.div_(2)
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), plain_model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("gradients", ["shard", "keep"])
def test_a_rank_whose_loss_reaches_no_parameter_hangs_nobody(workers, gradients, clip):
    workers(2).run(reaches_no_parameter, gradients, clip)


def clips_after_a_nan() -> None:
    """A factor of nan also reached what lies between parameters, and stayed there."""
    torch.manual_seed(0)
    model = nn.Linear(10, 3)
    opt = shardstep.shard(model, optim.SGD, lr=0.0)
    (model(torch.ones(2, 10)).sum() * torch.nan).backward()
    assert opt.clip_grad_norm_(1.0).isnan()
    opt.zero_grad()
    model(torch.ones(2, 10)).sum().backward()
    assert opt.clip_grad_norm_(1.0).isfinite()


def test_one_nan_does_not_make_every_later_norm_nan(workers):
    workers(2).run(clips_after_a_nan)


class UsedByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))

    def forward(self, with_b: bool) -> torch.Tensor:
        return self.a.sum() + (self.b.sum() if with_b else 0.0)


def unfreezes_what_one_rank_uses(gradients: Any) -> None:
    model = UsedByOne()
    model.b.requires_grad_(False)
    opt = shardstep.shard(model, optim.SGD, lr=1.0, config=shardstep.ShardConfig(gradients=gradients))
    model(False).backward()
    opt.step()
    opt.zero_grad()
    model.b.requires_grad_(True)
    model(dist.get_rank() == 1).backward()
    opt.step()
    assert torch.equal(model.b.detach(), torch.full((8,), 0.5)), model.b


@pytest.mark.parametrize("gradients", ["shard", "keep"])
def test_a_parameter_that_is_unfrozen_and_used_on_one_rank_is_stepped(workers, gradients):
    workers(2).run(unfreezes_what_one_rank_uses, gradients)


def goes_on_after_a_failed_pass() -> str:
    """Gradients are accumulated over two passes, the first of which failed on one rank and was caught."""
    model = nn.Sequential(nn.Linear(7, 7), Broken(), nn.Linear(7, 7))
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=shardstep.ShardConfig(bucket_mb=0.0002))
    Broken.armed = dist.get_rank() == 1
    try:
        model(torch.ones(2, 7)).sum().backward()
    except ArithmeticError:
        assert Broken.armed
    Broken.armed = False
    model(torch.ones(2, 7)).sum().backward()
    return raised(opt.step)[1]


class Broken(nn.Module):
    armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Broken.armed:
            x.register_hook(fail)
        return x * 1.0


def fail(gradient: torch.Tensor) -> None:
    raise ArithmeticError("half-way")


def test_a_failed_pass_is_not_forgotten_when_another_one_follows(workers):
    for text in workers(2).run(goes_on_after_a_failed_pass, timeout=30):
        assert "the backward pass failed on ranks [1]" in text


def adds_a_group_without_a_pass() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    opt = shardstep.shard(model[0], optim.SGD, lr=0.1)
    if dist.get_rank() == 0:
        model[0](torch.ones(2, 7)).sum().backward()
    opt.add_param_group({"params": list(model[1].parameters())})
    opt.step()


def test_a_group_may_be_added_when_a_rank_has_made_no_pass(workers):
    workers(2).run(adds_a_group_without_a_pass, timeout=30)


def drops_the_old_plan() -> None:
    """Without the garbage collector: a new plan must not keep the memory of the old one."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    model(torch.ones(2, 7)).sum().backward()
    opt.step()
    opt.zero_grad()
    gc.collect()
    gc.disable()
    try:
        old = weakref.ref(opt._engine.runtime.local_step)
        model[0].requires_grad_(False)
        model(torch.ones(2, 7)).sum().backward()
        opt.step()
        assert old() is None
    finally:
        gc.enable()


def test_a_new_plan_lets_go_of_the_old_one(workers):
    workers(2).run(drops_the_old_plan)
    workers(1).run(drops_the_old_plan)


def reduces_complex_in_half() -> None:
    model = nn.ParameterList([nn.Parameter(torch.ones(4, dtype=torch.complex64))])
    config = shardstep.ShardConfig(reduce_dtype=torch.bfloat16)
    opt = shardstep.shard(model, optim.SGD, lr=1.0, config=config)
    (model[0] * 1j).real.sum().backward()
    opt.step()
    assert torch.allclose(model[0].detach(), torch.full((4,), 1 + 1j)), model[0]


def test_complex_gradients_keep_their_imaginary_part_on_the_wire(workers):
    workers(2).run(reduces_complex_in_half)


def keeps_zeros(rank_without_a_pass: int) -> None:
    """With gradients="keep" and zeros left in param.grad: what is there is no gradient that was forgotten."""
    model = nn.Linear(7, 3)
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(gradients="keep"))
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad(set_to_none=False)
    before = model.weight.detach().clone()
    if dist.get_rank() != rank_without_a_pass:
        model(torch.ones(1, 7)).sum().backward()
    opt.step()
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    assert torch.allclose(model.weight, before - 0.1 * share)


def test_kept_zeros_are_not_gradients_that_were_never_reduced(workers):
    for rank in range(2):
        workers(2).run(keeps_zeros, rank, timeout=30)


def starts_apart(layout: Layout, collectives: bool) -> None:
    """Every rank from weights and running means of its own, as without a seed; a subgroup and a frozen layer, too."""
    torch.manual_seed(100 + dist.get_rank())
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    for tensor in [*model.parameters(), *model.buffers()]:
        with torch.no_grad():
            tensor.add_(dist.get_rank())
    first = [tensor.detach().clone() for tensor in [*model.parameters(), *model.buffers()]]
    for tensor in first:
        dist.broadcast(tensor, 0)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(layout=layout, bucket_mb=SMALL_BUCKETS))
    for tensor, expected in zip([*model.parameters(), *model.buffers()], first, strict=True):
        assert torch.equal(tensor, expected)
    extra = nn.Linear(3, 2)
    model.append(extra)
    opt.add_param_group({"params": list(extra.parameters())})
    assert_ranks_equal(list(extra.parameters()))


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE])
def test_all_ranks_take_the_first_ranks_parameters_and_buffers(workers, layout, collectives):
    workers(3).run(starts_apart, layout, collectives, timeout=30)
