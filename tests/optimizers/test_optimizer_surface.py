"""What programs and libraries do with a torch optimizer, done with a sharded one: hooks, modes, groups of any kind."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch, loss_of
from shardstep import ShardConfig, ZeroRedundancyOptimizer
from training import assert_ranks_equal, raised


def counts_steps() -> None:
    """Hooks on every optimizer's steps, as profilers and schedulers have them."""
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.1, config=ShardConfig(bucket_mb=SMALL_BUCKETS))
    seen: list[tuple[str, Any]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda one, *_: seen.append(("before", one))),
        register_optimizer_step_post_hook(lambda one, *_: seen.append(("after", one))),
        opt.register_step_pre_hook(lambda one, *_: seen.append(("own", one))),
    ]
    try:
        loss_of(model, batch(0)).backward()
        opt.step()
    finally:
        for handle in handles:
            handle.remove()
    assert [when for when, _ in seen] == ["before", "own", "after"] or [when for when, _ in seen] == [
        "own",
        "before",
        "after",
    ]
    assert all(one is opt for _, one in seen)


def test_hooks_on_every_optimizers_steps_fire_once(workers):
    workers(2).run(counts_steps)


def hooks_of_the_local_optimizer_fire() -> None:
    params = [nn.Parameter(torch.ones(3, 3)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1)
    seen: list[str] = []
    zero.optim.register_step_pre_hook(lambda *_: seen.append("step"))
    for param in params:
        param.grad = torch.ones_like(param)
    zero.step()
    assert seen == ["step"]


def test_a_hook_on_the_drop_ins_local_optimizer_fires(workers):
    workers(2).run(hooks_of_the_local_optimizer_fire)


def calls_hooks_of_state_dicts() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    loss_of(model, batch(0)).backward()
    opt.step()
    seen: list[str] = []
    opt.register_state_dict_pre_hook(lambda one: seen.append("before saving"))
    opt.register_state_dict_post_hook(lambda one, saved: {**saved, "mine": 1})
    opt.register_load_state_dict_pre_hook(lambda one, saved: saved.pop("mine") and seen.append("before loading"))
    opt.register_load_state_dict_post_hook(lambda one: seen.append("after loading"))
    saved = opt.state_dict()
    assert saved["mine"] == 1
    opt.load_state_dict(saved)
    assert seen == ["before saving", "before loading", "after loading"]
    assert "mine" in saved, "what the caller passed stays as it is"


def test_hooks_of_state_dicts_are_called(workers):
    workers(2).run(calls_hooks_of_state_dicts)


class TwoFaced(optim.SGD):
    """Keeps weights for training and for evaluation, as schedule-free optimizers do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            group["train_mode"] = True

    def _switch(self, mode: bool, by: float) -> None:
        for group in self.param_groups:
            if group["train_mode"] is not mode:
                group["train_mode"] = mode
                for param in group["params"]:
                    param.add_(by)

    def eval(self) -> None:
        self._switch(False, 1.0)

    def train(self) -> None:
        self._switch(True, -1.0)


def switches(gather: Any, collectives: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    config = ShardConfig(gather=gather, bucket_mb=SMALL_BUCKETS)
    if collectives:
        with by_collectives():
            opt = shardstep.shard(model, TwoFaced, lr=0.1, config=config)
    else:
        opt = shardstep.shard(model, TwoFaced, lr=0.1, config=config)
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):  # the second time nothing changes
        opt.eval()
        assert all(torch.allclose(param, before[name] + 1) for name, param in model.named_parameters())
        assert [group["train_mode"] for group in opt.param_groups] == [False]
    assert_ranks_equal(list(model.parameters()))
    opt.train()
    assert all(torch.allclose(param, before[name], atol=1e-6) for name, param in model.named_parameters())
    loss_of(model, batch(1)).backward()
    opt.step()
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_optimizers_with_modes_have_them(workers, gather, collectives):
    workers(2).run(switches, gather, collectives)


class FailsAtTheLast(TwoFaced):
    """On the last rank, and only in the part that has the last bias."""

    def eval(self) -> None:
        held = [param for group in self.param_groups for param in group["params"]]
        if dist.get_rank() == dist.get_world_size() - 1 and any(param.numel() == 3 for param in held):
            raise ArithmeticError("no mean yet")
        super().eval()


def switches_half(collectives: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    config = ShardConfig(layout=shardstep.Layout.WHOLE, bucket_mb=1e-5)  # a part for each parameter
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, FailsAtTheLast, lr=0.1, config=config)
    kind, text = raised(opt.eval)
    assert kind == "RuntimeError"
    assert_ranks_equal(list(model.parameters()))
    return text


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_eval_that_failed_on_one_rank_did_not_say_that_weights_are_half_switched(workers, ranks, collectives):
    for text in workers(ranks).run(switches_half, collectives, timeout=60):
        assert "eval() failed half-way" in text
        assert "ArithmeticError: no mean yet" in text
        assert "Weights may be switched in part. Call shard(...) again on all ranks, and load a checkpoint" in text
        assert ranks == 1 or "failed on rank 1" in text


def is_scripted() -> None:
    """torch.jit.script compiles the model's hooks, and takes functions only."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3))
    for config in (ShardConfig(), ShardConfig(gather="overlap")):
        opt = shardstep.shard(model, optim.SGD, lr=0.1, config=config)
        for one in (model, copy.deepcopy(model)):
            kind, text = raised(lambda one=one: torch.jit.script(one))
            assert kind == "RuntimeError"
            assert "torch.jit.script cannot compile" in text
            assert "call opt.close() first" in text
        opt.close()
        torch.jit.script(model)


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_sharded_model_that_is_scripted_says_what_to_do(workers):
    for ranks in (1, 2):
        workers(ranks).run(is_scripted, timeout=60)


def has_no_modes() -> None:
    opt = shardstep.shard(Net(), optim.SGD, lr=0.1)
    assert not hasattr(opt, "train")
    assert raised(lambda: opt.eval())[0] == "AttributeError"


def test_optimizers_without_modes_have_none(workers):
    workers(1).run(has_no_modes)


class LooksAtTheFirst(optim.SGD):
    """As classes do that take the device from it; and counts in its options."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            assert group["params"][0].dim() == 1
            group["count"] = group.get("count", 0) + 1
        super().step(closure)


def has_groups_that_are_elsewhere() -> None:
    """A small group of one parameter: ranks and buckets that hold nothing of it step it, too."""
    model = nn.ParameterList([nn.Parameter(torch.ones(size)) for size in (3, 64, 64, 64)])
    groups = [{"params": [model[0]], "lr": 0.2}, {"params": [model[1], model[2], model[3]]}]
    config = ShardConfig(layout=shardstep.Layout.WHOLE, bucket_mb=SMALL_BUCKETS)
    opt = shardstep.shard(model, LooksAtTheFirst, groups=groups, lr=0.1, config=config)
    for _ in range(2):
        sum(param.sum() * (1 + dist.get_rank()) for param in model).backward()
        opt.step()
        opt.zero_grad()
    mean = (1 + dist.get_world_size()) / 2
    assert torch.allclose(model[0], torch.full((3,), 1 - 2 * 0.2 * mean))
    assert all(torch.allclose(param, torch.full((64,), 1 - 2 * 0.1 * mean)) for param in list(model)[1:])
    assert [group["count"] for group in opt.param_groups] == [2, 2]
    assert len(opt.state_dict()["param_groups"][0]["params"]) == 1


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_class_that_looks_at_the_first_parameter_of_a_group(workers, ranks):
    workers(ranks).run(has_groups_that_are_elsewhere)
