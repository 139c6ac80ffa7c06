"""Checkpoints: what an independent review found, by symptom."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from checkpointing import ADAMW, FLAT, Blocks, train
from fast_lane_training import batch, loss_of
from shardstep import Layout, ShardConfig
from training import raised


class Around(nn.Module):
    """As a LightningModule is round the network that is sharded."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.net = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


# -- weights that were not loaded --------------------------------------------------------------------------------------


def knows_other_names(how: str, folder: str) -> None:
    def build(seed: int) -> tuple[Any, Any, Any]:
        inner = Blocks(seed)
        sharded: Any = torch.compile(inner, backend="eager") if how == "compiled" else inner
        opt = shardstep.shard(sharded, optim.AdamW, config=FLAT, **ADAMW)
        return inner, (sharded if how == "compiled" else Around(inner)), opt

    inner, model, opt = build(3)
    train(inner, opt, range(2))
    shardstep.save(f"{folder}/saved", model, opt)
    other, again, opt_again = build(11)
    shardstep.load(f"{folder}/saved", again, opt_again)
    assert all(map(torch.equal, weights(inner), weights(other))), "the weights are those of the checkpoint"
    if how == "compiled":  # and it loads into one that is not
        plain = Blocks(12)
        shardstep.load(f"{folder}/saved", plain, shardstep.shard(plain, optim.AdamW, config=FLAT, **ADAMW))
        assert all(map(torch.equal, weights(inner), weights(plain)))


@pytest.mark.parametrize("how", ["compiled", "sharded inside another module"])
def test_weights_are_loaded_where_the_optimizer_knows_them_by_other_names(workers, tmp_path, how):
    workers(2).run(knows_other_names, how, str(tmp_path))


def trains_what_is_outside(folder: str) -> tuple[str, str]:
    model = Blocks(3)
    opt = shardstep.shard(model, optim.AdamW, config=FLAT, **ADAMW)
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    return raised(lambda: shardstep.save(f"{folder}/saved", model, opt))


def test_a_trained_parameter_outside_the_model_is_not_silently_left_out(workers, tmp_path):
    for kind, text in workers(2).run(trains_what_is_outside, str(tmp_path)):
        assert kind == "ValueError"
        assert "not in the state_dict of this model, the first of shape (3,)" in text
    assert not list(tmp_path.iterdir())


# -- the model's own ---------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Keeps a tensor and a number as extra state."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.extra = {"scale": torch.full((3,), value), "calls": int(value)}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Tensorial(Counting):
    def get_extra_state(self) -> Any:
        return self.extra["scale"] * 1.0


@pytest.mark.parametrize("kind", [Counting, Tensorial])
def test_extra_state_of_modules_is_loaded_tensors_too(tmp_path, kind):
    shardstep.save(tmp_path / "saved", kind(7.0))
    other = kind()
    shardstep.load(tmp_path / "saved", other)
    found = other.extra["scale"] if kind is Counting else other.extra
    assert torch.equal(found, torch.full((3,), 7.0))


def test_extra_state_that_is_missing_or_unexpected_is_told(tmp_path):
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

    shardstep.save(tmp_path / "with", Counting(7.0))
    shardstep.save(tmp_path / "without", Plain())
    with pytest.raises(ValueError, match="not in this model: _extra_state"):
        shardstep.load(tmp_path / "with", Plain())
    with pytest.raises(ValueError, match="missing in the checkpoint: _extra_state"):
        shardstep.load(tmp_path / "without", Counting())


