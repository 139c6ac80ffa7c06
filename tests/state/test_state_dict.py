"""state_dict() of the fast lane: what a torch program expects, and never one rank's part that looks like the whole."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

import shardstep
from checkpointing import ADAMW, FLAT, KINDS, Blocks, assert_holds, leave_reference, muon_groups, read_reference
from checkpointing import train as train_steps
from training import raised

ALL = ["flat", "whole", "momentum", "bf16", "muon and adamw", "adafactor"]


def trained(name: str, seed: int = 3) -> tuple[nn.Module, Any]:
    model, opt = KINDS[name].build(seed=seed)
    train_steps(model, opt, range(3))
    return model, opt


def state_of(opt: Any) -> list[dict[str, Any]]:
    return [{key: value.clone() for key, value in entry.items()} for entry in opt.state.values()]


def assert_same(one: Any, other: Any) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


# -- the whole ---------------------------------------------------------------------------------------------------------


def consolidates(name: str, to: int) -> Any:
    """As a program saves it: on one rank, by torch.save, and read without running code."""
    _, opt = trained(name)
    opt.consolidate_state_dict(to)
    if dist.get_rank() != to:
        return None
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def equals_the_plain_one(name: str) -> None:
    """Keys, shapes and values, against the plain optimizer under DDP; and it loads into that."""
    kind = KINDS[name]
    assert kind.optimizer is not None
    twin = kind.model(3)
    plain = kind.optimizer(twin.named_parameters(), **kind.options)
    train_steps(DistributedDataParallel(twin, find_unused_parameters=True), plain, range(3))
    _, opt = trained(name)
    to = dist.get_world_size() - 1
    opt.consolidate_state_dict(to)
    if dist.get_rank() != to:
        return
    ours, theirs = opt.state_dict(), plain.state_dict()
    for mine, yours in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {key: mine[key] for key in yours} == yours
    assert ours["state"].keys() == theirs["state"].keys()
    for place, entry in theirs["state"].items():
        assert ours["state"][place].keys() == entry.keys()
        for key, value in entry.items():
            mine = ours["state"][place][key]
            assert (mine.shape, mine.dtype, mine.device.type) == (value.shape, value.dtype, "cpu"), (place, key)
            # Two addends commute; with three the sum depends on its order.
            bound = 0.0 if dist.get_world_size() <= 2 else 1e-6
            assert torch.allclose(mine, value, rtol=bound, atol=bound), (place, key)
    plain.load_state_dict(ours)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", ["flat", "whole", "momentum", "adafactor"])
def test_the_consolidated_state_is_that_of_the_plain_optimizer(workers, name, ranks):
    workers(ranks).run(equals_the_plain_one, name)


def loads_consolidated(name: str, saved: Any) -> None:
    """What one rank saved, all load; each finds what it had, whoever held it."""
    _, opt = KINDS[name].build(seed=11)
    before = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    opt.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        again = opt.state_dict()
        for place, entry in saved["state"].items():
            for key, value in entry.items():
                assert torch.equal(value, again["state"][place][key]), (place, key)
                assert torch.equal(value, before["state"][place][key]), "the caller's own is not written to"


@pytest.mark.parametrize("name", ALL)
def test_what_one_rank_saved_loads_on_any_number_of_ranks(workers, name):
    saved = workers(2).run(consolidates, name, 0)[0]
    for ranks in (1, 2, 3, 4):
        workers(ranks).run(loads_consolidated, name, saved)


def forgets() -> list[tuple[str, str]]:
    model, opt = trained("flat")
    opt.consolidate_state_dict(0)
    whole = dist.get_rank() == 0
    assert (type(opt.state_dict()["state"]) is dict) == whole
    train_steps(model, opt, range(3, 4))
    assert type(opt.state_dict()["state"]) is not dict, "old values would be taken for new ones"
    opt.consolidate_state_dict(1)
    assert (type(opt.state_dict()["state"]) is dict) == (dist.get_rank() == 1)
    return [raised(lambda: opt.consolidate_state_dict(7)), raised(lambda: opt.consolidate_state_dict(dist.get_rank()))]


def test_a_consolidated_state_is_not_kept_beyond_a_step(workers):
    for wrong, different in workers(2).run(forgets):
        assert "no rank 7" in wrong[1]
        assert "to=" in different[1]


# -- a part ------------------------------------------------------------------------------------------------------------


def uses_a_part(name: str) -> list[tuple[str, str]]:
    _, opt = trained(name)
    before = state_of(opt)
    found = [
        raised(lambda: torch.save(opt.state_dict(), io.BytesIO())),
        raised(lambda: torch.save(dict(opt.state_dict()["state"]), io.BytesIO())),
        raised(lambda: torch.save(opt.state_dict()["state"], io.BytesIO())),
    ]
    saved = copy.deepcopy(opt.state_dict())
    parts = [value for entry in saved["state"].values() for value in entry.values() if type(value) is not torch.Tensor]
    found += [raised(lambda: parts[0] + 1), raised(lambda: parts[0].sum())]
    assert "elements" in repr(parts[0])
    train_steps(opt.model, opt, range(3, 4))
    opt.load_state_dict(saved)
    assert_same(before, state_of(opt))
    return found


@pytest.mark.parametrize("name", ["flat", "whole", "adafactor"])
def test_one_ranks_part_is_not_saved_as_if_it_were_the_whole(workers, name):
    for found in workers(2).run(uses_a_part, name):
        for kind, text in found:
            assert kind == "RuntimeError"
            assert "consolidate_state_dict(to=0) on all ranks" in text
            assert "shardstep.save" in text


def nothing_here() -> tuple[bool, str]:
    model = nn.Linear(1, 1, bias=False)
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    torch.save(opt.state_dict(), io.BytesIO())  # nothing was stepped: there is nothing to lose
    opt.load_state_dict(opt.state_dict())
    model(torch.ones(1, 1)).sum().backward()
    opt.step()
    return bool(opt.state), raised(lambda: torch.save(opt.state_dict(), io.BytesIO()))[1]


def test_a_rank_that_holds_nothing_does_not_save_an_empty_state(workers):
    found = workers(3).run(nothing_here)
    assert [holds for holds, _ in found].count(False) == 2
    assert all("one rank's part" in text for _, text in found)


# -- by name -----------------------------------------------------------------------------------------------------------


def reordered(saved: Any) -> None:
    """The groups' parameters in another order, and the state under names, as torch's named optimizers have it."""
    model = Blocks(3)
    names = [name for name, _ in model.named_parameters()][::-1]
    opt = shardstep.shard(model, optim.AdamW, groups=[{"params": names}], config=FLAT, **ADAMW)
    opt.load_state_dict(saved)
    group = saved["param_groups"][0]
    by_name = {group["param_names"][place]: entry for place, entry in saved["state"].items()}
    opt.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        found = opt.state_dict()
        for place, name in enumerate(found["param_groups"][0]["param_names"]):
            for key, value in by_name[name].items():
                assert torch.equal(found["state"][place][key], value), (name, key)
    other = shardstep.shard(Blocks(3), optim.AdamW, config=FLAT, **ADAMW)
    named = {key: value for key, value in group.items() if key != "param_names"}
    other.load_state_dict({"state": by_name, "param_groups": [{**named, "params": sorted(by_name)}]})
    other.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        for place, entry in other.state_dict()["state"].items():
            assert all(torch.equal(value, saved["state"][place][key]) for key, value in entry.items())
    for wrong, words in (
        ({**by_name, "blocks.9.weight": {}}, "it has blocks.9.weight, which this optimizer does not have"),
        ({key: value for key, value in by_name.items() if key != "head.bias"}, "it does not have head.bias"),
    ):
        bad = {"state": wrong, "param_groups": [{**named, "params": sorted(wrong)}]}
        kind, text = raised(lambda bad=bad: other.load_state_dict(bad))
        assert kind == "ValueError"
        assert words in text


def whole_of_blocks() -> Any:
    model = Blocks(3)
    opt = shardstep.shard(model, optim.AdamW, config=FLAT, **ADAMW)
    train_steps(model, opt, range(2))
    opt.consolidate_state_dict(0)
    return opt.state_dict() if dist.get_rank() == 0 else None


@pytest.mark.parametrize("ranks", [1, 2])
def test_parameters_are_found_by_their_names(workers, ranks):
    saved = workers(2).run(whole_of_blocks)[0]
    workers(ranks).run(reordered, saved)


def other_groups(saved: Any) -> tuple[str, str]:
    opt = shardstep.shard(Blocks(3), optim.AdamW, groups=[{"params": "*.weight"}, {"params": "rest"}], **ADAMW)
    opt.load_state_dict(saved)  # both groups have the options of the one
    back = shardstep.shard(Blocks(3), optim.AdamW, **ADAMW)
    opt.consolidate_state_dict(0)
    opt.param_groups[0]["lr"] = 5.0
    return raised(lambda: back.load_state_dict(opt.state_dict()))


def test_groups_that_were_two_do_not_become_one(workers):
    saved = workers(1).run(whole_of_blocks)[0]
    (kind, text), *_ = workers(1).run(other_groups, saved)
    assert kind == "ValueError"
    assert "in one group here, and in two" in text


# -- torch.distributed.checkpoint --------------------------------------------------------------------------------------


def quietly(action: Any) -> Any:
    """torch warns of its own future."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return action()


