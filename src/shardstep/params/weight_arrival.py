"""When weights in flight are waited for, with gather="overlap": whatever uses one finds it finished.

Most uses are seen by the parameters themselves (proxy.py). torch does not ask a parameter where it is used by

- an extension in C++ that is handed a parameter: before a module's forward its parameters are waited for, too, and
  before hooks that were there already (weight_norm, spectral_norm and pruning compute weights in theirs);
- compiled code, which reads memory: modules that were compiled in place, and a model compiled by `opt.compile()`, wait
  for what they read (compiled.py); where other compiled or traced code is met, `step` waits from then on;
- a tensor that was made before the step and shares a parameter's memory: docs/limits.md.
"""

from __future__ import annotations

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
from shardstep.params.pending_gathers import in_flight_lock
from shardstep.params.proxy import set_at_rest, set_in_flight

_is_tracing: Callable[[], bool] = torch.jit._trace.is_tracing
_all_arrivals: weakref.WeakSet[WeightArrivals] = weakref.WeakSet()


class Readers:
    """Which code reads weights without asking whether they have arrived."""

    def __init__(self) -> None:
        self.compiled = False
        self.traced = False
        self.in_regions = False  # the model is compiled by `opt.compile()`, whose regions wait
        self.is_warned = False  # a new plan is no reason to warn again

    def name(self) -> str | None:
        return "torch.compile" if self.compiled else "torch.jit.trace or a CUDA graph" if self.traced else None

    def note_compiled(self) -> None:
        """A hook was called by the compiler, which traces it: setting an attribute is all that it can do here."""
        if not self.in_regions:
            self.compiled = True


