"""`load` of several optimizers takes all or nothing; and with strict=False nothing of another class."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS
from shardstep import ShardConfig, ZeroRedundancyOptimizer
from shardstep.optimizers.optimizer_copy import OptimizerCopy
from training import raised

CONFIG = ShardConfig(bucket_mb=SMALL_BUCKETS)
BOTH_WAYS = pytest.mark.parametrize(
    ("ranks", "collectives"), [(1, False), (2, False), (2, True)], ids=["alone", "messages", "collectives"]
)


class Pair(nn.Module):
    """Two parts, each with an optimizer of its own; and something that is no tensor, which may be refused."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.one, self.two = nn.Linear(7, 13), nn.Linear(13, 5)
        self.note, self.refuses = seed, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))  # type: ignore[no-any-return]

    def get_extra_state(self) -> Any:
        return {"note": self.note}

    def set_extra_state(self, state: Any) -> None:
        if self.refuses:
            self.refuses = False
            raise ValueError("this model refuses")
        self.note = state["note"]


class Refuses(optim.SGD):
    """Where `REFUSING` says so: when state is loaded, or when it is built with what was loaded."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if REFUSING and REFUSING[0] in ("setstate", f"rank {torch.distributed.get_rank()}"):
            raise ValueError("this class refuses")


REFUSING: list[str] = []


def build(lane: str, kind: Any, params: nn.Module, name: str, **options: Any) -> Any:
    if lane == "shard":
        return shardstep.shard(params, kind, config=CONFIG, lr=0.05, **options)
    make: Any = kind if lane == "plain" else lambda params, **given: ZeroRedundancyOptimizer(params, kind, **given)
    return make(params.parameters(), lr=0.05, **options)


def two_of(seed: int, lanes: tuple[str, str]) -> tuple[Pair, list[Any]]:
    model = Pair(seed)
    first = build(lanes[0], optim.AdamW, model.one, "one")
    return model, [first, build(lanes[1], Refuses, model.two, "two", momentum=0.9)]


def train(model: nn.Module, opts: list[Any], steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(step))
        model(x).square().mean().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()


def look(model: Pair, opts: list[Any]) -> Any:
    """Weights, state and options, as they are now, by value."""
    state = [[(key, copy.deepcopy(dict(entry))) for key, entry in enumerate(opt.state.values())] for opt in opts]
    options = [[{k: v for k, v in group.items() if k != "params"} for group in opt.param_groups] for opt in opts]
    weights = {key: value.clone() for key, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    return copy.deepcopy((state, options, weights, model.note))


def assert_same(one: Any, other: Any, what: str) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys(), what
        for key in one:
            assert_same(one[key], other[key], f"{what}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), what
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, theirs, f"{what}[{number}]")
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other), what
    else:
        assert one == other, what


@contextmanager
def way(collectives: bool) -> Iterator[None]:
    with by_collectives() if collectives else nullcontext():
        yield


LANES = [("shard", "shard"), ("shard", "drop-in"), ("drop-in", "plain"), ("plain", "shard")]


def refuses_the_second(folder: Path, lanes: tuple[str, str], collectives: bool) -> None:
    with way(collectives):
        REFUSING.clear()
        model, opts = two_of(3, lanes)
        train(model, opts, range(3))
        path = folder / "-".join(lanes)
        shardstep.save(path, model, opts)
        refusals: dict[str, Callable[[Pair], None]] = {
            "all ranks": lambda model: REFUSING.append("setstate"),
            "one rank": lambda model: REFUSING.append(f"rank {torch.distributed.get_world_size() - 1}"),
            "the model": lambda model: setattr(model, "refuses", True),
        }
        for who, refuse in refusals.items():
            model, opts = two_of(11, lanes)
            twin, others = two_of(11, lanes)
            train(model, opts, range(10, 12))
            train(twin, others, range(10, 12))
            before = look(model, opts)
            refuse(model)
            kind, text = raised(lambda: shardstep.load(path, model, opts))  # noqa: B023
            assert kind == "ValueError", text
            assert "refuses" in text, text
            REFUSING.clear()
            assert_same(look(model, opts), before, f"{lanes}, {who}")
            train(model, opts, range(12, 14))
            train(twin, others, range(12, 14))
            assert_same(look(model, opts), look(twin, others), f"{lanes}, {who}, afterwards")
            shardstep.load(path, model, opts)
            assert model.note == 3


@BOTH_WAYS
def test_the_first_of_two_optimizers_is_replaced_when_the_second_refuses_a_checkpoint(
    workers, tmp_path, ranks, collectives
):
    for lanes in LANES:
        workers(ranks).run(refuses_the_second, tmp_path, lanes, collectives, timeout=60)


def calls_hooks(folder: Path) -> None:
    for lane in ("shard", "drop-in", "plain"):
        model, opts = two_of(3, (lane, lane))
        train(model, opts, range(3))
        shardstep.save(folder / lane, model, opts)
        calls: list[Any] = []
        model, opts = two_of(11, (lane, lane))
        for opt in opts:
            opt.register_load_state_dict_pre_hook(lambda opt, saved: calls.append(("before", opt)))  # noqa: B023
            opt.register_load_state_dict_post_hook(lambda opt: calls.append(("after", opt, look(model, opts))))  # noqa: B023
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            shardstep.load(folder / lane, model, opts)
        after = [call for call in calls if call[0] == "after"]
        assert [call[1] for call in after] == opts, "the optimizers themselves, and each once"
        assert_same(after[0][2], look(model, opts), "a hook sees all that is loaded")
        befores = [call[1] for call in calls if call[0] == "before"]
        if lane == "shard":
            assert not befores
            assert any("register_load_state_dict_pre_hook" in str(one.message) for one in caught)
        else:
            assert befores == opts


@pytest.mark.parametrize("ranks", [1, 2])
def test_hooks_of_loading_are_not_called_by_load(workers, tmp_path, ranks):
    workers(ranks).run(calls_hooks, tmp_path, timeout=60)


# -- strict=False ------------------------------------------------------------------------------------------------------

OPTIONS: dict[Any, dict[str, Any]] = {optim.SGD: {"momentum": 0.9}}
MISFITS = [
    (optim.SGD, optim.AdamW),
    (optim.AdamW, optim.Adamax),
    (optim.RMSprop, optim.Adam),
    (optim.AdamW, optim.SGD),
    (optim.AdamW, optim.Adam),
]


def small(kind: Any, lane: str, seed: int, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5)).to(dtype)
    return model, build(lane, kind, model, "", **OPTIONS.get(kind, {}))


def loads_another_class(folder: Path, collectives: bool) -> None:
    with way(collectives):
        for saved_by, kind in MISFITS:
            path = folder / f"{saved_by.__name__}-{kind.__name__}"
            source, opt = small(saved_by, "shard", 3)
            train(source, [opt], range(3))
            shardstep.save(path, source, opt)
            for lane in ("shard", "drop-in", "plain"):
                model, opt = small(kind, lane, 5)
                train(model, [opt], range(10, 12))  # it has state of its own, which stays
                twin, other = small(kind, lane, 5)
                train(twin, [other], range(10, 12))
                opt.param_groups[0]["lr"] = other.param_groups[0]["lr"] = 0.03
                text = raised(lambda: shardstep.load(path, model, opt))[1]  # noqa: B023
                assert "was trained by" in text
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    shardstep.load(path, model, opt, strict=False)
                told = [str(one.message) for one in caught]
                assert len(told) == 1, told
                for word in ("0.weight", "2.bias", saved_by.__name__, kind.__name__, "lr", "weight_decay"):
                    assert word in told[0], told[0]
                for name, param in model.named_parameters():
                    assert torch.equal(param, dict(source.named_parameters())[name]), "weights are loaded"
                twin.load_state_dict(source.state_dict())
                train(model, [opt], range(12, 14))
                train(twin, [other], range(12, 14))
                where = f"{saved_by.__name__} into {kind.__name__}, {lane}"
                assert opt.param_groups[0].keys() == other.param_groups[0].keys(), where
                for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
                    assert torch.equal(ours, theirs), where


@BOTH_WAYS
def test_state_and_options_of_another_class_are_loaded_with_strict_false(workers, tmp_path, ranks, collectives):
    workers(ranks).run(loads_another_class, tmp_path, collectives, timeout=120)


def loads_one_group_of_two(folder: Path) -> None:
    """One of the groups was trained by another class: the other is loaded."""

    def make(first: Any, seed: int) -> tuple[Pair, Any]:
        model = Pair(seed)
        groups = [
            {"params": "one.*", "optimizer": first, "lr": 0.02},
            {"params": "two.*", "optimizer": optim.AdamW, "lr": 0.01},
        ]
        return model, shardstep.shard(model, groups=groups, config=CONFIG)

    source, opt = make(optim.RMSprop, 3)
    train(source, [opt], range(3))
    opt.param_groups[1]["lr"] = 0.005
    shardstep.save(folder / "two", source, opt)
    model, loaded = make(optim.Adagrad, 11)
    with pytest.warns(UserWarning, match="of another class"):
        shardstep.load(folder / "two", model, loaded, strict=False)
    assert loaded.param_groups[1]["lr"] == 0.005
    assert loaded.param_groups[0]["lr"] == 0.02
    assert "alpha" not in loaded.param_groups[0]
    for param in model.two.parameters():
        assert all("exp_avg" in entry for key, entry in loaded.state.items() if key is param)
    for param in model.one.parameters():
        assert all("square_avg" not in entry for key, entry in loaded.state.items() if key is param)
    assert torch.equal(model.one.weight, source.one.weight)
    train(model, [loaded], range(3, 5))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_group_of_another_class_is_loaded_with_strict_false(workers, tmp_path, ranks):
    workers(ranks).run(loads_one_group_of_two, tmp_path, timeout=60)


def loads_a_model_that_was_saved_alone(folder: Path) -> None:
    """Trained weights as well; the master of 16-bit ones with them, and the optimizer's state stays."""
    for dtype in (torch.float32, torch.bfloat16):
        path = folder / str(dtype)
        source, _ = small(optim.AdamW, "plain", 3, torch.float32)
        shardstep.save(path, source)
        for lane in ("shard", "drop-in", "plain"):
            model, opt = small(optim.AdamW, lane, 5, dtype)
            x = torch.randn(4, 7).to(dtype)
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            shardstep.load(path, model, opt, strict=False)
            for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
                assert torch.equal(ours, theirs.to(dtype)), f"{lane}, {dtype}"
            assert opt.state, lane
            assert all(float(entry["step"]) == 1 for entry in opt.state.values()), lane
            if lane == "shard" and dtype is torch.bfloat16:
                opt.param_groups[0].update(lr=0.0)
                opt.step()
                for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
                    assert torch.equal(ours, theirs.to(dtype)), "its master is another"


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_checkpoint_without_an_optimizer_leaves_trained_weights_as_they_were(workers, tmp_path, ranks):
    workers(ranks).run(loads_a_model_that_was_saved_alone, tmp_path, timeout=60)


def fails_between_two_collective_commits(folder: Path) -> None:
    """A plain optimizer between two sharded ones; taking over what was loaded fails on the last rank."""

    def build_three(seed: int) -> tuple[nn.Module, list[Any]]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 3))
        kinds = ("shard", "plain", "shard")
        return model, [build(kind, optim.AdamW, part, kind) for kind, part in zip(kinds, model, strict=True)]

    model, opts = build_three(3)
    train(model, opts, range(2))
    shardstep.save(folder / "three", model, opts)
    model, opts = build_three(4)
    take = OptimizerCopy.take

    def runs_out_of_memory(self: OptimizerCopy) -> None:
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            raise MemoryError("no memory is left here")
        take(self)

    with mock.patch.object(OptimizerCopy, "take", runs_out_of_memory):
        kind, text = raised(lambda: shardstep.load(folder / "three", model, opts))
    assert kind in ("RuntimeError", "MemoryError"), text
    assert "no memory is left here" in text, text
    shardstep.load(folder / "three", model, opts)  # no rank is left in an exchange of the first call


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_wait_for_one_whose_plain_optimizer_failed_between_two_sharded_ones(workers, tmp_path, ranks):
    workers(ranks).run(fails_between_two_collective_commits, tmp_path)