def writes_by_dcp(name: str, folder: str, how: str) -> None:
    model, opt = trained(name)
    leave_reference(opt, model, Path(folder))
    if how == "plain":
        state = {"model": model.state_dict(), "optim": opt.state_dict()}
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flattened", strict=False)
        weights, optimizer = get_state_dict(model, opt, options=options)
        state = {"model": weights, "optim": optimizer}
    if how == "asynchronous":
        own = dist.new_group(backend="gloo")  # its thread sends, and so does training
        saving = quietly(lambda: dcp.async_save(state, checkpoint_id=f"{folder}/dcp", process_group=own))
        train_steps(model, opt, range(3, 5))  # what is saved is the state of the call
        saving.result()
    else:
        quietly(lambda: dcp.save(state, checkpoint_id=f"{folder}/dcp"))


def reads_by_dcp(name: str, folder: str, how: str) -> None:
    model, opt = trained(name, seed=11)
    reference = read_reference(Path(folder), {n: p.shape for n, p in model.named_parameters()})
    if how == "plain":
        state = {"model": model.state_dict(), "optim": opt.state_dict()}
        quietly(lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"))
        opt.load_state_dict(state["optim"])
    else:
        options = StateDictOptions(flatten_optimizer_state_dict=how == "flattened", strict=False)
        weights, optimizer = get_state_dict(model, opt, options=options)
        state = {"model": weights, "optim": optimizer}
        quietly(lambda: dcp.load(state, checkpoint_id=f"{folder}/dcp"))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)
    assert_holds(opt, model, reference)


