"""The class of a sharded parameter: it answers what the parameter cannot know by itself.

While a model is sharded, each of its parameters is of a subclass of its own class, which is made here; when the
optimizer is closed, it has its own class again. Other parameters, torch's functions and modules are not touched.

[Note: gradients in shards] torch's functions skip a parameter without a gradient: clipping clips nothing, a norm is
0.0, a loop that scales gradients scales none, and nobody notices. So reading `grad` raises where there is a gradient
and it lies in shards. `model.zero_grad()` reads it too, and drops the shards; a GradScaler reads it, and is answered
(gradients/grad_scaler.py). `data` is reported to the optimizer, because torch does not count what is written to it.

[Note: weights in flight] While a parameter's values arrive, its class also has a `__torch_function__`, which torch
calls before it does anything with the parameter: it waits for the values. So forward, state_dict, load_state_dict,
averages of weights, copies and norms find finished weights, and no program needs to know that they were in flight. It
is a second class because a `__torch_function__` costs microseconds at every use, and because the compiler compares
classes. What torch does not ask about, weight_arrival.py waits for.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardstep.params.pending_gathers import in_flight_lock
from shardstep.torch_internals import frame_at, name_of, variables_of_unscale, variables_of_zero_grad

_tensor: Any = torch.Tensor
gradient_of: Any = _tensor.grad.__get__  # what is in `param.grad`, whatever the class of the parameter
_data_of: Any = _tensor.data.__get__
# What can be asked of a parameter whose values are in flight.
_NEEDS_NO_VALUES = {
    getattr(_tensor, name).__get__
    for name in ("grad", "requires_grad", "shape", "dtype", "device", "layout", "is_leaf", "grad_fn", "is_cuda")
} | {
    _tensor.grad.__set__,
    _tensor.requires_grad.__set__,
    _tensor.numel,
    _tensor.dim,
    _tensor.size,
    _tensor.is_floating_point,
    _tensor.is_complex,
}


class ProxyOwner(Protocol):
    """The optimizer that has sharded a parameter."""

    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        """Return whether `param` has a gradient that is not in `param.grad`."""

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None:
        """Called when zero_grad() of a module with these parameters is called."""

    def shows_memory_of(self, param: torch.Tensor) -> None:
        """Called when `param.data` is read or set; a reader may write to it."""

    def gradient_to_unscale(self, param: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the gradient of `param` for a GradScaler; `call` are the variables of its function."""


class WeightSource(Protocol):
    """Delivers the values of parameters that are in flight."""

    def wait_for(self, params: Iterable[Any]) -> None:
        """Return when no value of `params` is in flight; anything else among them is ignored."""

    def wait_for_all(self) -> None:
        """Return when nothing is in flight."""


@dataclass(slots=True)
class _Proxied:
    owner: weakref.ref[ProxyOwner]
    source: weakref.ref[WeightSource] | None = None  # who has set it in flight last


_proxied: dict[int, _Proxied] = {}  # by the identity of the parameter
_nobody: Any = weakref.ref(set())


def attach_proxies(owner: ProxyOwner, params: Iterable[torch.Tensor]) -> None:
    """From now on `owner` answers for these parameters."""
    for param in params:
        _proxied[id(param)] = _Proxied(weakref.ref(owner))
        if not isinstance(param, _Proxy):
            param.__class__ = _proxy_class(_Proxy, type(param))


def detach_proxies(owner: ProxyOwner, params: Iterable[torch.Tensor]) -> None:
    """Give parameters their own class back, unless they have another owner by now."""
    for param in params:
        known = _proxied.get(id(param))
        if known is not None and known.owner() not in (owner, None):
            continue
        _proxied.pop(id(param), None)
        if isinstance(param, _Proxy):
            param.__class__ = param._shardstep_own_class


def set_in_flight(param: Any, source: WeightSource) -> None:
    """From now on whatever uses `param` waits for `source`. The caller holds the lock."""
    # Another optimizer may have taken the proxy of a frozen parameter that both have, and was closed since; or this one
    # was closed inside ema(). Then nobody answers for its gradient, and its values are in flight all the same.
    _proxied.setdefault(id(param), _Proxied(_nobody)).source = weakref.ref(source)
    own = param._shardstep_own_class if isinstance(param, _Proxy) else type(param)
    param.__class__ = _proxy_class(_InFlight, own)


