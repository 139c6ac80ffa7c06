"""What an optimizer's class does with loaded state is done: to old formats, other precisions, by code of its own."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS
from shardstep import ShardConfig, ZeroRedundancyOptimizer

OLD = (optim.AdamW, optim.Adam, optim.RMSprop, optim.Adagrad, optim.NAdam, optim.RAdam, optim.Adamax, optim.Rprop)
KINDS = (*OLD, optim.Adadelta, optim.ASGD, optim.SGD, optim.Adafactor)
NEWER = ("amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused", "decoupled_weight_decay")
CONFIG = ShardConfig(bucket_mb=SMALL_BUCKETS)
BOTH_WAYS = pytest.mark.parametrize(
    ("ranks", "collectives"), [(1, False), (2, False), (2, True)], ids=["alone", "messages", "collectives"]
)


def make_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).to(dtype)


def train(model: nn.Module, opt: Any, steps: range) -> None:
    """The same on every rank: the mean of their gradients is what one has."""
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x.to(next(model.parameters()).dtype)).square().mean().backward()
        opt.step()
        opt.zero_grad()


def options_of(kind: Any) -> dict[str, Any]:
    return {optim.SGD: {"momentum": 0.9}, optim.ASGD: {"t0": 1}}.get(kind, {})


def trained(kind: Any, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Module, Any]:
    model = make_model(dtype)
    opt = kind(model.named_parameters(), lr=0.01, **options_of(kind), **options)
    train(model, opt, range(3))
    return model, opt


def make_older(opt: Any) -> None:
    """As torch had them before version 1.12: counters are numbers, and newer options are missing."""
    for entry in opt.state.values():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                entry[key] = value.item()
    newer = ("foreach",) if type(opt) is optim.Adafactor else NEWER  # which is newer itself
    for group in opt.param_groups:
        for key in newer:
            group.pop(key, None)


def sharded(kind: Any, lane: str, model: nn.Module, **options: Any) -> Any:
    if lane == "shard":
        return shardstep.shard(model, kind, config=CONFIG, lr=0.01, **options_of(kind), **options)
    return ZeroRedundancyOptimizer(model.named_parameters(), kind, lr=0.01, **options_of(kind), **options)


def assert_trains_like(model: nn.Module, opt: Any, plain: nn.Module, oracle: Any, what: str) -> None:
    model.load_state_dict(plain.state_dict())
    plain = copy.deepcopy(plain)
    rows = [{**group, "params": []} for group in oracle.param_groups]
    # Not a deep copy of the oracle, which would have parameters of its own: another one that loads what it has.
    other = type(oracle)([{**row, "params": own} for row, own in zip(rows, [list(plain.parameters())], strict=True)])
    other.load_state_dict(copy.deepcopy(oracle.state_dict()))
    train(model, opt, range(3, 6))
    train(plain, other, range(3, 6))
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs), f"{what}: {name} differs by {(ours - theirs).abs().max()}"


@contextmanager
def way(collectives: bool) -> Iterator[None]:
    with by_collectives() if collectives else nullcontext():
        yield


# -- state_dicts of older torch ----------------------------------------------------------------------------------------


def loads_older(folder: Path, collectives: bool) -> None:
    with way(collectives):
        for kind in KINDS:
            plain, oracle = trained(kind)
            same, old = trained(kind)
            make_older(old)
            saved = old.state_dict()
            before = copy.deepcopy(saved)
            shardstep.save(folder / kind.__name__, same, old)
            for lane in ("shard", "drop-in"):
                for by in ("load_state_dict", "load"):
                    model = make_model()
                    opt = sharded(kind, lane, model)
                    if by == "load":
                        shardstep.load(folder / kind.__name__, model, opt)
                    else:
                        opt.load_state_dict(saved)
                    assert_trains_like(model, opt, plain, oracle, f"{kind.__name__}, {lane}, {by}")
            for key, entry in before["state"].items():
                assert list(entry) == list(saved["state"][key])
                for name, value in entry.items():
                    assert type(value) is type(saved["state"][key][name]), "the caller's state was written to"
            assert before["param_groups"] == saved["param_groups"], "the caller's groups were written to"


@BOTH_WAYS
@pytest.mark.filterwarnings("ignore:options of param groups")
def test_after_loading_a_state_dict_of_older_torch_step_says_that_the_api_has_changed(
    workers, tmp_path, ranks, collectives
):
    workers(ranks).run(loads_older, tmp_path, collectives, timeout=120)


def unfreezes_what_was_loaded() -> None:
    plain, oracle = trained(optim.AdamW)
    old = trained(optim.AdamW)[1]
    make_older(old)
    model = make_model()
    model[0].weight.requires_grad_(False)
    opt = sharded(optim.AdamW, "shard", model)
    opt.load_state_dict(old.state_dict())
    model[0].weight.requires_grad_(True)
    train(model, opt, range(1))  # makes the new plan
    opt.load_state_dict(old.state_dict())
    assert_trains_like(model, opt, plain, oracle, "loaded when it trained")
    model = make_model()
    model[0].weight.requires_grad_(False)
    opt = sharded(optim.AdamW, "shard", model)
    opt.load_state_dict(old.state_dict())
    assert all(isinstance(entry["step"], torch.Tensor) for entry in opt._engine.runtime.local_step.parked.values())
    model[0].weight.requires_grad_(True)
    train(model, opt, range(2))
    assert all(torch.isfinite(param).all() for param in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_older_state_of_a_frozen_parameter_breaks_the_step_in_which_it_trains_again(workers, ranks):
    workers(ranks).run(unfreezes_what_was_loaded, timeout=60)


def takes_the_class_s_defaults() -> None:
    """Of options that the saved groups do not know, as the plain optimizer does."""
    old = trained(optim.Adam)[1]
    make_older(old)
    for lane in ("shard", "drop-in"):
        opt = sharded(optim.Adam, lane, make_model(), maximize=True)
        opt.load_state_dict(old.state_dict())
        assert opt.param_groups[0]["maximize"] is False, lane


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_option_that_older_torch_did_not_save_is_not_what_the_class_makes_of_it(workers, ranks):
    workers(ranks).run(takes_the_class_s_defaults, timeout=60)


# -- another class, another precision ----------------------------------------------------------------------------------


def loads_adam_into_adamw(folder: Path, collectives: bool) -> None:
    with way(collectives):
        adams, adam = trained(optim.Adam, weight_decay=0.5)
        plain = copy.deepcopy(adams)
        oracle = optim.AdamW(plain.named_parameters(), lr=0.01, weight_decay=0.5)
        oracle.load_state_dict(copy.deepcopy(adam.state_dict()))
        shardstep.save(folder / "adam", adams, adam)
        for lane in ("shard", "drop-in"):
            for by in ("load_state_dict", "load"):
                model = make_model()
                opt = sharded(optim.AdamW, lane, model, weight_decay=0.5)
                if by == "load":
                    shardstep.load(folder / "adam", model, opt, strict=False)
                else:
                    opt.load_state_dict(adam.state_dict())
                assert opt.param_groups[0]["decoupled_weight_decay"] is True, f"{lane}, {by}"
                assert_trains_like(model, opt, plain, oracle, f"{lane}, {by}")


@BOTH_WAYS
def test_adamw_that_has_loaded_adam_s_state_decays_weights_like_adam(workers, tmp_path, ranks, collectives):
    workers(ranks).run(loads_adam_into_adamw, tmp_path, collectives, timeout=60)


def loads_another_precision(folder: Path) -> None:
    configs = {"fp32": CONFIG, "none": ShardConfig(master="none"), "stochastic": ShardConfig(master="stochastic")}
    for saved_as in (torch.float32, torch.bfloat16):
        plain, oracle = trained(optim.NAdam, saved_as)
        path = folder / str(saved_as)
        shardstep.save(path, plain, oracle)
        for dtype, master in [(torch.float32, "fp32"), *((torch.bfloat16, name) for name in configs)]:
            for by in ("load_state_dict", "load"):
                model = make_model(dtype)
                opt = shardstep.shard(model, optim.NAdam, config=configs[master], lr=0.01)
                if by == "load":
                    shardstep.load(path, model, opt)
                else:
                    opt.load_state_dict(oracle.state_dict())
                train(model, opt, range(3))
                wanted = torch.bfloat16 if dtype is torch.bfloat16 and master == "none" else torch.float32
                for entry in opt.state.values():
                    assert entry["exp_avg"].dtype is wanted, f"{saved_as} into {dtype}, {master}, {by}"
                    assert entry["mu_product"].dtype is torch.float32, "a counter is not rounded"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.filterwarnings("ignore:master=")
def test_state_of_another_precision_loads_and_breaks_the_next_step(workers, tmp_path, ranks):
    workers(ranks).run(loads_another_precision, tmp_path, timeout=60)


# -- classes with code of their own ------------------------------------------------------------------------------------


class Converts(optim.SGD):
    """A momentum has had another name."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for entry in self.state.values():
            if "velocity" in entry:
                entry["momentum_buffer"] = entry.pop("velocity")


