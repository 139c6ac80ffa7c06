"""Weights that are on their way: whatever touches one waits for it.

[Note: touching] While its values arrive, a parameter is of a subclass of its own class, of which torch asks
`__torch_function__` before it does anything with it: that waits, and makes the parameter what it was. So forward,
state_dict, load_state_dict, averages of weights, copies and norms find finished weights, and no program needs to know
that they were on their way. What torch does not ask about:

- an extension in C++ that is handed a parameter: before a module's forward its parameters are waited for, too, and
  before hooks that were there already (weight_norm, spectral_norm and pruning compute weights in theirs);
- compiled code, which reads memory: modules that were compiled in place, and a model compiled by `opt.compile()`, wait
  for what they read (compiled.py); where other compiled or traced code is met, `step` waits from then on;
- a tensor that was made before the step and shares a parameter's memory: docs/limits.md.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from shardstep.params.compiled import cover_compiled, uncover
from shardstep.params.model_hooks import ModelHook, hook_first
from shardstep.params.pending_gathers import books

_is_tracing: Callable[[], bool] = torch.jit._trace.is_tracing
_of_param: dict[int, weakref.ref[WeightArrivals]] = {}  # by the identity of a parameter that is on its way
_MARK = "_shardstep_is_on_its_way"
_everyone: weakref.WeakSet[WeightArrivals] = weakref.WeakSet()

_tensor: Any = torch.Tensor
# What can be asked of a parameter that is on its way.
_NO_VALUES = {
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


class Readers:
    """Who reads weights without asking. Compiled code can set this, where it cannot call us."""

    def __init__(self) -> None:
        self.compiled = False
        self.traced = False
        self.in_regions = False  # the model is compiled by `opt.compile()`, whose regions wait
        self.told = False  # the program was; a new plan is no reason to tell it again

    def name(self) -> str | None:
        return "torch.compile" if self.compiled else "torch.jit.trace or a CUDA graph" if self.traced else None


class WeightArrivals:
    """Of one plan. `buckets_of` are those of each parameter; `wait` waits for buckets, and calls `landed`."""

    def __init__(
        self,
        model: nn.Module,
        buckets_of: Mapping[torch.Tensor, Sequence[int]],
        wait: Callable[[Sequence[int]], None],
        wait_for_all: Callable[[], None],
        readers: Readers,
    ) -> None:
        self._buckets_of = {id(param): buckets for param, buckets in buckets_of.items()}
        self._param_of = {id(param): param for param in buckets_of}
        self._params_of: dict[int, list[torch.Tensor]] = {}
        for param, buckets in buckets_of.items():
            for bucket in buckets:
                self._params_of.setdefault(bucket, []).append(param)
        self._missing: dict[int, set[int]] = {}  # of a parameter on its way: the buckets that have not landed
        self._wait, self._wait_for_all = weakref.WeakMethod(wait), weakref.WeakMethod(wait_for_all)
        self._readers = readers
        self._model = weakref.ref(model)
        self._covered: list[nn.Module] = []  # compiled in place: they wait before they are called
        self._in_compiled: list[int] = []  # threads inside code whose weights are waited for
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            readers.traced = True
        self._hooks = self._hook(model, buckets_of)
        _everyone.add(self)
        self._cover_compiled()

    def _hook(
        self, model: nn.Module, buckets_of: Mapping[torch.Tensor, Sequence[int]]
    ) -> dict[nn.Module | None, RemovableHandle]:
        """A module with parameters of its own may use those of modules inside it without calling them
        (nn.MultiheadAttention does): it waits for theirs too."""
        before_all = _BeforeModel(self._wait_for_all, self._readers)
        hooks: dict[nn.Module | None, RemovableHandle] = {None: hook_first(model, before_all)}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)) and not isinstance(module, torch.jit.ScriptModule):
                needed = sorted({bucket for param in module.parameters() for bucket in buckets_of.get(param, ())})
                before_use = _BeforeUse(self._wait, needed, self._readers)
                hooks[module] = hook_first(module, before_use)
        return hooks

    def _cover_compiled(self) -> bool:
        """Let modules that were compiled in place wait before their code runs; return whether there are new ones.

        Before that code is traced: hooks would be traced with it, and taking them away compiles it again.
        """
        model = self._model()
        found = [] if model is None else cover_compiled(model, weakref.ref(self))
        for module in {inner for outer in found for inner in outer.modules()}:
            if module in self._hooks:
                self._hooks.pop(module).remove()
        self._covered += found
        return bool(found)

    def remove(self) -> None:
        """Nothing is on its way any more."""
        uncover(self._covered)
        for handle in self._hooks.values():
            handle.remove()
        self.landed(list(self._params_of))

    @property
    def has_readers_that_do_not_ask(self) -> bool:
        """Then weights must have arrived when `step` returns."""
        name = self._readers.name()
        if name is not None and not self._readers.told:
            self._readers.told = True
            warnings.warn(
                f'gather="overlap" hides nothing here: {name} reads weights without asking whether they have arrived, '
                'so step() waits for them, as with gather="wait". Compile the model by opt.compile(), or block by '
                "block: for block in model.blocks: block.compile()",
                stacklevel=2,
            )
        return name is not None

    def begin(self, buckets: Iterable[int]) -> None:
        """These are on their way."""
        _watch_the_compiler()
        with books:
            for bucket in buckets:
                for param in self._params_of.get(bucket, ()):
                    if id(param) not in self._missing:
                        self._missing[id(param)] = set()
                        _of_param[id(param)] = weakref.ref(self)
                        param.__class__ = _arriving(type(param))
                    self._missing[id(param)].add(bucket)

    def landed(self, buckets: Iterable[int]) -> None:
        """What is done from now on finds their values."""
        with books:
            for bucket in buckets:
                for param in self._params_of.get(bucket, ()):
                    missing = self._missing.get(id(param))
                    if missing is None:
                        continue
                    missing.discard(bucket)
                    if not missing:
                        _has_arrived(param)
                        del self._missing[id(param)], _of_param[id(param)]

    def finish(self) -> None:
        """Wait for all weights, and for nothing else."""
        wait = self._wait()
        if wait is not None:
            wait(list(self._params_of))

    def touch(self, param: torch.Tensor) -> None:
        wait = self._wait()
        if wait is None:  # the optimizer is gone, and whatever arrives is nobody's
            self.landed(list(self._params_of))
        else:
            wait(self._buckets_of[id(param)])

    def __del__(self) -> None:
        """The optimizer is gone. What arrives goes on arriving, in memory that nobody else gets."""
        self.landed(list(self._params_of))

    def compiler_starts(self) -> None:
        """Code is compiled while weights are on their way: it may be code that uses them."""
        found = self._cover_compiled()
        if threading.get_ident() not in self._in_compiled and self._missing and not found:
            self._readers.compiled = True
        self.wait_for_all()

    # -- for compiled code ---------------------------------------------------------------------------------------------

    def wait_for(self, params: Sequence[Any]) -> None:
        wait = self._wait()
        if self._missing and wait is not None:
            wait(sorted({bucket for param in params for bucket in self._missing.get(id(param), ())}))

    def wait_for_all(self) -> None:
        wait_for_all = self._wait_for_all()
        if self._missing and wait_for_all is not None:
            wait_for_all()

    def hand_over(self) -> None:
        with books:
            for place in self._missing:
                _has_arrived(self._param_of[place])

    def run_compiled(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        self._in_compiled.append(thread)
        try:
            return call(*args, **kwargs)
        finally:
            self._in_compiled.remove(thread)


@functools.cache
def _arriving(kind: type) -> type:
    """The class of a parameter of class `kind` while it is on its way."""
    is_plain = kind.__torch_function__ is torch._C._disabled_torch_function_impl  # type: ignore[attr-defined]

    def wait_and_call(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del cls, types
        if is_plain and func in _NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        _touch_all(torch.utils._pytree.tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))

    def deep_copy(self: Any, memo: Any) -> Any:
        """torch asks a parameter's class before it looks at its values: a copy would be on its way for ever."""
        _touch_all([self])
        return copy.deepcopy(self, memo)

    def as_text(self: Any) -> str:
        _touch_all([self])
        return repr(self)

    names = {"__torch_function__": classmethod(wait_and_call), "__deepcopy__": deep_copy, "__repr__": as_text}
    return type(kind)(kind.__name__, (kind,), {**names, "__module__": kind.__module__, _MARK: True})