@pytest.mark.parametrize("how", ["plain", "by name", "flattened", "asynchronous"])
@pytest.mark.parametrize("name", ["flat", "whole", "bf16", "muon and adamw"])
def test_stock_dcp_saves_and_loads_it_on_any_number_of_ranks(workers, tmp_path, name, how):
    workers(2).run(writes_by_dcp, name, str(tmp_path), how)
    for ranks in (1, 2, 3):
        workers(ranks).run(reads_by_dcp, name, str(tmp_path), how)


def fresh(folder: str) -> list[tuple[str, str]]:
    model, opt = KINDS["flat"].build()
    before = [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    found = [
        raised(lambda: get_optimizer_state_dict(model, opt)),
        raised(lambda: set_optimizer_state_dict(model, opt, {"state": {}, "param_groups": []})),
    ]
    assert before == [{key: value for key, value in group.items() if key != "params"} for group in opt.param_groups]
    assert all(param.grad is None for param in model.parameters())
    del folder
    return found


def test_an_optimizer_without_state_is_not_stepped_by_torchs_functions(workers, tmp_path):
    """They would make it by a step with gradients of zeros and a rate of zero, and leave both if that fails."""
    for found in workers(2).run(fresh, str(tmp_path)):
        for kind, text in found:
            assert kind == "RuntimeError"
            assert "shardstep.load" in text


def gathered() -> tuple[str, str] | None:
    model, opt = trained("flat")
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, strict=False)
    found = get_optimizer_state_dict(model, opt, options=options)
    return raised(lambda: torch.save(found, io.BytesIO())) if dist.get_rank() == 0 else None


def test_torchs_full_state_dict_is_not_one_ranks_part(workers):
    kind, text = workers(2).run(gathered)[0]
    assert kind == "RuntimeError"
    assert "consolidate_state_dict" in text


def several_classes() -> None:
    model = Blocks(3)
    opt = shardstep.shard(model, groups=muon_groups(), config=FLAT)
    train_steps(model, opt, range(2))
    opt.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        file = io.BytesIO()
        torch.save(opt.state_dict(), file)
        file.seek(0)
        groups = torch.load(file, weights_only=True)["param_groups"]
        assert [group["param_names"][0] for group in groups] == ["blocks.0.weight", "embed.weight"]


def test_the_state_of_several_classes_is_saved_without_code(workers):
    workers(2).run(several_classes)
