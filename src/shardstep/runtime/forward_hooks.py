"""What happens round a module's forward: weights that are still arriving are waited for, and buffers follow rank 0."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardstep.runtime.collectives import Channel, broadcast_tensors


class BufferSync:
    """Module buffers, as DistributedDataParallel keeps them: rank 0's, before a forward that follows a training one."""

    def __init__(self, channel: Channel, model: nn.Module, syncs: Callable[[], bool]) -> None:
        self._channel = channel
        self._model = weakref.ref(model)
        self._syncs = syncs
        self._due = True
        self._handle = model.register_forward_pre_hook(_calling(self.before_forward))

    def before_forward(self) -> None:
        model = self._model()
        if model is None:
            return
        buffers = list(model.buffers())
        if self._due and buffers and self._channel.world_size > 1:
            with torch.no_grad():
                broadcast_tensors(self._channel, buffers, source=0)
        self._due = torch.is_grad_enabled() and self._syncs()


def wait_before_use(
    model: nn.Module,
    buckets_of: Mapping[torch.Tensor, Sequence[int]],
    wait: Callable[[Sequence[int]], None],
    wait_for_all: Callable[[], None],
) -> list[RemovableHandle]:
    """Before a module's forward wait for the buckets of its own parameters, and before its state_dict for all."""
    handles: list[RemovableHandle] = []
    waiting, waiting_for_all = weakref.WeakMethod(wait), weakref.WeakMethod(wait_for_all)
    for module in model.modules():
        needed = sorted({bucket for param in module.parameters(recurse=False) for bucket in buckets_of.get(param, ())})
        if needed:
            handles.append(module.register_forward_pre_hook(_waiting(waiting, needed)))
            before_reading = _calling_weakly(waiting_for_all)
            handles.append(module.register_state_dict_pre_hook(before_reading))  # type: ignore[no-untyped-call]
    return handles


def _waiting(wait: weakref.ref[Any], buckets: Sequence[int]) -> Callable[[nn.Module, Any], None]:
    def before_forward(module: nn.Module, inputs: Any) -> None:
        del module, inputs
        target = wait()
        if target is not None:
            target(buckets)

    return before_forward


def _calling_weakly(target: weakref.ref[Any]) -> Callable[..., None]:
    def call(*_: Any) -> None:
        found = target()
        if found is not None:
            found()

    return call


def _calling(method: Callable[[], None]) -> Callable[[nn.Module, Any], None]:
    weak = weakref.WeakMethod(method)

    def call(module: nn.Module, inputs: Any) -> None:
        del module, inputs
        found = weak()
        if found is not None:
            found()

    return call