def set_at_rest(param: Any) -> None:
    """From now on `param` is used without waiting. The caller holds the lock: another thread may do the opposite."""
    if is_in_flight(param):
        known, own = _proxied.get(id(param)), param._shardstep_own_class
        has_owner = known is not None and known.owner() is not None
        param.__class__ = _proxy_class(_Proxy, own) if has_owner else own


def is_in_flight(value: object) -> bool:
    return issubclass(type(value), _InFlight)


@functools.cache
def _proxy_class(methods: type[_Proxy], own: type) -> type:
    """Return the class of a parameter whose own class is `own`, by whose name it goes."""
    return type(own)(own.__name__, (methods, own), {"__module__": own.__module__, "_shardstep_own_class": own})


class _Proxy:
    """What a sharded parameter does otherwise than its own class does."""

    __slots__ = ()
    _shardstep_own_class: type

    def _read_grad(self: Any) -> torch.Tensor | None:
        gradient: torch.Tensor | None = gradient_of(self)
        known = _proxied.get(id(self))
        owner = None if known is None else known.owner()
        if owner is None:
            return gradient
        reader = frame_at(1)
        unscale = variables_of_unscale(reader, owner)
        if unscale is not None:
            return owner.gradient_to_unscale(self, unscale)
        if gradient is None and owner.holds_gradient_of(self):
            zero_grad = variables_of_zero_grad(reader)
            if zero_grad is not None:
                owner.zero_gradients_of(list(zero_grad["self"].parameters()), zero_grad["set_to_none"])
            elif torch._guards.TracingContext.try_get() is None:  # the compiler reads it, and does nothing with it
                raise RuntimeError(
                    f"param.grad is None, and {name_of(reader)} reads it: backward has reduced this gradient to "
                    "shards, one for each rank. Use clip_grad_norm_(), clip_grad_value_() or grad_norms() of the "
                    'optimizer that shardstep.shard() returned; or pass config=ShardConfig(gradients="keep"), and '
                    "param.grad is the mean"
                )
        return gradient

    grad = property(_read_grad, _tensor.grad.__set__, _tensor.grad.__delete__)

    @property
    def data(self: Any) -> Any:
        _report_memory(self)
        return _data_of(self)

    @data.setter
    def data(self: Any, value: torch.Tensor) -> None:
        _tensor.data.__set__(self, value)
        _report_memory(self)

    def __deepcopy__(self: Any, memo: Any) -> Any:
        """A copy belongs to no optimizer."""
        _wait_for(self)  # torch looks for this method before it looks at values
        own = self._shardstep_own_class
        copied = own.__deepcopy__(self, memo)
        if isinstance(copied, _Proxy):
            copied.__class__ = own
        return copied

    def __repr__(self: Any) -> str:
        """As a parameter of its own class is shown: of a subclass torch would write the name, too."""
        _wait_for(self)
        shown = self.detach().requires_grad_(self.requires_grad)
        shown.__class__ = self._shardstep_own_class
        vars(shown).update(vars(self))
        return repr(shown)


class _InFlight(_Proxy):
    """The same while values arrive: see [Note: weights in flight]."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own: Any = cls._shardstep_own_class
        is_plain = own.__torch_function__ is torch._C._disabled_torch_function_impl
        if is_plain and func in _NEEDS_NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        in_flight = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if is_in_flight(leaf)]
        for param in in_flight:
            _wait_for(param)  # if it is in flight again after this, func asks again
        if not in_flight:
            _wait_for_all()  # it is hidden in an argument of a kind that is not known here
        return func(*args, **kwargs)


def _report_memory(param: torch.Tensor) -> None:
    known = _proxied.get(id(param))
    owner = None if known is None else known.owner()
    if owner is not None:
        owner.shows_memory_of(param)


def _wait_for(param: Any) -> None:
    """Return when the values of `param` are there. If its optimizer is gone, nobody delivers them any more."""
    if not is_in_flight(param):
        return
    source = _source_of(param)
    if source is not None:
        source.wait_for([param])
    with in_flight_lock:  # a thread that has received the values holds it until all classes are changed
        if _source_of(param) is None:
            set_at_rest(param)


def _source_of(param: object) -> WeightSource | None:
    known = _proxied.get(id(param))
    return None if known is None or known.source is None else known.source()


def _wait_for_all() -> None:
    for source in {known.source() for known in list(_proxied.values()) if known.source is not None} - {None}:
        source.wait_for_all()  # type: ignore[union-attr]
