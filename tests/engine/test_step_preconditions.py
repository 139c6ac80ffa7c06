"""What a step takes for granted is the same on all ranks, or all raise before a weight has moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Normed, batch, loss_of
from shardstep import ShardConfig, ZeroRedundancyOptimizer
from training import assert_ranks_equal, raised

BOTH_WAYS = pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])


def shard(model: nn.Module, collectives: bool, **options: Any) -> Any:
    options = {"lr": 0.1, "config": ShardConfig(bucket_mb=SMALL_BUCKETS), **options}
    with by_collectives() if collectives else nullcontext():
        return shardstep.shard(model, options.pop("optimizer_class", optim.AdamW), **options)


def trained_once(collectives: bool, make: Callable[[], nn.Module] = Normed) -> tuple[nn.Module, Any]:
    model = make()
    opt = shard(model, collectives)
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    return model, opt


def raised_before_a_weight_moved(model: nn.Module, call: Any) -> tuple[str, str]:
    before = [param.detach().clone() for param in model.parameters()]
    found = raised(call)
    for param, earlier in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.float(), earlier.float())
    return found


# -- options -----------------------------------------------------------------------------------------------------------


def plateaus_alone(collectives: bool) -> None:
    model, opt = trained_once(collectives)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for loss in (1.0, 2.0 if dist.get_rank() else 0.5):
        scheduler.step(loss)
    loss_of(model, batch(1)).backward()
    _, text = raised_before_a_weight_moved(model, opt.step)
    assert "Rank 1: it has <param_groups[0]['lr'] = 0.05> where rank 0 has <param_groups[0]['lr'] = 0.1>" in text
    assert "Rank 2: it has <param_groups[0]['lr'] = 0.05>" in text
    opt.param_groups[0]["lr"] = 0.05
    opt.step()  # the gradients are still there
    assert_ranks_equal(list(model.parameters()))


@BOTH_WAYS
def test_ranks_with_different_learning_rates_do_not_train_on(workers, collectives):
    workers(3).run(plateaus_alone, collectives)


def plateaus_alone_in_the_drop_in(views: bool) -> str:
    """There the ranks agree at the end of a step: it has stepped, and it is the last one."""
    model = DistributedDataParallel(Normed())
    opt = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, parameters_as_bucket_view=views, lr=0.1)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0, factor=0.5)
    for step, loss in enumerate((1.0, 2.0 if dist.get_rank() else 0.5)):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step(loss)
    loss_of(model, batch(2)).backward()
    return raised(opt.step)[1]


@pytest.mark.parametrize("views", [False, True])
def test_ranks_with_different_learning_rates_do_not_train_on_with_the_drop_in(workers, views):
    (text,) = set(workers(2).run(plateaus_alone_in_the_drop_in, views))
    assert "Rank 1: it has <param_groups[0]['lr'] = 0.05> where rank 0 has <param_groups[0]['lr'] = 0.1>" in text


class CountsInItsGroup(optim.SGD):
    """Only where it has a gradient: a rank without parameters does not count."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group.setdefault("k", 0)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += any(param.grad is not None for param in group["params"])
        return super().step(closure)


def counts_where_it_holds_something() -> None:
    model = DistributedDataParallel(nn.Linear(7, 3, bias=False))
    opt = ZeroRedundancyOptimizer(model.parameters(), CountsInItsGroup, lr=0.1)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    assert_ranks_equal(list(model.parameters()))


def test_a_counter_in_a_group_is_no_option_of_the_program(workers):
    workers(2).run(counts_where_it_holds_something)


def sets_options(collectives: bool) -> None:
    """What looks different and is not; what changes on all ranks; a tensor that is written to."""
    model = Normed()
    opt = shard(model, collectives, lr=torch.tensor(0.1), optimizer_class=optim.SGD)
    odd = dist.get_rank() == 1
    opt.param_groups[0]["weight_decay"] = 0 if odd else 0.0
    opt.param_groups[0]["note"] = f"of rank {dist.get_rank()}"
    for step in range(2):
        loss_of(model, batch(step)).backward()
        opt.param_groups[0]["momentum"] = 0.5 * step  # between backward and step
        opt.step()
        opt.zero_grad()
    opt.param_groups[0]["lr"].fill_(0.3 if odd else 0.2)
    loss_of(model, batch(2)).backward()
    text = raised_before_a_weight_moved(model, opt.step)[1]
    assert "param_groups[0]['lr'] = tensor(0.3" in text


