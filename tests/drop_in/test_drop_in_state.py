"""Saving and loading: the unsharded optimizer's state_dict, from and to any number of ranks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import optim
from torch.optim import SGD, AdamW

import shardstep
from shardstep import ZeroRedundancyOptimizer
from shardstep.comm import tensors
from shardstep.zero_redundancy_optimizer import _broadcast_object, _recursive_copy_to_device
from training import (
    SHAPES,
    all_same,
    assert_same,
    assert_states_equal,
    consolidated,
    make_params,
    raised,
    set_gradients,
    twins,
)

WORLDS = [1, 2, 3, 4]
CLASSES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (AdamW, {"amsgrad": True}),
    (AdamW, {"fused": True}),
    (SGD, {"momentum": 0.9}),
    (SGD, {}),
    (optim.Adafactor, {}),
    (optim.NAdam, {"foreach": True}),
    (optim.ASGD, {}),
]


def train(optimizer: optim.Optimizer, params: list[Any], steps: range) -> None:
    for step in steps:
        set_gradients(step, params)
        optimizer.step()


def cross_loading(optimizer_class: type[optim.Optimizer], options: dict[str, Any], bucket_view: bool) -> None:
    shapes = SHAPES[:4]
    ours = make_params(shapes)
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, optimizer_class, parameters_as_bucket_view=bucket_view, lr=0.05, **options)
    plain = optimizer_class(theirs, lr=0.05, **options)
    train(zero, ours, range(3))
    train(plain, theirs, range(3))
    saved_by_zero, saved_by_plain = consolidated(zero), plain.state_dict()
    assert_states_equal(saved_by_zero, saved_by_plain)

    # Across, into optimizers with other options, and on with the training.
    new_ours, new_theirs = twins(ours), twins(theirs)
    new_zero = ZeroRedundancyOptimizer(new_ours, optimizer_class, lr=9.0)
    new_plain = optimizer_class(new_theirs, lr=9.0)
    new_zero.load_state_dict(saved_by_plain)
    new_plain.load_state_dict(saved_by_zero)
    assert new_zero.param_groups[0]["lr"] == new_zero.optim.param_groups[0]["lr"] == 0.05
    train(zero, ours, range(3, 6))
    train(new_zero, new_ours, range(3, 6))
    train(new_plain, new_theirs, range(3, 6))
    assert_same(new_ours, ours)
    assert_same(new_theirs, ours)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize(("optimizer_class", "options"), CLASSES, ids=[f"{c.__name__}{o}" for c, o in CLASSES])
def test_states_cross_load_with_the_plain_optimizer(workers, optimizer_class, options, world_size, bucket_view):
    workers(world_size).run(cross_loading, optimizer_class, options, bucket_view)


def save_after_three_steps() -> Any:
    params = make_params()
    zero = ZeroRedundancyOptimizer([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], AdamW, lr=0.1)
    train(zero, params, range(3))
    return consolidated(zero, to=zero.world_size - 1), [param.detach() for param in params]


def load_and_go_on(saved: dict[str, Any], values: list[torch.Tensor]) -> list[torch.Tensor]:
    params = [torch.nn.Parameter(value.clone()) for value in values]
    zero = ZeroRedundancyOptimizer([{"params": params[:2]}, {"params": params[2:]}], AdamW, lr=5.0)
    zero.load_state_dict(saved)
    train(zero, params, range(3, 6))
    return [param.detach() for param in params]


def test_a_state_saved_by_n_ranks_loads_on_m(workers):
    results = []
    for saving, loading in [(1, 4), (4, 1), (2, 3), (3, 2), (4, 4)]:
        saved, values = workers(saving).run(save_after_three_steps)[0]
        results += workers(loading).run(load_and_go_on, saved, values)
    for result in results:
        assert_same(result, results[0])


def only_where_it_was_consolidated() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    train(zero, params, range(1))
    with pytest.raises(RuntimeError, match=rf"never consolidated.*consolidate_state_dict\(to={zero.rank}\)"):
        zero.state_dict()
    zero.consolidate_state_dict(to=1)
    if zero.rank == 1:
        assert list(zero.state_dict()["state"]) == list(range(len(params)))
    else:
        with pytest.raises(RuntimeError, match=rf"consolidated to rank 1.*\(to={zero.rank}\) on all ranks"):
            zero.state_dict()


def test_state_dict_elsewhere_names_the_call_to_make(workers):
    workers(3).run(only_where_it_was_consolidated)


def nothing_to_consolidate_yet() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], AdamW, lr=0.1)
    plain = AdamW([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], lr=0.1)
    for _ in range(2):  # as programs do that put a state_dict on its device: also when they do it again
        saved = zero.state_dict()
        assert saved == plain.state_dict()
        zero.load_state_dict(saved)
    train(zero, params, range(1))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="never consolidated"):
            zero.state_dict()
        zero.load_state_dict(_stepped(params, plain))


def _stepped(params: list[torch.Tensor], plain: torch.optim.Optimizer) -> dict[str, Any]:
    for param in params:
        param.grad = torch.zeros_like(param)
    plain.step()
    return plain.state_dict()


def test_state_dict_before_the_first_step_is_that_of_a_new_optimizer_on_every_rank(workers):
    workers(3).run(nothing_to_consolidate_yet)


def options_are_current() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(zero, 1)
    train(zero, params, range(1))
    zero.consolidate_state_dict()
    scheduler.step()
    if zero.rank == 0:
        group = zero.state_dict()["param_groups"][0]
        assert (group["lr"], group["initial_lr"]) == (pytest.approx(0.01), 0.1)


def test_options_in_the_state_dict_are_the_current_ones(workers):
    workers(2).run(options_are_current)


def a_snapshot_stays_as_it_was() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, SGD, lr=0.1, momentum=0.9)
    train(zero, params, range(1))
    zero.consolidate_state_dict()
    if zero.rank == 0:
        saved = zero.state_dict()
        before = copy.deepcopy(saved)
    train(zero, params, range(1, 3))
    if zero.rank == 0:
        assert_states_equal(saved, before)


def test_a_state_dict_that_was_taken_does_not_change_under_further_steps(workers):
    workers(2).run(a_snapshot_stays_as_it_was)


class OddState(SGD):
    """Keeps everything that state may hold, and state that belongs to no parameter."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param].update(
                    nothing=None, flag=True, count=3, ratio=float("nan"), text="ü", pair=(1, [2.5, None]),
                    nested={"a": {1: torch.arange(3)}}, kind=torch.bfloat16, number=2 + 3j, empty=torch.zeros(0, 2),
                    last=torch.linspace(0, 1, 120).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
                    scalar=torch.tensor(4),
                )  # fmt: skip
        self.state["of_all"] = {"seen": 7}


