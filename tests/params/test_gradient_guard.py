"""Gradients that lie in shards: whoever looks for them in `param.grad` hears of it, and nothing else is touched."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.utils import clip_grad

import shardstep
from fast_lane_training import Net, batch, loss_of
from shardstep import ShardConfig
from shardstep.comm.agreement import Claim, Facts
from shardstep.params.proxy import gradient_of
from training import raised


def by_hand(model: nn.Module) -> float:
    """As many programs have it."""
    total = 0.0
    for param in model.parameters():
        if param.grad is not None:
            total += param.grad.norm().item() ** 2
    return total**0.5


def scales(model: nn.Module) -> None:
    for param in model.parameters():
        if param.grad is not None:
            param.grad.mul_(0.5)


READERS: dict[str, Callable[[nn.Module], Any]] = {
    "get_total_norm": lambda model: torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]),
    "clip_grad_norm_": lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_value_": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 1.0),
    "a norm by hand": by_hand,
    "scaling by hand": scales,
}


def reads_gradients(name: str) -> None:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    by_hand(model)  # there is none yet, and nothing is missed
    loss_of(model, batch(0)).backward()
    before = [param.detach().clone() for param in model.parameters()]
    kind, text = raised(lambda: READERS[name](model))
    assert kind == "RuntimeError"
    assert "has reduced this gradient to shards" in text
    assert 'gradients="keep"' in text
    assert all(map(torch.equal, model.parameters(), before))
    opt.step()  # the gradients are still there
    assert not all(map(torch.equal, model.parameters(), before))
    opt.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_of_sharded_gradients_is_not_zero_without_a_word(workers, ranks, name):
    workers(ranks).run(reads_gradients, name)


def scales_in_a_step_hook() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    opt.register_step_pre_hook(lambda *_: scales(model))
    loss_of(model, batch(0)).backward()
    assert raised(opt.step)[0] == "RuntimeError"


def test_scaling_in_a_step_hook_is_not_lost_without_a_word(workers):
    workers(2).run(scales_in_a_step_hook)


def reads_kept_gradients() -> None:
    model = Net()
    shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(gradients="keep"))
    loss_of(model, batch(0)).backward()
    assert by_hand(model) > 0


def test_kept_gradients_are_in_param_grad(workers):
    workers(2).run(reads_kept_gradients)


def zeroes_the_model(set_to_none: bool) -> None:
    class Special(Net):
        def zero_grad(self, set_to_none: bool = True) -> None:
            super().zero_grad(set_to_none)

    for model in (Net(), Special()):
        opt = shardstep.shard(model, optim.SGD, lr=0.1)
        loss_of(model, batch(0)).backward()
        before = [param.detach().clone() for param in model.parameters()]
        model.zero_grad(set_to_none=set_to_none)
        opt.step()
        assert all(map(torch.equal, model.parameters(), before))
        opt.close()


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_the_model_drops_the_shards(workers, set_to_none):
    workers(2).run(zeroes_the_model, set_to_none)


# -- nothing else is touched, and nothing stays ------------------------------------------------------------------------


def is_untouched(model: nn.Module) -> None:
    assert {type(param) for param in model.parameters()} == {nn.Parameter}
    for param in model.parameters():
        assert not param._post_accumulate_grad_hooks
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._forward_hooks
        assert not module._state_dict_pre_hooks
        assert "zero_grad" not in vars(module)


def shards_again_and_again(gather: Any, closes: bool) -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    for _ in range(4):
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(gather=gather))
        loss_of(model, batch(0)).backward()
        opt.step()
        opt.zero_grad()
        if closes:
            opt.close()
        else:
            del opt
            gc.collect()
        is_untouched(model)
    for _ in range(10):  # as in a notebook: the next one closes the one before
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(gather=gather))
    assert sum(len(param._post_accumulate_grad_hooks or ()) for param in model.parameters()) == 4
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.close()
    is_untouched(model)


@pytest.mark.parametrize("closes", [True, False], ids=["close", "del"])
@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_an_optimizer_that_is_closed_or_gone_leaves_nothing_behind(workers, gather, closes):
    workers(2).run(shards_again_and_again, gather, closes)


def changes_nothing_for_others() -> None:
    places = [(nn.Module, "zero_grad"), (torch.nn.utils, "clip_grad_norm_"), (clip_grad, "clip_grad_value_"),
              (clip_grad, "_clip_grads_with_norm_")]  # fmt: skip
    before = [getattr(*place) for place in places]
    model, other = Net(), Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    loss_of(model, batch(0)).backward()
    loss_of(other, batch(0)).backward()
    assert [getattr(*place) for place in places] == before
    assert {type(param) for param in other.parameters()} == {nn.Parameter}
    torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
    other.zero_grad()
    assert opt.holds_gradient_of(model.first.weight)


def test_torchs_functions_are_those_of_torch(workers):
    workers(2).run(changes_nothing_for_others)


# -- copies ------------------------------------------------------------------------------------------------------------


def is_copied(gather: Any) -> None:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(gather=gather))
    loss_of(model, batch(0)).backward()
    opt.step()
    for hidden in (True, False):
        if hidden:
            loss_of(model, batch(1)).backward()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            assert {type(param) for param in twin.parameters()} == {nn.Parameter}
            assert all(map(torch.equal, twin.parameters(), model.parameters()))
            loss_of(twin, batch(1)).backward()  # nobody else takes part
            assert by_hand(twin) > 0
            twin.zero_grad()
        opt.zero_grad()
    for attempt in (lambda: copy.deepcopy(opt), lambda: pickle.dumps(opt), lambda: torch.save(opt, io.BytesIO())):
        kind, text = raised(attempt)
        assert kind == "TypeError"
        assert "shardstep.save" in text


@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_a_sharded_model_can_be_copied_and_pickled(workers, gather):
    workers(2).run(is_copied, gather)


def accumulates_under_the_compiler() -> None:
    """The compiler looks at `param.grad` when it compiles, and that may be while gradients are in shards."""
    results = []
    for compiles in (False, True):
        model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.1)
        opt = shardstep.shard(model, optim.SGD, lr=0.1)
        loss_of(model, batch(0)).backward()
        call = torch.compile(model, backend="aot_eager", fullgraph=True) if compiles else model
        for step in range(1, 4):
            loss_of(call, batch(step)).backward()
        opt.step()
        results.append([param.detach().clone() for param in model.parameters()])
        opt.close()
    assert all(torch.allclose(one, other, atol=1e-7) for one, other in zip(*results, strict=True))
    assert all(gradient_of(param) is None for param in model.parameters())


def test_gradients_add_up_under_torch_compile(workers):
    workers(2).run(accumulates_under_the_compiler, timeout=100)


def goes_apart_with_weights_on_their_way() -> None:
    """The ranks part after a step with overlap; what is left can be closed, and waits for nobody."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 3))
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=ShardConfig(gather="overlap"))
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    if dist.get_rank() == 0:
        assert raised(lambda: (loss_of(model, batch(2)).backward(), opt.step()))[0] == "RuntimeError"
    else:
        assert raised(opt.step)[0] == "RuntimeError"
    opt.close()
    is_untouched(model)
    assert all(param.isfinite().all() for param in model.parameters())