def _has_arrived(param: Any) -> None:
    """Called with the books in hand: another thread may be about to do the same, or the opposite."""
    if _MARK in vars(type(param)):
        param.__class__ = type(param).__base__


def _touch_all(leaves: Sequence[Any]) -> None:
    """Whatever they are, none of them is on its way after this."""
    arriving = [leaf for leaf in leaves if hasattr(type(leaf), _MARK)]
    for leaf in arriving:
        arrivals = _of_param.get(id(leaf))
        target = None if arrivals is None else arrivals()
        if target is not None:
            target.touch(leaf)  # if it is on its way again after this, whoever uses it is asked again
        else:
            _forget(leaf)
    if not arriving:  # it is hidden in an argument of a kind that we do not know: all of them
        for everyone in list(_everyone):
            everyone.compiler_starts()


def _forget(param: Any) -> None:
    """Its optimizer is gone; or it has arrived just now, in another thread."""
    with books:
        arrivals = _of_param.get(id(param))
        if arrivals is None or arrivals() is None:
            _has_arrived(param)


class _BeforeUse(ModelHook):
    """Before a module's forward its parameters have arrived."""

    def __init__(self, wait: weakref.ref[Any], buckets: Sequence[int], readers: Readers) -> None:
        self._wait, self._buckets, self._readers = wait, buckets, readers

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        if torch.compiler.is_compiling():
            if not self._readers.in_regions:
                self._readers.compiled = True
            return
        wait = self._wait()
        if wait is not None:
            wait(self._buckets)


