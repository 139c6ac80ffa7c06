"""Every optimizer of torch that takes dense tensors, sharded: twenty steps equal to the plain one, bit for bit.

A row is a class and options that change the arithmetic. `capturable` needs an accelerator; test_drop_in_gpu.py has it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import optim

from shardstep import ZeroRedundancyOptimizer
from training import SHAPES, assert_ranks_equal, assert_same, assert_states_equal, make_params, set_gradients, twins

MATRICES = ((7, 5), (4, 4), (2, 9), (6, 1), (3, 3))
WITH_ELEMENTS = tuple(shape for shape in SHAPES if 0 not in shape)  # Adafactor divides by the number of elements

ROWS: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    *[(optim.Adadelta, options) for options in ({}, {"weight_decay": 0.1}, {"foreach": True}, {"maximize": True})],
    *[(optim.Adafactor, options) for options in ({}, {"foreach": True}, {"maximize": True}, {"weight_decay": 0.1})],
    *[
        (optim.Adagrad, options)
        for options in ({}, {"lr_decay": 0.1}, {"foreach": True}, {"fused": True}, {"maximize": True})
    ],
    *[
        (cls, options)
        for cls in (optim.Adam, optim.AdamW)
        for options in (
            {},
            {"amsgrad": True},
            {"amsgrad": True, "fused": True},
            {"foreach": True},
            {"fused": True},
            {"maximize": True},
            {"weight_decay": 0.1, "fused": True},
        )
    ],
    *[(optim.Adamax, options) for options in ({}, {"foreach": True}, {"maximize": True}, {"weight_decay": 0.1})],
    *[(optim.ASGD, options) for options in ({}, {"t0": 3}, {"foreach": True}, {"maximize": True})],
    *[(optim.Muon, options) for options in ({}, {"nesterov": False}, {"weight_decay": 0.0})],
    *[
        (optim.NAdam, options)
        for options in (
            {},
            {"decoupled_weight_decay": True, "weight_decay": 0.1},
            {"foreach": True},
            {"maximize": True},
        )
    ],
    *[
        (optim.RAdam, options)
        for options in (
            {},
            {"decoupled_weight_decay": True, "weight_decay": 0.1},
            {"foreach": True},
            {"maximize": True},
        )
    ],
    *[
        (optim.RMSprop, options)
        for options in ({}, {"centered": True}, {"momentum": 0.9}, {"foreach": True}, {"maximize": True})
    ],
    *[(optim.Rprop, options) for options in ({}, {"foreach": True}, {"maximize": True})],
    *[
        (optim.SGD, options)
        for options in (
            {},
            {"momentum": 0.9},
            {"momentum": 0.9, "nesterov": True},
            {"momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
            {"momentum": 0.9, "foreach": True},
            {"momentum": 0.9, "fused": True},
            {"maximize": True},
        )
    ],
]


def shapes_for(optimizer_class: type[optim.Optimizer]) -> tuple[tuple[int, ...], ...]:
    return {optim.Muon: MATRICES, optim.Adafactor: WITH_ELEMENTS}.get(optimizer_class, SHAPES)


def twenty_steps(
    optimizer_class: type[optim.Optimizer], options: dict[str, Any], bucket_view: bool, device: str = "cpu"
) -> None:
    ours = make_params(shapes_for(optimizer_class), device=device)
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, optimizer_class, parameters_as_bucket_view=bucket_view, lr=0.05, **options)
    plain = optimizer_class(theirs, lr=0.05, **options)
    for step in range(20):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
        assert_same(ours, theirs, f"after step {step}")
    assert_ranks_equal(ours)
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        assert_states_equal(zero.state_dict(), plain.state_dict())


@pytest.mark.parametrize("bucket_view", [False, True], ids=["scattered", "bucket_view"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    ROWS,
    ids=[f"{cls.__name__}({', '.join(f'{k}={v}' for k, v in options.items())})" for cls, options in ROWS],
)
def test_twenty_steps_equal_the_plain_optimizer(workers, optimizer_class, options, world_size, bucket_view):
    workers(world_size).run(twenty_steps, optimizer_class, options, bucket_view)


def test_the_table_has_every_dense_optimizer_of_torch():
    sparse_or_coupled = {optim.SparseAdam, optim.LBFGS}
    classes = {
        value
        for name in dir(optim)
        if isinstance(value := getattr(optim, name), type)
        and issubclass(value, optim.Optimizer)
        and value is not optim.Optimizer
    }
    assert {cls for cls, _ in ROWS} == classes - sparse_or_coupled


def refuse_lbfgs() -> str:
    with pytest.raises(ValueError, match="line search") as caught:
        ZeroRedundancyOptimizer(make_params(), optim.LBFGS, lr=0.1)
    return str(caught.value)


def test_lbfgs_is_refused_with_the_reason(workers):
    for text in workers(2).run(refuse_lbfgs):
        assert "would silently compute something else" in text


def lbfgs_alone() -> None:
    ours = make_params(((4, 3), (3,)))
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, optim.LBFGS, lr=0.5)
    plain = optim.LBFGS(theirs, lr=0.5)

    def closure_for(optimizer: optim.Optimizer, params: list[torch.nn.Parameter]) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = sum(((param - 1) ** 2).sum() for param in params)
            loss.backward()
            return loss

        return closure

    for _ in range(3):
        assert torch.equal(zero.step(closure_for(zero, ours)), plain.step(closure_for(plain, theirs)))
    assert_same(ours, theirs)


def test_lbfgs_works_on_one_rank(workers):
    workers(1).run(lbfgs_alone)
