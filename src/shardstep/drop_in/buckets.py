"""The step inside DistributedDataParallel's backward pass: what is known of its buckets, and who steps them.

The first three classes keep the names and fields of torch's, because torch's own communication hooks read and write
them: programs import those hooks and drive our optimizer with them.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.profiler import record_function

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.channel import Channel
from shardstep.comm.transport import Transport, finish_gathers
from shardstep.drop_in.local_shard import LocalShard
from shardstep.params.parameter_messages import FlatMessage
from shardstep.planning import Plan
from shardstep.planning.assignment import Assignment, assign_parts_of_buckets, assign_whole_buckets
from shardstep.stepping.parted_optimizer import PartedOptimizer


class _OverlapStatus(enum.IntEnum):
    """How far the optimizer has come in learning DDP's buckets."""

    UNINITIALIZED = 0  # DDP still has the buckets of its construction
    DDP_HAS_REBUILT_BUCKETS = 1  # the buckets are final; this backward pass tells what is in them
    INITIALIZED = 2  # every backward pass steps


class _DDPBucketAssignment:
    """Parameters of one DDP bucket that one rank steps: `parameters`, from place `offset` of the bucket on.

    `tensor` holds their values; they are views of it.
    """

    def __init__(self, bucket_index: int, parameters: list[torch.Tensor], offset: int) -> None:
        if not parameters:
            raise ValueError(f"bucket {bucket_index}: an assignment without parameters")
        self.bucket_index = bucket_index
        self.parameters = parameters
        self.offset = offset
        self.device: torch.device = parameters[0].device
        self.tensor: torch.Tensor | None = None


class _OverlapInfo:
    """What hooks learn and keep, from one backward pass to the next and within one."""

    def __init__(self, world_size: int) -> None:
        self.status = _OverlapStatus.UNINITIALIZED
        self.shard_buckets = False
        # Learned once, when DDP's buckets are final
        self.params_per_bucket: list[list[torch.Tensor]] = []
        self.params_per_rank: list[list[torch.Tensor]] = [[] for _ in range(world_size)]
        self.offsets: dict[int, int] = {}  # bucket -> place of its first parameter among this rank's
        self.assigned_ranks_per_bucket: list[set[int]] = []
        self.num_bucket_assignments = 0
        self.total_size: int | None = None  # elements in all buckets, where buckets are cut between ranks
        # Within one backward pass
        self.broadcast_handles: list[Any] = []
        self.bucket_indices_seen: list[int] = []
        self.bucket_index_to_future: dict[int, torch.futures.Future[Any]] = {}
        self.bucket_index_to_bucket: dict[int, Any] = {}

    def wait_for_broadcasts(self) -> None:
        """Return when the parameters of all assignments have arrived."""
        started, self.broadcast_handles = self.broadcast_handles, []
        if len(started) != self.num_bucket_assignments:
            raise RuntimeError(
                f"{len(started)} of {self.num_bucket_assignments} broadcasts were started; a hook has missed a bucket"
            )
        for handle in started:
            handle.wait()

    def clear_per_iter_info(self) -> None:
        """The backward pass is over."""
        for seen in (self.bucket_indices_seen, self.bucket_index_to_future, self.bucket_index_to_bucket):
            seen.clear()


@dataclass(frozen=True, slots=True)
class BucketLayout:
    """Who steps which parameters, by index."""

    assignments: tuple[Assignment, ...]
    holders: tuple[int, ...]  # of every parameter; those that DDP does not reduce stay where they were


def agree_on_buckets(channel: Channel, info: _OverlapInfo, plan: Plan, params: Sequence[torch.Tensor]) -> BucketLayout:
    """The layout by DDP's buckets, the same on every rank; or every rank raises."""
    index_of = {param: index for index, param in enumerate(params)}
    unknown = sum(param not in index_of for bucket in info.params_per_bucket for param in bucket)
    failure = ValueError(f"DDP reduces {unknown} parameters that the optimizer was not given") if unknown else None
    buckets = [[index_of[param] for param in bucket if param in index_of] for bucket in info.params_per_bucket]
    names = [spec.name for spec in plan.params]
    facts = Facts(f"DDP bucket {number}: {[names[i] for i in bucket]}" for number, bucket in enumerate(buckets))
    agree(channel, Claim("the backward pass", failure, facts))
    assign = assign_parts_of_buckets if info.shard_buckets else assign_whole_buckets
    assignments = assign([[plan.params[i].numel for i in bucket] for bucket in buckets], channel.world_size)
    holders = plan.holders()
    for part in assignments:
        for index in buckets[part.bucket][part.start : part.stop]:
            holders[index] = part.rank
    return BucketLayout(tuple(assignments), tuple(holders))


