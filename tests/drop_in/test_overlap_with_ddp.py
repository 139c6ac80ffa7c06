"""overlap_with_ddp: the step inside the backward pass equals DDP with the plain optimizer, whatever its class."""

from __future__ import annotations

import gc
import itertools
import random
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adagrad, AdamW, Muon, Optimizer

from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved
from shardstep.planning.assignment import assign_parts_of_buckets, assign_whole_buckets
from shardstep.planning.schedule import AFTER_BACKWARD, INTERLEAVED, StepOrder
from training import (
    all_same,
    assert_ranks_equal,
    assert_same,
    assert_states_equal,
    batches,
    consolidated,
    copies,
    raised,
)

HOOKS = [hook_with_zero_step, hook_with_zero_step_interleaved]


class Counting(Optimizer):
    """A user's own: counts steps in its groups and on itself, and the counts change the update."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})
        self.calls = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls += 1
        for group in self.param_groups:
            group["step"] += 1
            for param in group["params"]:
                if param.grad is not None:
                    average = self.state[param].setdefault("average", torch.zeros_like(param))
                    average.mul_(0.9).add_(param.grad)
                    param.sub_(average, alpha=group["lr"] / group["step"] ** 0.5 / (1 + 0.1 * self.calls))


OPTIMIZERS: list[tuple[type[Optimizer], dict[str, Any]]] = [
    (SGD, {"lr": 0.05, "momentum": 0.9}),
    (AdamW, {"lr": 0.01}),
    (Adagrad, {"lr": 0.05}),
    (Muon, {"lr": 0.01}),
    (Counting, {"lr": 0.05}),
]


def model_for(optimizer_class: type[Optimizer]) -> nn.Module:
    torch.manual_seed(5)
    biased = optimizer_class is not Muon
    return nn.Sequential(
        nn.Linear(6, 16, bias=biased), nn.Tanh(), nn.Linear(16, 16, bias=biased), nn.Tanh(),
        nn.Linear(16, 16, bias=biased), nn.Tanh(), nn.Linear(16, 3, bias=biased),
    )  # fmt: skip


def wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model, bucket_cap_mb=0.001, **options)  # a kilobyte: several buckets


def parity(
    optimizer_class: type[Optimizer],
    options: dict[str, Any],
    make_hook: Callable[..., Any],
    *,
    shard_buckets: bool = False,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = False,
    train_from_first_step: bool = False,
    group: Any = None,
    device: str = "cpu",
    reduce: Callable[..., Any] = allreduce_hook,
) -> None:
    """Train both ways on the same batches, ten updates; parameters equal after each of them.

    To the bit, unless a sum of three or more gradients is taken in another order than torch's.
    """
    ours, theirs = copies(model_for(optimizer_class).to(device), 2)
    ddp_options = {
        "static_graph": static_graph,
        "gradient_as_bucket_view": gradient_as_bucket_view,
        "process_group": group,
    }
    ddp_ours, ddp_theirs = wrapped(ours, **ddp_options), wrapped(theirs, **ddp_options)
    zero = ZeroRedundancyOptimizer(
        ddp_ours.parameters(),
        optimizer_class,
        process_group=group,
        overlap_with_ddp=True,
        train_from_first_step=train_from_first_step,
        **options,
    )
    ddp_ours.register_comm_hook(None, make_hook(reduce, ddp_ours, zero, shard_buckets=shard_buckets))
    ddp_theirs.register_comm_hook(group, allreduce_hook)  # divides before it sums, as the wrapped one does
    plain = optimizer_class(ddp_theirs.parameters(), **options)
    warm_up = 0 if train_from_first_step else 3 if static_graph else 2
    for step, batch in enumerate(batches(warm_up + 10, rank=dist.get_rank())):
        batch = batch.to(device)
        for optimizer in (zero, plain):
            optimizer.param_groups[0]["lr"] = options["lr"] / (1 + step)  # as a scheduler would
        ddp_ours(batch).square().mean().backward()
        zero.zero_grad()
        ddp_theirs(batch).square().mean().backward()
        if step >= warm_up:
            plain.step()
        plain.zero_grad()
        if reduce is allreduce_hook or zero.world_size <= 2:
            assert_same(list(ours.parameters()), list(theirs.parameters()), f"after pass {step}")
        else:
            for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    assert_ranks_equal(list(ours.parameters()), group)
    if reduce is allreduce_hook or zero.world_size <= 2:
        assert_states_equal(consolidated(zero), plain.state_dict())


def matrix(optimizer_class: type[Optimizer], options: dict[str, Any], make_hook: Callable[..., Any]) -> list[str]:
    failures = []
    for shard, static, view in itertools.product([False, True], repeat=3):
        try:
            parity(
                optimizer_class,
                options,
                make_hook,
                shard_buckets=shard,
                static_graph=static,
                gradient_as_bucket_view=view,
            )
        except AssertionError as error:
            failures.append(f"shard_buckets={shard} static_graph={static} gradient_as_bucket_view={view}: {error}")
    return failures


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=[cls.__name__ for cls, _ in OPTIMIZERS])
def test_ten_updates_equal_ddp_with_the_plain_optimizer(workers, optimizer_class, options, world_size, make_hook):
    for failures in workers(world_size).run(matrix, optimizer_class, options, make_hook):
        assert failures == []


def from_the_first(make_hook: Callable[..., Any]) -> None:
    for (cls, options), shard, static in itertools.product(OPTIMIZERS, [False, True], [False, True]):
        parity(cls, options, make_hook, shard_buckets=shard, static_graph=static, train_from_first_step=True)


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_11_the_first_passes_train_nothing(workers, world_size, make_hook):
    workers(world_size).run(from_the_first, make_hook)


def in_subgroups(memberships: list[list[int]]) -> None:
    groups = [dist.new_group(members) for members in memberships]
    for members, group in zip(memberships, groups, strict=True):
        if dist.get_rank() in members:
            for make_hook, shard in itertools.product(HOOKS, [False, True]):
                parity(AdamW, {"lr": 0.01}, make_hook, shard_buckets=shard, group=group)


@pytest.mark.parametrize("memberships", [[[0, 1], [2, 3]], [[1, 3]]], ids=str)
def test_09_a_group_that_does_not_start_at_rank_0_never_trains(workers, memberships):
    workers(4).run(in_subgroups, memberships)


def with_torchs_hook(shard_buckets: bool, static_graph: bool) -> None:
    def make_hook(*args: Any, **kwargs: Any) -> Any:
        # torch's own function, unmodified; only its check of the backend is answered for it.
        with mock.patch.object(dist, "get_backend", return_value="nccl"):
            return torch_hooks.hook_with_zero_step(*args, **kwargs)

    for optimizer_class, options in OPTIMIZERS:
        parity(optimizer_class, options, make_hook, shard_buckets=shard_buckets, static_graph=static_graph)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("static_graph", [False, True])
def test_torchs_own_hook_drives_our_class(workers, shard_buckets, static_graph):
    for world_size in (2, 4):
        workers(world_size).run(with_torchs_hook, shard_buckets, static_graph)


def stale_after_torchs_hook() -> list[str]:
    ddp = wrapped(model_for(SGD))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    with mock.patch.object(dist, "get_backend", return_value="nccl"):
        ddp.register_comm_hook(None, torch_hooks.hook_with_zero_step(allreduce_hook, ddp, zero))
    inputs = list(batches(4, rank=0))
    for batch in inputs[:3]:
        ddp(batch).sum().backward()
    zero.consolidate_state_dict(to=0)
    if zero.rank == 0:
        zero.state_dict()
    ddp(inputs[3]).sum().backward()
    zero._sync_params()  # once more; they are all the same already
    assert_ranks_equal(list(ddp.parameters()))
    return list(raised(zero.state_dict))


def test_after_torchs_own_hook_state_dict_returned_old_values(workers):
    kind, text = workers(2).run(stale_after_torchs_hook)[0]
    assert kind == "RuntimeError"
    assert "was consolidated before the last backward pass" in text


def several_groups(make_hook: Callable[..., Any]) -> None:
    ours, theirs = copies(model_for(AdamW), 2)
    ddp_ours, ddp_theirs = wrapped(ours), wrapped(theirs)

    def groups(model: nn.Module) -> list[dict[str, Any]]:
        params = dict(model.named_parameters())
        return [
            {"params": [p for n, p in params.items() if "weight" in n], "weight_decay": 0.1},
            {"params": [p for n, p in params.items() if "bias" in n], "weight_decay": 0.0, "lr": 0.05},
        ]

    zero = ZeroRedundancyOptimizer(groups(ours), AdamW, overlap_with_ddp=True, train_from_first_step=True, lr=0.01)
    ddp_ours.register_comm_hook(None, make_hook(fp16_like_hook, ddp_ours, zero))
    plain = AdamW(groups(theirs), lr=0.01)
    ddp_theirs.register_comm_hook(None, fp16_like_hook)
    for batch in batches(6, rank=dist.get_rank()):
        ddp_ours(batch).square().mean().backward()
        zero.zero_grad()
        ddp_theirs(batch).square().mean().backward()
        plain.step()
        plain.zero_grad()
        assert_same(list(ours.parameters()), list(theirs.parameters()))
    assert_states_equal(consolidated(zero, to=1), plain.state_dict())


fp16_like_hook = fp16_compress_hook  # leaves its result in a tensor of its own until DDP copies it


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_10_several_param_groups_and_another_hook_inside(workers, make_hook):
    for world_size in (2, 3):
        workers(world_size).run(several_groups, make_hook)


class Branches(nn.Module):
    """Uses a branch that depends on the rank and the step, and one never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(6, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.never = nn.Linear(16, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, batch: torch.Tensor, branch: int) -> torch.Tensor:
        return self.head(torch.tanh(self.branches[branch](torch.tanh(self.trunk(batch)))))


def unused_parameters(
    make_hook: Callable[..., Any], shard_buckets: bool, reduce: Callable[..., Any] = allreduce_hook
) -> None:
    torch.manual_seed(2)
    ours, theirs = copies(Branches(), 2)
    ddp_ours, ddp_theirs = (wrapped(model, find_unused_parameters=True) for model in (ours, theirs))
    zero = ZeroRedundancyOptimizer(
        ddp_ours.parameters(), AdamW, overlap_with_ddp=True, train_from_first_step=True, lr=0.01
    )
    ddp_ours.register_comm_hook(None, make_hook(reduce, ddp_ours, zero, shard_buckets=shard_buckets))
    ddp_theirs.register_comm_hook(None, allreduce_hook)
    plain = AdamW(ddp_theirs.parameters(), lr=0.01)
    for step, batch in enumerate(batches(10, rank=dist.get_rank())):
        branch = min(dist.get_rank(), 1) if step % 3 else 2  # rank-dependent, or the same; branch 3 and `never` unused
        ddp_ours(batch, branch).square().mean().backward()
        zero.zero_grad()
        ddp_theirs(batch, branch).square().mean().backward()
        plain.step()
        plain.zero_grad()
        assert_same(list(ours.parameters()), list(theirs.parameters()), f"after pass {step}")
    assert_states_equal(consolidated(zero), plain.state_dict())


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_parameters_that_no_rank_used_are_not_stepped(workers, make_hook, shard_buckets):
    for world_size in (2, 3):
        workers(world_size).run(unused_parameters, make_hook, shard_buckets)


def saved_and_loaded() -> None:
    """Overlap -> plain and non-overlap -> overlap again; training goes on identically everywhere."""
    start = model_for(AdamW)
    models = copies(start, 4)
    ddps = [wrapped(model) for model in models]
    first, second = (
        ZeroRedundancyOptimizer(ddps[i].parameters(), AdamW, overlap_with_ddp=True, lr=0.01) for i in (0, 3)
    )
    for ddp, zero in ((ddps[0], first), (ddps[3], second)):
        ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero, shard_buckets=True))
    for ddp in ddps[1:3]:
        ddp.register_comm_hook(None, allreduce_hook)
    warm_up = list(batches(5, rank=dist.get_rank()))
    for batch in warm_up:
        ddps[0](batch).square().mean().backward()
        first.zero_grad()
    for ddp in ddps[1:]:  # all have rebuilt their buckets, which decide the order of sums; what they train is replaced
        for batch in warm_up[:3]:
            ddp(batch).square().mean().backward()
            ddp.zero_grad()
    saved = consolidated(first)
    plain = AdamW(ddps[1].parameters(), lr=5.0)
    without = ZeroRedundancyOptimizer(ddps[2].parameters(), AdamW, lr=5.0)
    for model in models[1:]:
        for param, value in zip(model.parameters(), models[0].parameters(), strict=True):
            param.detach().copy_(value.detach())
    plain.load_state_dict(saved)
    without.load_state_dict(saved)
    second.load_state_dict(consolidated(without))
    for batch in batches(4, rank=10 + dist.get_rank()):
        for ddp in ddps:
            ddp(batch).square().mean().backward()
        plain.step()
        without.step()
        for ddp in ddps:
            ddp.zero_grad()
        for model in models[1:]:
            assert_same(list(model.parameters()), list(models[0].parameters()))
    assert_states_equal(consolidated(second), plain.state_dict())


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_15_overlap_cannot_save(workers, world_size):
    workers(world_size).run(saved_and_loaded)


