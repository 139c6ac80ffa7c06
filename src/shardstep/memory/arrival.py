"""Weights that are still arriving are waited for before a module uses them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


def wait_before_use(
    model: nn.Module,
    buckets_of: Mapping[torch.Tensor, Sequence[int]],
    wait: Callable[[Sequence[int]], None],
    wait_for_all: Callable[[], None],
) -> list[RemovableHandle]:
    """Before a module's forward wait for the buckets of its parameters, and before its state_dict for all.

    Before hooks that were there already, too: weight_norm, spectral_norm and pruning compute weights in theirs.

    A module with parameters of its own may use those of modules inside it without calling them (nn.MultiheadAttention
    does): it waits for theirs too. Without gradients, as in an evaluation, the model waits for everything.
    """
    handles: list[RemovableHandle] = []
    handles.append(model.register_forward_pre_hook(_before_evaluation(weakref.WeakMethod(wait_for_all)), prepend=True))
    waiting, waiting_for_all = weakref.WeakMethod(wait), weakref.WeakMethod(wait_for_all)
    for module in model.modules():
        if not any(True for _ in module.parameters(recurse=False)):
            continue
        needed = sorted({bucket for param in module.parameters() for bucket in buckets_of.get(param, ())})
        if needed:
            handles.append(module.register_forward_pre_hook(_waiting(waiting, needed), prepend=True))
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


def _before_evaluation(wait_for_all: weakref.ref[Any]) -> Callable[[nn.Module, Any], None]:
    def before_forward(module: nn.Module, inputs: Any) -> None:
        del module, inputs
        target = wait_for_all()
        if target is not None and not torch.is_grad_enabled():
            target()

    return before_forward


def _calling_weakly(target: weakref.ref[Any]) -> Callable[..., None]:
    def call(*_: Any) -> None:
        found = target()
        if found is not None:
            found()

    return call