def odd_state() -> None:
    ours = make_params()
    theirs = twins(ours)
    torch.manual_seed(0)
    zero = ZeroRedundancyOptimizer(ours, OddState, lr=0.1)
    train(zero, ours, range(1))
    zero.consolidate_state_dict(to=1)
    if zero.rank != 1:
        return
    plain = OddState(theirs, lr=0.1)
    train(plain, theirs, range(1))
    saved, expected = zero.state_dict()["state"], plain.state_dict()["state"]
    assert list(saved) == [0, 1, 2, 3, 4, "of_all"]
    assert saved["of_all"] == {"seen": 7}
    for key in range(5):
        for name in ("nothing", "flag", "count", "text", "pair", "kind", "number"):
            assert saved[key][name] == expected[key][name]
            assert type(saved[key][name]) is type(expected[key][name])
        assert saved[key]["ratio"] != saved[key]["ratio"]
        assert saved[key]["nested"]["a"][1].tolist() == [0, 1, 2]
        assert saved[key]["empty"].shape == (0, 2)
        assert saved[key]["last"].is_contiguous(memory_format=torch.channels_last)


def test_every_kind_of_state_arrives(workers):
    workers(3).run(odd_state)


class Opaque:
    pass


class OpaqueState(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["thing"] = Opaque()


def opaque_state() -> tuple[str, str]:
    params = make_params(((3,), (2,)))
    zero = ZeroRedundancyOptimizer(params, OpaqueState, lr=0.1)
    train(zero, params, range(1))
    return raised(lambda: zero.consolidate_state_dict())


def test_state_that_would_need_a_pickle_is_refused_by_name(workers):
    kind, text = all_same(workers(2).run(opaque_state))
    assert kind == "TypeError"
    assert "['thing']" in text
    assert "Opaque" in text


def resident(which: str) -> int:
    """Bytes of resident memory: now (VmRSS), or at most since the peak was last forgotten (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(which))


def large_state(fast_lane: bool) -> dict[str, int]:
    """Bytes of state sent and received, the largest message, and the peak of memory, in consolidation."""
    params = [
        torch.nn.Parameter(torch.zeros(4_000_000)) for _ in range(4 * dist.get_world_size())
    ]  # 128 MB of state each
    if fast_lane:
        zero: Any = shardstep.shard(torch.nn.ParameterList(params), AdamW, lr=0.1)
        sum(param.sum() for param in params).backward()
        zero.step()
    else:
        zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
        train(zero, params, range(1))
    zero.zero_grad()
    counts = {"sent": 0, "received": 0, "largest": 0}
    message = tensors._message

    def counting(channel: Any, way: Any, values: torch.Tensor, peer: int) -> None:
        counts["sent" if way is dist.isend else "received"] += values.nbytes
        if way is dist.isend:
            counts["largest"] = max(counts["largest"], values.nbytes)
        message(channel, way, values, peer)

    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far, or it would hide this one
    before = resident("VmRSS")
    with mock.patch.object(tensors, "_message", counting):
        zero.consolidate_state_dict(to=0)
    counts["peak_growth"] = resident("VmHWM") - before
    state = zero.state if fast_lane else zero.optim.state
    counts["own_state"] = sum(
        value.nbytes for entry in state.values() for value in entry.values() if torch.is_tensor(value)
    )
    return counts


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads memory from Linux's /proc")
@pytest.mark.parametrize("fast_lane", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_only_the_target_receives_and_memory_is_bounded_by_own_state_and_one_chunk(workers, world_size, fast_lane):
    counts = workers(world_size).run(large_state, fast_lane)
    largest = 2 * 4_000_000 * 4  # one parameter's state, while its parts become one
    assert counts[0]["peak_growth"] <= sum(rank["own_state"] for rank in counts) + largest + 64 * 2**20
    assert all(rank["received"] == 0 for rank in counts[1:])
    assert counts[0]["sent"] == 0
    assert counts[0]["received"] == sum(rank["sent"] for rank in counts)
    for rank in counts[1:]:
        assert 0 <= rank["sent"] - rank["own_state"] < 4096, "its own state and a description, once"
        assert rank["largest"] <= 64 * 2**20
        assert rank["peak_growth"] <= 64 * 2**20, "its own state is sent from where it lies"


def hooks_run() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    train(zero, params, range(1))
    zero.consolidate_state_dict()
    seen: list[str] = []
    zero.register_state_dict_pre_hook(lambda optimizer: seen.append("before saving"))
    zero.register_state_dict_post_hook(lambda optimizer, state: {**state, "extra": 1})
    zero.register_load_state_dict_pre_hook(lambda optimizer, state: seen.append(f"loading {sorted(state)}"))
    zero.register_load_state_dict_post_hook(lambda optimizer: seen.append("loaded"))
    saved = zero.state_dict()
    assert saved["extra"] == 1
    zero.load_state_dict(saved)
    assert seen == ["before saving", "loading ['extra', 'param_groups', 'state']", "loaded"]


def test_state_dict_hooks_run(workers):
    workers(1).run(hooks_run)


def broadcast_objects(source: int) -> None:
    obj = {"a": [torch.arange(5), (1, "two")], "b": None} if dist.get_rank() == source else None
    got = _broadcast_object(obj, src_rank=source, group=dist.group.WORLD, device=torch.device("cpu"))
    assert got["a"][0].tolist() == [0, 1, 2, 3, 4]
    assert got["a"][1] == (1, "two")
    moved = _recursive_copy_to_device(got, non_blocking=True, device=torch.device("cpu"))
    assert moved["a"][1] == (1, "two")


def test_objects_are_broadcast(workers):
    for source in (0, 2):
        workers(3).run(broadcast_objects, source)


def broadcast_code() -> str:
    obj = {"a": Opaque()} if dist.get_rank() == 0 else None
    try:
        _broadcast_object(obj, src_rank=0)
    except Exception as error:
        return str(error)
    return "returned"


def test_an_object_that_brings_code_along_is_not_unpickled(workers):
    sender, receiver = workers(2).run(broadcast_code)
    assert sender == "returned"
    assert "Weights only load failed" in receiver


def test_the_chunk_is_at_most_64_mb():
    assert tensors.CHUNK_NBYTES <= 64 * 2**20