class Reloads(optim.SGD):
    """With a `load_state_dict` of its own, which counts; and with something beside state and groups."""

    loads, note = 0, ""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "note": self.note}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "note"})
        self.note = state_dict["note"]
        self.loads = self.loads + 1
        for group in self.param_groups:
            group["warm"] = 1.0
            for param in group["params"]:
                if param in self.state:
                    self.state[param]["scale"] = torch.tensor(2.0)


def loads_by_code_of_the_class(folder: Path) -> None:
    for lane in ("shard", "drop-in"):
        plain, oracle = trained(optim.SGD)
        renamed = copy.deepcopy(oracle.state_dict())
        for entry in renamed["state"].values():
            entry["velocity"] = entry.pop("momentum_buffer")
        model = make_model()
        opt = ZeroRedundancyOptimizer(model.named_parameters(), Converts, lr=0.01, momentum=0.9)
        if lane == "shard":
            opt = shardstep.shard(model, Converts, lr=0.01, momentum=0.9)
        opt.load_state_dict(renamed)
        assert all(set(entry) == {"momentum_buffer"} for entry in opt.state.values()), lane
        assert all("velocity" in entry for entry in renamed["state"].values()), "the caller's"
        assert_trains_like(model, opt, plain, oracle, lane)

        model = make_model()
        source = Reloads(model.named_parameters(), lr=0.01, momentum=0.9)
        train(model, source, range(2))
        saved = source.state_dict()
        model = make_model()
        opt = ZeroRedundancyOptimizer(model.named_parameters(), Reloads, lr=0.01, momentum=0.9)
        if lane == "shard":
            opt = shardstep.shard(model, Reloads, lr=0.01, momentum=0.9)
        opt.load_state_dict(saved)
        assert opt.param_groups[0]["warm"] == 1.0, lane
        assert opt.state
        assert all(float(entry["scale"]) == 2.0 for entry in opt.state.values()), lane
        train(model, opt, range(2))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_class_s_own_setstate_and_load_state_dict_are_not_called_for_what_is_loaded(workers, tmp_path, ranks):
    workers(ranks).run(loads_by_code_of_the_class, tmp_path, timeout=60)