def test_ranks_that_went_apart_close_without_waiting(workers):
    workers(2).run(goes_apart_with_weights_on_their_way, timeout=30)


def raises_in_the_middle() -> None:
    """What is thrown away while an error goes up must not wait for ranks that have none."""

    def trains() -> None:
        model = Net()
        opt = shardstep.shard(model, optim.SGD, lr=0.1)
        loss_of(model, batch(0)).backward()
        opt._engine.context.agreement.claim(Claim("step", None, Facts()))  # half a step
        raise ArithmeticError("on the way")

    if dist.get_rank() == 0:
        assert raised(trains)[0] == "ArithmeticError"
        gc.collect()
    else:
        shardstep.shard(Net(), optim.SGD, lr=0.1)


def test_an_optimizer_dropped_by_an_error_waits_for_nobody(workers):
    workers(2).run(raises_in_the_middle, timeout=30)


def loads_nothing_on_one_rank() -> str:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    saved: Any = opt.state_dict() if dist.get_rank() == 0 else None  # its file was not there
    return raised(lambda: opt.load_state_dict(saved))[1]


def test_a_state_that_is_missing_on_one_rank_raises_on_all(workers):
    for text in workers(2).run(loads_nothing_on_one_rank, timeout=30):
        assert "load_state_dict failed on rank 1" in text


def zeroes_once() -> int:
    model = nn.Sequential(*[nn.Linear(7, 7) for _ in range(5)])
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    loss_of(model, batch(0)).backward()
    with mock.patch.object(opt, "zero_grad", side_effect=opt.zero_grad) as zero_grad:
        model.zero_grad(set_to_none=False)
    return int(zero_grad.call_count)


def test_zero_grad_of_the_model_makes_shards_zero_once(workers):
    assert workers(1).run(zeroes_once) == [1]