def state_before_the_buckets_are_known() -> bool:
    """Whether the optimizer of the first passes is gone once DDP's buckets are final, and its state with it."""
    ddp = wrapped(model_for(AdamW))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, overlap_with_ddp=True, train_from_first_step=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    first = weakref.ref(zero.optim)
    for batch in batches(4, rank=dist.get_rank()):
        ddp(batch).sum().backward()
    assert zero.inside_backward().overlapped is not None
    gc.collect()
    return first() is None


def test_state_is_not_kept_twice_when_the_buckets_are_final(workers):
    assert all(workers(2).run(state_before_the_buckets_are_known))


class Exploding(SGD):
    def step(self, closure: Any = None) -> None:
        super().step()
        if dist.get_rank() == 1 and self.param_groups[0].get("explode"):
            raise ArithmeticError("one over nothing")


def failing_part(make_hook: Callable[..., Any]) -> tuple[str, str]:
    ddp = wrapped(model_for(SGD))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), Exploding, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero))
    inputs = list(batches(4, rank=0))
    for batch in inputs[:3]:
        ddp(batch).sum().backward()
    zero.param_groups[0]["explode"] = True
    return raised(lambda: ddp(inputs[3]).sum().backward())


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_a_part_that_fails_on_one_rank_raises_on_all(workers, make_hook):
    kind, text = all_same(workers(3).run(failing_part, make_hook, timeout=20))
    assert kind == "RuntimeError"
    assert "the backward pass failed on rank 1: ArithmeticError: one over nothing" in text


