"""A gradient that lies in shards is not in `param.grad`, and whoever looks for it there is told so.

torch's functions skip a parameter without a gradient: clipping clips nothing, a norm is 0.0, a loop that scales
gradients scales none, and nobody hears of it. So while a model is sharded, its parameters are of a subclass of their
own class, whose `grad` raises where there is a gradient and it is elsewhere. `model.zero_grad()` asks for it first,
too: it is answered by dropping the shards. Nothing but sharded parameters is touched, and these are what they were when
the optimizer is closed. torch's GradScaler asks for it, too, and is told what it wants to know (scaling.py).
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn

_tensor: Any = torch.Tensor
gradient_of: Any = _tensor.grad.__get__  # what is in `param.grad`, whatever the class of the parameter
_data_of: Any = _tensor.data.__get__
_UNSCALES = torch.amp.GradScaler._unscale_grads_.__code__
_MARK = "_shardstep_guards_grad"


class Owner(Protocol):
    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that is not in `param.grad`."""

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None:
        """Somebody calls zero_grad() of a module with these parameters."""

    def shows_memory_of(self, param: torch.Tensor) -> None:
        """Somebody reads `param.data`, and may write to it: torch does not count such writes."""

    def gradient_to_unscale(self, param: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor | None:
        """What a GradScaler gets that asks for `param.grad`; `call` are the variables of the function that asks."""


_owner_of: dict[int, weakref.ref[Owner]] = {}  # by the identity of a parameter


def guard(owner: Owner, params: Iterable[torch.Tensor]) -> None:
    """From now on the gradients of `params` are looked for with `owner`."""
    for param in params:
        _owner_of[id(param)] = weakref.ref(owner)
        if not hasattr(type(param), _MARK):
            param.__class__ = _guarded(type(param))


def release(owner: Owner, params: Iterable[torch.Tensor]) -> None:
    """They are what they were, unless they have another owner by now."""
    for param in params:
        known = _owner_of.get(id(param))
        if known is not None and known() not in (owner, None):
            continue
        _owner_of.pop(id(param), None)
        guarded = next((kind for kind in type(param).__mro__ if _MARK in vars(kind)), None)
        if guarded is not None:
            param.__class__ = guarded.__base__  # type: ignore[assignment]


@functools.cache
def _guarded(kind: type) -> type:
    """The class of a parameter of class `kind` while it is sharded."""

    def get(self: torch.Tensor) -> torch.Tensor | None:
        gradient: torch.Tensor | None = gradient_of(self)
        owner = _owner_of.get(id(self))
        target = None if owner is None else owner()
        if target is None:
            return gradient
        caller = sys._getframe(1)
        if caller.f_code is _UNSCALES and caller.f_locals["optimizer"] is target:
            answer: torch.Tensor | None = target.gradient_to_unscale(self, caller.f_locals)
            return answer
        if gradient is None and target.holds_gradient_of(self):
            _look_elsewhere(target, caller)
        return gradient

    def get_data(self: torch.Tensor) -> Any:
        owner = _owner_of.get(id(self))
        target = None if owner is None else owner()
        if target is not None:
            target.shows_memory_of(self)
        return _data_of(self)

    def deep_copy(self: torch.Tensor, memo: Any) -> Any:
        """A copy is nobody's."""
        made: Any = kind.__deepcopy__(self, memo)  # type: ignore[attr-defined]
        if hasattr(type(made), _MARK):
            made.__class__ = kind
        return made

    def as_text(self: Any) -> str:
        """As what it is to its reader; torch would name the class."""
        now, self.__class__ = type(self), kind
        try:
            return repr(self)
        finally:
            self.__class__ = now

    grad = property(get, _tensor.grad.__set__, _tensor.grad.__delete__)

    def set_data(self: torch.Tensor, value: torch.Tensor) -> None:
        _tensor.data.__set__(self, value)
        owner = _owner_of.get(id(self))
        target = None if owner is None else owner()
        if target is not None:
            target.shows_memory_of(self)

    data = property(get_data, set_data)
    names = {
        "grad": grad,
        "data": data,
        "__deepcopy__": deep_copy,
        "__repr__": as_text,
        "__module__": kind.__module__,
        _MARK: True,
    }
    return type(kind)(kind.__name__, (kind,), names)


def _look_elsewhere(owner: Owner, caller: FrameType) -> None:
    """Somebody reads `param.grad`, and the gradient is in a shard."""
    if caller.f_code is nn.Module.zero_grad.__code__:
        module, set_to_none = caller.f_locals["self"], caller.f_locals["set_to_none"]
        owner.zero_gradients_of(list(module.parameters()), set_to_none)
    elif torch._guards.TracingContext.try_get() is None:  # the compiler looks, and does nothing with it
        named: FrameType | None = caller
        while named is not None and named.f_code.co_name.startswith("<") and named.f_back is not None:
            named = named.f_back  # a comprehension is no name that a reader knows
        reader = caller.f_code.co_name if named is None else named.f_code.co_name
        raise RuntimeError(
            f"param.grad is None, and {reader} reads it: backward has reduced this gradient to shards, "
            "one for each rank. Use clip_grad_norm_(), clip_grad_value_() or grad_norms() of the optimizer that "
            'shardstep.shard() returned; or pass config=ShardConfig(gradients="keep"), and param.grad is the mean'
        )
