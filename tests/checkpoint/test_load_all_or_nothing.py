"""What loading does to a sharded optimizer: all of it or nothing, on every rank; and what is saved is what is there."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from checkpointing import Blocks, train
from fast_lane_training import SMALL_BUCKETS
from shardstep import ShardConfig
from shardstep.stepping.masters import AVERAGE, MASTER
from training import raised

RANKS = [1, 2]
SMALL = ShardConfig(bucket_mb=SMALL_BUCKETS)


class Picky(optim.SGD):
    """Refuses a learning rate that is too large."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        if any(group["lr"] > 5 for group in self.param_groups):
            raise ValueError("lr too large")


class Noted(Blocks):
    """With something in its state_dict that is no tensor."""

    note = "own"

    def get_extra_state(self) -> dict[str, str]:
        return {"note": self.note}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.note = state["note"]


def values_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def state_of(opt: Any) -> dict[Any, Any]:
    return copy.deepcopy(opt._engine.runtime.local_step.entries())


def assert_same_state(one: dict[Any, Any], other: dict[Any, Any]) -> None:
    assert one.keys() == other.keys()
    for piece, entry in one.items():
        assert entry.keys() == other[piece].keys()
        assert all(torch.equal(entry[key], other[piece][key]) for key in entry)


def whole_state(opt: Any) -> dict[str, Any]:
    """On every rank."""
    opt.consolidate_state_dict(0)
    told = [opt.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(told, 0)
    assert told[0] is not None
    return told[0]


def picky(seed: int = 1) -> tuple[Noted, Any]:
    model = Noted(seed)
    return model, shardstep.shard(model, Picky, lr=0.1, momentum=0.9, config=SMALL)


def stored_state(path: str) -> dict[str, list[str]]:
    found = json.loads(Path(path, "contents.json").read_text())["parameters"]
    return {name: parameter["state"] for name, parameter in found.items()}


# -- a load that is refused --------------------------------------------------------------------------------------------


def refuses_a_checkpoint(folder: str) -> None:
    theirs, their_opt = picky(seed=2)
    train(theirs, their_opt, range(3))
    their_opt.param_groups[0]["lr"], their_opt.param_groups[0]["new"], theirs.note = 10.0, 1, "theirs"
    shardstep.save(f"{folder}/bad", theirs, their_opt)
    model, opt = picky()
    train(model, opt, range(2))
    shardstep.save(f"{folder}/before", model, opt)
    weights, state = values_of(model), state_of(opt)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert "lr too large" in raised(lambda: shardstep.load(f"{folder}/bad", model, opt))[1]
    assert all(map(torch.equal, weights, model.parameters())), "weights"
    assert_same_state(state, state_of(opt))
    assert (opt.param_groups[0]["lr"], "new" in opt.param_groups[0], model.note) == (0.1, False, "own")
    train(model, opt, range(1))
    shardstep.save(f"{folder}/after", model, opt)
    assert stored_state(f"{folder}/after") == stored_state(f"{folder}/before")


@pytest.mark.parametrize("ranks", RANKS)
def test_a_checkpoint_that_the_class_refuses_changes_nothing_and_the_next_save_has_all_state(workers, tmp_path, ranks):
    workers(ranks).run(refuses_a_checkpoint, str(tmp_path))


def refuses_a_state_dict() -> None:
    model, opt = picky()
    train(model, opt, range(2))
    saved = whole_state(opt)
    saved["param_groups"][0]["lr"] = 10.0
    train(model, opt, range(1))
    state = state_of(opt)
    assert "lr too large" in raised(lambda: opt.load_state_dict(saved))[1]
    assert opt.param_groups[0]["lr"] == 0.1
    assert_same_state(state, state_of(opt))
    train(model, opt, range(1))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_state_dict_that_the_class_refuses_costs_no_state(workers, ranks):
    workers(ranks).run(refuses_a_state_dict)


class RefusesLater(Picky):
    """On the last rank, and only where it is given parameters: no trial without them finds out."""

    armed = False

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        holds = any(param.numel() for group in self.param_groups for param in group["params"])
        if RefusesLater.armed and holds and dist.get_rank() == dist.get_world_size() - 1:
            raise ValueError("not these parameters")


def is_refused_on_one_rank() -> None:
    model = Blocks(1)
    opt = shardstep.shard(model, RefusesLater, lr=0.1, momentum=0.9, config=SMALL)
    train(model, opt, range(1))
    saved = whole_state(opt)
    saved["param_groups"][0]["lr"] = 0.2
    train(model, opt, range(2))
    state = state_of(opt)
    RefusesLater.armed = True
    try:
        assert "not these parameters" in raised(lambda: opt.load_state_dict(saved))[1]
    finally:
        RefusesLater.armed = False
    assert opt.param_groups[0]["lr"] == 0.1
    assert_same_state(state, state_of(opt))


def test_what_one_rank_refuses_no_rank_has_loaded(workers):
    workers(2).run(is_refused_on_one_rank)


def fails_with_a_new_option() -> None:
    model = Blocks(1)
    opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=SMALL)
    train(model, opt, range(1))
    saved = whole_state(opt)
    saved["param_groups"][0]["mine"] = 1
    if dist.get_rank() == 1:
        saved["state"][0]["exp_avg"] = torch.zeros(2, 2)
    keys = list(opt.param_groups[0])
    assert "exp_avg" in raised(lambda: opt.load_state_dict(saved))[1]
    assert list(opt.param_groups[0]) == keys


def test_a_load_that_failed_leaves_no_new_option_on_any_rank(workers):
    workers(2).run(fails_with_a_new_option)