class OverlappedStep:
    """Steps and sends DDP's buckets, one at a time. Made once, when the buckets are final."""

    def __init__(
        self, channel: Channel, transport: Transport, info: _OverlapInfo, layout: BucketLayout, shard: LocalShard
    ) -> None:
        self.assignments_per_rank: list[dict[int, _DDPBucketAssignment]] = [{} for _ in range(channel.world_size)]
        self._params_per_bucket = info.params_per_bucket
        self._part_of: dict[int, int] = {}  # bucket -> part of the local optimizer
        self._stepped: set[int] = set()
        messages = self._assign(info, layout)
        self._own = self.assignments_per_rank[channel.rank]
        stepped = 0
        for bucket, assignment in self._own.items():
            self._part_of[bucket] = len(self._part_of)
            info.offsets[bucket] = stepped
            stepped += len(assignment.parameters)
        self._parted = PartedOptimizer(shard.optim, [part.parameters for part in self._own.values()], shard.make)
        self._parted.resume(shard.counted)
        devices = [params[0].device for params in info.params_per_bucket]
        self._gathers = transport.message_gathers(list(zip(devices, messages, strict=True)))

    def _assign(self, info: _OverlapInfo, layout: BucketLayout) -> list[list[list[FlatMessage]]]:
        """Make every assignment's parameters views of one buffer; its message, by bucket and rank."""
        ranks = range(len(self.assignments_per_rank))
        messages: list[list[list[FlatMessage]]] = [[[] for _ in ranks] for _ in info.params_per_bucket]
        info.assigned_ranks_per_bucket = [set() for _ in info.params_per_bucket]
        info.num_bucket_assignments = len(layout.assignments)
        if info.shard_buckets:
            info.total_size = sum(param.numel() for bucket in info.params_per_bucket for param in bucket)
        for part in layout.assignments:
            params = info.params_per_bucket[part.bucket][part.start : part.stop]
            assignment = _DDPBucketAssignment(part.bucket, params, part.start)
            message = FlatMessage(params, params[0].dtype, params[0].device)
            assignment.tensor = message.buffer
            messages[part.bucket][part.rank].append(message)
            self.assignments_per_rank[part.rank][part.bucket] = assignment
            info.assigned_ranks_per_bucket[part.bucket].add(part.rank)
            info.params_per_rank[part.rank].extend(params)
        return messages

    def parts_of(self, bucket: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """A bucket's flat gradients, cut into those of the parameters that each rank steps."""
        parts = []
        ends = [0, *itertools.accumulate(param.numel() for param in self._params_per_bucket[bucket])]
        for assignments in self.assignments_per_rank:
            part = assignments.get(bucket)
            start, stop = (part.offset, part.offset + len(part.parameters)) if part else (0, 0)
            parts.append(buffer[ends[start] : ends[stop]])
        return parts

    def expect(self, bucket: int) -> None:
        """The other ranks may send their parts of a bucket; its gradients have been computed here."""
        self._gathers[bucket].expect()

    def step(self, bucket: int, gradients: Sequence[torch.Tensor | None], param_groups: list[dict[str, Any]]) -> None:
        """Step this rank's part of a bucket, if it has one; `gradients` are those of the whole bucket."""
        if bucket not in self._part_of:
            return
        assignment = self._own[bucket]
        chosen = gradients[assignment.offset : assignment.offset + len(assignment.parameters)]
        with record_function(f"shardstep::step bucket {bucket}"):
            self.step_part(self._part_of[bucket], chosen, param_groups)

    def step_part(
        self, part: int, gradients: Sequence[torch.Tensor | None], param_groups: list[dict[str, Any]]
    ) -> None:
        """Step one part; the first of an iteration takes over the options, the last gives back what was written."""
        if not self._stepped:
            self._parted.begin(param_groups)
        self._parted.step(part, gradients)
        self._stepped.add(part)
        if len(self._stepped) == len(self._part_of):
            self._parted.end(param_groups)
            self._stepped.clear()

    def step_given(self, gradients: Sequence[torch.Tensor | None], param_groups: list[dict[str, Any]]) -> None:
        """Step the parts that have gradients here; they are in the order of `_OverlapInfo.params_per_rank`."""
        start = 0
        for bucket, part in self._part_of.items():
            stop = start + len(self._own[bucket].parameters)
            if any(gradient is not None for gradient in gradients[start:stop]):
                self.step_part(part, gradients[start:stop], param_groups)
            start = stop

    def send(self, bucket: int) -> None:
        with record_function(f"shardstep::send bucket {bucket}"):
            self._gathers[bucket].send()

    def pass_on(self, bucket: int, distance: int) -> None:
        """Pass on what came from the rank at this distance, round the ring."""
        with record_function(f"shardstep::pass on bucket {bucket}"):
            self._gathers[bucket].pass_on(distance)

    @property
    def hops(self) -> int:
        return max((gather.hops for gather in self._gathers), default=0)

    def finish(self) -> None:
        """Return when all buckets have arrived."""
        with record_function("shardstep::wait for parameters"):
            finish_gathers(self._gathers)
        self._stepped.clear()  # after a failure, not all parts were stepped

    def exchange(self) -> None:
        """Give every rank all buckets as their holders have them now."""
        for bucket in range(len(self._gathers)):
            self.expect(bucket)
        for bucket in range(len(self._gathers)):
            self.send(bucket)
        self.finish()

    def reload(self) -> None:
        """The local optimizer has loaded a state."""
        self._parted.reload()
