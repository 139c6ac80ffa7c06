"""From autograd to the pass: which gradient is there, and when a backward pass is over.

[Note: the outermost pass] The end of a pass is a callback that autograd runs for the graph on which it was queued. With
reentrant checkpointing a backward pass runs others inside itself, and a callback queued from a parameter's hook would
end with the inner one, too early. So it is queued when the gradient of the model's output comes, which is always in the
outermost; from a parameter's hook only where the loss does not go through the model's forward.

[Note: passes that raise] A pass that raises runs no callback, and the other ranks wait for the rest of its messages. So
it is ended by the next call that could wait for them. Autograd drops its callbacks when it is done with a pass, whether
that raised or not: as long as the callback is alive the pass runs, perhaps in another thread. A forward ends a pass of
its own thread only; other threads may call the model at any time.
"""

from __future__ import annotations

import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from shardstep.comm.call_order import CallOrder
from shardstep.gradients.inside_ddp import refuse_inside_ddp
from shardstep.gradients.passes import GradientPass
from shardstep.params.model_hooks import ModelHook

# Seconds: autograd's thread of a device may drop a pass that raised a moment after the caller has its error.
PATIENCE = 5.0


class BackwardHooks:
    """Tells `current` of the gradients of `params`, by their place; `done` is called at the end of a reduced pass."""

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[torch.Tensor],
        current: GradientPass,
        call_order: CallOrder,
        done: Callable[[], None] | None,
    ) -> None:
        self._pass, self._call_order = current, call_order
        self._done = done
        # autograd's, at the end of the pass: see [Note: passes that raise]
        self._callback: weakref.ref[Any] | None = None
        self._thread = 0  # that of the forward which the pass goes back through
        self._handles: list[RemovableHandle] = []
        try:
            self._register(model, params)
        except BaseException:
            self.remove()  # or those that are there would reduce the passes of whatever comes after
            raise

    def _register(self, model: nn.Module, params: Sequence[torch.Tensor]) -> None:
        """The hooks live as long as the parameters; a reference to this object would keep it alive as long."""
        me = weakref.ref(self)
        act, order = _when_ready(me), self._pass.order
        for place, param in enumerate(params):
            if param.requires_grad:
                hook = order.hook(place, act)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._handles.append(model.register_forward_pre_hook(_BeforeCall(me)))
        self._handles.append(model.register_forward_hook(_AfterCall(me)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def ready(self, place: int) -> None:
        if self._call_order.syncs:
            self.arm(threading.get_ident())
            self._pass.ready(place)

    def output_came(self, thread: int) -> None:
        """The gradient of what the model has returned in `thread`: a backward pass has begun."""
        if self._call_order.syncs:
            self.arm(thread)

    def arm(self, thread: int) -> None:
        """Queue the end of the pass that runs now, and goes back through a forward of `thread`."""
        if self._has_raised():
            self._end_failed()  # no forward, and no call of ours, came after it
        if self._callback is None:
            callback = functools.partial(self._end)
            self._callback, self._thread = weakref.ref(callback), thread
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end(self) -> None:
        ended = self._pass.end_of_backward()
        self._callback = None  # not before: if the end raises, `recover` is to make another
        if ended and self._done is not None:
            self._done()

    def _end_failed(self) -> None:
        self._pass.end(failed=True)
        self._callback = None

    def recover(self) -> None:
        """Before anything is done with gradients: if a backward pass has raised half-way, end it."""
        if self._callback is None or in_backward():
            return
        self._wait_until_dropped(PATIENCE)
        if self._has_raised():
            self._end_failed()
        elif self._callback is not None:
            raise RuntimeError(
                "a backward pass of this model still runs in another thread: wait for it before step(), zero_grad() or "
                "any other call that uses gradients"
            )

    def before_forward(self) -> None:
        """The same, if it was a pass of this thread: what this forward does may make other ranks wait."""
        if self._callback is not None and self._thread == threading.get_ident() and not in_backward():
            self._wait_until_dropped(PATIENCE / 100)
            if self._has_raised():
                self._end_failed()

    def _has_raised(self) -> bool:
        callback = self._callback
        return callback is not None and callback() is None

    def _wait_until_dropped(self, patience: float) -> None:
        until = time.monotonic() + patience
        while self._callback is not None and not self._has_raised() and time.monotonic() < until:
            time.sleep(0.0005)


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _when_ready(hooks: weakref.ref[BackwardHooks]) -> Callable[[int], None]:
    def ready(place: int) -> None:
        target = hooks()
        if target is not None:
            target.ready(place)

    return ready


class _BeforeCall(ModelHook):
    def __init__(self, hooks: weakref.ref[BackwardHooks]) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        del inputs
        target = None if torch.compiler.is_compiling() else self._hooks()
        if target is not None:
            target.before_forward()
            if DistributedDataParallel._active_ddp_module is not None:
                refuse_inside_ddp(module)


class _AfterCall(ModelHook):
    """When the gradient of what the model returned comes, a backward pass has begun: see [Note: the outermost pass]."""

    def __init__(self, hooks: weakref.ref[BackwardHooks]) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        if torch.compiler.is_compiling():  # it takes no hooks on what it computes; the parameters' own will do
            return
        for leaf in torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(functools.partial(self._arm, threading.get_ident()))  # type: ignore[no-untyped-call]

    def _arm(self, thread: int, gradient: torch.Tensor) -> None:
        del gradient
        target = self._hooks()
        if target is not None:
            target.output_came(thread)