def copies_options() -> None:
    model = Blocks(1)
    opt = shardstep.shard(model, optim.AdamW, lr=torch.tensor(0.1), config=SMALL)
    train(model, opt, range(1))
    saved = whole_state(opt)
    saved["param_groups"][0].update(lr=torch.tensor(0.25), other=torch.ones(2))
    own = opt.param_groups[0]["lr"]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["lr"] is own, "a scheduler may hold it"
    assert own == 0.25
    own.fill_(0.75)
    opt.param_groups[0]["other"].fill_(3)
    assert saved["param_groups"][0]["lr"] == 0.25
    assert torch.equal(saved["param_groups"][0]["other"], torch.ones(2))


@pytest.mark.parametrize("ranks", RANKS)
def test_a_learning_rate_in_a_tensor_is_not_shared_with_the_state_dict_it_came_from(workers, ranks):
    workers(ranks).run(copies_options)


# -- what is saved is what is there ------------------------------------------------------------------------------------


def saves_written_weights(folder: str, steps: int) -> None:
    model = Blocks(1).bfloat16()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=ShardConfig(bucket_mb=SMALL_BUCKETS, ema=0.9))
    for _ in range(steps):
        model(torch.randn(4, 7).bfloat16()).sum().backward()
        opt.step()
        opt.zero_grad()
    other = Blocks(2).bfloat16()
    model.load_state_dict(other.state_dict())
    shardstep.save(f"{folder}/saved", model, opt)
    wide = Blocks(3)
    shardstep.load(f"{folder}/saved", wide)
    # Rounded: an element that happens to be what it was keeps the digits of its master.
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(wide.parameters(), other.parameters(), strict=True))
    saved = whole_state(opt)["state"]
    for place, param in enumerate(other.parameters()):
        assert torch.equal(saved[place][MASTER].reshape(param.shape).bfloat16(), param)
        if not steps:
            assert torch.equal(saved[place][AVERAGE].reshape(param.shape).bfloat16(), param)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("steps", [0, 2])
def test_weights_that_the_program_loaded_are_saved_and_not_the_masters_from_before(workers, tmp_path, ranks, steps):
    workers(ranks).run(saves_written_weights, str(tmp_path), steps)


def looks_between_loads() -> None:
    """Masters, a look at the state, then the weights that are theirs."""
    first = Blocks(1)
    model = copy.deepcopy(first).bfloat16()
    saved = whole_state(shardstep.shard(model, optim.SGD, lr=0.1, masters_from=first, config=SMALL))
    again = Blocks(2).bfloat16()
    opt = shardstep.shard(again, optim.SGD, lr=0.1, config=SMALL)
    opt.load_state_dict(saved)
    assert opt.state
    again.load_state_dict(model.state_dict())
    for place, param in enumerate(first.parameters()):
        assert torch.equal(whole_state(opt)["state"][place][MASTER].reshape(param.shape), param)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_look_at_the_state_before_the_weights_are_loaded_does_not_cost_the_masters_digits(workers, ranks):
    workers(ranks).run(looks_between_loads)


def consolidates_then_loads(folder: str) -> None:
    model = Blocks(1)
    opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=SMALL)
    train(model, opt, range(1))
    shardstep.save(f"{folder}/saved", model, opt)
    train(model, opt, range(3))
    opt.consolidate_state_dict(0)
    shardstep.load(f"{folder}/saved", model, opt)
    entries = [entry for entry in opt.state_dict()["state"].values() if entry]
    assert [float(entry["step"]) for entry in entries] == [1.0] * len(entries)


@pytest.mark.parametrize("ranks", RANKS)
def test_what_was_consolidated_before_a_load_is_not_the_state_after_it(workers, tmp_path, ranks):
    workers(ranks).run(consolidates_then_loads, str(tmp_path))


def loads_on_a_rank_that_holds_nothing(folder: str) -> None:
    model = nn.Linear(1, 1, bias=False)
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
    shardstep.save(f"{folder}/saved", model, opt)
    again = nn.Linear(1, 1, bias=False)
    other = shardstep.shard(again, optim.AdamW, lr=0.1)
    shardstep.load(f"{folder}/saved", again, other)
    assert list(other.state_dict()["state"]) == [0], "torch.distributed.checkpoint wants an entry on every rank"


def test_after_a_load_a_rank_without_state_knows_that_others_have_some(workers, tmp_path):
    workers(2).run(loads_on_a_rank_that_holds_nothing, str(tmp_path))


def loads_without_averages(folder: str, dtype: torch.dtype) -> None:
    saved = Blocks(1).to(dtype)
    shardstep.save(f"{folder}/saved", saved, shardstep.shard(saved, optim.AdamW, lr=0.1, config=SMALL))
    model = Blocks(2).to(dtype)
    opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=ShardConfig(bucket_mb=SMALL_BUCKETS, ema=0.9))
    for _ in range(3):
        sum(param.float().square().sum() for param in model.parameters()).backward()
        opt.step()
        opt.zero_grad()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        shardstep.load(f"{folder}/saved", model, opt)
    assert any("the averages begin with the loaded weights" in str(one.message) for one in told)
    with opt.ema():
        assert all(map(torch.equal, model.parameters(), saved.parameters()))
    assert all(map(torch.equal, model.parameters(), saved.parameters()))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_averages_that_were_not_saved_begin_with_the_loaded_weights(workers, tmp_path, ranks, dtype):
    workers(ranks).run(loads_without_averages, str(tmp_path), dtype)
