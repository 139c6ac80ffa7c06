"""Bad input gets a clear error on every rank, and leaves everything as it was."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from training import all_same, assert_states_equal, consolidated, make_params, raised, set_gradients, twins


def test_no_process_group():
    code = """
import torch, shardstep
try:
    shardstep.ZeroRedundancyOptimizer([torch.zeros(2)], torch.optim.SGD, lr=0.1)
except RuntimeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    assert "there is no process group: start the program with torchrun" in done.stdout


def outside_of_the_group() -> tuple[str, str] | None:
    group = dist.new_group([1])
    if dist.get_rank() == 1:
        ZeroRedundancyOptimizer(make_params(), SGD, process_group=group, lr=0.1)
        return None
    return raised(lambda: ZeroRedundancyOptimizer(make_params(), SGD, process_group=group, lr=0.1))


def test_a_group_this_rank_is_not_in(workers):
    kind, text = workers(2).run(outside_of_the_group)[0]
    assert kind == "RuntimeError"
    assert "global rank 0 is not a member of the given process group" in text


def made_with(params: Callable[[], Any], optimizer_class: Any, options: dict[str, Any]) -> tuple[str, str]:
    return raised(lambda: ZeroRedundancyOptimizer(params(), optimizer_class, **options))


def a_tensor() -> Any:
    return torch.zeros(3)


def a_number() -> Any:
    return 1.5


def nothing() -> Any:
    return []


def empty_group() -> Any:
    return [{"params": []}]


def a_dict_without_params() -> Any:
    return [{"lr": 0.1}]


def tensors_and_dicts() -> Any:
    return [torch.zeros(2), {"params": [torch.zeros(2)]}]


def tensors_and_pairs() -> Any:
    return [torch.zeros(2), ("w", torch.zeros(2))]


def a_text_among_tensors() -> Any:
    return [torch.zeros(2), "w"]


def a_set() -> Any:
    return [{"params": {torch.zeros(2), torch.zeros(3)}}]


def sparse() -> Any:
    return [torch.zeros(2), torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)]


def two_dtypes() -> Any:
    return [torch.zeros(2), torch.zeros(2, dtype=torch.float64)]


def twice_in_a_group() -> Any:
    param = nn.Parameter(torch.zeros(2))
    return [param, nn.Parameter(torch.zeros(1)), param]


def twice_in_two_groups() -> Any:
    param = nn.Parameter(torch.zeros(2))
    return [{"params": [("a", param)]}, {"params": [("b", param)]}]


def not_a_leaf() -> Any:
    return [("leaf", nn.Parameter(torch.zeros(2))), ("sum", torch.zeros(2, requires_grad=True) + 1)]


def fine() -> Any:
    return make_params()


class NotAnOptimizer:
    def __init__(self, params: Any, lr: float) -> None:
        self.params = list(params)


