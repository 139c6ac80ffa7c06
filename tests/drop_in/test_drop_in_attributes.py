"""Every attribute of the drop-in that programs, hooks and Join hooks read, and what each holds."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from shardstep import ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step
from shardstep.zero_redundancy_optimizer import _DDPBucketAssignment, _OverlapInfo, _OverlapStatus, _ZeROJoinHook
from training import assert_ranks_equal, assert_same, batches, make_params, raised, set_gradients, small_model, twins


def ids(params: Any) -> list[int]:
    return [id(param) for param in params]


def attributes_after_backward(bucket_view: bool) -> None:
    params = make_params()
    groups = [{"params": params[:2], "lr": 0.1}, {"params": params[2:], "lr": 0.2}]
    zero = ZeroRedundancyOptimizer(groups, AdamW, parameters_as_bucket_view=bucket_view, lr=0.3)
    rank, world_size = dist.get_rank(), dist.get_world_size()

    assert zero.initialized is True
    assert (zero.world_size, zero.rank, zero.global_rank) == (world_size, rank, rank)
    assert zero.process_group is zero.join_process_group is dist.group.WORLD
    assert zero.join_device == torch.device("cpu")
    assert zero.parameters_as_bucket_view is bucket_view
    assert zero._overlap_with_ddp is False
    assert isinstance(zero.functional_optim_map, dict)
    hook = zero.join_hook()
    assert type(hook) is _ZeROJoinHook
    assert hook.zero is zero

    # All parameters, in the order of the param groups: an index is that of a state_dict.
    assert ids(zero._all_params) == ids(zero._index_to_param) == ids(params)
    assert isinstance(zero._all_params, list)
    assert isinstance(zero._index_to_param, list)
    assert zero._param_to_index == {param: index for index, param in enumerate(params)}
    assert zero._device_to_device_index == {torch.device("cpu"): 0}

    # Each has one holder, whose local optimizer has it.
    partition = zero._partition_parameters()
    assert len(partition) == world_size
    assert all([group["lr"] for group in held] == [0.1, 0.2] for held in partition)
    holders = {param: owner for owner, held in enumerate(partition) for group in held for param in group["params"]}
    assert zero._param_to_rank == holders
    assert set(ids(holders)) == set(ids(params))
    assert type(zero.optim) is AdamW
    assert [ids(group["params"]) for group in zero.optim.param_groups] == [
        ids(group["params"]) for group in partition[rank]
    ]

    if bucket_view:
        assert [[buffer.numel() for buffer in row] for row in zero._buckets] == [
            [sum(param.numel() for param in params if holders[param] == owner) for owner in range(world_size)]
        ]
    else:
        assert zero._buckets == []
    info = zero._overlap_info
    assert isinstance(info, _OverlapInfo)
    assert info.status is _OverlapStatus.UNINITIALIZED
    assert raised(lambda: zero._bucket_assignments_per_rank)[0] == "ValueError"

    # What a program that calls the two halves of a step by itself relies on.
    mine = [param for param in params if holders[param] == rank]
    before = [param.detach().clone() for param in params]
    set_gradients(0, params)
    assert zero._local_step() is None
    unequal = {id(param) for param, old in zip(params, before, strict=True) if not torch.equal(param, old)}
    assert unequal == {id(param) for param in mine if param.numel()}
    zero._sync_params()
    assert_ranks_equal(params)

    added = nn.Parameter(torch.ones(3))
    zero.add_param_group({"params": [added]})
    assert ids(zero._all_params) == ids([*params, added])
    assert zero._param_to_index[added] == len(params)
    assert zero._param_to_rank[added] in range(world_size)


@pytest.mark.parametrize("bucket_view", [False, True])
def test_attributes_that_programs_read_hold_what_torchs_hold(workers, bucket_view):
    for world_size in (1, 2):
        workers(world_size).run(attributes_after_backward, bucket_view, timeout=60)


def attributes_inside_backward(with_torchs_hook: bool, shard_buckets: bool) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ddp = DistributedDataParallel(small_model(), bucket_cap_mb=0.001)
    zero = ZeroRedundancyOptimizer(ddp.parameters(), SGD, overlap_with_ddp=True, lr=0.1)
    info = zero._overlap_info
    assert zero._overlap_with_ddp is True
    assert zero.parameters_as_bucket_view is False
    assert zero._buckets == []
    fields = {name: getattr(info, name) for name in vars(info)}
    assert fields == {
        "status": _OverlapStatus.UNINITIALIZED,
        "shard_buckets": False,
        "params_per_bucket": [],
        "params_per_rank": [[] for _ in range(world_size)],
        "offsets": {},
        "assigned_ranks_per_bucket": [],
        "num_bucket_assignments": 0,
        "total_size": None,
        "broadcast_handles": [],
        "bucket_indices_seen": [],
        "bucket_index_to_future": {},
        "bucket_index_to_bucket": {},
    }
    make_hook = torch_hooks.hook_with_zero_step if with_torchs_hook else hook_with_zero_step
    with mock.patch.object(dist, "get_backend", return_value="nccl"):  # torch's hook refuses Gloo
        ddp.register_comm_hook(None, make_hook(allreduce_hook, ddp, zero, shard_buckets=shard_buckets))
    assert info.shard_buckets is shard_buckets
    for batch in batches(4, rank=rank):
        ddp(batch).square().mean().backward()

    assert info.status is _OverlapStatus.INITIALIZED
    params = [param for bucket in info.params_per_bucket for param in bucket]
    assert Counter(ids(params)) == Counter(ids(zero._all_params))
    assert info.total_size == (sum(param.numel() for param in params) if shard_buckets else None)
    assignments = zero._bucket_assignments_per_rank
    assert len(assignments) == world_size
    parts = [part for held in assignments for part in held.values()]
    assert info.num_bucket_assignments == len(parts)
    offset = 0
    for bucket, part in assignments[rank].items():
        assert info.offsets[bucket] == offset
        offset += len(part.parameters)
    assert set(info.offsets) == set(assignments[rank])
    for owner, held in enumerate(assignments):
        assert ids(info.params_per_rank[owner]) == [id(p) for part in held.values() for p in part.parameters]
        for bucket, part in held.items():
            assert isinstance(part, _DDPBucketAssignment)
            assert (part.bucket_index, part.device) == (bucket, torch.device("cpu"))
            whole = info.params_per_bucket[bucket]
            assert ids(part.parameters) == ids(whole[part.offset : part.offset + len(part.parameters)])
            assert part.tensor is not None
            assert torch.equal(part.tensor, torch.cat([p.detach().flatten() for p in part.parameters]))
            assert owner in info.assigned_ranks_per_bucket[bucket]
            assert all(zero._param_to_rank[param] == owner for param in part.parameters)
            if not shard_buckets:
                assert zero._get_assigned_rank(bucket) == owner
    assert sum(len(ranks) for ranks in info.assigned_ranks_per_bucket) == len(parts)
    # Within a pass only; after it, empty.
    assert (info.broadcast_handles, info.bucket_indices_seen) == ([], [])
    assert (info.bucket_index_to_future, info.bucket_index_to_bucket) == ({}, {})
    assert_ranks_equal(list(ddp.parameters()))


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("with_torchs_hook", [False, True])
def test_fields_of_the_overlap_hold_what_torchs_hold(workers, with_torchs_hook, shard_buckets):
    for world_size in (1, 2):
        workers(world_size).run(attributes_inside_backward, with_torchs_hook, shard_buckets, timeout=60)


class GradientSetter(Joinable):
    """Gives a rank without inputs the gradients of the others, through what a Join hook reads of the optimizer."""

    def __init__(self) -> None:
        super().__init__()

    def join_hook(self, **kwargs: Any) -> JoinHook:
        zero, first = kwargs["zero"], kwargs["first"]

        class Hook(JoinHook):
            step = first

            def main_hook(self) -> None:
                set_gradients(self.step, zero._all_params)
                self.step += 1

        return Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def with_a_join_hook_that_reads_all_params() -> None:
    """As torch's own test of Join does it. Rank r has r inputs more than rank 0."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ours = make_params()
    theirs = twins(ours)
    zero, plain = ZeroRedundancyOptimizer(ours, AdamW, lr=0.1), AdamW(theirs, lr=0.1)
    setter = GradientSetter()
    with Join([setter, zero], zero=zero, first=1 + rank):
        for step in range(1 + rank):
            Join.notify_join_context(setter)
            set_gradients(step, ours)
            zero.step()
    for step in range(world_size):
        set_gradients(step, theirs)
        plain.step()
    assert_same(ours, theirs)


def test_a_join_hook_that_reads_all_params_raised_attribute_error(workers):
    for world_size in (1, 2, 3):
        workers(world_size).run(with_a_join_hook_that_reads_all_params, timeout=60)
