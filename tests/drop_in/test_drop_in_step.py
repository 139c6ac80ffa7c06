"""What `step` promises: closures, schedulers, scaling, clipping, frozen parameters, subgroups, uneven inputs."""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from training import (
    assert_ranks_equal,
    assert_same,
    batches,
    copies,
    make_params,
    set_gradients,
    small_model,
    twins,
)

WORLDS = [1, 2, 3, 4]


def with_ddp(bucket_view: bool, amp: bool, clip: bool) -> None:
    """DDP with the plain optimizer and DDP with ours, side by side on the same batches."""
    ours, theirs = copies(small_model(), 2)
    ddp_ours, ddp_theirs = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    zero = ZeroRedundancyOptimizer(ddp_ours.parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01)
    plain = AdamW(ddp_theirs.parameters(), lr=0.01)
    pairs = [(ddp_ours, zero), (ddp_theirs, plain)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.05, total_steps=8) for _, o in pairs]
    scalers = [torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2) for _ in pairs]
    for batch in batches(8, rank=dist.get_rank()):
        for (ddp, optimizer), scheduler, scaler in zip(pairs, schedulers, scalers, strict=True):
            optimizer.zero_grad()
            loss = ddp(batch).square().mean()
            if amp:
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
            else:
                loss.backward()
            if clip:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
            if amp:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            scheduler.step()
        assert zero.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
        assert zero.param_groups[0]["betas"] == plain.param_groups[0]["betas"]  # OneCycleLR moves these too
        assert_same(list(ours.parameters()), list(theirs.parameters()))
    assert_ranks_equal(list(ours.parameters()))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize(("amp", "clip"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("world_size", WORLDS)
def test_trains_like_ddp_with_the_plain_optimizer(workers, world_size, amp, clip, bucket_view):
    workers(world_size).run(with_ddp, bucket_view, amp, clip)


def scaler_skips_an_overflow() -> None:
    params = make_params(((4, 4), (4,)))
    before = twins(params)
    zero = ZeroRedundancyOptimizer(params, SGD, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(sum((param * float("inf")).sum() for param in params)).backward()
    scaler.step(zero)
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert_same(params, before)


def test_grad_scaler_skips_a_step_that_overflowed(workers):
    workers(2).run(scaler_skips_an_overflow)


def closures(bucket_view: bool) -> None:
    ours, theirs = copies(small_model(), 2)
    zero = ZeroRedundancyOptimizer(ours.parameters(), SGD, parameters_as_bucket_view=bucket_view, lr=0.1, momentum=0.9)
    plain = SGD(theirs.parameters(), lr=0.1, momentum=0.9)

    def closure_for(model: nn.Module, optimizer: Any, batch: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            return loss

        return closure

    for batch in batches(4, rank=0):
        loss = zero.step(closure_for(ours, zero, batch))
        assert torch.equal(loss, plain.step(closure_for(theirs, plain, batch)))
    assert_same(list(ours.parameters()), list(theirs.parameters()))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_closures_go_through_and_their_loss_comes_back(workers, world_size, bucket_view):
    workers(world_size).run(closures, bucket_view)


class Recorder(SGD):
    """An optimizer with a step of its own."""

    def step(self, closure: Any = None, *, note: list[Any] | None = None) -> Any:
        super().step()
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
        if note is not None:
            note.append(closure)
        return "done"


class WithoutClosure(SGD):
    def step(self) -> Any:
        return super().step()


def arguments_go_through() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer([{"params": params[:2]}, {"params": params[2:]}], Recorder, lr=0.1)
    set_gradients(0, params)
    note: list[Any] = []
    assert zero.step(0, note=note) == "done"
    assert note == [0]
    assert [group["seen"] for group in zero.param_groups] == [1, 1]
    zero.param_groups[1]["seen"] = 10
    zero.step()
    assert [group["seen"] for group in zero.param_groups] == [2, 11]
    set_gradients(1, params)
    ZeroRedundancyOptimizer(params, WithoutClosure, lr=0.1).step()


def test_arguments_of_step_and_keys_of_groups_go_through(workers):
    for world_size in WORLDS:
        workers(world_size).run(arguments_go_through)


def the_local_optimizer() -> None:
    params = make_params()
    zero = ZeroRedundancyOptimizer(
        [{"params": params[:1], "lr": 0.5}, {"params": params[1:]}], SGD, lr=0.1, momentum=0.9
    )
    assert isinstance(zero.optim, SGD)
    assert [group["lr"] for group in zero.optim.param_groups] == [0.5, 0.1]
    assert len(zero.optim.param_groups) == len(zero.param_groups) == 2
    held = [param for group in zero.optim.param_groups for param in group["params"]]
    assert all(any(own is param for param in params) for own in held), "the caller's own parameter objects"
    assert sum(len(groups[0]["params"]) + len(groups[1]["params"]) for groups in zero._partition_parameters()) == 5
    set_gradients(0, params)
    zero.step()
    for param in held:
        assert torch.equal(zero.optim.state[param]["momentum_buffer"], param.grad)
    zero.zero_grad()
    assert all(param.grad is None for param in params)
    assert zero.world_size == dist.get_world_size()
    assert zero.rank == zero.global_rank == dist.get_rank()
    assert zero.initialized
    assert list(zero._device_to_device_index.values()) == [0]
    assert SGD in ZeroRedundancyOptimizer.functional_optim_map


def test_the_local_optimizer_holds_the_callers_parameters(workers):
    for world_size in WORLDS:
        workers(world_size).run(the_local_optimizer)


def stepped_and_sent_by_hand(bucket_view: bool) -> None:
    ours = make_params()
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero._local_step()
        plain.step()
        held = {param for group in zero.optim.param_groups for param in group["params"]}
        assert_same([p for p in ours if p in held], [q for p, q in zip(ours, theirs, strict=True) if p in held])
        zero._sync_params()
        assert_same(ours, theirs)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_step_of_the_local_optimizer_is_sent_when_the_program_says_so(workers, world_size, bucket_view):
    workers(world_size).run(stepped_and_sent_by_hand, bucket_view)


def partition_of_the_contract(world_size: int) -> None:
    sizes = [9, 7, 5, 3] * world_size
    params = [torch.rand(size, 1) for size in sizes]
    zero = ZeroRedundancyOptimizer(params[:-1], SGD, lr=0.1)
    zero.add_param_group({"params": [params[-1]]})
    assert sum(p.numel() for group in zero.optim.param_groups for p in group["params"]) == 24


@pytest.mark.parametrize("world_size", WORLDS)
def test_parameters_are_shared_out_evenly_by_size(workers, world_size):
    workers(world_size).run(partition_of_the_contract, world_size)


def named_parameters() -> None:
    ours, theirs = copies(small_model(), 2)
    zero = ZeroRedundancyOptimizer(ours.named_parameters(), AdamW, lr=0.1)
    plain = AdamW(theirs.named_parameters(), lr=0.1)
    assert zero.param_groups[0]["param_names"] == plain.param_groups[0]["param_names"]
    for step in range(2):
        set_gradients(step, list(ours.parameters()), list(theirs.parameters()))
        zero.step()
        plain.step()
    assert_same(list(ours.parameters()), list(theirs.parameters()))
    zero.consolidate_state_dict()
    if zero.rank == 0:
        assert zero.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    zero.load_state_dict(plain.state_dict())
    names = dict(ours.named_parameters())
    for group in zero.optim.param_groups:
        assert all(names[n] is p for n, p in zip(group["param_names"], group["params"], strict=True))


@pytest.mark.parametrize("world_size", WORLDS)
def test_named_parameters_keep_their_names(workers, world_size):
    workers(world_size).run(named_parameters)


class CaptureLog(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def captured_log() -> Any:
    handler, logger = CaptureLog(), logging.getLogger("shardstep")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def freezing(bucket_view: bool) -> None:
    ours = make_params()
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    with captured_log() as log:
        for step, frozen in enumerate([(), (0,), (0, 2), (2,), (0, 1, 2, 3, 4), ()]):
            for params in (ours, theirs):
                for index, param in enumerate(params):
                    param.requires_grad_(index not in frozen)
            set_gradients(step, ours, theirs)
            zero.step()
            plain.step()
            assert_same(ours, theirs, f"with {frozen} frozen")
            if bucket_view:
                sent = sum(buffer.numel() for row in zero._buckets for buffer in row)
                assert sent == sum(param.numel() for param in ours if param.requires_grad)
    assert len(log) == 5
    assert all("trainable parameters has changed" in line for line in log)
    assert_ranks_equal(ours)


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_parameters_may_be_frozen_and_unfrozen_between_steps(workers, world_size, bucket_view):
    workers(world_size).run(freezing, bucket_view)


def leftover_gradients() -> None:
    """A frozen parameter with a gradient left over is stepped by the plain optimizer, so ours must step and send it."""
    ours = make_params(((4, 3), (6,)))
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours, SGD, lr=0.1, momentum=0.9), SGD(theirs, lr=0.1, momentum=0.9)
    set_gradients(0, ours, theirs)
    for params in (ours, theirs):
        params[0].requires_grad_(False)
    for _ in range(2):
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    assert_ranks_equal(ours)


def test_a_frozen_parameter_with_a_gradient_left_over_is_stepped_everywhere(workers):
    workers(3).run(leftover_gradients)


def bucket_views() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 3)).to(memory_format=torch.channels_last)
    params = list(model.parameters())
    formats = [param.stride() for param in params]
    values = [param.detach().clone() for param in params]
    zero = ZeroRedundancyOptimizer(params, SGD, parameters_as_bucket_view=True, lr=0.1)
    assert len(zero._buckets) == 1
    assert len(zero._buckets[0]) == zero.world_size
    for param, rank in zero._param_to_rank.items():
        buffer = zero._buckets[0][rank]
        assert param.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert [param.stride() for param in params] == formats, "channels_last stays channels_last"
    assert_same(params, values)
    assert ZeroRedundancyOptimizer(params, SGD, lr=0.1)._buckets == []


@pytest.mark.parametrize("world_size", WORLDS)
def test_bucket_views_share_one_buffer_per_rank_and_keep_their_memory_format(workers, world_size):
    workers(world_size).run(bucket_views)


def memory_swapped_by_the_program() -> str:
    """As weight averaging does: `param.data` is another tensor for a while."""
    ours = make_params()
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, SGD, parameters_as_bucket_view=True, lr=0.1)
    plain = SGD(theirs, lr=0.1)
    for step in range(3):
        for params in (ours, theirs):
            for param in params:
                param.data = param.detach() * 0.5
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
        assert_same(ours, theirs)
    ours[0].data = ours[0].detach().double()
    ours[0].grad = None
    with pytest.raises(RuntimeError, match=r"build the optimizer after model.to") as caught:
        zero.step()
    return str(caught.value)


def test_bucket_views_follow_a_parameter_whose_data_was_replaced(workers):
    for world_size in WORLDS:
        for text in workers(world_size).run(memory_swapped_by_the_program):
            assert "torch.float64 on cpu" in text


def subgroups(members: list[int], bucket_view: bool) -> None:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return
    ours = make_params()
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, process_group=group, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    assert (zero.rank, zero.global_rank) == (members.index(dist.get_rank()), dist.get_rank())
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    last = len(members) - 1
    zero.consolidate_state_dict(to=last)
    if zero.rank == last:
        assert len(zero.state_dict()["state"]) == len(ours)
    else:
        with pytest.raises(RuntimeError, match=rf"consolidate_state_dict\(to={zero.rank}\)"):
            zero.state_dict()


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("members", [[0, 2], [1, 3], [3], [1, 2, 3]], ids=str)
def test_a_group_of_any_ranks_trains(workers, members, bucket_view):
    workers(4).run(subgroups, members, bucket_view)


def two_groups_at_once() -> None:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    ours = make_params()
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, process_group=groups[dist.get_rank() // 2], lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    for step in range(3):
        set_gradients(step + 100 * (dist.get_rank() // 2), ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)


def test_two_groups_train_at_the_same_time(workers):
    workers(4).run(two_groups_at_once)


def uneven_inputs(ddp_joins: bool, bucket_view: bool) -> None:
    """Rank r has r batches more than rank 0. The oracle is DDP with the plain optimizer under the same Join."""
    rank = dist.get_rank()
    ours, theirs = copies(small_model(), 2)
    ddp_ours, ddp_theirs = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    zero = ZeroRedundancyOptimizer(ddp_ours.parameters(), AdamW, parameters_as_bucket_view=bucket_view, lr=0.01)
    plain = AdamW(ddp_theirs.parameters(), lr=0.01)
    inputs = list(batches(2 + 2 * rank, rank=rank))
    after: list[list[torch.Tensor]] = []
    with Join([ddp_theirs]):
        for batch in inputs:
            plain.zero_grad()
            ddp_theirs(batch).square().mean().backward()
            plain.step()
            after.append([param.detach().clone() for param in theirs.parameters()])
    with Join([ddp_ours, zero] if ddp_joins else [zero, ddp_ours]):
        for batch, expected in zip(inputs, after, strict=True):
            zero.zero_grad()
            ddp_ours(batch).square().mean().backward()
            zero.step()
            assert_same(list(ours.parameters()), expected)
    assert_same(list(ours.parameters()), list(theirs.parameters()))  # DDP's hook gives all ranks the last one's
    assert_ranks_equal(list(ours.parameters()))


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_that_run_out_of_inputs_do_not_step_with_old_gradients(workers, world_size, bucket_view):
    workers(world_size).run(uneven_inputs, True, bucket_view)


def uneven_epochs() -> None:
    """Without state: under DDP a rank without inputs does not step, and its own copy of it would stay behind."""
    ours, theirs = copies(small_model(), 2)
    ddp_ours, ddp_theirs = DistributedDataParallel(ours), DistributedDataParallel(theirs)
    zero, plain = ZeroRedundancyOptimizer(ddp_ours.parameters(), SGD, lr=0.01), SGD(ddp_theirs.parameters(), lr=0.01)
    for ddp, optimizer, joins in ((ddp_theirs, plain, [ddp_theirs]), (ddp_ours, zero, [ddp_ours, zero])):
        for _ in range(3):
            with Join(joins):
                for batch in batches(2 + 2 * dist.get_rank(), rank=dist.get_rank()):
                    ddp(batch).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
    assert_same(list(ours.parameters()), list(theirs.parameters()))


def test_gradients_that_a_rank_was_lent_under_join_are_not_added_to_in_the_next_epoch(workers):
    workers(2).run(uneven_epochs)


def join_alone() -> None:
    rank = dist.get_rank()
    ours = make_params()
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours, AdamW, lr=0.1), AdamW(theirs, lr=0.1)
    most = 2 + dist.get_world_size() - 1
    for step in range(most):
        set_gradients(step, theirs)
        plain.step()
    with Join([zero]):
        for step in range(2 + rank):
            set_gradients(step, ours)
            zero.step()
    assert_same(ours, theirs)
    assert_ranks_equal(ours)


def test_join_with_the_optimizer_alone(workers):
    for world_size in WORLDS:
        workers(world_size).run(join_alone)


def early_termination() -> str:
    zero = ZeroRedundancyOptimizer(make_params(), SGD, lr=0.1)

    def train() -> None:
        with Join([zero], throw_on_early_termination=True):
            for _ in range(1 + dist.get_rank()):
                set_gradients(0, zero.param_groups[0]["params"])
                zero.step()

    with pytest.raises(RuntimeError, match="exhausted") as caught:
        train()
    return str(caught.value)


def test_join_can_end_all_ranks_together(workers):
    assert len(workers(2).run(early_termination)) == 2


def special_dtypes(dtype: torch.dtype, bucket_view: bool) -> None:
    ours = make_params(dtype=dtype)
    theirs = twins(ours)
    zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
    plain = AdamW(theirs, lr=0.1)
    for step in range(3):
        set_gradients(step, ours, theirs)
        zero.step()
        plain.step()
    assert_same(ours, theirs)
    assert_ranks_equal([torch.view_as_real(p.detach()) if p.is_complex() else p for p in ours])
    zero.consolidate_state_dict()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes_work(workers, dtype):
    for bucket_view in (False, True):
        workers(3).run(special_dtypes, dtype, bucket_view)


def more_ranks_than_parameters() -> None:
    for shapes, bucket_view in itertools.product([((3,),), ((),), ((0,),)], (False, True)):
        ours = make_params(shapes)
        theirs = twins(ours)
        zero = ZeroRedundancyOptimizer(ours, AdamW, parameters_as_bucket_view=bucket_view, lr=0.1)
        plain = AdamW(theirs, lr=0.1)
        set_gradients(0, ours, theirs)
        zero.step()
        plain.step()
        assert_same(ours, theirs)
        zero.consolidate_state_dict(to=3)


def test_more_ranks_than_parameters_or_elements(workers):
    workers(4).run(more_ranks_than_parameters)
