"""DDP communication hooks that step a ZeroRedundancyOptimizer inside the backward pass.

    zero = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=3e-4)
    ddp.register_comm_hook(None, hook_with_zero_step(allreduce_hook, ddp, zero))

[Note: who issues what] DDP calls a communication hook once per bucket, in the order of the buckets, on the thread that
runs the backward pass; the wrapped hook issues the bucket's reduction there. Everything else is issued on that same
thread, inside the same calls, in the order that `planning/schedule.py` derives from bucket numbers alone. Nothing is
issued from a future's callback: those run on the backend's own threads, at a moment that differs from rank to rank,
which is how torch's interleaved hook hangs on Gloo. Waiting for a reduction is safe here: it was issued by an earlier
part of the same sequence, so every rank issues it without waiting for this one. So is waiting for what goes round the
ring: a rank passes on at bucket b only what the rank before it passed on at bucket b - 1, without waiting for this one.

Python annotations are real objects in this file: DDP compares those of a hook with its own types.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from shardstep.drop_in.backward import OverlappedBackward
from shardstep.drop_in.holder_reduction import HolderReduction
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.planning.schedule import AFTER_BACKWARD, INTERLEAVED, StepOrder

__all__ = ["hook_with_zero_step", "hook_with_zero_step_interleaved", "reduce_to_holders"]

Hook = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]


def reduce_to_holders(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """To be wrapped in place of `allreduce_hook`: a gradient goes only to the rank that steps its parameter.

        hook_with_zero_step_interleaved(reduce_to_holders, ddp, zero, shard_buckets=True)

    Gradients and parameters together then take as many bytes as DDP alone. Afterwards `param.grad` is the mean on the
    rank that stepped it, and on no other: nothing that reads gradients after the backward pass may rely on it.
    """
    del state, bucket
    raise RuntimeError(
        "reduce_to_holders needs to know who steps what: pass it to hook_with_zero_step or "
        "hook_with_zero_step_interleaved in place of allreduce_hook"
    )


def hook_with_zero_step(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """`hook`, which reduces a bucket, followed by the optimizer's step when the last bucket's gradients are there.

    Early buckets are stepped while late ones are still being reduced; then all are sent. `shard_buckets` cuts buckets
    between ranks at parameter boundaries, for an even share; otherwise bucket i belongs to rank i modulo the ranks.
    """
    return _overlapping(hook, ddp, zero, shard_buckets, AFTER_BACKWARD)


def hook_with_zero_step_interleaved(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool = False
) -> Hook:
    """The same, but each bucket is stepped while the gradients of later ones are still being computed."""
    return _overlapping(hook, ddp, zero, shard_buckets, INTERLEAVED)


def _overlapping(
    hook: Hook, ddp: DistributedDataParallel, zero: ZeroRedundancyOptimizer, shard_buckets: bool, order: StepOrder
) -> Hook:
    inside = zero.inside_backward()
    if ddp.process_group != zero.process_group:
        raise ValueError("DDP and the optimizer have different process groups; give both the same")
    inside.cut_buckets(shard_buckets)
    if hook is reduce_to_holders:
        reduction = HolderReduction(inside, next(ddp.parameters()).device)
        hook, order = reduction, reduction.order(order)
    backward = OverlappedBackward(weakref.ref(ddp), zero, order)

    # For torch's own hooks a state of None means all ranks. DDP on a part of them would wait for the rest for ever.
    default_state = None if zero.process_group == dist.group.WORLD else zero.process_group

    def step_in_backward(state: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(default_state if state is None else state, bucket)
        backward.reduction_issued(bucket, future)
        return future

    return step_in_backward
