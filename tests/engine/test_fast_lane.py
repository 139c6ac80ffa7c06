"""shardstep.shard against DistributedDataParallel with the plain optimizer, on the same batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

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
from shardstep.params.proxy import gradient_of
from training import assert_ranks_equal, raised

ELEMENTWISE: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.Adadelta, {}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {}),
    (optim.AdamW, {"fused": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.Adamax, {}),
    (optim.ASGD, {"t0": 3}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Rprop, {}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
]


def conforms(layout: Layout, gradients: Any) -> None:
    config = ShardConfig(layout=layout, gradients=gradients, bucket_mb=SMALL_BUCKETS)
    for optimizer_class, options in ELEMENTWISE:
        for accumulate in (1, 3):
            assert_trains_like_ddp(Net, optimizer_class, options, config, accumulate=accumulate)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE], ids=["flat", "whole"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_elementwise_optimizer_trains_like_ddp(workers, ranks, layout, gradients):
    workers(ranks).run(conforms, layout, gradients, timeout=120)


# -- layouts -----------------------------------------------------------------------------------------------------------


def chooses_layouts() -> None:
    state = torch.get_rng_state()
    for optimizer_class, options, expected in (
        (optim.AdamW, {}, Layout.FLAT),
        (optim.SGD, {"momentum": 0.9}, Layout.FLAT),
        (optim.Adafactor, {}, Layout.WHOLE),
        (optim.Muon, {}, Layout.WHOLE),
        (NormScaled, {}, Layout.WHOLE),
    ):
        opt = shardstep.shard(Matrices(), optimizer_class, lr=0.01, **options)
        assert opt._engine.runtime.recipe.layouts == [expected], optimizer_class
        assert_trains_like_ddp(Matrices, optimizer_class, {"lr": 0.01, **options})
        if expected is Layout.WHOLE:
            kind, text = raised(
                lambda cls=optimizer_class: shardstep.shard(
                    Matrices(), cls, config=ShardConfig(layout=Layout.FLAT), lr=0.01
                )
            )
            assert kind == "ValueError"
            assert "Layout.FLAT is not safe" in text
            assert optimizer_class.__name__ in text
    torch.set_rng_state(state)


def test_the_layout_is_the_finest_that_the_optimizer_tolerates(workers):
    workers(2).run(chooses_layouts)


def probes_without_a_trace() -> None:
    from shardstep.optimizers.layout_trial import probe

    before = torch.get_rng_state()
    learning_rate = torch.tensor(0.1)
    options = {"lr": learning_rate, "betas": [0.9, 0.99]}
    probe(optim.AdamW, options, [{"params": []}], torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(learning_rate, torch.tensor(0.1))


def test_probing_leaves_no_trace():
    probes_without_a_trace()


# -- graphs ------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Parameter(torch.randn(11, 7))
        self.inner = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x @ self.embed.T @ self.embed)) @ self.embed.T


class Twice(nn.Module):
    """One layer called twice, one whose parameter is used thrice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(7, 7)
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(self.layer(x * self.gain)) * self.gain) + self.gain


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(3))
        self.head = self.layers[0] if tied else nn.Linear(7, 3)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        for layer in self.layers:
            x = torch.tanh(checkpoint(layer, x, use_reentrant=self.reentrant))
        return self.head(x)