def has_statistics(folder: str, kind: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.BatchNorm1d(2))
    ddp = DistributedDataParallel(model)
    opt: Any = (
        optim.AdamW(ddp.parameters())
        if kind == "plain"
        else shardstep.ZeroRedundancyOptimizer(ddp.parameters(), optim.AdamW)
    )
    for step in range(2):
        ddp(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    first = [buffer.clone() for buffer in model.buffers()]
    for buffer in first:
        dist.broadcast(buffer, 0)
    shardstep.save(f"{folder}/saved", ddp, opt)
    shardstep.load(f"{folder}/saved", ddp, opt)
    assert all(map(torch.equal, model.buffers(), first)), "all of them are the first rank's, as DDP goes on with them"


@pytest.mark.parametrize("kind", ["plain", "drop-in"])
def test_running_statistics_are_one_ranks_and_not_a_mixture(workers, tmp_path, kind):
    workers(2).run(has_statistics, str(tmp_path), kind)


# -- precision ---------------------------------------------------------------------------------------------------------


def changes_its_digits(folder: str) -> None:
    model = Blocks(3).bfloat16()
    opt = shardstep.shard(model, optim.AdamW, config=FLAT, **ADAMW)
    for step in range(3):
        loss_of(model, batch(step).bfloat16()).backward()
        opt.step()
        opt.zero_grad()
    masters = {key: value.clone() for entry in opt.state.values() for key, value in entry.items() if "master" in key}
    shardstep.save(f"{folder}/saved", model, opt)
    half = Blocks(11).half()
    again = shardstep.shard(half, optim.AdamW, config=FLAT, **ADAMW)
    shardstep.load(f"{folder}/saved", half, again)
    loss_of(half, batch(0).half()).backward()
    again.zero_grad()
    assert masters
    shardstep.save(f"{folder}/again", half, again)
    wide, plain = Blocks(12), None
    shardstep.load(f"{folder}/again", wide, plain)
    direct = Blocks(13)
    shardstep.load(f"{folder}/saved", direct)
    for one, other in zip(wide.parameters(), direct.parameters(), strict=True):
        assert torch.equal(one, other), "the masters' digits went through fp16"


@pytest.mark.parametrize("ranks", [1, 2])
def test_masters_survive_a_change_from_bf16_to_fp16(workers, tmp_path, ranks):
    workers(ranks).run(changes_its_digits, str(tmp_path))


# -- ranks that differ -------------------------------------------------------------------------------------------------


def has_a_cache_on_one_rank(folder: str) -> tuple[str, str]:
    model = Blocks(3)
    opt = shardstep.shard(model, optim.AdamW, config=FLAT, **ADAMW)
    train(model, opt, range(1))
    shardstep.save(f"{folder}/s1", model, opt, keep=1)
    model.register_buffer("cache", torch.zeros(3 + 3 * dist.get_rank()))
    return raised(lambda: shardstep.save(f"{folder}/s2", model, opt, keep=1))


def test_models_that_differ_between_ranks_are_refused_before_the_good_one_is_pruned(workers, tmp_path):
    for kind, text in workers(2).run(has_a_cache_on_one_rank, str(tmp_path)):
        assert kind == "RuntimeError"
        assert "cache: shape" in text
    assert [path.name for path in tmp_path.iterdir()] == ["s1"]
    shardstep.load(tmp_path, Blocks(4))


def has_state_on_one_rank(folder: str) -> tuple[str, str]:
    model = Blocks(3)
    opt = optim.AdamW(model.parameters(), **ADAMW)
    if dist.get_rank() == 0:
        loss_of(model, batch(0)).backward()
        opt.step()
    return raised(lambda: shardstep.save(f"{folder}/saved", model, opt))


def test_a_plain_optimizer_with_state_on_one_rank_is_not_half_saved(workers, tmp_path):
    for kind, text in workers(2).run(has_state_on_one_rank, str(tmp_path)):
        assert kind == "RuntimeError"
        assert "state of" in text


class CountsInATensor(optim.Optimizer):
    """Keeps its count in a tensor of one element, and not in a scalar; and a list."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if not state:
                        state.update(count=torch.zeros(1), mean=torch.zeros_like(param), seen=[])
                    state["count"] += 1
                    state["seen"].append(len(state["seen"]))
                    state["mean"].mul_(0.9).add_(param.grad)
                    param.sub_(state["mean"] / state["count"], alpha=group["lr"])


def counts(folder: str) -> None:
    model = Blocks(3)
    config = ShardConfig(layout=Layout.FLAT, bucket_mb=FLAT.bucket_mb)
    opt = shardstep.shard(model, CountsInATensor, config=config)
    train(model, opt, range(2))
    kept = copy.deepcopy([entry["seen"] for entry in opt.state.values()])
    saving: Any = shardstep.save(f"{folder}/saved", model, opt, asynchronous=True)
    train(model, opt, range(2, 5))
    saving.wait()
    shardstep.load(f"{folder}/saved", model, opt)
    assert [entry["seen"] for entry in opt.state.values()] == kept, "of the moment of the call"
    assert all(torch.equal(entry["count"], torch.tensor([2.0])) for entry in opt.state.values())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_count_in_a_tensor_of_its_own_is_saved_once_and_a_list_as_it_was(workers, tmp_path, ranks):
    workers(ranks).run(counts, str(tmp_path))


def test_a_buffer_whose_elements_share_memory_is_named(tmp_path):
    model = nn.Module()
    model.register_buffer("wide", torch.zeros(1).expand(4))
    shardstep.save(tmp_path / "saved", model)
    with pytest.raises(ValueError, match="wide is expanded"):
        shardstep.load(Path(tmp_path) / "saved", model)
