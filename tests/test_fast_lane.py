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
from shardstep import Layout, ShardConfig
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
SMALL_BUCKETS = 0.0004  # MB: a hundred elements, so that parameters are cut by buckets and by ranks


class Net(nn.Module):
    """Matrices, vectors, a scalar and a parameter without elements; sizes that divide by nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale + self.nothing.sum()


def batch(step: int, width: int = 7) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, width, generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


def assert_trains_like_ddp(
    make: Callable[[], nn.Module],
    optimizer_class: type[optim.Optimizer] = optim.AdamW,
    options: dict[str, Any] | None = None,
    config: ShardConfig | None = None,
    *,
    loss: Loss = loss_of,
    steps: int = 4,
    accumulate: int = 1,
    find_unused: bool = False,
    group: Any = None,
    width: int = 7,
) -> Any:
    """Bitwise on one and two ranks. A sum of three or more depends on its order: 1e-5 after a few steps."""
    model = make()
    options = {"lr": 0.05, **(options or {})}
    ddp = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=find_unused, process_group=group)
    plain = optimizer_class(ddp.parameters(), **options)
    config = config or ShardConfig(bucket_mb=SMALL_BUCKETS)
    sharded = shardstep.shard(model, optimizer_class, config=config, process_group=group, **options)
    for step in range(steps):
        for micro in range(accumulate):
            last = micro == accumulate - 1
            x = batch(step * 10 + micro, width)
            with nullcontext() if last else ddp.no_sync():
                loss(ddp, x).backward()
            with nullcontext() if last else sharded.no_sync():
                loss(model, x).backward()
        plain.step()
        plain.zero_grad()
        sharded.step()
        sharded.zero_grad()
    sharded.synchronize()
    exact = dist.get_world_size(group) <= 2
    pairs = zip(model.named_parameters(), ddp.module.parameters(), strict=True)
    for (name, ours), theirs in pairs:
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        assert same, f"{optimizer_class.__name__} {options}: {name} differs by {(ours - theirs).abs().max()}"
    if dist.get_rank(group) == 0:  # under DDP the others' follow before the next forward
        for ours, theirs in zip(model.buffers(), ddp.module.buffers(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5), "buffers differ"
    assert_ranks_equal(list(model.buffers()), group)
    assert_ranks_equal(list(model.parameters()), group)
    return sharded


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


class NormScaled(optim.Optimizer):
    """Like LAMB: the step of a parameter depends on the norm of all of it."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad / (param.grad.norm() + 1e-3), alpha=group["lr"])