class SomeUnused(nn.Module):
    """`never` is used on no rank; `sometimes` on odd ranks only, and on all in step 2."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.always = nn.Linear(7, 7)
        self.sometimes = nn.Linear(7, 7)
        self.never = nn.Linear(7, 7)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.always(x)
        return self.sometimes(x) if dist.get_rank() % 2 or self.calls == 2 else x


def trains_graph(case: str, config: ShardConfig) -> None:
    makers: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "tied": (Tied, False),
        "twice": (Twice, False),
        "checkpointed": (lambda: Checkpointed(reentrant=False), False),
        "unused": (SomeUnused, True),
        "batch norm": (Normed, False),
    }
    make, find_unused = makers[case]
    sharded = assert_trains_like_ddp(make, config=config, find_unused=find_unused, options={"weight_decay": 0.1})
    if case == "unused":
        names = {param: name for name, param in sharded.model.named_parameters()}
        assert not any(names[param].startswith("never") for param in sharded.state), "it was never stepped"


CONFIGS = {
    "default": ShardConfig(bucket_mb=SMALL_BUCKETS),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
    "large buckets": ShardConfig(),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("case", ["tied", "twice", "checkpointed", "unused", "batch norm"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_graphs(workers, ranks, case, config):
    workers(ranks).run(trains_graph, case, config)


def trains_reentrant(tied: bool) -> None:
    """DDP refuses reentrant checkpoints of tied weights, so the oracle is the same model without reentrance."""
    model, twin = Checkpointed(reentrant=True, tied=tied), Checkpointed(reentrant=False, tied=tied)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS)
    one = shardstep.shard(model, optim.AdamW, config=config, lr=0.05)
    other = shardstep.shard(twin, optim.AdamW, config=config, lr=0.05)
    for step in range(4):
        for net, opt in ((model, one), (twin, other)):
            loss_of(net, batch(step)).backward()
            opt.step()
            opt.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("tied", [False, True])
def test_reentrant_checkpointing(workers, tied):
    workers(2).run(trains_reentrant, tied)


def accumulates_outside_no_sync() -> None:
    """Two reduced passes add up in the shard; so does a graph that is kept and run twice."""
    model, twin = Net(), Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(bucket_mb=SMALL_BUCKETS))
    plain = optim.SGD(twin.parameters(), lr=0.1)
    loss = loss_of(model, batch(0))
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model, batch(1)).backward()
    torch.autograd.grad(loss_of(model, batch(2)), list(model.parameters()), allow_unused=True)  # adds nothing
    for x in (batch(0), batch(0), batch(1)):
        loss_of(twin, x).backward()
    for param in twin.parameters():
        dist.all_reduce(param.grad)
        param.grad /= dist.get_world_size()
    opt.step()
    plain.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


def test_passes_add_up(workers):
    workers(2).run(accumulates_outside_no_sync)


class Breaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Breaks.apply(self.first(x)))


def survives_a_broken_backward(everywhere: bool) -> None:
    model, twin = Breaking(), Breaking()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS)
    opt, other = (shardstep.shard(net, optim.AdamW, config=config, lr=0.05) for net in (model, twin))
    Breaks.armed = everywhere or dist.get_rank() == 1
    broken = Breaks.armed
    if broken:
        assert raised(lambda: loss_of(model, batch(0)).backward())[0] == "ArithmeticError"
    else:
        loss_of(model, batch(0)).backward()
    Breaks.armed = False
    if not everywhere:
        kind, text = raised(opt.step)
        assert kind == "RuntimeError"
        assert "the backward pass failed on ranks [1]" in text
    opt.zero_grad()
    for step in (1, 2):
        for net, o in ((model, opt), (twin, other)):
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def goes_on_without_a_step(gradients: Any, passes: int) -> None:
    """The usual loop: whoever's backward pass or step raises drops the batch and goes on with the next."""
    model, twin = Breaking(), Breaking()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    opt, other = (shardstep.shard(net, optim.AdamW, config=config, lr=0.05) for net in (model, twin))
    failed = []
    for step in range(4):
        try:
            for number in range(passes):
                Breaks.armed = step == 1 and number == passes - 1 and dist.get_rank() == 1
                loss_of(model, batch(10 * step + number)).backward()
            opt.step()
        except (ArithmeticError, RuntimeError):
            failed.append(step)
        Breaks.armed = False
        opt.zero_grad()
        dist.barrier()
        if step != 1:
            for number in range(passes):
                loss_of(twin, batch(10 * step + number)).backward()
            other.step()
            other.zero_grad()
    assert failed == [1]
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("gradients", ["shard", "keep"])
def test_a_rank_whose_backward_raised_need_not_step(workers, gradients, passes):
    workers(2).run(goes_on_without_a_step, gradients, passes)


@pytest.mark.parametrize("everywhere", [True, False])
def test_after_a_backward_that_raised_the_next_step_works(workers, everywhere):
    workers(2).run(survives_a_broken_backward, everywhere)


# -- gradients ---------------------------------------------------------------------------------------------------------