@BOTH_WAYS
def test_a_rate_in_a_tensor_is_compared_by_its_value(workers, collectives):
    workers(2).run(sets_options, collectives)


def shards_differently(collectives: bool) -> None:
    odd = dist.get_rank() == 1
    text = raised(lambda: shard(nn.Linear(7, 5), collectives, weight_decay=0.1 if odd else 0.2))[1]
    assert "param_groups[0]['weight_decay'] = 0.1" in text
    text = raised(lambda: shard(nn.Linear(7, 5), collectives, optimizer_class=optim.NAdam if odd else optim.AdamW))[1]
    assert "<optimizer_class torch.optim.nadam.NAdam>" in text
    assert "<optimizer_class torch.optim.adamw.AdamW>" in text
    text = raised(lambda: shard(nn.Linear(7, 5, bias=odd), collectives))[1]
    bias = f"<bias: shape (5,), float32, {torch.empty(0).device.type}:0, group 0, trainable>"
    assert f"Rank 1: it has {bias}, which rank 0 has not" in text
    text = raised(lambda: shard(nn.Linear(7, 5, bias=not odd), collectives))[1]
    assert f"Rank 1: it has no {bias}, which rank 0 has." in text


@BOTH_WAYS
def test_ranks_that_build_different_optimizers_say_what_differs(workers, collectives):
    workers(2).run(shards_differently, collectives)


# -- gradients ---------------------------------------------------------------------------------------------------------


def drops_alone(collectives: bool, clips: bool, set_to_none: bool) -> None:
    model, opt = trained_once(collectives)
    loss_of(model, batch(1)).backward()
    if clips:
        opt.clip_grad_norm_(1.0)
    opt.zero_grad()
    opt.step()  # all have dropped theirs: nothing to do
    loss_of(model, batch(2)).backward()
    if clips:
        opt.clip_grad_norm_(1.0)
    if dist.get_rank() == 1:
        opt.zero_grad(set_to_none)
    text = raised_before_a_weight_moved(model, opt.step)[1]
    assert "ranks [1] call step() after zero_grad() dropped the gradients" in text
    assert "ranks [0, 2] call step()" in text


@BOTH_WAYS
@pytest.mark.parametrize(("clips", "set_to_none"), [(False, True), (True, True), (True, False)])
def test_a_rank_that_drops_its_gradients_alone_is_named(workers, collectives, clips, set_to_none):
    workers(3).run(drops_alone, collectives, clips, set_to_none)


# -- parameters --------------------------------------------------------------------------------------------------------


def replaces_a_parameter(collectives: bool, how: str, everywhere: bool) -> None:
    model, opt = trained_once(collectives)
    if everywhere or dist.get_rank() == 1:
        if how == "assignment":
            model.layers[2].weight = nn.Parameter(torch.ones(2, 6))
        elif how == "module":
            model.layers[2] = nn.Linear(6, 2)
        else:
            model.load_state_dict({key: value.clone() for key, value in model.state_dict().items()}, assign=True)
    loss_of(model, batch(1)).backward()
    kind, text = raised_before_a_weight_moved(model, opt.step)
    assert kind == "RuntimeError"
    assert "came after shard(...)" in text
    assert "Build the optimizer again" in text
    assert everywhere or "rank 1" in text
    again = shard(model, collectives)
    loss_of(model, batch(2)).backward()
    again.step()
    assert_ranks_equal(list(model.parameters()))


@BOTH_WAYS
@pytest.mark.parametrize(
    ("how", "everywhere"), [("assignment", True), ("assignment", False), ("module", True), ("assign=True", True)]
)
def test_a_parameter_that_was_replaced_does_not_silently_train_nothing(workers, collectives, how, everywhere):
    workers(2).run(replaces_a_parameter, collectives, how, everywhere)


def rearranges_the_model() -> None:
    """Parameters that have left the model, or are found elsewhere in it, are no fault."""
    model, opt = trained_once(False, lambda: nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7)))
    model[1].weight = model[0].weight  # tied
    nn.utils.parametrizations.spectral_norm(model[2])
    for step in range(2):
        before = model[2].parametrizations.weight.original.detach().clone()
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        assert not torch.equal(before, model[2].parametrizations.weight.original)


def test_a_model_that_is_tied_or_parametrized_after_shard_goes_on(workers):
    workers(2).run(rearranges_the_model)


