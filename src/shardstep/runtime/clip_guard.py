"""torch.nn.utils.clip_grad_norm_ finds no `param.grad` on sharded gradients, and would silently clip nothing.

torch offers no place to say so: a parameter without a gradient is skipped. So the function that scales the gradients is
wrapped once, and asks whether one of the parameters it was given has its gradient in shards.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.nn.utils import clip_grad

_SCALING = "_clip_grads_with_norm_"  # called by clip_grad_norm_ with the parameters, as of torch 2.6
_MARK = "_refuses_sharded_gradients"
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def guard(owner: Any) -> None:
    """From now on, clipping parameters for which `owner.holds_gradient_of(param)` by torch's function raises."""
    _owners.add(owner)
    scale = getattr(clip_grad, _SCALING)
    if not hasattr(scale, _MARK):
        setattr(clip_grad, _SCALING, _refusing(scale))


def _refusing(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given: Iterable[torch.Tensor] = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(owner.holds_gradient_of(param) for owner in list(_owners) for param in given):
            raise RuntimeError(
                "these gradients are sharded over the ranks, and param.grad is None: torch.nn.utils.clip_grad_norm_ "
                "would clip nothing. Call clip_grad_norm_ of the optimizer that shardstep.shard() returned, or pass "
                'config=ShardConfig(gradients="keep")'
            )
        return scale(given, *args, **kwargs)

    setattr(checked, _MARK, True)
    return checked
