"""Faults that were found and mended, each named after what a user saw."""

from __future__ import annotations

import functools
from collections import namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from training import all_same, assert_ranks_equal, assert_same, consolidated, make_params, raised, set_gradients, twins


def learning_rate_and_a_new_group() -> None:
    ours = make_params()
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours[:2], SGD, lr=1.0), SGD(theirs[:2], lr=1.0)
    set_gradients(0, ours, theirs)
    for optimizer, params in ((zero, ours), (plain, theirs)):
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.add_param_group({"params": params[2:], "lr": 0.5})
        assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]
        optimizer.step()
    assert_same(ours, theirs)
    raised(lambda: zero.add_param_group({"params": [ours[0]]}))
    assert [group["lr"] for group in zero.param_groups] == [0.1, 0.5]


def test_add_param_group_undid_what_a_scheduler_had_set(workers):
    workers(2).run(learning_rate_and_a_new_group)


def reading_all_state() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    set_gradients(0, params)
    zero.step()
    for param in params:
        zero.state[param]
    saved = consolidated(zero)
    assert all(saved["state"].values())
    saved["state"][1] = {}  # as in a plain optimizer whose state was read too early
    zero.load_state_dict(saved)


def test_reading_the_state_of_another_ranks_parameter_made_saving_fail(workers):
    workers(2).run(reading_all_state)


def an_empty_group() -> None:
    params = make_params()
    groups = [{"params": params}, {"params": [], "lr": 0.5}]
    zero = ZeroRedundancyOptimizer(groups, SGD, lr=0.1, momentum=0.9)
    set_gradients(0, params)
    zero.step()
    zero.load_state_dict(consolidated(zero))
    assert zero.param_groups[1]["lr"] == 0.5


def test_a_state_with_an_empty_last_group_did_not_load(workers):
    workers(2).run(an_empty_group)


def schedule_under_join() -> None:
    rank = dist.get_rank()
    ours = make_params()
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours, SGD, lr=1.0), SGD(theirs, lr=1.0)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (zero, plain)]
    for step in range(4):
        set_gradients(step, theirs)
        plain.step()
        schedulers[1].step()
    with Join([zero]):
        for step in range(1 if rank == 0 else 4):
            set_gradients(step, ours)
            zero.step()
            schedulers[0].step()
    assert_same(ours, theirs)


def test_a_rank_without_inputs_stepped_with_an_old_learning_rate(workers):
    workers(2).run(schedule_under_join)


def sparse_under_join() -> None:
    torch.manual_seed(0)
    tables = [nn.Embedding(6, 2, sparse=True) for _ in range(2)]
    params = [table.weight for table in tables]
    zero = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    with Join([zero]):
        for _ in range(1 + dist.get_rank()):
            zero.zero_grad()
            sum(table(torch.tensor([1, 3])).sum() for table in tables).backward()
            zero.step()
    assert_ranks_equal(params)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_join_with_sparse_gradients_hung(workers):
    workers(2).run(sparse_under_join, timeout=20)


class Interrupted(BaseException):
    pass


class Interruptible(SGD):
    def step(self, closure: Any = None) -> None:
        if self.param_groups[0].get("interrupt"):
            raise Interrupted
        super().step()


def interrupted_step() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, Interruptible, lr=0.1)
    zero.param_groups[0]["interrupt"] = True
    set_gradients(0, params)
    with pytest.raises(Interrupted):
        zero.step()
    with pytest.raises(RuntimeError, match="interrupted half-way"):
        zero.step()
    dist.barrier()
    again, plain_params = ZeroRedundancyOptimizer(params, SGD, lr=0.1), twins(params)
    plain = SGD(plain_params, lr=0.1)
    for step in range(3):
        set_gradients(step, params, plain_params)
        again.step()
        plain.step()
    assert_same(params, plain_params)


def test_building_the_optimizer_again_after_an_interrupted_step_hung(workers):
    workers(2).run(interrupted_step, timeout=20)