CASES: list[tuple[Callable[[], Any], Any, dict[str, Any], str, str]] = [
    (a_tensor, SGD, {"lr": 0.1}, "TypeError", "iterable of tensors or dicts, got a single"),
    (a_number, SGD, {"lr": 0.1}, "TypeError", "iterable of tensors or dicts, got float"),
    (nothing, SGD, {"lr": 0.1}, "ValueError", "params is empty"),
    (empty_group, SGD, {"lr": 0.1}, "ValueError", "params is empty"),
    (a_dict_without_params, SGD, {"lr": 0.1}, "ValueError", 'has no "params"'),
    (tensors_and_dicts, SGD, {"lr": 0.1}, "TypeError", "mixes tensors and dicts"),
    (tensors_and_pairs, SGD, {"lr": 0.1}, "TypeError", "mixes tensors and (name, tensor) pairs"),
    (a_text_among_tensors, SGD, {"lr": 0.1}, "TypeError", "entry 1 is str"),
    (a_set, SGD, {"lr": 0.1}, "TypeError", "a set has none"),
    (sparse, SGD, {"lr": 0.1}, "ValueError", "sparse: param_groups[0]['params'][1]"),
    (two_dtypes, SGD, {"lr": 0.1}, "ValueError", "float64 (param_groups[0]['params'][1])"),
    (twice_in_a_group, SGD, {"lr": 0.1}, "ValueError", "twice: param_groups[0]['params'][0] and param_groups[0]"),
    (twice_in_two_groups, SGD, {"lr": 0.1}, "ValueError", "given twice: a and b"),
    (not_a_leaf, SGD, {"lr": 0.1}, "ValueError", "computed from others: sum"),
    (fine, NotAnOptimizer, {"lr": 0.1}, "TypeError", "must be a subclass of torch.optim.Optimizer"),
    (fine, "AdamW", {"lr": 0.1}, "TypeError", "must be a subclass of torch.optim.Optimizer, got 'AdamW'"),
    (fine, SGD, {"lr": float("-inf")}, "ValueError", "Invalid learning rate"),
    (fine, SGD, {"lr": 0.1, "momentun": 0.9}, "TypeError", "momentun"),
    (fine, AdamW, {"lr": 0.1, "betas": (float("nan"), 0.9)}, "ValueError", "Invalid beta parameter"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("params", "optimizer_class", "options", "kind", "text"), CASES, ids=[f"{c[0].__name__}-{c[4][:30]}" for c in CASES]
)
def test_a_constructor_that_cannot_work_says_why(workers, params, optimizer_class, options, kind, text):
    for got_kind, got_text in workers(2).run(made_with, params, optimizer_class, options):
        assert got_kind == kind
        assert text in got_text


def nan_learning_rate() -> None:
    """NaN goes through to the optimizer's own check; torch's SGD accepts it."""
    SGD(make_params(), lr=float("nan"))
    ZeroRedundancyOptimizer(make_params(), SGD, lr=float("nan"))


def test_nan_options_are_the_optimizers_own_business(workers):
    workers(2).run(nan_learning_rate)


def an_instance() -> tuple[str, str]:
    return raised(lambda: ZeroRedundancyOptimizer(make_params(), SGD(make_params(), lr=0.1), lr=0.1))


def test_an_instance_instead_of_a_class(workers):
    kind, text = all_same(workers(2).run(an_instance))
    assert kind == "TypeError"
    assert "must be a class, got an instance of SGD" in text


def bad_only_on_rank_one() -> tuple[str, str]:
    params = [torch.zeros(2), 5] if dist.get_rank() == 1 else [torch.zeros(2), torch.zeros(1)]
    return raised(lambda: ZeroRedundancyOptimizer(params, SGD, lr=0.1))


def test_input_that_is_bad_on_one_rank_only_raises_on_all(workers):
    kind, text = all_same(workers(3).run(bad_only_on_rank_one, timeout=20))
    assert kind == "TypeError"
    assert "failed on rank 1: params must be tensors" in text


Damage = Callable[[dict[str, Any]], Any]


def damages() -> dict[str, tuple[Damage, str, str]]:
    def without(key: str) -> Damage:
        return lambda saved: {k: v for k, v in saved.items() if k != key}

    def change(path: tuple[Any, ...], value: Any) -> Damage:
        def apply(saved: dict[str, Any]) -> Any:
            at = saved
            for step in path[:-1]:
                at = at[step]
            at[path[-1]] = value
            return saved

        return apply

    def delete(path: tuple[Any, ...]) -> Damage:
        def apply(saved: dict[str, Any]) -> Any:
            at = saved
            for step in path[:-1]:
                at = at[step]
            del at[path[-1]]
            return saved

        return apply

    return {
        "no state": (without("state"), "ValueError", "has no 'state'"),
        "no groups": (without("param_groups"), "ValueError", "has no 'param_groups'"),
        "not a dict": (lambda saved: [saved], "TypeError", "must be a dict, got list"),
        "extra group": (
            lambda saved: {**saved, "param_groups": saved["param_groups"] * 2},
            "ValueError",
            "it has 4 param groups, the optimizer has 2",
        ),
        "missing parameter": (change(("param_groups", 1, "params"), [2]), "ValueError", "param_groups[1] has 1 param"),
        "group without params": (delete(("param_groups", 0, "params")), "ValueError", "[0] has no 'params'"),
        "extra entry": (change(("state", 9), {}), "ValueError", "state[9] belongs to no parameter"),
        "none entry": (change(("state", 1), None), "ValueError", "state[1] (param_groups[0]['params'][1]) is NoneType"),
        "wrong shape": (
            change(("state", 1, "exp_avg"), torch.zeros(7)),
            "ValueError",
            "state[1]['exp_avg'] has shape (7,), param_groups[0]['params'][1] has (5,)",
        ),
        "other optimizer": (delete(("param_groups", 0, "betas")), "ValueError", "has no 'betas', which AdamW needs"),
    }  # fmt: skip


def load_damaged(name: str) -> tuple[str, str]:
    params = make_params(((7, 5), (5,), (5,), (3,)))
    zero = ZeroRedundancyOptimizer([{"params": params[:2]}, {"params": params[2:], "lr": 0.2}], AdamW, lr=0.1)
    set_gradients(0, params)
    zero.step()
    before = consolidated(zero)
    damage, _, _ = damages()[name]
    error = raised(lambda: zero.load_state_dict(damage(copy.deepcopy(before))))
    assert_states_equal(consolidated(zero), before)
    set_gradients(1, params)
    zero.step()
    return error


@pytest.mark.parametrize("name", list(damages()))
def test_a_state_dict_that_does_not_fit_is_named_and_changes_nothing(workers, name):
    _, kind, text = damages()[name]
    got_kind, got_text = all_same(workers(2).run(load_damaged, name))
    assert got_kind == kind
    assert text in got_text


def load_with_a_value_missing() -> tuple[str, str]:
    params = make_params(((5,), (4,)))
    plain_params = twins(params)
    plain = AdamW(plain_params, lr=0.1)
    set_gradients(0, plain_params)
    plain.step()
    saved = plain.state_dict()
    del saved["state"][1]["exp_avg_sq"]
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    error = raised(lambda: zero.load_state_dict(saved))
    assert not zero.state
    return error


def test_a_state_dict_with_a_value_missing_is_named(workers):
    kind, text = all_same(workers(2).run(load_with_a_value_missing))
    assert kind == "ValueError"
    assert "state[1] (param_groups[0]['params'][1]) has no 'exp_avg_sq'" in text


def damaged_on_one_rank() -> tuple[str, str]:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    set_gradients(0, params)
    zero.step()
    saved = consolidated(zero)
    before = copy.deepcopy(saved)
    if dist.get_rank() == 2:
        del saved["param_groups"]
    error = raised(lambda: zero.load_state_dict(saved))
    assert_states_equal(consolidated(zero), before)
    return error


def test_a_state_dict_damaged_on_one_rank_is_loaded_by_none(workers):
    kind, text = all_same(workers(3).run(damaged_on_one_rank, timeout=20))
    assert kind == "ValueError"
    assert "load_state_dict failed on rank 2: the state_dict has no 'param_groups'" in text


def consolidate_to(to: Any) -> tuple[str, str]:
    zero = ZeroRedundancyOptimizer(make_params(), SGD, lr=0.1)
    return raised(lambda: zero.consolidate_state_dict(to=to))


@pytest.mark.parametrize(
    ("to", "kind"), [(2, "ValueError"), (-1, "ValueError"), ("0", "TypeError"), (None, "TypeError")]
)
def test_consolidate_to_a_rank_that_does_not_exist(workers, to, kind):
    got_kind, text = all_same(workers(2).run(consolidate_to, to))
    assert got_kind == kind
    assert "rank" in text


def consolidate_to_different_ranks() -> tuple[str, str]:
    zero = ZeroRedundancyOptimizer(make_params(), SGD, lr=0.1)
    return raised(lambda: zero.consolidate_state_dict(to=dist.get_rank()))


def test_ranks_that_consolidate_to_different_ranks(workers):
    kind, text = all_same(workers(2).run(consolidate_to_different_ranks, timeout=20))
    assert kind == "RuntimeError"
    assert "<to=1> where rank 0 has <to=0>" in text


def closure_fails_on_one_rank() -> str:
    zero = ZeroRedundancyOptimizer(make_params(), SGD, lr=0.1)

    def closure() -> float:
        raise LookupError("no data")

    return raised(lambda: zero.step(closure))[0]


def test_an_error_in_a_closure_comes_out_as_it_is(workers):
    assert workers(2).run(closure_fails_on_one_rank) == ["LookupError", "LookupError"]


def refused_construction_leaves_parameters_alone() -> None:
    params = make_params()
    pointers = [param.data_ptr() for param in params]
    group: dict[str, Any] = {"params": params, "lr": 0.1}
    raised(lambda: ZeroRedundancyOptimizer([group], SGD, parameters_as_bucket_view=True, momentum=-1.0))
    assert [param.data_ptr() for param in params] == pointers
    assert group == {"params": params, "lr": 0.1}


def test_a_refused_construction_leaves_the_parameters_alone(workers):
    workers(2).run(refused_construction_leaves_parameters_alone)


def builds_with_its_own_rate() -> tuple[str, str]:
    rate = 0.1 if dist.get_rank() else 0.2
    return raised(lambda: ZeroRedundancyOptimizer(make_params(), torch.optim.SGD, lr=rate))


def test_ranks_that_build_the_drop_in_with_different_rates_all_raise(workers):
    kind, text = all_same(workers(2).run(builds_with_its_own_rate))
    assert kind == "RuntimeError"
    assert "it has <param_groups[0]['lr'] = 0.1> where rank 0 has <param_groups[0]['lr'] = 0.2>" in text
