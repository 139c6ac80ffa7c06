"""The parts of Muon's batches, without processes: spans of memory, stacks, products, and which buckets go together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain

import pytest
import torch
from torch import optim

from given_matrices import LR, MOST, rows_of, stepper_of
from shardstep.planning import Piece
from shardstep.planning.schedule import keep_batches_whole
from shardstep.stepping import batched_muon
from shardstep.stepping.batched_muon import orthogonalise, why_not
from shardstep.stepping.steppers import Row


def operations_of(call: Callable[[], object]) -> Iterator[str]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    outer = [event for event in profiler.events() if event.cpu_parent is None]
    yield from (event.name for event in outer)


def test_neighbours_in_memory_take_one_operation_each():
    """Twelve matrices of one bucket as many as one: two dozen, where the class makes as many for each matrix."""

    def count(matrices: int) -> int:
        values, gradients = torch.randn(matrices, 64), torch.randn(matrices, 64)
        stepper, _, _ = stepper_of(rows_of([row.view(8, 8) for row in values]))
        stepper.step(0, list(gradients), None)
        views = {"aten::as_strided", "aten::view", "aten::detach", "aten::slice", "aten::permute", "aten::unsqueeze",
                 "aten::transpose", "aten::to", "aten::unbind", "aten::empty", "aten::matrix_H", "aten::mT",
                 "aten::select"}  # fmt: skip
        return len(
            [name for name in operations_of(lambda: stepper.step(0, list(gradients), None)) if name not in views]
        )

    assert count(12) == count(1) <= 24


def test_large_batches_are_split_evenly(monkeypatch):
    monkeypatch.setattr(batched_muon, "MOST_NUMEL", 5 * 64)
    rows = rows_of([torch.zeros(8, 8) for _ in range(11)])
    assert [len(batch.rows) for batch in batched_muon._batches_of(rows)] == [3, 4, 4]
    monkeypatch.setattr(batched_muon, "MOST_NUMEL", 1)
    assert [len(batch.rows) for batch in batched_muon._batches_of(rows)] == [1] * 11


def test_temporary_memory_is_that_of_the_largest_batch():
    stepper, _, _ = stepper_of(rows_of([torch.zeros(8, 4)] * 3 + [torch.zeros(5, 5)]))
    assert stepper.temporary_nbytes == 3 * (2 * 2 * 32 + 2 * 2 * 16)


def test_momenta_lie_in_one_stack():
    tensors = [torch.randn(4, 6) for _ in range(3)] + [torch.randn(5, 5)]
    stepper, state, _ = stepper_of(rows_of(tensors))
    stepper.step(0, [torch.randn(24), None, torch.randn(24), torch.randn(25)], None)
    assert [tensor in state and "momentum_buffer" in state[tensor] for tensor in tensors] == [True, False, True, True]
    storages = [state[tensors[place]]["momentum_buffer"].untyped_storage().data_ptr() for place in (0, 2, 3)]
    assert storages[0] == storages[1] != storages[2]


def test_a_matrix_that_lies_transposed_is_the_matrix_that_it_is():
    base = torch.randn(3, 7)
    ours, theirs = base.clone().T, base.clone().T.requires_grad_()
    gradient = torch.randn(7, 3)
    row = Row(ours, ours.T.reshape(-1).view(-1), None, torch.float32, 0, Piece(0, 0, 21, 0), ours.stride())
    assert row.values.data_ptr() == ours.data_ptr()
    stepper, _, groups = stepper_of([row])
    stepper.step(0, [gradient.T.reshape(-1)], None)
    plain = optim.Muon([theirs], **{key: value for key, value in groups[0].items() if key != "params"})
    theirs.grad = gradient
    plain.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=0, atol=MOST * LR)


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 5, 8), (4, 6, 6), (2, 0, 3), (1, 1, 1)])
def test_orthogonal_matrices(shape):
    """Five iterations bring singular values between 0.3 and 1 to between 0.6 and 1.3."""
    u, s, v = torch.linalg.svd(torch.randn(shape, generator=torch.Generator().manual_seed(1)), full_matrices=False)
    stack = (u @ torch.diag_embed(0.3 + 0.7 * torch.rand_like(s)) @ v).bfloat16()
    found = torch.linalg.svdvals(orthogonalise(stack, (3.4445, -4.7750, 2.0315), 5, 1e-7).float())
    assert ((found > 0.6) & (found < 1.3)).all(), found


def test_a_group_is_left_to_the_class_for_a_reason():
    group = dict(optim.Muon([torch.zeros(2, 2)], lr=LR).param_groups[0])
    floats = {torch.float32}
    assert why_not(optim.Muon, group, floats) is None
    for changes in ({"momentum": torch.tensor(0.9)}, {"lr": torch.tensor(0.1, requires_grad=True)},
                    {"adjust_lr_fn": "new"}, {"ns_steps": 100}, {"ns_coefficients": (1.0, 2.0)}):  # fmt: skip
        assert why_not(optim.Muon, {**group, **changes}, floats), changes
    assert why_not(type("Own", (optim.Muon,), {}), group, floats)
    assert why_not(optim.Muon, group, {torch.complex64})
    assert why_not(optim.Muon, {**group, "nesterov": False}, {torch.bfloat16})
    assert why_not(optim.Muon, {**group, "nesterov": False}, floats) is None


@pytest.mark.parametrize(
    ("order", "numels", "least", "expected"),
    [
        ([[3], [2], [1], [0]], [5, 0, 5, 0], 10, [[3], [2, 0], [1]]),
        ([[3], [2], [1], [0]], [5, 5, 5, 5], 10, [[3, 2], [1, 0]]),
        ([[3], [2], [1], [0]], [5, 5, 5, 5], 8, [[3, 2], [1, 0]]),
        ([[4, 3], [2, 1, 0]], [5, 5, 5, 5, 0], 8, [[4], [3, 2], [1, 0]]),
        ([[2, 1, 0]], [1, 1, 1], 100, [[2, 1, 0]]),
        ([[2, 1], [0]], [0, 0, 0], 1, [[2, 1], [0]]),
        ([[2, 1, 0]], [9, 9, 9], 5, [[2], [1], [0]]),
        ([], [], 5, []),
    ],
)
def test_buckets_with_batches_are_stepped_together(order, numels, least, expected):
    """No group has less than the least, but a single one; the others keep their places, and none is lost."""
    found = keep_batches_whole(order, numels, least)
    assert found == expected
    assert sorted(chain.from_iterable(found)) == sorted(chain.from_iterable(order))
