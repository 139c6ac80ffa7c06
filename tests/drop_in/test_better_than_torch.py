"""One test for each fault of torch's class that ours does not have, named after what a user sees.

The numbers are those of "Better than torch" in docs/contract.md.
"""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Muon

from shardstep import ZeroRedundancyOptimizer
from training import all_same, assert_same, assert_states_equal, consolidated, make_params, raised, set_gradients, twins


def loads_without_writing() -> None:
    params = make_params()
    plain_params = twins(params)
    plain = AdamW(plain_params, lr=0.1)
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    set_gradients(0, params, plain_params)
    plain.step()
    saved = plain.state_dict()
    before = copy.deepcopy(saved)
    zero.load_state_dict(saved)
    set_gradients(1, params)
    zero.step()  # would write to the caller's tensors if it had kept them
    assert_states_equal(saved, before)


def test_01_load_state_dict_overwrites_the_callers_dict(workers):
    for world_size in (1, 2, 3):
        workers(world_size).run(loads_without_writing)


def stale_state() -> str:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    for step in range(3):
        set_gradients(step, params)
        zero.step()
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        zero.state_dict()
    zero.step()
    return raised(zero.state_dict)[1]


def test_02_state_dict_after_further_steps_returns_old_values(workers):
    text = workers(2).run(stale_state)[0]
    assert "was consolidated at step 3, and a step was taken since" in text
    assert "consolidate_state_dict(to=0) on all ranks" in text


def a_group_added_later(bucket_view: bool) -> None:
    ours = make_params()
    theirs = twins(ours)
    for params in (ours, theirs):
        params[3].requires_grad_(False)
    zero = ZeroRedundancyOptimizer(ours[:2], AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    given = {"params": (param for param in ours[2:]), "lr": 0.01}
    zero.add_param_group(given)
    assert set(given) == {"params", "lr"}, "the caller's dict is not written to"
    plain = AdamW([{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.01}], lr=0.1)
    for step in range(4):
        if step == 2:  # a change that torch's class does not notice in groups added later
            for params in (ours, theirs):
                params[3].requires_grad_(True)
                params[2].requires_grad_(False)
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
        assert_same(ours, theirs)
    assert all(param in zero._param_to_rank for param in ours)
    assert_states_equal(consolidated(zero), plain.state_dict())


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_03_add_param_group_forgets_trainability(workers, world_size, bucket_view):
    workers(world_size).run(a_group_added_later, bucket_view)


def bad_groups() -> list[tuple[str, str]]:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    before = [dict(group) for group in zero.param_groups]
    errors = [
        raised(lambda group=group: zero.add_param_group(group))
        for group in (
            {"params": [torch.zeros(2, dtype=torch.float64)]},
            {"params": [torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)]},
            {"params": [params[0]]},
            {"lr": 0.1},
            {"params": [1.5]},
            [params[0]],
            {"params": [torch.zeros(2, requires_grad=True) * 2]},
        )
    ]
    assert zero.param_groups == before, "nothing was added"
    assert len(zero.optim.param_groups) == 1
    set_gradients(0, params)
    zero.step()
    return errors


def test_03_add_param_group_skips_the_checks_of_the_constructor(workers):
    errors = all_same(workers(2).run(bad_groups))
    assert [kind for kind, _ in errors] == [
        "ValueError", "ValueError", "ValueError", "ValueError", "TypeError", "TypeError", "ValueError",
    ]  # fmt: skip
    for (_, text), expected in zip(
        errors, ["dtypes", "sparse", "twice", "params", "float", "dict", "leaf"], strict=True
    ):
        assert expected in text


# How a rank fared, and a digest of what all must share: on Gloo a message from each rank to each other, in every step.
RECORD_NBYTES = 33


def bytes_sent_by_step(zero: ZeroRedundancyOptimizer) -> int:
    sent = 0
    isend = dist.isend

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counting):
        zero.step()
    total = torch.tensor(sent)
    dist.all_reduce(total)
    return int(total)