def clips(norm_type: Any, gradients: Any) -> None:
    model = Matrices()  # torch has no infinity norm of a parameter without elements
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.AdamW(ddp.parameters(), lr=0.05)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05)
    for step in range(3):
        loss_of(ddp, batch(step)).backward()
        loss_of(model, batch(step)).backward()
        norms = opt.grad_norms(norm_type)
        for name, param in ddp.module.named_parameters():
            expected = torch.linalg.vector_norm(param.grad, float(norm_type)).item() if param.numel() else 0.0
            assert norms[name] == pytest.approx(expected, rel=1e-5), name
        theirs = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1, norm_type)
        ours = opt.clip_grad_norm_(0.1, norm_type)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        for optimizer in (plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping(workers, norm_type, gradients):
    workers(2).run(clips, norm_type, gradients)


def clips_by_odd_norms(collectives: bool) -> None:
    with by_collectives() if collectives else nullcontext():
        clips("inf", "shard")
        clips(0, "shard")
        opt = shardstep.shard(model := Matrices(), optim.SGD, lr=0.05)
    loss_of(model, batch(0)).backward()
    for order in (-1.0, float("-inf"), float("nan")):
        for call in (lambda order=order: opt.clip_grad_norm_(1.0, order), lambda order=order: opt.grad_norms(order)):
            kind, text = raised(call)
            assert kind == "ValueError"
            assert "norm_type must be 0, a positive number or inf" in text
    opt.step()


@pytest.mark.parametrize("collectives", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_clipping_by_the_norm_of_order_0_divided_by_zero(workers, ranks, collectives):
    workers(ranks).run(clips_by_odd_norms, collectives, timeout=60)


def clips_values(gradients: Any) -> None:
    model = Matrices()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.SGD(ddp.parameters(), lr=0.05)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    opt = shardstep.shard(model, optim.SGD, config=config, lr=0.05)
    for step in range(3):
        loss_of(ddp, batch(step)).backward()
        loss_of(model, batch(step)).backward()
        limit = max(param.grad.abs().max().item() for param in ddp.parameters() if param.numel()) / 3
        torch.nn.utils.clip_grad_value_(ddp.parameters(), limit)
        opt.clip_grad_value_(limit)
        for optimizer in (plain, opt):
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
def test_clipping_by_value(workers, gradients):
    workers(2).run(clips_values, gradients)


def zeroes_through_the_model(set_to_none: bool, gradients: Any) -> None:
    model, twin = Net(), Net()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    opt, other = (shardstep.shard(net, optim.AdamW, config=config, lr=0.05) for net in (model, twin))
    for step in range(3):
        loss_of(model, batch(7)).backward()  # forgotten at once
        model.zero_grad(set_to_none)
        if not set_to_none:
            loss_of(twin, batch(7)).backward()
            other.zero_grad(set_to_none=False)
        for net, optimizer in ((model, opt), (twin, other)):
            loss_of(net, batch(step)).backward()
            optimizer.step()
        model.zero_grad()
        other.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_drops_the_shards(workers, set_to_none, gradients):
    workers(2).run(zeroes_through_the_model, set_to_none, gradients)


def refuses_to_zero_a_part() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7))
    model[0].unused = unused = nn.Linear(2, 2)
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    model[0].zero_grad()  # there is nothing to drop
    loss_of(model, batch(0)).backward()
    kind, text = raised(model[0].zero_grad)
    assert kind == "RuntimeError"
    unused.zero_grad()  # it has no gradient
    assert "call zero_grad() of the model or of the optimizer" in text
    nn.ModuleDict({"inner": model, "head": nn.Linear(2, 2)}).zero_grad()  # all of it, and more
    assert not opt.holds_gradient_of(model[0].weight)
    opt.close()
    model[0].zero_grad()  # nobody's any more


def test_zero_grad_of_a_part_of_the_model_is_refused(workers):
    workers(2).run(refuses_to_zero_a_part)


def refuses_to_clip_nothing() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    loss_of(model, batch(0)).backward()
    assert all(gradient_of(param) is None for param in model.parameters())
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        kind, text = raised(lambda clip=clip: clip(model.parameters(), 1.0))
        assert kind == "RuntimeError"
        assert "has reduced this gradient to shards" in text
        assert f"{clip.__name__}()" in text
        clip(other.parameters(), 1.0)  # nobody else is disturbed
    opt.grad_norms()
    for shard in opt._engine.runtime.gradients.shards():
        shard.mul_(float("nan"))
    assert raised(lambda: opt.clip_grad_norm_(1.0, error_if_nonfinite=True))[0] == "RuntimeError"


def test_torchs_clipping_does_not_silently_clip_nothing(workers):
    workers(2).run(refuses_to_clip_nothing)


def forgets_to_sync() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    with opt.no_sync():
        loss_of(model, batch(0)).backward()
    kind, text = raised(opt.step)
    assert kind == "RuntimeError"
    assert "never reduced" in text
    assert f"and of {len(list(model.parameters())) - 1} other parameters" in text
    loss_of(model, batch(1)).backward()
    opt.step()  # both passes count
    opt.zero_grad()
    single = nn.Linear(7, 3, bias=False)
    opt = shardstep.shard(single, optim.SGD, lr=0.05)
    with opt.no_sync():
        loss_of(single, batch(0)).backward()
    assert "the gradients of weight were never reduced" in raised(opt.step)[1]  # and not of "0 other parameters"


def test_gradients_that_were_never_reduced_are_not_silently_dropped(workers):
    workers(2).run(forgets_to_sync)
