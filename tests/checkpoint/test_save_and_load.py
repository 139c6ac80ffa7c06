"""shardstep.save and load: written by any number of ranks, loaded by any other, in any layout."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from checkpointing import ADAMW, KINDS, MUON, Kind, assert_holds, leave_reference, read_reference, train
from fast_lane_training import batch, loss_of

pytestmark = pytest.mark.slow  # make test-slow

RANKS = [1, 2, 3, 4]
LR = 0.0123  # as a scheduler may have left it


# -- the matrix --------------------------------------------------------------------------------------------------------


def saves(name: str, folder: str, asynchronous: bool = False) -> None:
    model, opt = KINDS[name].build()
    train(model, opt, range(3))
    opt.param_groups[0]["lr"] = LR
    leave_reference(opt, model, Path(folder))
    extra = {"step": 3, "noise": torch.arange(5.0)}
    saving = shardstep.save(
        f"{folder}/saved", model, opt, extra=extra, extra_of_rank={"rank": dist.get_rank()}, asynchronous=asynchronous
    )
    if saving is not None:
        train(model, opt, range(3, 5))  # what is saved is the model of the call
        saving.wait()


def loads(name: str, folder: str, saved_on: int) -> None:
    kind = KINDS[name]
    for config in kind.loads_as:
        model, opt = kind.build(config, seed=11)
        train(model, opt, range(7, 8))
        reference = read_reference(Path(folder), {n: p.shape for n, p in model.named_parameters()})
        extra = shardstep.load(f"{folder}/saved", model, opt)
        assert_holds(opt, model, reference)
        assert opt.param_groups[0]["lr"] == LR
        assert extra["step"] == 3
        assert torch.equal(extra["noise"].cpu(), torch.arange(5.0, device="cpu"))
        assert extra.own == ({"rank": dist.get_rank()} if saved_on == dist.get_world_size() else None)
        opt.close()


@pytest.mark.parametrize("saved_on", RANKS)
@pytest.mark.parametrize("name", KINDS)
def test_what_any_number_of_ranks_saved_is_loaded_by_any_other_bitwise(workers, tmp_path, name, saved_on):
    workers(saved_on).run(saves, name, str(tmp_path))
    for ranks in RANKS:
        workers(ranks).run(loads, name, str(tmp_path), saved_on)


@pytest.mark.parametrize("name", ["flat", "bf16", "muon and adamw"])
def test_an_asynchronous_save_is_of_the_moment_of_the_call(workers, tmp_path, name):
    workers(2).run(saves, name, str(tmp_path), True)
    workers(3).run(loads, name, str(tmp_path), 2)


def goes_on(name: str, folder: str) -> None:
    """Against the plain optimizers, loaded from the same checkpoint: bitwise, but for sums of three and more."""
    kind = KINDS[name]
    model, opt = kind.build(seed=11)
    shardstep.load(f"{folder}/saved", model, opt)
    twin = kind.model(11)
    ddp = DistributedDataParallel(twin, find_unused_parameters=True)
    plain = plain_optimizers(kind, twin)
    for one in plain:  # each has a part of the parameters, if there are two
        shardstep.load(f"{folder}/saved", ddp, one, strict=len(plain) == 1)
    assert plain[0].param_groups[0]["lr"] == LR
    for step in range(3, 6):
        for net, opts in ((ddp, plain), (model, [opt])):
            loss_of(net, batch(step)).backward()
            for one in opts:
                one.step()
                one.zero_grad()
    for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        exact = dist.get_world_size() <= 2 and not ours.is_cuda
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)
        assert same, f"{key} differs by {(ours - theirs).abs().max()}"


def plain_optimizers(kind: Kind, model: Any) -> list[optim.Optimizer]:
    if kind.optimizer is not None:
        return [kind.optimizer(model.parameters(), **kind.options)]
    named = dict(model.named_parameters())
    matrices = [param for key, param in named.items() if key.startswith("blocks.") and key.endswith("weight")]
    others = [param for param in named.values() if all(param is not one for one in matrices)]
    return [optim.Muon(matrices, **MUON), optim.AdamW(others, **ADAMW)]


@pytest.mark.parametrize("name", ["flat", "whole", "momentum", "muon and adamw", "adafactor"])
@pytest.mark.parametrize(("saved_on", "loaded_on"), [(1, 2), (3, 2), (2, 1), (2, 3)])
def test_training_goes_on_as_if_nothing_had_happened(workers, tmp_path, name, saved_on, loaded_on):
    workers(saved_on).run(saves, name, str(tmp_path))
    workers(loaded_on).run(goes_on, name, str(tmp_path))


# -- other optimizers --------------------------------------------------------------------------------------------------


def drop_in_saves(folder: str) -> None:
    model = KINDS["flat"].model()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    zero = shardstep.ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW, **ADAMW)
    plain_twin = DistributedDataParallel(copy.deepcopy(model), find_unused_parameters=True)
    plain = optim.AdamW(plain_twin.parameters(), **ADAMW)
    for step in range(3):
        for net, opt in ((ddp, zero), (plain_twin, plain)):
            loss_of(net, batch(step)).backward()
            opt.step()
            opt.zero_grad()
    shardstep.save(f"{folder}/zero", ddp, zero)
    shardstep.save(f"{folder}/plain", plain_twin, plain)


def drop_in_loads(folder: str, source: str) -> list[Any]:
    """Into the drop-in, into the plain one and into the fast lane; all hold the same, and go on alike."""
    kind = KINDS["flat"]
    results = []
    for wanted in ("zero", "plain", "shard"):
        if wanted == "shard":
            net, opt = kind.build(seed=11)
        else:
            net = DistributedDataParallel(kind.model(11), find_unused_parameters=True)
            make = optim.AdamW if wanted == "plain" else None
            opt = (
                make(net.parameters(), **ADAMW)
                if make
                else shardstep.ZeroRedundancyOptimizer(net.parameters(), optim.AdamW, **ADAMW)
            )
        shardstep.load(f"{folder}/{source}", net, opt)
        train(net, opt, range(3, 5))
        results.append([param.detach().clone() for param in net.parameters()])
    for other in results[1:]:
        for one, two in zip(results[0], other, strict=True):
            assert torch.equal(one, two) or (dist.get_world_size() > 2 and torch.allclose(one, two, atol=1e-6))
    return [param.double().sum().item() for param in results[0]]


def test_the_drop_in_and_the_plain_optimizer_save_and_load_the_same(workers, tmp_path):
    workers(2).run(drop_in_saves, str(tmp_path))
    found = [
        workers(ranks).run(drop_in_loads, str(tmp_path), source)[0] for ranks in (2, 3) for source in ("zero", "plain")
    ]
    assert found[0] == found[1]
    assert found[2] == found[3]