def frozen_is_not_sent(bucket_view: bool) -> None:
    """The bytes of all ranks together are those of the parameters that travel, and the records."""
    params = make_params(((10, 10), (20,), (30,), (40,)))
    zero = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=bucket_view, lr=0.1)
    set_gradients(0, params)
    others = dist.get_world_size() - 1
    records = dist.get_world_size() * others * RECORD_NBYTES
    assert bytes_sent_by_step(zero) == others * 4 * 190 + records
    params[0].requires_grad_(False)
    set_gradients(1, params)
    zero.step()  # the step that notices the change still sends as before
    set_gradients(2, params)
    assert bytes_sent_by_step(zero) == others * 4 * 90 + records


@pytest.mark.parametrize("bucket_view", [False, True])
def test_04_frozen_parameters_are_sent_at_every_step(workers, bucket_view):
    workers(2).run(frozen_is_not_sent, bucket_view)
    workers(4).run(frozen_is_not_sent, bucket_view)


COLLECTIVES = ("broadcast", "all_reduce", "all_gather", "all_gather_into_tensor", "reduce", "reduce_scatter",
               "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "gather", "scatter", "barrier")  # fmt: skip


def messages_of_a_step(count: int, bucket_view: bool, numel: int = 5) -> tuple[int, int, int]:
    """This rank's collectives, records and messages of parameters."""
    params = make_params(tuple((numel + i % 7,) for i in range(count)))
    zero = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=bucket_view, lr=0.1)
    set_gradients(0, params)
    collectives: list[int] = []
    sends: list[int] = []
    with mock.patch.multiple(
        dist,
        **{name: recording(getattr(dist, name), collectives) for name in COLLECTIVES},
        isend=recording(dist.isend, sends),
        send=recording(dist.send, sends),
    ):
        zero.step()
    records = sends.count(RECORD_NBYTES)
    return len(collectives), records, len(sends) - records


def recording(function: Any, calls: list[int]) -> Any:
    """`function`, which notes in `calls` the bytes of every message."""

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(args[0].nbytes if args and isinstance(args[0], torch.Tensor) else 0)
        return function(*args, **kwargs)

    return call


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_05_one_message_per_parameter(workers, world_size, bucket_view):
    for count in (3, 300):
        for collectives, records, sends in workers(world_size).run(messages_of_a_step, count, bucket_view):
            assert collectives == 0, "the agreement goes by messages too"
            assert records == world_size - 1, "the agreement of 33 bytes, once to every other rank"
            assert sends <= world_size - 1, "this rank's share, once to every other rank"


@pytest.mark.parametrize("world_size", [2, 4])
def test_05_large_parameters_are_sent_from_their_own_memory(workers, world_size):
    # Copying four megabytes through fresh memory takes longer than a message of its own.
    for collectives, records, sends in workers(world_size).run(messages_of_a_step, 2 * world_size, False, 2**20):
        assert collectives == 0
        assert records == world_size - 1
        assert sends == 2 * (world_size - 1)


def bytes_sent_by_the_holder(bucket_view: bool) -> tuple[int, int]:
    """One large parameter: rank 0 holds it alone. Bytes sent by this rank, and bytes of the parameter."""
    params = make_params(((3_000_000,), (10,), (10,), (10,)))
    before = twins(params)
    zero = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = SGD(before, lr=0.1)
    set_gradients(0, params, before)
    sent: list[int] = []
    isend = dist.isend

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", counting):
        zero.step()
    plain.step()
    assert_same(params, before)
    return sum(sent), params[0].nbytes


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [3, 4])
def test_05_the_holder_of_a_large_parameter_sends_it_once(workers, world_size, bucket_view):
    results = workers(world_size).run(bytes_sent_by_the_holder, bucket_view)
    assert results[0][0] < 1.01 * results[0][1]
    assert all(sent < 1.01 * large for sent, large in results), "no rank sends more than all parameters once"


