"""ShardConfig(wire="bf16") and checkpoints: what is saved and loaded are the exact values."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from fast_lane_training import Net, batch, loss_of
from shardstep import Layout, ShardConfig
from shardstep.checkpoint import loading
from training import assert_ranks_equal
from wire_by_hand import ADAMW, SMALL, exact_of, is_rounded, train, truth_of


def saves_exact_values(folder: Path, config: ShardConfig) -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    shardstep.save(folder / "checkpoint", model, opt)
    names = [spec.name for spec in opt._engine.runtime.plan.params]
    exact = {(names[piece.param], piece.start): values.clone() for piece, values in exact_of(opt).items()}
    moments = {
        (names[piece.param], piece.start): entry["exp_avg"].clone()
        for piece, entry in opt._engine.runtime.local_step.entries().items()
        if "exp_avg" in entry
    }
    torch.save((exact, moments, model.state_dict()), folder / f"exact-{dist.get_rank()}.pt")


def loads_exact_values(folder: Path, saved_by: int, config: ShardConfig) -> None:
    files = [torch.load(folder / f"exact-{rank}.pt") for rank in range(saved_by)]
    exact = {key: values for file in files for key, values in file[0].items()}
    rounded = files[0][2]
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    shardstep.load(folder / "checkpoint", model, opt)
    loaded = {name: param.detach() for name, param in model.named_parameters()}
    if config.wire is not None:
        names = [spec.name for spec in opt._engine.runtime.plan.params]
        for name, param in loaded.items():
            assert torch.equal(param, rounded[name]), name
        loaded = {name: param.clone() for name, param in loaded.items()}
        for piece, values in exact_of(opt).items():
            loaded[names[piece.param]].view(-1)[piece.start : piece.stop] = values
            own = [(piece.start, piece.stop) for piece in exact_of(opt) if names[piece.param] == "first.weight"]
        pieces = {(name, at): part for (name, at), part in exact.items()}
        for (name, start), values in pieces.items():
            for low, high in own if name == "first.weight" else ():
                begin, end = max(low, start), min(high, start + len(values))
                if begin < end:
                    found = loaded[name].reshape(-1)[begin:end]
                    assert torch.equal(found, values[begin - start : end - start]), name
    else:
        for (name, start), values in exact.items():
            assert torch.equal(loaded[name].reshape(-1)[start : start + len(values)], values), name
        for name, param in loaded.items():
            if not is_rounded(param):
                assert torch.equal(param, rounded[name]), name
    for step in range(3, 5):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    assert_ranks_equal(list(model.parameters()))


def test_saved_at_three_ranks_with_it_loaded_at_two_without(workers, tmp_path):
    workers(3).run(saves_exact_values, tmp_path, SMALL)
    workers(2).run(loads_exact_values, tmp_path, 3, replace(SMALL, wire=None))
    workers(2).run(loads_exact_values, tmp_path, 3, SMALL)
    workers(1).run(loads_exact_values, tmp_path, 3, replace(SMALL, wire=None, layout=Layout.WHOLE))


def loads_a_checkpoint_of_exact_weights(folder: Path, dtype: torch.dtype) -> None:
    """What was trained without it, in fp32 or in bf16 with masters, goes on with it from the same values."""
    saved = Net().to(dtype)
    opt = shardstep.shard(saved, optim.AdamW, **ADAMW, config=replace(SMALL, wire=None))
    for step in range(2):
        loss_of(saved, batch(step).to(dtype)).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    shardstep.save(folder, saved, opt)
    exact = {
        (piece.param, piece.start): entry["shardstep.master"].clone()
        for piece, entry in opt._engine.runtime.local_step.entries().items()
        if "shardstep.master" in entry
    }
    weights = [param.detach().clone() for param in saved.parameters()]
    opt.close()
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL)
    shardstep.load(folder, model, opt)
    for place, (old, new) in enumerate(zip(weights, model.parameters(), strict=True)):
        if dtype is torch.float32:
            assert torch.equal(new, old.bfloat16().float() if is_rounded(old) else old)
        elif is_rounded(old):
            assert torch.equal(new, old.float()), place
    for piece, values in exact_of(opt).items():
        if dtype is torch.float32:
            assert torch.equal(values, weights[piece.param].reshape(-1)[piece.start : piece.stop])
    for (param, start), master in exact.items():
        for piece, values in exact_of(opt).items():
            low, high = max(start, piece.start), min(start + len(master), piece.stop)
            if piece.param == param and low < high:
                assert torch.equal(values[low - piece.start : high - piece.start], master[low - start : high - start])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_that_was_made_without_it(workers, ranks, dtype, tmp_path):
    workers(ranks).run(loads_a_checkpoint_of_exact_weights, tmp_path / "checkpoint", dtype)


def resumes_from_state_dicts(model_first: bool) -> None:
    def trained(model: nn.Module, opt: Any, steps: range) -> None:
        for step in steps:
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()

    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL)
    trained(model, opt, range(3))
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    trained(model, opt, range(3, 6))
    other = Net()
    resumed = shardstep.shard(other, optim.AdamW, **ADAMW, config=SMALL)
    loads = [lambda: other.load_state_dict(saved["model"]), lambda: resumed.load_state_dict(saved["opt"])]
    for load in loads if model_first else loads[::-1]:
        load()
    trained(other, resumed, range(3, 6))
    for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("model_first", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_resumes_from_state_dicts_bit_for_bit(workers, ranks, model_first):
    workers(ranks).run(resumes_from_state_dicts, model_first)


# -- frozen weights ----------------------------------------------------------------------------------------------------


def keeps_the_truth_of_frozen_weights(folder: Path) -> dict[str, torch.Tensor]:
    """`first.weight` is trained, and then frozen."""
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL)
    train(model, opt, range(2))
    before = truth_of(opt)["first.weight"]
    model.first.weight.requires_grad_(False)
    train(model, opt, range(2, 4))
    assert torch.equal(truth_of(opt)["first.weight"], before)
    assert torch.equal(model.first.weight, before.bfloat16().float())
    assert not torch.equal(model.first.weight, before)
    shardstep.save(folder / "checkpoint", model, opt)
    truth = truth_of(opt)
    model.first.weight.requires_grad_(True)
    train(model, opt, range(4, 5))
    return {**truth, "trained on": model.first.weight.detach().clone()}


def finds_the_truth_of_frozen_weights(
    folder: Path, truth: dict[str, torch.Tensor], config: ShardConfig, trains: bool
) -> None:
    model = Net()
    model.first.weight.requires_grad_(trains)
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    shardstep.load(folder / "checkpoint", model, opt)
    found = truth_of(opt)
    for name, values in truth.items():
        if name != "trained on":
            assert torch.equal(found[name], values), name
    if config.wire is None:
        assert torch.equal(model.first.weight, truth["first.weight"])
        assert not any("shardstep.master" in entry for entry in opt._engine.runtime.local_step.entries().values())
        return
    assert torch.equal(model.first.weight, truth["first.weight"].bfloat16().float())
    model.first.weight.requires_grad_(True)
    train(model, opt, range(4, 5))
    if dist.get_world_size() == 2:
        assert torch.equal(model.first.weight, truth["trained on"])
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_frozen_weight_is_saved_exact(workers, ranks, tmp_path):
    truth = workers(ranks).run(keeps_the_truth_of_frozen_weights, tmp_path)[0]
    for others in (ranks, 3):
        for config in (SMALL, replace(SMALL, wire=None), replace(SMALL, layout=Layout.WHOLE)):
            for trains in (False, True):
                workers(others).run(finds_the_truth_of_frozen_weights, tmp_path, truth, config, trains)


def loads_a_frozen_weight_without_an_optimizer(folder: Path, truth: dict[str, torch.Tensor]) -> None:
    model = Net()
    shardstep.load(folder / "checkpoint", model)
    assert torch.equal(model.first.weight, truth["first.weight"])
    plain = Net()
    shardstep.load(folder / "checkpoint", plain, optim.AdamW(plain.parameters()))
    assert torch.equal(plain.first.weight, truth["first.weight"])


def test_a_frozen_weight_is_exact_in_a_model_that_is_loaded_by_itself(workers, tmp_path):
    truth = workers(2).run(keeps_the_truth_of_frozen_weights, tmp_path)[0]
    workers(2).run(loads_a_frozen_weight_without_an_optimizer, tmp_path, truth)


def notices_writes_to_frozen_weights(by_data: bool, folder: Path) -> None:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.01, config=SMALL)
    train(model, opt, range(2))
    model.first.weight.requires_grad_(False)
    train(model, opt, range(2, 3))
    kept = truth_of(opt)["first.weight"]
    written = kept.clone()
    written[3:5] += 0.001
    shown = model.first.weight.detach().clone()
    shown[3:5] = written[3:5]
    with torch.no_grad():
        (model.first.weight.data if by_data else model.first.weight).copy_(shown)
    assert torch.equal(truth_of(opt)["first.weight"], written)
    shardstep.save(folder / "checkpoint", model, opt)
    plain = Net()
    shardstep.load(folder / "checkpoint", plain)
    assert torch.equal(plain.first.weight, written)
    for group in opt.param_groups:
        group["lr"] = 0.0
    model.first.weight.requires_grad_(True)
    train(model, opt, range(3, 5))
    assert torch.equal(truth_of(opt)["first.weight"], written)
    assert torch.equal(model.first.weight, written.bfloat16().float())
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("by_data", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_written_to_a_frozen_weight_is_noticed(workers, ranks, by_data, tmp_path):
    workers(ranks).run(notices_writes_to_frozen_weights, by_data, tmp_path)


# -- what the other optimizer does not keep ----------------------------------------------------------------------------


def leaves_nothing_over(freeze: bool) -> None:
    """Masters and averages of a state_dict, in an optimizer that keeps neither."""
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=replace(SMALL, ema=0.9))
    train(model, opt, range(2))
    if freeze:
        model.first.weight.requires_grad_(False)
        train(model, opt, range(2, 3))
    truth = truth_of(opt)
    weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(opt.state_dict())
    other = Net()
    other.first.weight.requires_grad_(not freeze)
    plain = shardstep.shard(other, optim.AdamW, **ADAMW, config=replace(SMALL, wire=None))
    other.load_state_dict(weights)
    plain.load_state_dict(saved)
    for name, param in other.named_parameters():
        if not (freeze and name == "first.weight"):  # docs/limits.md: only shardstep.load gives it to all ranks
            assert torch.equal(param, truth[name]), name
    assert_ranks_equal(list(other.parameters()))
    keys = {key for entry in plain._engine.runtime.local_step.entries().values() for key in entry}
    assert not {key for key in keys if key.startswith("shardstep.")}, keys
    train(other, plain, range(3, 5))
    # Weights that are not what the masters were rounded to are somebody's own: they stay.
    third = Net()
    again = shardstep.shard(third, optim.AdamW, **ADAMW, config=replace(SMALL, wire=None))
    third.first.weight.requires_grad_(not freeze)
    before = [param.detach().clone() for param in third.parameters()]
    again.load_state_dict(saved)
    for old, new in zip(before, third.parameters(), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("freeze", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_that_an_optimizer_does_not_keep_become_its_weights(workers, ranks, freeze):
    workers(ranks).run(leaves_nothing_over, freeze)


def reads_once(folder: Path, saved_with: ShardConfig, config: ShardConfig) -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=saved_with)
    train(model, opt, range(2))
    shardstep.save(folder, model, opt)
    other = Net()
    own = shardstep.shard(other, optim.AdamW, **ADAMW, config=config)
    read: list[tuple[str, tuple[int, ...]]] = []

    def counted(path: Any, tensors: Any, wishes: Any) -> None:
        wishes = list(wishes)
        read.extend((wish.key, tuple(wish.offsets)) for wish in wishes if wish.target.numel())
        read_blocks(path, tensors, wishes)

    read_blocks = loading.read_blocks
    with mock.patch.object(loading, "read_blocks", counted):
        shardstep.load(folder, other, own)
    assert len(set(read)) == len(read), "read twice"
    assert any(key == "model.first.weight" for key, _ in read) or dist.get_rank()
    found, saved = truth_of(own), truth_of(opt)
    for name, values in saved.items():
        assert torch.equal(found[name], values), name


@pytest.mark.parametrize("saved_with", [SMALL, replace(SMALL, wire=None)], ids=["with", "without"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_exact_values_are_read_once(workers, ranks, saved_with, tmp_path):
    workers(ranks).run(reads_once, tmp_path / "checkpoint", saved_with, SMALL)


def shows_exact_values_to_other_programs() -> None:
    """consolidate_state_dict, an audit and the average, after a load."""
    config = replace(SMALL, ema=0.5, audit=1)
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    train(model, opt, range(3))
    truth = truth_of(opt)
    opt.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        state = opt.state_dict()["state"]
        names = [name for name, _ in model.named_parameters()]
        for place, name in enumerate(names):
            if "shardstep.master" in state[place]:
                master = state[place]["shardstep.master"].to(truth[name].device)
                assert torch.equal(master.reshape(truth[name].shape), truth[name]), name
        assert sum("shardstep.master" in entry for entry in state.values()) == sum(map(is_rounded, truth.values()))
    other = Net()
    resumed = shardstep.shard(other, optim.AdamW, **ADAMW, config=config)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(opt.state_dict() if dist.get_world_size() == 1 else copy.deepcopy(_parts(opt)))
    for net, its in ((model, opt), (other, resumed)):
        train(net, its, range(3, 5))
    with opt.ema(), resumed.ema():
        for ours, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert_ranks_equal(list(model.parameters()))
    for name, values in truth_of(opt).items():
        assert torch.equal(values, truth_of(resumed)[name]), name


def _parts(opt: shardstep.ShardedOptimizer) -> dict[str, Any]:
    """Each rank's own part, also where it was consolidated."""
    opt._engine.saved.keep(None, 0)
    return opt.state_dict()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_consolidated_state_audits_and_averages_go_on_after_a_load(workers, ranks):
    workers(ranks).run(shows_exact_values_to_other_programs)