def errors_of_the_contract() -> list[tuple[str, str]]:
    ddp = wrapped(model_for(SGD))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    without = ZeroRedundancyOptimizer(ddp.parameters(), SGD, lr=0.1)
    assert zero.step() is None
    return [
        raised(lambda: zero.consolidate_state_dict()),
        raised(zero.state_dict),
        raised(lambda: zero.load_state_dict({})),
        raised(lambda: hook_with_zero_step(allreduce_hook, ddp, without)),
        raised(lambda: hook_with_zero_step_interleaved(allreduce_hook, ddp, without)),
        raised(lambda: zero.add_param_group({"params": [torch.zeros(1)]})),
        raised(lambda: zero._bucket_assignments_per_rank),
        raised(lambda: ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.LBFGS, overlap_with_ddp=True)),
    ]


def test_errors_of_the_contract(workers):
    kinds = [kind for kind, _ in all_same(workers(2).run(errors_of_the_contract))]
    assert kinds == ["RuntimeError"] * 3 + ["ValueError"] * 2 + ["RuntimeError"] * 2 + ["ValueError"]


def frozen_later(make_hook: Callable[..., Any]) -> None:
    """With find_unused_parameters DDP allows it: what is frozen is not used, so it is not stepped."""
    torch.manual_seed(2)
    ours, theirs = copies(Branches(), 2)
    ddp_ours, ddp_theirs = (wrapped(model, find_unused_parameters=True) for model in (ours, theirs))
    zero = ZeroRedundancyOptimizer(
        ddp_ours.parameters(), AdamW, overlap_with_ddp=True, train_from_first_step=True, lr=0.01
    )
    ddp_ours.register_comm_hook(None, make_hook(allreduce_hook, ddp_ours, zero))
    ddp_theirs.register_comm_hook(None, allreduce_hook)
    plain = AdamW(ddp_theirs.parameters(), lr=0.01)
    for step, batch in enumerate(batches(8, rank=dist.get_rank())):
        for model in (ours, theirs):
            model.trunk.requires_grad_(step not in (4, 5))
        ddp_ours(batch, 0).square().mean().backward()
        zero.zero_grad()
        ddp_theirs(batch, 0).square().mean().backward()
        plain.step()
        plain.zero_grad()
        assert_same(list(ours.parameters()), list(theirs.parameters()), f"after pass {step}")


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_parameters_may_be_frozen_where_ddp_allows_it(workers, make_hook):
    workers(2).run(frozen_later, make_hook)