Pair = namedtuple("Pair", "count average")


class KeepsPairs(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["pair"] = Pair(1, torch.ones(3))


def named_tuples() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, KeepsPairs, lr=0.1)
    set_gradients(0, params)
    zero.step()
    assert consolidated(zero)["state"][0]["pair"][0] == 1


def test_a_named_tuple_in_the_state_made_consolidation_hang(workers):
    workers(2).run(named_tuples, timeout=20)


def shared_memory() -> tuple[str, str]:
    base = torch.ones(8)
    params = [("a", nn.Parameter(base[:6])), ("b", nn.Parameter(base[4:]))]
    return raised(lambda: ZeroRedundancyOptimizer(params, SGD, lr=0.1))


def test_parameters_over_the_same_memory_ended_different_on_each_rank(workers):
    kind, text = all_same(workers(2).run(shared_memory))
    assert kind == "ValueError"
    assert "a and b share memory" in text


def grown() -> tuple[str, str]:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    params[1].data = torch.ones(9)
    return raised(zero.step)


def test_a_parameter_that_grew_was_sent_in_part(workers):
    kind, text = all_same(workers(2).run(grown))
    assert kind == "RuntimeError"
    assert "changed their size" in text


class Note:
    """An option of the program's own."""


def options_that_print_differently() -> None:
    params = make_params()
    groups = [{"params": params, "tags": {"decay", "embedding", "head"}, "note": Note()}]
    zero = ZeroRedundancyOptimizer(groups, SGD, lr=0.1, momentum=0.9)
    set_gradients(0, params)
    zero.step()
    zero.load_state_dict(consolidated(zero))


def test_options_that_print_differently_were_taken_for_different_checkpoints(workers):
    workers(3).run(options_that_print_differently)


def a_partial() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, functools.partial(AdamW, lr=0.5))
    assert zero.param_groups[0]["lr"] == 0.5
    set_gradients(0, params)
    zero.step()
    zero.load_state_dict(consolidated(zero))


def test_a_partial_of_an_optimizer_class_was_refused(workers):
    workers(2).run(a_partial)


def lbfgs_round_trip() -> None:
    params = make_params(((4,), (3,)))
    zero = ZeroRedundancyOptimizer(params, optim.LBFGS, lr=0.5)

    def closure() -> torch.Tensor:
        zero.zero_grad()
        loss = sum(((param - 1) ** 2).sum() for param in params)
        loss.backward()
        return loss

    zero.step(closure)
    zero.load_state_dict(consolidated(zero))
    zero.step(closure)


def test_lbfgs_could_not_load_its_own_state(workers):
    workers(1).run(lbfgs_round_trip)


class RefusesOnRankOne(SGD):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        if dist.get_rank() == 1:
            raise ValueError("错误" * 2000)


def long_message() -> tuple[str, str]:
    return raised(lambda: ZeroRedundancyOptimizer(make_params(), RefusesOnRankOne, lr=0.1))


def test_a_long_error_in_chinese_came_out_as_a_json_error(workers):
    kind, text = all_same(workers(2).run(long_message))
    assert kind == "ValueError"
    assert "failed on rank 1: 错误" in text


def generator_that_fails() -> tuple[str, str]:
    def params() -> Any:
        yield torch.zeros(1)
        raise TypeError("the real cause")

    return raised(lambda: ZeroRedundancyOptimizer(params(), SGD, lr=0.1))


def test_an_error_inside_the_callers_generator_was_hidden(workers):
    assert workers(1).run(generator_that_fails) == [("TypeError", "the real cause")]


def a_set_of_tensors() -> tuple[str, str]:
    return raised(lambda: ZeroRedundancyOptimizer({torch.zeros(1), torch.zeros(2)}, SGD, lr=0.1))


def test_a_set_whose_order_differs_from_rank_to_rank_was_taken(workers):
    kind, text = all_same(workers(2).run(a_set_of_tensors))
    assert kind == "TypeError"
    assert "a set has none" in text
