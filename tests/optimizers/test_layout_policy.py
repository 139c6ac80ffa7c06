"""What shard() and the drop-in make of classes that are not torch's: cut, left whole, or refused with the reason."""

from __future__ import annotations

import random
import time
import types
import warnings
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from fast_lane_training import SMALL_BUCKETS, Matrices, assert_trains_like_ddp, batch, loss_of
from shardstep import Layout, ShardConfig, ZeroRedundancyOptimizer
from shardstep.optimizers import layout_policy
from training import all_same, raised


class Plain(optim.Optimizer):
    """Elementwise, and nobody knows it: gradient descent with `update` to say how."""

    def __init__(self, params: Any, lr: float = 0.01, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            self.before(group)
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, group)

    def before(self, group: dict[str, Any]) -> None: ...

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"])


class OneStepSize(Plain):
    """Like D-Adaptation: one step size for all parameters, from a sum that is kept in the group; at first tiny."""

    def before(self, group: dict[str, Any]) -> None:
        group["sum"] = group.get("sum", 0.0) + sum(float(p.grad.abs().sum()) for p in group["params"])
        group["d"] = max(group.get("d", 1e-6), 1e-9 * group["sum"])

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["d"])


class StepSizeOnItself(Plain):
    """The same, kept in an attribute, and not yet used."""

    seen = 0.0

    def before(self, group: dict[str, Any]) -> None:
        self.seen = self.seen + sum(float(p.grad.abs().sum()) for p in group["params"])


class CountsParameters(Plain):
    """Counts on itself, but once for every parameter."""

    count = 0

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        self.count += 1
        super().update(param, group)


class NotesTheTime(Plain):
    """On itself; it moves no weight."""

    def before(self, group: dict[str, Any]) -> None:
        self.last = time.perf_counter()


class ClipsAll(Plain):
    """Couples all parameters only where their gradients are large."""

    def before(self, group: dict[str, Any]) -> None:
        norm = torch.stack([p.grad.norm() for p in group["params"]]).norm() if group["params"] else torch.zeros(())
        group["clip"] = 1.0
        self.factor = 100.0 / float(norm) if norm > 100.0 else 1.0

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad * self.factor, alpha=group["lr"])


class WarmsUp(Plain):
    """Elementwise for forty steps, and then scaled by the norm of each parameter, as LARS is."""

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        state["step"] = state.get("step", 0) + 1
        scale = 1.0 if state["step"] <= 40 else float(param.norm() / (param.grad.norm() + 1e-6))
        param.sub_(param.grad * scale, alpha=group["lr"])


class DrawsWithTorch(Plain):
    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad + 0.1 * torch.randn_like(param), alpha=group["lr"])


class DrawsWithPython(Plain):
    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad * random.random(), alpha=group["lr"])


class DrawsWithNumpy(Plain):
    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad * float(numpy.random.rand()), alpha=group["lr"])


class TalksItself(Plain):
    def before(self, group: dict[str, Any]) -> None:
        dist.all_reduce(torch.zeros(1))


class NeedsClosure(Plain):
    def step(self, closure: Any = None) -> None:
        if closure is None:
            raise RuntimeError("give me a closure")
        super().step(closure)


class TensorRate(Plain):
    """As torchao's classes: the learning rate is made a tensor, and has to stay one."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["lr"] = torch.tensor(float(group["lr"]))

    def before(self, group: dict[str, Any]) -> None:
        if not isinstance(group["lr"], torch.Tensor):
            raise RuntimeError("lr was changed to a non-Tensor object")

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad * group["lr"])


class CountsInATensor(Plain):
    """Its step size falls with a count of its steps that it keeps in its group, and advances in place."""

    def before(self, group: dict[str, Any]) -> None:
        group.setdefault("count", torch.zeros(())).add_(1)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=float(group["lr"] / group["count"]))


class RefusesNothing(Plain):
    """As pytorch_optimizer's AdamS: an instance without parameters cannot be stepped."""

    def before(self, group: dict[str, Any]) -> None:
        if not group["params"]:
            raise RuntimeError("parameter size is 0")


def refusals(classes: list[type[optim.Optimizer]]) -> list[tuple[str, str]]:
    """What both surfaces say, and that no weight has moved."""
    found: list[tuple[str, str]] = []
    for kind in classes:
        model = Matrices()
        before = [param.detach().clone() for param in model.parameters()]
        found.append(raised(lambda kind=kind, model=model: shardstep.shard(model, kind)))
        found.append(raised(lambda kind=kind, model=model: ZeroRedundancyOptimizer(model.parameters(), kind)))
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return found