def unfrozen_later() -> tuple[str, str]:
    model = model_for(SGD)
    model[0].bias.requires_grad_(False)
    ddp = wrapped(model)
    zero = ZeroRedundancyOptimizer(ddp.module.named_parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))
    inputs = list(batches(4, rank=0))
    for batch in inputs[:3]:
        ddp(batch).sum().backward()
    model[0].bias.requires_grad_(True)
    return raised(lambda: ddp(inputs[3]).sum().backward())


def test_unfreezing_what_ddp_does_not_reduce_is_refused(workers):
    kind, text = all_same(workers(2).run(unfrozen_later, timeout=20))
    assert kind == "RuntimeError"
    assert "0.bias was frozen when DDP was built" in text


def delays(
    make_hook: Callable[..., Any], seeds: range, iterations: int, reduce: Callable[..., Any] = allreduce_hook
) -> None:
    """Random waits in the gradients and in the hook, different on every rank: nothing may depend on timing."""
    for seed in seeds:
        rng = random.Random(1000 * seed + dist.get_rank())
        model = model_for(SGD)
        ddp = wrapped(model, gradient_as_bucket_view=bool(seed % 2))
        zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=1e-3)

        def slow_reduce(state: Any, bucket: dist.GradBucket, rng: random.Random = rng) -> Any:
            time.sleep(rng.random() * 1e-3 if rng.random() < 0.3 else 0)
            return allreduce_hook(state, bucket)

        chosen = slow_reduce if reduce is allreduce_hook else reduce
        ddp.register_comm_hook(None, make_hook(chosen, ddp, zero, shard_buckets=bool(seed // 2 % 2)))
        for param in model.parameters():
            param.register_hook(lambda gradient, rng=rng: time.sleep(rng.random() * 1e-3 if rng.random() < 0.1 else 0))
        generator = torch.Generator().manual_seed(seed)
        for _ in range(iterations):
            ddp(torch.randn(4, 6, generator=generator)).square().mean().backward()
            zero.zero_grad()
        assert_ranks_equal(list(model.parameters()))


# Every seed has other delays. What 200 passes of each find and 40 do not is rare: those are for `make test-slow`.
@pytest.mark.timeout(600)
@pytest.mark.parametrize("passes", [40, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
def test_random_delays_never_deadlock(workers, make_hook, passes):
    workers(4).run(delays, make_hook, range(20), passes, timeout=580)


def issued(make_hook: Callable[..., Any]) -> list[str]:
    """What this rank issues in one backward pass, in order."""
    ddp = wrapped(model_for(SGD))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    log: list[str] = []

    def logging_reduce(state: Any, bucket: dist.GradBucket) -> Any:
        log.append(f"reduce {bucket.index()}")
        return allreduce_hook(state, bucket)

    ddp.register_comm_hook(None, make_hook(logging_reduce, ddp, zero))
    inputs = list(batches(4, rank=0))
    for batch in inputs[:3]:
        ddp(batch).sum().backward()
    overlapped = zero.inside_backward().overlapped
    assert overlapped is not None
    send = overlapped.send
    log.clear()
    with mock.patch.object(overlapped, "send", lambda bucket: (log.append(f"send {bucket}"), send(bucket))):
        ddp(inputs[3]).sum().backward()
    return log


def test_every_rank_issues_the_same_in_the_order_of_the_schedule(workers):
    after = all_same(workers(4).run(issued, hook_with_zero_step))
    buckets = len(after) // 2
    assert buckets >= 3
    assert after == [f"reduce {b}" for b in range(buckets)] + [f"send {b}" for b in range(buckets)]
    between = all_same(workers(4).run(issued, hook_with_zero_step_interleaved))
    expected = ["reduce 0"]
    for bucket in range(1, buckets):
        expected += [f"reduce {bucket}", f"send {bucket - 1}"]
    assert between == [*expected, f"send {buckets - 1}"]


def profiled() -> list[str]:
    ddp = wrapped(model_for(SGD))
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    ddp.register_comm_hook(None, hook_with_zero_step_interleaved(allreduce_hook, ddp, zero))
    inputs = list(batches(4, rank=0))
    for batch in inputs[:3]:
        ddp(batch).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ddp(inputs[3]).sum().backward()
    return [event.name for event in profile.events() if event.name.startswith("shardstep::")]


def test_a_profile_shows_steps_and_sends_by_bucket(workers):
    ranks = workers(2).run(profiled)
    assert "shardstep::step bucket 0" in ranks[0]
    assert "shardstep::step bucket 1" in ranks[1]
    assert all("shardstep::send bucket 0" in names for names in ranks)


def steps_due(order: StepOrder, bucket: int, last: bool) -> list[list[int]]:
    return [list(together) for together in order.due(bucket, last)]


def test_the_order_of_the_schedule():
    assert [steps_due(AFTER_BACKWARD, b, b == 3) for b in range(4)] == [[], [], [], [[0, 1, 2, 3]]]
    assert [steps_due(INTERLEAVED, b, b == 3) for b in range(4)] == [[], [[0]], [[1]], [[2], [3]]]
    assert steps_due(INTERLEAVED, 0, last=True) == [[0]]
    for lag, count in itertools.product([None, 0, 1, 2, 5], [1, 2, 3, 7]):
        due = [steps_due(StepOrder(lag), bucket, bucket == count - 1) for bucket in range(count)]
        flat = [index for now in due for together in now for index in together]
        assert flat == list(range(count)), "every bucket once, in order"


def test_what_goes_round_the_ring_is_passed_on_once_it_must_have_come():
    assert [INTERLEAVED.passed_on(bucket, hops=2) for bucket in range(4)] == [[], [], [(0, 1)], [(1, 1), (0, 2)]]
    assert all(AFTER_BACKWARD.passed_on(bucket, hops=2) == [] for bucket in range(4))


def test_buckets_are_shared_out():
    assert [part.rank for part in assign_whole_buckets([[1], [2], [3]], 2)] == [0, 1, 0]
    parts = assign_parts_of_buckets([[10, 10, 10, 10], [4, 4]], 2)
    assert [(part.bucket, part.start, part.stop, part.rank) for part in parts] == [
        (0, 0, 2, 0),
        (0, 2, 4, 1),
        (1, 0, 1, 0),
        (1, 1, 2, 1),
    ]
    # One parameter is more than a share: the others take the rest, of every bucket.
    around_a_large_one = assign_parts_of_buckets([[900], [10] * 6, [5] * 6], 4)
    load = [0] * 4
    for part in around_a_large_one:
        load[part.rank] += 900 if part.bucket == 0 else (10 if part.bucket == 1 else 5) * (part.stop - part.start)
    assert sorted(load) == [30, 30, 30, 900]


@given(
    st.lists(st.lists(st.integers(0, 1000), max_size=12), max_size=8),
    st.integers(1, 9),
)
def test_every_parameter_of_every_bucket_has_one_rank_and_a_rank_one_part_of_a_bucket(numels, world_size):
    parts = assign_parts_of_buckets(numels, world_size)
    for bucket, sizes in enumerate(numels):
        own = [part for part in parts if part.bucket == bucket]
        assert [index for part in own for index in range(part.start, part.stop)] == list(range(len(sizes)))
        ranks = [part.rank for part in own]
        assert len(set(ranks)) == len(ranks)
        assert all(0 <= rank < world_size for rank in ranks)
    load = [0] * world_size
    for part in parts:
        load[part.rank] += sum(numels[part.bucket][part.start : part.stop])
    largest = sum(max(sizes, default=0) for sizes in numels)  # a cut may miss its place by one parameter per bucket
    assert max(load) <= sum(load) / world_size + largest
