"""One backward pass of DDP with the optimizer's step inside: bucket by bucket, on the thread that runs it."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from shardstep.drop_in.buckets import OverlappedStep
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.planning.schedule import StepOrder


class OverlappedBackward:
    """Told of every bucket once its reduction has been issued. See [Note: who issues what] in ddp_zero_hook.py."""

    def __init__(
        self, ddp: weakref.ref[DistributedDataParallel], zero: ZeroRedundancyOptimizer, order: StepOrder
    ) -> None:
        self._ddp = ddp
        self._zero = zero  # for its param groups, as they are when a bucket comes
        self._inside = zero.inside_backward()
        self._order = order
        self._buckets: dict[int, tuple[GradBucket, torch.futures.Future[Any]]] = {}
        self._failure: Exception | None = None
        model = ddp()
        assert model is not None, "the hook is made while the model is alive"
        self._reduced = set(reduced_parameters(model))
        self._used: set[torch.Tensor] | None = None
        if model.find_unused_parameters:
            # DDP keeps such a map too, but asking for it inside a communication hook waits for a lock that DDP holds.
            self._used = set()
            for param in self._reduced:
                param.register_hook(partial(_mark, self._used, param))  # type: ignore[no-untyped-call]

    def reduction_issued(self, bucket: GradBucket, future: torch.futures.Future[Any]) -> None:
        self._buckets[bucket.index()] = (bucket, future)
        try:
            self._go_on(bucket)
        finally:
            if bucket.is_last():
                self._buckets.clear()
                if self._used is not None:
                    self._used.clear()

    def _go_on(self, bucket: GradBucket) -> None:
        ddp, inside = self._ddp(), self._inside
        if ddp is not None and ddp._has_rebuilt_buckets:
            inside.learn(self._zero.param_groups, bucket.index(), bucket.parameters())
        if inside.overlapped is not None:
            self._step_what_is_due(bucket, inside.overlapped)
        elif bucket.is_last() and inside.trains_at_once:
            self._step_all()

    def _step_what_is_due(self, bucket: GradBucket, overlapped: OverlappedStep) -> None:
        last = bucket.is_last()
        if bucket.index() == 0:
            self._failure = self._inside.begin(self._zero.param_groups, self._reduced)
        due = self._order.due(bucket.index(), last)
        for index in chain(*due):
            overlapped.expect(index)
        for together in due:
            for index in together:
                self._step(index, overlapped)
            for index in together:
                overlapped.send(index)
        for index, distance in self._order.passed_on(bucket.index(), overlapped.hops):
            overlapped.pass_on(index, distance)
        if last:
            failure, self._failure = self._failure, None
            self._inside.finish(overlapped, failure)

    def _step(self, index: int, overlapped: OverlappedStep) -> None:
        gradients = self._reduced_gradients(index)
        if self._failure is None:
            try:
                overlapped.step(index, gradients, self._zero.param_groups)
            except Exception as error:  # the others wait for what this rank sends; all raise together at the end
                self._failure = error

    def _step_all(self) -> None:
        """Before DDP's buckets are final: with the gradients that are in the buckets it has now."""
        gradients: dict[torch.Tensor, torch.Tensor | None] = {}
        for index, (bucket, _) in sorted(self._buckets.items()):
            gradients.update(zip(bucket.parameters(), self._reduced_gradients(index), strict=True))
        self._inside.step_at_the_end(self._zero.param_groups, gradients)

    def _reduced_gradients(self, index: int) -> list[torch.Tensor | None]:
        """The gradients of a bucket once they are reduced; None for a parameter that no rank has used."""
        bucket, future = self._buckets[index]
        reduced = future.wait()  # on an accelerator the stream waits, not the host
        values = reduced[0] if isinstance(reduced, list | tuple) else reduced
        buffer = bucket.buffer()
        if values.data_ptr() != buffer.data_ptr():  # a hook may leave its result elsewhere; DDP copies it later
            buffer.copy_(values.view_as(buffer))
        used = self._used_somewhere(bucket)
        return [gradient if flag else None for gradient, flag in zip(bucket.gradients(), used, strict=True)]

    def _used_somewhere(self, bucket: GradBucket) -> list[bool]:
        """For a parameter that no rank has used DDP reduces zeros, and then leaves its gradient as it was."""
        params = bucket.parameters()
        if self._used is None:
            return [True] * len(params)
        return self._inside.used_somewhere([param in self._used for param in params])


def _mark(used: set[torch.Tensor], param: torch.Tensor, gradient: torch.Tensor) -> None:
    del gradient
    used.add(param)


def reduced_parameters(ddp: DistributedDataParallel) -> list[torch.Tensor]:
    """The parameters that DDP reduces, in its own order."""
    parameters: list[torch.Tensor] = ddp._build_params_for_reducer()[0]  # type: ignore[no-untyped-call]
    return parameters