COUPLED = {
    OneStepSize: "'sum'",
    StepSizeOnItself: "'seen'",
    CountsParameters: "'count'",
    ClipsAll: "treats all parameters together",
}


@pytest.mark.parametrize("kind", COUPLED, ids=lambda kind: kind.__name__)
def test_one_step_size_for_all_parameters_was_sharded_as_if_elementwise(workers, kind):
    for name, text in all_same(workers(2).run(refusals, [kind])):
        assert name == "ValueError"
        assert "treats all parameters together" in text
        assert COUPLED[kind] in text


@pytest.mark.parametrize("kind", [DrawsWithTorch, DrawsWithPython, DrawsWithNumpy])
def test_random_numbers_were_refused_as_coupling(workers, kind):
    for name, text in all_same(workers(2).run(refusals, [kind])):
        assert name == "ValueError"
        assert f"{kind.__name__} draws random numbers" in text
        assert "treats all parameters together" not in text


def test_an_optimizer_that_talks_to_other_ranks_itself_is_refused(workers):
    for name, text in all_same(workers(2).run(refusals, [TalksItself])):
        assert name == "ValueError"
        assert "talks to other ranks itself" in text


def trains_after_a_warm_up() -> None:
    sharded = assert_trains_like_ddp(Matrices, WarmsUp, {"lr": 0.01}, steps=50)
    assert sharded._engine.runtime.recipe.layouts[0] is Layout.WHOLE


def test_what_couples_elements_after_a_warm_up_was_cut(workers):
    workers(2).run(trains_after_a_warm_up)


def obeys_the_caller() -> None:
    flat = ShardConfig(layout=Layout.FLAT, bucket_mb=SMALL_BUCKETS)
    assert assert_trains_like_ddp(Matrices, Plain, {"lr": 0.01})._engine.runtime.recipe.layouts[0] is Layout.WHOLE
    assert (
        assert_trains_like_ddp(Matrices, NotesTheTime, {"lr": 0.01})._engine.runtime.recipe.layouts[0] is Layout.WHOLE
    )
    assert assert_trains_like_ddp(Matrices, Plain, {"lr": 0.01}, flat)._engine.runtime.recipe.layouts[0] is Layout.FLAT


def test_a_class_of_somebody_elses_is_cut_only_if_the_caller_asks(workers):
    workers(2).run(obeys_the_caller)


def takes_the_known() -> None:
    module = types.ModuleType("lion_pytorch.lion_pytorch")
    kind = type("Lion", (Plain,), {"__module__": module.__name__})
    assert layout_policy.qualified_name(kind) in layout_policy.ELEMENTWISE
    assert shardstep.shard(Matrices(), kind)._engine.runtime.recipe.layouts[0] is Layout.FLAT
    elsewhere = type("Lion", (Plain,), {"__module__": "mine"})
    assert shardstep.shard(Matrices(), elsewhere)._engine.runtime.recipe.layouts[0] is Layout.WHOLE


def test_known_elementwise_classes_are_cut(workers):
    workers(2).run(takes_the_known)


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40_000, 64)
        self.head = nn.Linear(64, 8)


def warns_of_the_large() -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardstep.shard(Large(), Plain)
        shardstep.shard(Large(), optim.SGD)
        shardstep.shard(Large(), Plain, config=ShardConfig(layout=Layout.FLAT))
        shardstep.shard(Large(), Plain, config=ShardConfig(layout=Layout.WHOLE))
        shardstep.shard(Matrices(), Plain)
    return [str(one.message) for one in caught if "Layout.FLAT" in str(one.message)]


def test_a_whole_embedding_on_one_rank_is_said_once_with_the_remedy(workers):
    first, second = workers(2).run(warns_of_the_large)
    assert len(first) == 1
    assert "Plain is not known to treat every element alone" in first[0]
    assert "2,560,000 of 2,560,520 elements" in first[0]
    assert "ShardConfig(layout=Layout.FLAT)" in first[0]
    assert second == []


def needs_a_closure() -> tuple[str, str]:
    shardstep.shard(Matrices(), NeedsClosure, config=ShardConfig(layout=Layout.WHOLE))
    ZeroRedundancyOptimizer(Matrices().parameters(), NeedsClosure)
    return raised(lambda: shardstep.shard(Matrices(), NeedsClosure))