class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(7, 9, bias=False)
        self.second = nn.Linear(9, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


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
        assert opt._layout is expected, optimizer_class
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
    from shardstep.runtime.probe import finest_layout

    before = torch.get_rng_state()
    learning_rate = torch.tensor(0.1)
    options = {"lr": learning_rate, "betas": [0.9, 0.99]}
    finest_layout(optim.AdamW, options, [{"params": []}], torch.device("cpu"))
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


class Normed(nn.Module):
    """Batch norm: buffers that depend on the rank's own batches.

    No bias before it: its gradient would be zero but for rounding, and AdamW makes full steps of that.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.layers = nn.Sequential(nn.Linear(7, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


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
        names = {param: name for name, param in sharded._model.named_parameters()}
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


class Breaks(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Breaks.armed:
            raise ArithmeticError("half-way")
        return gradient


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


@pytest.mark.parametrize("everywhere", [True, False])
def test_after_a_backward_that_raised_the_next_step_works(workers, everywhere):
    workers(2).run(survives_a_broken_backward, everywhere)


# -- gradients ---------------------------------------------------------------------------------------------------------


def clips(norm_type: float, gradients: Any) -> None:
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
            expected = torch.linalg.vector_norm(param.grad, norm_type).item() if param.numel() else 0.0
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


def refuses_to_clip_nothing() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    loss_of(model, batch(0)).backward()
    assert all(param.grad is None for param in model.parameters())
    kind, text = raised(lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    assert kind == "RuntimeError"
    assert "would clip nothing" in text
    other = nn.Linear(2, 2)
    other(torch.ones(1, 2)).sum().backward()
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)  # nobody else is disturbed
    opt.grad_norms()
    opt._gradients.scale(float("nan"))
    assert raised(lambda: opt.clip_grad_norm_(1.0, error_if_nonfinite=True))[0] == "RuntimeError"


def test_torchs_clip_grad_norm_does_not_silently_clip_nothing(workers):
    workers(2).run(refuses_to_clip_nothing)


def forgets_to_sync() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05)
    with opt.no_sync():
        loss_of(model, batch(0)).backward()
    kind, text = raised(opt.step)
    assert kind == "RuntimeError"
    assert "never reduced" in text
    loss_of(model, batch(1)).backward()
    opt.step()  # both passes count


def test_gradients_that_were_never_reduced_are_not_silently_dropped(workers):
    workers(2).run(forgets_to_sync)


# -- programs ----------------------------------------------------------------------------------------------------------


def schedules_and_closures() -> None:
    model = Net()
    ddp = DistributedDataParallel(copy.deepcopy(model))
    plain = optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    opt = shardstep.shard(model, optim.SGD, lr=0.1, momentum=0.9)
    assert isinstance(opt, optim.Optimizer)
    schedulers = [optim.lr_scheduler.StepLR(o, 2, gamma=0.1) for o in (plain, opt)]
    for step in range(5):
        for net, o in ((ddp, plain), (model, opt)):

            def closure(net: nn.Module = net, o: Any = o, step: int = step) -> torch.Tensor:
                o.zero_grad()
                loss = loss_of(net, batch(step))
                loss.backward()
                return loss

            assert o.step(closure).item() > 0
        for scheduler in schedulers:
            scheduler.step()
    assert opt.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    for ours, theirs in zip(model.parameters(), ddp.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_schedulers_and_closures(workers):
    workers(2).run(schedules_and_closures)


def takes_groups() -> None:
    def groups(net: Net) -> list[dict[str, Any]]:
        return [{"params": ["*.bias", net.scale], "weight_decay": 0.0}, {"params": "*", "lr": 0.02}]

    model = Net()
    twin = copy.deepcopy(model)
    opt = shardstep.shard(model, optim.AdamW, groups=groups(model), lr=0.05, weight_decay=0.1)
    assert opt.param_groups[0]["param_names"] == ["first.bias", "second.bias", "scale"]
    assert [group["lr"] for group in opt.param_groups] == [0.05, 0.02]
    named = dict(twin.named_parameters())
    plain = optim.AdamW(
        [
            {"params": [named[name] for name in group["param_names"]], "lr": group["lr"], "weight_decay": decay}
            for group, decay in zip(opt.param_groups, (0.0, 0.1), strict=True)
        ]
    )
    ddp = DistributedDataParallel(twin)
    for step in range(3):
        for net, o in ((ddp, plain), (model, opt)):
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    for bad, word in (
        ([{"params": "first.*"}], "no group has"),
        ([{"params": "frist.*"}], "no parameter is called"),
        ([{"params": [torch.zeros(2)]}], "not in the model"),
    ):
        assert word in raised(lambda bad=bad: shardstep.shard(Net(), optim.AdamW, groups=bad, lr=0.1))[1]


def test_groups_by_name_pattern_and_tensor(workers):
    workers(2).run(takes_groups)


def freezes_and_adds(gradients: Any) -> None:
    """Freeze, unfreeze and add a group between steps; the plain optimizer does the same."""
    model = nn.ModuleDict({"a": nn.Linear(7, 7), "b": nn.Linear(7, 7), "c": nn.Linear(7, 7)})
    for index, param in enumerate(model.parameters()):
        torch.manual_seed(index)
        nn.init.normal_(param)
    twin = copy.deepcopy(model)

    def loss(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return net["c"](torch.tanh(net["b"](torch.tanh(net["a"](x))))).square().mean()

    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gradients=gradients)
    opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05)
    plain = optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(10):
        for net in (model, twin):
            net["a"].requires_grad_(step < 2 or step >= 5)
            net["b"].requires_grad_(step != 7)
        loss(model, batch(step)).backward()
        loss(twin, batch(step)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        for o in (opt, plain):
            o.step()
            o.zero_grad()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6), (step, name)
    extra, other = (nn.Linear(7, 7) for _ in range(2))
    other.load_state_dict(extra.state_dict())
    with torch.no_grad():
        for param in [*extra.parameters(), *other.parameters()]:
            dist.broadcast(param, 0)
    model["d"], twin["d"] = extra, other
    opt.add_param_group({"params": extra.parameters(), "lr": 0.01})
    plain.add_param_group({"params": other.parameters(), "lr": 0.01})
    for step in range(3):
        for net in (model, twin):
            net["d"](loss(net, batch(step)) * batch(step)).square().mean().backward()
        for param in twin.parameters():
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
        for o in (opt, plain):
            o.step()
            o.zero_grad()
    for (name, ours), theirs in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.allclose(ours, theirs[1], rtol=1e-6, atol=1e-6), name


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_freezing_unfreezing_and_new_groups(workers, ranks, gradients):
    workers(ranks).run(freezes_and_adds, gradients)


def swaps_what_is_frozen() -> None:
    """First the head trains, then the rest: no parameter that the plan knew has a gradient."""
    model = Matrices()
    model.first.requires_grad_(False)
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    for _ in range(2):
        before = [param.detach().clone() for param in model.parameters()]
        loss_of(model, batch(0)).backward()
        opt.step()
        opt.zero_grad()
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(param, value) != param.requires_grad
        for param in model.parameters():
            param.requires_grad_(not param.requires_grad)


def test_what_is_frozen_is_swapped(workers):
    workers(2).run(swaps_what_is_frozen)


def saves_and_loads() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(bucket_mb=SMALL_BUCKETS))

    def train(net: nn.Module, o: Any, steps: range) -> None:
        for step in steps:
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()

    train(model, opt, range(2))
    saved, weights = copy.deepcopy(opt.state_dict()), copy.deepcopy(model.state_dict())
    kept = copy.deepcopy(saved)
    train(model, opt, range(2, 4))
    again = Net()
    again.load_state_dict(weights)
    other = shardstep.shard(again, optim.AdamW, lr=0.9)  # another bucket size, so other pieces
    other.load_state_dict(saved)
    assert str(saved) == str(kept), "what was passed is not written to"
    train(again, other, range(2, 4))
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    # The plain optimizer's state loads too.
    twin = Net()
    plain = optim.AdamW(twin.parameters(), lr=0.05)
    for step in range(2):
        loss_of(twin, torch.full((4, 7), 0.1 * step)).backward()
        plain.step()
        plain.zero_grad()
    from_plain = copy.deepcopy(twin)
    loaded = shardstep.shard(from_plain, optim.AdamW, lr=0.05)
    loaded.load_state_dict(plain.state_dict())
    for net, o in ((twin, plain), (from_plain, loaded)):
        loss_of(net, torch.full((4, 7), 0.3)).backward()
        o.step()
    for ours, theirs in zip(from_plain.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    bad = plain.state_dict()
    bad["state"][0]["exp_avg"] = torch.zeros(3)
    assert "exp_avg" in raised(lambda: loaded.load_state_dict(bad))[1]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_state_saves_and_loads(workers, ranks):
    workers(ranks).run(saves_and_loads)


def is_balanced() -> None:
    model = nn.Sequential(nn.Embedding(501, 16), nn.Linear(16, 33), nn.Linear(33, 7))
    opt = shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(bucket_mb=0.01))
    loss_of(model, torch.arange(20)).backward()
    opt.step()
    held = sum(entry["exp_avg"].numel() for entry in opt.state.values())
    total = sum(param.numel() for param in model.parameters())
    assert held <= 1.01 * total / dist.get_world_size() + 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_is_balanced(workers, ranks):
    workers(ranks).run(is_balanced)


def disagrees(how: str) -> None:
    rank = dist.get_rank()
    if how == "options":
        kind, text = raised(lambda: shardstep.shard(Net(), optim.AdamW, lr=-1.0 if rank == 1 else 0.1))
        assert kind == "ValueError"
        assert "rank 1" in text
    elif how == "model":
        net = nn.Linear(7, 5 if rank == 1 else 4)
        assert "do not agree" in raised(lambda: shardstep.shard(net, optim.AdamW, lr=0.1))[1]
    else:
        model = Net()
        opt = shardstep.shard(model, Failing, lr=0.1)
        loss_of(model, batch(0)).backward()
        Failing.armed = rank == 1
        kind, text = raised(opt.step)
        Failing.armed = False
        assert kind == "RuntimeError"
        assert "rank 1" in text or rank == 1


class Failing(optim.SGD):
    armed = False

    def step(self, closure: Any = None) -> Any:
        if Failing.armed:
            raise RuntimeError("this rank cannot")
        return super().step(closure)


@pytest.mark.parametrize("how", ["options", "model", "step"])
def test_when_ranks_disagree_all_raise(workers, how):
    workers(2).run(disagrees, how)


def trains_in_a_subgroup() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = groups[dist.get_rank() // 2]
    assert_trains_like_ddp(Net, group=mine)


def test_subgroups_train_at_the_same_time(workers):
    workers(4).run(trains_in_a_subgroup)


def delays(seed: int) -> None:
    """Random pauses in gradients, on every rank its own."""
    import random
    import time

    rng = random.Random(1000 * seed + dist.get_rank())

    def pause(_: torch.Tensor) -> None:
        if rng.random() < 0.2:
            time.sleep(rng.random() * 0.002)

    model, twin = Net(), Net()
    for param in model.parameters():
        param.register_hook(pause)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS)
    overlapped = ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap")
    opt = shardstep.shard(model, optim.AdamW, config=overlapped, lr=0.01)
    other = shardstep.shard(twin, optim.AdamW, config=config, lr=0.01)
    for step in range(100):
        for net, o in ((model, opt), (twin, other)):
            loss_of(net, batch(step)).backward()
            o.step()
            o.zero_grad()
    opt.synchronize()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), "overlap on and off must give the same bits, whatever the timing"


def stress(seeds: int) -> None:
    for seed in range(seeds):
        delays(seed)


def test_stress_random_delays_never_deadlock_and_change_no_bit(workers):
    workers(4).run(stress, 10, timeout=240)


# -- what a review found -----------------------------------------------------------------------------------------------


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
    assert shardstep.shard(Matrices(), optim.Adafactor, lr=0.0)._layout is Layout.WHOLE
    assert shardstep.shard(Matrices(), NormScaled, lr=1e-9)._layout is Layout.WHOLE
    assert shardstep.shard(Matrices(), optim.AdamW, lr=0.0)._layout is Layout.FLAT
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