class _BeforeModel(ModelHook):
    """Without gradients, as in an evaluation, kernels of torch's own take many parameters at once: all have arrived."""

    def __init__(self, wait_for_all: weakref.ref[Any], readers: Readers) -> None:
        self._wait_for_all, self._readers = wait_for_all, readers

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        if torch.compiler.is_compiling():
            if not self._readers.in_regions:
                self._readers.compiled = True
            return
        _watch_the_compiler()
        if _is_tracing() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            self._readers.traced = True
        wait_for_all = self._wait_for_all()
        if wait_for_all is not None and (self._readers.traced or not torch.is_grad_enabled()):
            wait_for_all()


def _finish_before_fork() -> None:
    """A forked process has no peers, and no weight must be on its way there."""
    for arrivals in list(_everyone):
        with suppress(Exception):  # who reads a weight after this, here, is told
            arrivals.finish()
    books.acquire()  # no other thread has them: it would not be there to put them back


def _put_books_back() -> None:
    books.release()


os.register_at_fork(before=_finish_before_fork, after_in_parent=_put_books_back, after_in_child=_put_books_back)


def _compiler_starts(*_: Any) -> None:
    for arrivals in list(_everyone):
        arrivals.compiler_starts()


def _watch_the_compiler() -> None:
    """Where a program has loaded the compiler: it is told before code is compiled."""
    watching = sys.modules.get("torch._dynamo.callback")
    handler = getattr(watching, "callback_handler", None)
    if handler is not None and _compiler_starts not in handler.start_callbacks:
        handler.register_start_callback(_compiler_starts)