def test_what_cannot_be_tried_is_refused_unless_the_caller_knows(workers):
    name, text = all_same(workers(2).run(needs_a_closure))
    assert name == "ValueError"
    assert "give me a closure" in text
    assert "ShardConfig(layout=Layout.WHOLE)" in text


def trains(kind: type[optim.Optimizer]) -> None:
    every_parameter_alone = ShardConfig(layout=Layout.WHOLE, bucket_mb=1e-6)
    assert_trains_like_ddp(Matrices, kind, {"lr": 0.01}, every_parameter_alone, steps=6)


def test_a_learning_rate_that_the_class_keeps_in_a_tensor_was_replaced_by_a_number(workers):
    workers(2).run(trains, TensorRate)


def test_a_count_in_a_tensor_of_the_group_was_advanced_once_for_every_bucket(workers):
    workers(2).run(trains, CountsInATensor)


def test_an_instance_without_parameters_was_stepped(workers):
    workers(2).run(trains, RefusesNothing)


def grows() -> tuple[str, str]:
    model = Matrices()
    zero = ZeroRedundancyOptimizer([model.first.weight], Switched, lr=0.01)
    before = model.second.weight.detach().clone()
    found = raised(lambda: zero.add_param_group({"params": [model.second.weight], "together": True}))
    assert torch.equal(model.second.weight, before)
    assert len(zero.param_groups) == 1
    return found


class Switched(OneStepSize):
    """Couples parameters under an option."""

    def __init__(self, params: Any, lr: float = 0.01, together: bool = False) -> None:
        super().__init__(params, lr, together=together)

    def before(self, group: dict[str, Any]) -> None:
        if group["together"]:
            super().before(group)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"])


def test_a_group_whose_options_couple_parameters_is_refused_when_it_is_added(workers):
    name, text = all_same(workers(2).run(grows))
    assert name == "ValueError"
    assert "treats all parameters together" in text


def test_a_trial_leaves_no_trace():
    from shardstep.optimizers.layout_trial import probe

    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    threads = torch.get_num_threads()
    mine = torch.ones(3, requires_grad=True)
    options = {"params": [mine], "lr": torch.tensor(0.1), "betas": [0.9, 0.99]}
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].copy()
    for kind in (DrawsWithTorch, DrawsWithPython, DrawsWithNumpy, Plain):
        probe(kind, {}, [options], torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (numpy.random.get_state()[1] == states[2]).all()
    assert torch.get_num_threads() == threads
    assert mine.grad is None
    assert torch.equal(mine, torch.ones(3))
    assert options["betas"] == [0.9, 0.99]
    assert float(options["lr"]) == pytest.approx(0.1)


class CountsItself(Plain):
    """Its step size falls with a count of its steps that it keeps in an attribute."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.calls = 0

    def step(self, closure: Any = None) -> None:
        self.calls += 1
        super().step(closure)

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        param.sub_(param.grad, alpha=group["lr"] / self.calls)


class KeepsMomentumOnItself(Plain):
    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr)
        self.momentum: dict[torch.Tensor, torch.Tensor] = {}

    def update(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        momentum = self.momentum.setdefault(param, torch.zeros_like(param))
        param.sub_(momentum.mul_(0.9).add_(param.grad), alpha=group["lr"])


def freezes_for_a_step(kind: type[optim.Optimizer]) -> float:
    """The largest difference from the plain optimizer, on the same mean gradients."""
    model, twin = Matrices(), Matrices()
    opt, plain = shardstep.shard(model, kind, lr=0.1), kind(twin.parameters(), lr=0.1)
    for step in range(8):
        for net in (model, twin):
            net.second.weight.requires_grad_(step != 3)
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        loss_of(twin, batch(step)).backward()
        for param in twin.parameters():
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= 2
        plain.step()
        plain.zero_grad()
    return max(float((a - b).detach().abs().max()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_a_count_on_the_instance_was_lost_when_a_layer_was_frozen_for_a_step(workers):
    assert workers(2).run(freezes_for_a_step, CountsItself) == [0.0, 0.0]


def refuses_a_new_plan() -> tuple[str, str]:
    return raised(lambda: freezes_for_a_step(KeepsMomentumOnItself))


def test_what_a_class_keeps_on_itself_for_each_parameter_was_lost_with_a_new_plan(workers):
    name, text = all_same(workers(2).run(refuses_a_new_plan))
    assert name == "RuntimeError"
    assert "KeepsMomentumOnItself keeps 'momentum' on itself" in text