def nothing_is_copied_that_lies_together() -> None:
    flat = torch.zeros(60)
    params = [nn.Parameter(flat[i * 10 : (i + 1) * 10]) for i in range(6)]
    # Rank r of two is dealt every other parameter of equal size; put those one behind the other.
    mine = [params[i] for i in (0, 1, 2)], [params[i] for i in (3, 4, 5)]
    ordered = [param for pair in zip(*mine, strict=True) for param in pair]
    zero = ZeroRedundancyOptimizer(ordered, SGD, lr=0.1)
    set_gradients(0, ordered)
    pointers: list[int] = []
    isend = dist.isend

    def watching(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.nbytes != RECORD_NBYTES:
            pointers.append(tensor.data_ptr())
        return isend(tensor, *args, **kwargs)

    with mock.patch.object(dist, "isend", watching):
        zero.step()
    assert pointers == [flat.data_ptr() + zero.rank * 30 * 4]
    assert all(param.data_ptr() == flat[i * 10 :].data_ptr() for i, param in enumerate(params))


def test_05_parameters_that_lie_in_one_buffer_are_sent_without_a_copy(workers):
    workers(2).run(nothing_is_copied_that_lies_together)


# 06, consolidation: tests/drop_in/test_drop_in_state.py


def muon_and_a_bias(later: bool) -> tuple[str, str]:
    matrices = [("a.weight", nn.Parameter(torch.ones(4, 4))), ("b.weight", nn.Parameter(torch.ones(3, 3)))]
    bias = [("b.bias", nn.Parameter(torch.ones(3)))]
    if not later:
        return raised(lambda: ZeroRedundancyOptimizer([*matrices, *bias], Muon, lr=0.1))
    zero = ZeroRedundancyOptimizer(matrices, Muon, lr=0.1)
    error = raised(lambda: zero.add_param_group({"params": bias}))
    set_gradients(0, [param for _, param in matrices])
    zero.step()
    assert len(zero.param_groups) == len(zero.optim.param_groups) == 1
    return error


@pytest.mark.parametrize("later", [False, True])
def test_07_an_optimizer_that_refuses_a_parameter_raises_on_one_rank_and_the_others_hang(workers, later):
    kind, text = all_same(workers(3).run(muon_and_a_bias, later, timeout=20))
    assert kind == "ValueError"
    assert "rank 2" in text or later
    assert "Muon refuses b.bias" in text


class FailsOnRankOne(SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        if dist.get_rank() == 1:
            raise OSError("disk on fire")

    def step(self, closure: Any = None) -> None:
        if dist.get_rank() == 1 and self.param_groups[0].get("explode"):
            raise ZeroDivisionError("one over nothing")
        super().step()


def failures_later() -> list[tuple[str, str]]:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, FailsOnRankOne, lr=0.1, momentum=0.9)
    set_gradients(0, params)
    zero.step()
    state = {param: dict(entry) for param, entry in zero.optim.state.items()}
    saved = consolidated(zero)
    saved["param_groups"][0]["lr"] = 100.0
    errors = [raised(lambda: zero.load_state_dict(saved))]
    assert zero.param_groups[0]["lr"] == zero.optim.param_groups[0]["lr"] == 0.1, "as before"
    assert zero.optim.state.keys() == state.keys()
    zero.param_groups[0]["explode"] = True
    errors.append(raised(zero.step))
    zero.param_groups[0]["explode"] = False
    zero.step()
    return errors


def test_07_a_failure_in_load_state_dict_or_step_reaches_all_ranks(workers):
    (load_kind, load_text), (step_kind, step_text) = all_same(workers(3).run(failures_later, timeout=20))
    assert (load_kind, step_kind) == ("OSError", "RuntimeError")
    assert "load_state_dict failed on rank 1: disk on fire" in load_text
    assert "step failed on rank 1: ZeroDivisionError: one over nothing" in step_text


def different_parameters(how: str) -> tuple[str, str]:
    odd = dist.get_rank() == 1
    named = [("w", nn.Parameter(torch.zeros(4, 3))), ("b", nn.Parameter(torch.zeros(4)))]
    optimizer_class, options = SGD, {"lr": 0.1}
    if odd and how == "order":
        named.reverse()
    elif odd and how == "shape":
        named[1] = ("b", nn.Parameter(torch.zeros(5)))
    elif odd and how == "count":
        named.append(("extra", nn.Parameter(torch.zeros(1))))
    elif odd and how == "dtype":
        named = [(name, nn.Parameter(param.detach().double())) for name, param in named]
    elif odd and how == "frozen":
        named[0][1].requires_grad_(False)
    elif odd and how == "class":
        optimizer_class = AdamW
    return raised(lambda: ZeroRedundancyOptimizer(named, optimizer_class, **options))


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("order", "b: shape (4,)"),
        ("shape", "b: shape (5,)"),
        ("count", "extra: shape (1,)"),
        ("dtype", "w: shape (4, 3), float64"),
        ("frozen", "frozen"),
        ("class", "optimizer_class torch.optim.adamw.AdamW"),
    ],
)
def test_08_ranks_with_different_parameters_hang_or_corrupt_each_other(workers, how, expected):
    kind, text = all_same(workers(3).run(different_parameters, how, timeout=20))
    assert kind == "RuntimeError"
    assert f"Rank 1: it has <{expected}" in text or (how == "frozen" and expected in text)
    assert "Ranks that differ from rank 0: [1]" in text