def casts_alone(collectives: bool, what: str) -> None:
    model, opt = trained_once(collectives)
    if dist.get_rank() == 1:
        if what == "model":
            model.double()
        elif what == "parameter":
            model.layers[0].weight.data = model.layers[0].weight.data.double()
        else:
            model.layers[1].running_mean = torch.zeros(11)
    opt.zero_grad()
    text = raised_before_a_weight_moved(model, opt.step)[1]
    if what == "buffer":
        assert "layers.1.running_mean: a buffer of shape (11,)" in text
        assert "sync_buffers=False" in text
    else:
        assert "became one of shape" in text
        assert "layers.0.weight" in text or "layers.2" in text
        assert "rank 1" in text


@BOTH_WAYS
@pytest.mark.parametrize("what", ["model", "parameter", "buffer"])
def test_a_cast_or_another_buffer_on_one_rank_raises_on_all_before_a_weight_moves(workers, collectives, what):
    workers(2).run(casts_alone, collectives, what, timeout=30)


def grows_a_parameter(collectives: bool, everywhere: bool) -> None:
    model, opt = trained_once(collectives, lambda: nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2)))
    if everywhere or dist.get_rank() == 1:
        model[0].weight.data, model[0].bias.data = torch.ones(11, 7), torch.ones(11)
        model[1].weight.data = torch.ones(2, 11)
        text = raised(loss_of(model, batch(1)).backward)[1]
        assert "1.weight" in text
        assert "shape (2, 11)" in text
        assert "shard(...) again" in text
    else:
        loss_of(model, batch(1)).backward()
    ranks = [0, 1] if everywhere else [1]
    assert f"the backward pass failed on ranks {ranks}" in raised_before_a_weight_moved(model, opt.step)[1]
    opt.zero_grad()
    assert "became one of shape" in raised_before_a_weight_moved(model, opt.step)[1]


@BOTH_WAYS
@pytest.mark.parametrize("everywhere", [True, False])
def test_a_parameter_that_grew_does_not_abort_the_process(workers, collectives, everywhere):
    workers(2).run(grows_a_parameter, collectives, everywhere, timeout=30)


# -- state -------------------------------------------------------------------------------------------------------------


def writes_to_shown_state() -> None:
    _, opt = trained_once(False)
    assert opt.state
    for write in (opt.state.clear, lambda: opt.state.update({}), lambda: setattr(opt, "state", {})):
        kind, text = raised(write)
        assert kind == "TypeError"
        assert "load_state_dict" in text
    opt.load_state_dict({"state": {}, "param_groups": opt.state_dict()["param_groups"]})
    assert not opt.state


def test_clearing_the_state_does_not_silently_do_nothing(workers):
    workers(2).run(writes_to_shown_state)


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(7, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(x)


def loads_what_is_not_its_own(plain: bool) -> None:
    model, opt = trained_once(False)
    saved = opt.state_dict()
    if plain:
        params = [nn.Parameter(param.detach().clone()) for param in model.parameters()]
        names = [f"module.{name}" for name, _ in model.named_parameters()]
        adam = optim.AdamW(list(zip(names, params, strict=True)), lr=0.1)
        for param in params:
            param.grad = torch.ones_like(param)
        adam.step()
        saved = adam.state_dict()
        opt.load_state_dict(saved)  # DDP's prefix is no other name
    before = {name: value.clone() for name, value in next(iter(opt.state.values())).items()}
    other = shard(Normed(), False, optimizer_class=optim.SGD)
    kind, text = raised(lambda: other.load_state_dict(saved))
    assert kind == "ValueError"
    assert "has no 'momentum', 'dampening'" in text
    assert "SGD" in text
    foreign = other.state_dict() if not plain else optim.SGD(model.parameters(), lr=0.1).state_dict()
    assert "'betas'" in raised(lambda: opt.load_state_dict(foreign))[1]
    assert all(torch.equal(value, before[name]) for name, value in next(iter(opt.state.values())).items())
    renamed = shard(Renamed(), False)
    text = raised(lambda: renamed.load_state_dict(saved))[1]
    assert "it has layers.0.weight, layers.1.weight" in text
    assert "it does not have other.0.weight" in text
    for group in saved["param_groups"]:
        del group["param_names"]
    renamed.load_state_dict(saved)
    assert renamed.state


@pytest.mark.parametrize("plain", [False, True])
def test_the_state_of_another_optimizer_or_model_is_not_loaded_by_position(workers, plain):
    workers(2).run(loads_what_is_not_its_own, plain)