class WeightArrivals:
    """Which buckets of weights are in flight, and which parameters of a plan wait for them.

    `wait` waits for buckets and has `landed` called with them; `wait_for_all` waits for all of them.
    """

    def __init__(
        self,
        model: nn.Module,
        buckets_of: Mapping[torch.Tensor, Sequence[int]],
        wait: Callable[[Sequence[int]], None],
        wait_for_all: Callable[[], None],
        readers: Readers,
    ) -> None:
        self._in_flight: set[int] = set()
        self._buckets_of = {id(param): buckets for param, buckets in buckets_of.items()}
        self._params_of: dict[int, list[torch.Tensor]] = {}
        for param, buckets in buckets_of.items():
            for bucket in buckets:
                self._params_of.setdefault(bucket, []).append(param)
        self._wait, self._wait_for_all = weakref.WeakMethod(wait), weakref.WeakMethod(wait_for_all)
        self._readers = readers
        self._model = weakref.ref(model)
        self._covered: list[nn.Module] = []  # compiled in place: they wait before they are called
        self._in_compiled: list[int] = []  # threads that run compiled code whose weights are waited for
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            readers.traced = True
        self._hooks = self._hook(model, buckets_of)
        _all_arrivals.add(self)
        self._cover_compiled()

    def _hook(
        self, model: nn.Module, buckets_of: Mapping[torch.Tensor, Sequence[int]]
    ) -> dict[nn.Module | None, RemovableHandle]:
        """Have each module with parameters of its own wait for them, and for those of modules inside it.

        It may use these without calling the modules, as nn.MultiheadAttention does.
        """
        before_all = _BeforeModel(self._wait_for_all, self._readers)
        hooks: dict[nn.Module | None, RemovableHandle] = {None: hook_first(model, before_all)}
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)) and not isinstance(module, torch.jit.ScriptModule):
                needed = sorted({bucket for param in module.parameters() for bucket in buckets_of.get(param, ())})
                before_use = _BeforeUse(self._wait, self._readers, needed)
                hooks[module] = hook_first(module, before_use)
        return hooks

    def _cover_compiled(self) -> bool:
        """Let modules that were compiled in place wait before their code runs; return whether there are new ones.

        Called before that code is traced: hooks would be traced with it, and removing them would compile it again.
        """
        model = self._model()
        found = [] if model is None else cover_compiled(model, weakref.ref(self))
        for module in {inner for outer in found for inner in outer.modules()}:
            if module in self._hooks:
                self._hooks.pop(module).remove()
        self._covered += found
        return bool(found)

    def remove(self) -> None:
        """Remove the hooks; no parameter is in flight any more."""
        uncover(self._covered)
        for handle in self._hooks.values():
            handle.remove()
        self.landed(list(self._in_flight))

    @property
    def has_readers_that_do_not_ask(self) -> bool:
        """Whether weights must have arrived when `step` returns."""
        name = self._readers.name()
        if name is not None and not self._readers.is_warned:
            self._readers.is_warned = True
            warnings.warn(
                f'gather="overlap" hides nothing here: {name} reads weights without asking whether they have arrived, '
                'so step() waits for them, as with gather="wait". Compile the model by opt.compile(), or block by '
                "block: for block in model.blocks: block.compile()",
                stacklevel=2,
            )
        return name is not None

    def begin(self, pending: Iterable[int]) -> None:
        """Set the parameters of these buckets in flight; another thread may be about to take some out of `pending`."""
        _watch_the_compiler()
        with in_flight_lock:
            sent = (self._params_of.keys() & pending) - self._in_flight
            self._in_flight |= sent
            for bucket in sent:
                for param in self._params_of[bucket]:
                    set_in_flight(param, self)

    def landed(self, buckets: Iterable[int]) -> None:
        """Set parameters at rest that wait for no other bucket: what is done from now on finds their values."""
        with in_flight_lock:
            finished = self._in_flight.intersection(buckets)
            self._in_flight -= finished
            for bucket in finished:
                for param in self._params_of[bucket]:
                    if self._in_flight.isdisjoint(self._buckets_of[id(param)]):
                        set_at_rest(param)

    def wait_for(self, params: Iterable[Any]) -> None:
        """Return when the values of `params` have arrived; anything else among them is ignored."""
        wait = self._wait()
        if wait is None:  # the optimizer is gone: nobody delivers them
            self.landed(list(self._in_flight))
        elif self._in_flight:
            wait(sorted({bucket for param in params for bucket in self._buckets_of.get(id(param), ())}))

    def wait_for_all(self) -> None:
        wait_for_all = self._wait_for_all()
        if self._in_flight and wait_for_all is not None:
            wait_for_all()

    def finish(self) -> None:
        """Wait for all weights, and not for the agreement whether all ranks have succeeded."""
        if (wait := self._wait()) is not None:
            wait(list(self._params_of))

    # -- for compiled code ---------------------------------------------------------------------------------------------

    def prepare_to_compile(self) -> None:
        """Called before code is compiled. If weights are in flight, it may be code that uses them."""
        found = self._cover_compiled()
        if threading.get_ident() not in self._in_compiled and self._in_flight and not found:
            self._readers.compiled = True
        self.wait_for_all()

    def hand_over(self) -> None:
        with in_flight_lock:
            for bucket in self._in_flight:
                for param in self._params_of[bucket]:
                    set_at_rest(param)

    def run_compiled(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        self._in_compiled.append(thread)
        try:
            return call(*args, **kwargs)
        finally:
            self._in_compiled.remove(thread)


class _BeforeUse(ModelHook):
    """Waits for weights before the forward of a module that uses them."""

    def __init__(self, wait: weakref.ref[Any], readers: Readers, *needed: Sequence[int]) -> None:
        self._wait, self._readers, self._needed = wait, readers, needed

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        del module, inputs
        if torch.compiler.is_compiling():
            self._readers.note_compiled()
        elif (wait := self._wait()) is not None:
            wait(*self._needed)


class _BeforeModel(_BeforeUse):
    """Waits for all weights if there are no gradients: in an evaluation torch has kernels that read many at once."""

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            _watch_the_compiler()
            if _is_tracing() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                self._readers.traced = True
            if torch.is_grad_enabled() and not self._readers.traced:
                return
        super().__call__(module, inputs)


def _finish_before_fork() -> None:
    """A forked process has no peers: no weight must be in flight there."""
    for arrivals in list(_all_arrivals):
        with suppress(Exception):  # it is raised where a weight is read after this, in the parent
            arrivals.finish()
    in_flight_lock.acquire()  # another thread that held it would not be there to release it


os.register_at_fork(
    before=_finish_before_fork, after_in_parent=in_flight_lock.release, after_in_child=in_flight_lock.release
)


def _prepare_all_to_compile(*_: Any) -> None:
    for arrivals in list(_all_arrivals):
        arrivals.prepare_to_compile()


def _watch_the_compiler() -> None:
    """Have `_prepare_all_to_compile` called before code is compiled, if the program has loaded the compiler."""
    loaded = sys.modules.get("torch._dynamo.callback")
    handler = getattr(loaded, "callback_handler", None)
    if handler is not None and _prepare_all_to_compile not in handler.start_callbacks:
        handler.register_start_callback(_prepare_all_to_compile)