def frozen_on_one_rank() -> tuple[str, str]:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    if dist.get_rank() == 1:
        params[1].requires_grad_(False)
    set_gradients(0, params)
    return raised(zero.step)


def test_08_a_parameter_frozen_on_one_rank_only(workers):
    kind, text = all_same(workers(3).run(frozen_on_one_rank, timeout=20))
    assert kind == "RuntimeError"
    assert "step: the ranks do not agree. Rank 1: it has <param_groups[0]['params'][1]" in text


def different_checkpoints() -> tuple[str, str]:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    plain_params = twins(params)
    plain = AdamW(plain_params, lr=0.1)
    for step in range(1 + dist.get_rank()):
        set_gradients(step, plain_params)
        plain.step()
    return raised(lambda: zero.load_state_dict(plain.state_dict()))


def test_08_ranks_that_load_different_checkpoints(workers):
    kind, text = all_same(workers(2).run(different_checkpoints, timeout=20))
    assert kind == "RuntimeError"
    assert "<state[0]['step'] = 2.0> where rank 0 has <state[0]['step'] = 1.0>" in text


def mixed_dtypes(bucket_view: bool) -> None:
    single, double = make_params(((4, 3), (5,))), make_params(((3, 3), (2,)), torch.float64)
    ours = [single[0], double[0], single[1], double[1]]
    theirs = twins(ours)
    kind, text = raised(lambda: ZeroRedundancyOptimizer(ours, AdamW, lr=0.1))
    assert kind == "ValueError"
    assert "allow_mixed_dtypes=True" in text
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, allow_mixed_dtypes=True, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    assert [param.dtype for param in ours] == [param.dtype for param in theirs]
    assert_states_equal(consolidated(zero), plain.state_dict())


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_12_mixed_dense_dtypes_are_refused(workers, world_size, bucket_view):
    workers(world_size).run(mixed_dtypes, bucket_view)


def state_is_visible() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(params, AdamW, lr=0.1)
    set_gradients(0, params)
    zero.step()
    held = {param for group in zero.optim.param_groups for param in group["params"]}
    assert set(zero.state) == held
    assert all(zero.state[param] is zero.optim.state[param] for param in held)
    zero.load_state_dict(consolidated(zero))
    assert set(zero.state) == held


def test_13_zero_state_is_empty(workers):
    for world_size in (1, 2, 4):
        workers(world_size).run(state_is_visible)


def fused_reload() -> None:
    ours = make_params()
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours, AdamW, lr=0.1, fused=True), AdamW(theirs, lr=0.1, fused=True)
    for step in range(4):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
        zero.load_state_dict(consolidated(zero))
    assert_same(ours, theirs)
    for entry in zero.state.values():
        assert entry["step"].dtype == torch.float32
        assert entry["step"].device == ours[0].device


def test_14_fused_adamw_cannot_be_reloaded_after_a_consolidation(workers):
    # On the CPU the counter's device cannot be wrong; tests/gpu/test_drop_in_gpu.py repeats this on a GPU.
    workers(2).run(fused_reload)
