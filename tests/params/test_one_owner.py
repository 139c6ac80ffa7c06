"""A parameter belongs to one sharded optimizer at a time, whatever modules it is in."""

from __future__ import annotations

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import batch, loss_of
from training import raised, small_model


def two_with_one_head() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    head = nn.Linear(5, 2)
    return (
        nn.Sequential(nn.Linear(7, 5), head),
        nn.ModuleDict({"body": nn.Linear(7, 5), "head": head}),
    )


def shards_two_with_one_head(collectives: bool) -> None:
    one, other = two_with_one_head()
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(one, optim.SGD, lr=0.1)
        kind, text = raised(lambda: shardstep.shard(other, optim.SGD, lr=0.1))
        assert kind == "ValueError"
        assert "head.weight of this ModuleDict is 1.weight of a Sequential" in text
        assert "close()" in text
        loss_of(one, batch(0)).backward()  # the first goes on
        opt.step()
        opt.close()
        shardstep.shard(other, optim.SGD, lr=0.1)


@pytest.mark.parametrize("collectives", [False, True])
def test_a_head_of_two_sharded_models_does_not_get_the_gradients_of_both(workers, collectives):
    workers(2).run(shards_two_with_one_head, collectives)


def shards_a_part_again() -> None:
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2))
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    assert (
        "weight of this Linear is 0.weight of a Sequential"
        in raised(lambda: shardstep.shard(model[0], optim.SGD, lr=0.1))[1]
    )
    other = shardstep.shard(nn.Linear(7, 5), optim.SGD, lr=0.1)
    kind, text = raised(lambda: other.add_param_group({"params": model[0].parameters()}))
    assert kind == "ValueError"
    assert "is 0.weight of a Sequential" in text
    del opt
    gc.collect()
    shardstep.shard(model[0], optim.SGD, lr=0.1)


def test_a_part_of_a_sharded_model_is_not_taken_from_it(workers):
    workers(2).run(shards_a_part_again)
    workers(1).run(shards_a_part_again)


def shards_a_part_of_garbage() -> None:
    """Nobody collects what was dropped, and it may be a cycle."""
    model = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 2))
    gc.disable()
    try:
        shardstep.shard(model, optim.SGD, lr=0.1)
        opt = shardstep.shard(model[0], optim.SGD, lr=0.1)
        loss_of(model, batch(0)).backward()
        opt.step()
    finally:
        gc.enable()


def test_an_optimizer_that_is_garbage_owns_nothing(workers):
    workers(2).run(shards_a_part_of_garbage)


def shares_a_frozen_backbone() -> None:
    one, other = two_with_one_head()
    one[1].requires_grad_(False)
    first, second = (shardstep.shard(net, optim.SGD, lr=0.1) for net in (one, other))
    before = one[1].weight.detach().clone()
    loss_of(one, batch(0)).backward()
    other["head"](other["body"](batch(0))).sum().backward()
    first.step()
    second.step()
    assert torch.equal(one[1].weight, before)


def test_two_models_may_share_what_neither_trains(workers):
    workers(2).run(shares_a_frozen_backbone)


def unfreezes_what_two_models_share(collectives: bool) -> str:
    """Frozen, a backbone may belong to two; each would take the other's gradients when it trains."""
    backbone = nn.Linear(7, 7).requires_grad_(False)
    models = [nn.Sequential(backbone, nn.Linear(7, 3)) for _ in range(2)]
    with by_collectives() if collectives else nullcontext():
        opts = [shardstep.shard(model, optim.SGD, lr=0.1) for model in models]
    backbone.requires_grad_(True)
    loss_of(models[0], batch(0)).backward()
    before = backbone.weight.detach().clone()
    text = raised(opts[0].step)[1]
    assert torch.equal(backbone.weight, before)
    opts[0].close()
    assert opts[1].holds_gradient_of(models[1][1].weight) is False
    loss_of(models[1], batch(0)).backward()
    opts[1].step()  # it has one owner now
    assert not torch.equal(backbone.weight, before)
    return text


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
def test_a_shared_backbone_that_is_unfrozen_is_refused(workers, collectives):
    (text,) = set(workers(2).run(unfreezes_what_two_models_share, collectives, timeout=40))
    assert "sharded already" in text
    assert "0.weight" in text


class Wrapper:
    """As a trainer makes one: of the optimizer's own class, too, and all else is found in the optimizer inside."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self.__class__ = type("Wrapped", (Wrapper, type(optimizer)), {})

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)


def loses_a_wrapper() -> None:
    model = small_model()
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    wrapper: Any = Wrapper(opt)
    del wrapper
    gc.collect()
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(2, 6)).sum().backward()
    opt.step()
    assert not any(torch.equal(param, old) for param, old in zip(model.parameters(), before, strict=True))


def test_weights_stopped_to_move_when_a_wrapper_of_the_optimizer_was_garbage(workers):
    workers(2).run(loses_a_wrapper)
