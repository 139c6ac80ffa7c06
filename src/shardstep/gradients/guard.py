"""What torch offers for `param.grad` does nothing on sharded gradients, silently: it is made right, or made to raise.

torch's functions skip a parameter without a gradient, and offer no place to object. So three of them are wrapped, once:
`model.zero_grad()` drops the shards too; clipping by norm and by value says what to call instead. The last is missed
where a program has imported `clip_grad_value_` by name before it called `shard`: it calls nothing that has a name.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad

_SCALING = "_clip_grads_with_norm_"  # called by clip_grad_norm_ with the parameters, as of torch 2.6
_BY_VALUE = "clip_grad_value_"
_MARK = "_knows_sharded_gradients"


class Owner(Protocol):
    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that torch's functions do not see."""

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None:
        """Somebody calls zero_grad() of a module with these parameters."""


_owners: weakref.WeakValueDictionary[int, Owner] = weakref.WeakValueDictionary()  # in the order of all ranks
_count = itertools.count()


def guard(owner: Owner) -> None:
    """From now on, torch's functions know of the gradients of `owner`."""
    _owners[next(_count)] = owner
    _wrap_once(nn.Module, "zero_grad", _dropping)
    for place, name in ((clip_grad, _SCALING), (utils, _SCALING.strip("_") + "_")):  # one function, known by two names
        _wrap_once(place, name, functools.partial(_refusing, "clip_grad_norm_"))
    for place in (clip_grad, utils):
        _wrap_once(place, _BY_VALUE, functools.partial(_refusing, _BY_VALUE))


def _wrap_once(place: Any, name: str, wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    function = getattr(place, name)
    if not hasattr(function, _MARK):
        wrapper = functools.wraps(function)(wrapped(function))
        setattr(wrapper, _MARK, True)
        setattr(place, name, wrapper)


def _dropping(zero_grad: Callable[..., None]) -> Callable[..., None]:
    def dropped(module: nn.Module, set_to_none: bool = True) -> None:
        params = list(module.parameters())
        for owner in list(_owners.values()):
            owner.zero_gradients_of(params, set_to_none)
        zero_grad(module, set_to_none)

    return dropped


def _refusing(name: str, clip: Callable[..., Any]) -> Callable[..., Any]:
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        if any(owner.holds_gradient_of(param) for owner in list(_owners.values()) for param in given):
            raise RuntimeError(
                f"these gradients are sharded over the ranks, and param.grad is None: torch.nn.utils.{name} would clip "
                f"nothing. Call {name} of the optimizer that shardstep.shard() returned, or pass "
                'config=ShardConfig(gradients="keep")'
            )
        return clip(given, *args, **kwargs)

    return checked