def loads_older_of_two_classes(folder: Path) -> None:
    groups = [
        {"params": "*.weight", "optimizer": optim.Adagrad},
        {"params": "rest", "optimizer": Converts, "momentum": 0.9},
    ]
    model = make_model()
    opt = shardstep.shard(model, groups=[{**group, "lr": 0.01} for group in groups])
    train(model, opt, range(3))
    opt.consolidate_state_dict(0)
    box = [opt.state_dict() if torch.distributed.get_rank() == 0 else None]
    torch.distributed.broadcast_object_list(box)
    saved: Any = box[0]
    weights = copy.deepcopy(model.state_dict())
    for entry in saved["state"].values():
        if "step" in entry:
            entry["step"] = entry["step"].item()
        if "momentum_buffer" in entry:
            entry["velocity"] = entry.pop("momentum_buffer")
    for group in saved["param_groups"]:
        for key in NEWER:
            group.pop(key, None)
    other = make_model()
    loaded = shardstep.shard(other, groups=[{**group, "lr": 0.01} for group in groups])
    loaded.load_state_dict(saved)
    other.load_state_dict(weights)
    train(model, opt, range(3, 6))
    train(other, loaded, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_older_state_of_several_classes_breaks_the_next_step(workers, tmp_path, ranks):
    workers(ranks).run(loads_older_of_two_classes, tmp_path, timeout=60)


class Remembers(optim.SGD):
    """Keeps where each weight began, from when it is loaded without that."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].setdefault("start", param.detach().clone())


def looks_at_weights(folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        plain, oracle = trained(optim.SGD, dtype)
        for by in ("load_state_dict", "load"):
            path = folder / f"{dtype}-{by}"
            shardstep.save(path, plain, oracle)
            model = make_model(dtype)
            if by == "load_state_dict":
                model.load_state_dict(plain.state_dict())
            opt = shardstep.shard(model, Remembers, lr=0.01, momentum=0.9)
            if by == "load":
                with pytest.raises(ValueError, match="was trained by"):
                    shardstep.load(path, model, opt)
                shardstep.load(path, model, opt, strict=False)
            else:
                opt.load_state_dict(oracle.state_dict())
            for param, entry in opt.state.items():
                assert torch.equal(entry["start"].reshape(param.shape), param.float()), f"{dtype}, {by}"


def test_a_class_that_looks_at_weights_when_it_loads_sees_others(workers, tmp_path):
    workers(1).run(looks_at_weights, tmp_path, timeout=60)


# -- copies ------------------------------------------------------------------------------------------------------------


def copies_optimizers() -> None:
    model = make_model()
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW)
    train(model, zero, range(1))
    for made in (copy.copy(zero), copy.deepcopy(zero)):
        for use in (made.step, made.state_dict, lambda made=made: made.state):
            with pytest.raises(AttributeError, match="a copy of a ZeroRedundancyOptimizer"):
                use()
    train(model, zero, range(1, 2))
    opt = shardstep.shard(make_model(), optim.AdamW)
    for change in (copy.copy, copy.deepcopy, lambda opt: opt.__setstate__({"state": {}, "param_groups": []})):
        with pytest.raises(TypeError, match="a sharded optimizer"):
            change(opt)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_copy_of_an_optimizer_has_no_attribute_strategy(workers, ranks):
    workers(ranks).run(copies_optimizers, timeout=60)
