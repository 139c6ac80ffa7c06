"""Hooks of autograd: they report which gradient is ready, and when a backward pass has ended.

[Note: the outermost pass] The end of a pass is a callback that autograd runs for the graph on which it was queued. With
reentrant checkpointing a backward pass runs others inside itself, and a callback queued from a parameter's hook would
run when the inner one ends, too early. So it is queued when the gradient of the model's output is computed, which is
always in the outermost pass; from a parameter's hook only if the loss does not depend on the model's output.

[Note: passes that raise] A pass that raises runs no callback, and the other ranks wait for the rest of its messages. So
it is ended by the next call that could wait for these ranks. Autograd drops its callbacks when it is done with a pass,
whether that raised or not: as long as the callback is alive the pass runs, perhaps in another thread. A forward ends a
pass of its own thread only; other threads may call the model at any time.
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

# Seconds: the caller may have its error a moment before autograd's thread of a device drops the pass that raised.
PATIENCE = 5.0


class BackwardHooks:
    """Reports gradients of `params` to `current` by their index; calls `done` at the end of a pass that is reduced."""

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
        # What autograd calls at the end of the pass: see [Note: passes that raise].
        self._callback: weakref.ref[Any] | None = None
        self._thread = 0  # the one that ran the forward of this pass
        self._handles: list[RemovableHandle] = []
        try:
            self._register(model, params)
        except BaseException:
            self.remove()  # the hooks that are registered would reduce later passes
            raise

    def _register(self, model: nn.Module, params: Sequence[torch.Tensor]) -> None:
        """Register hooks that hold this object weakly: they live as long as the parameters."""
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
        """Called when a gradient completes a bucket, or may be the first of a pass."""
        if self._call_order.syncs:
            self.arm(threading.get_ident())
            self._pass.ready(place)

    def begin(self, thread: int) -> None:
        """Called when a backward pass reaches the output of a forward that ran in `thread`."""
        if self._call_order.syncs:
            self.arm(thread)

    def arm(self, thread: int) -> None:
        """Queue a callback for the end of the pass that runs now, whose forward ran in `thread`."""
        if self._has_raised():
            self._end_failed()  # neither a forward nor a call of ours came after it
        if self._callback is None:
            callback = functools.partial(self._end)
            self._callback, self._thread = weakref.ref(callback), thread
            torch.autograd.Variable._execution_engine.queue_callback(callback)

    def _end(self) -> None:
        ended = self._pass.end_of_backward()
        self._callback = None  # not before: if the line above raises, `recover` ends the pass
        if ended and self._done is not None:
            self._done()

    def _end_failed(self) -> None:
        self._pass.end(failed=True)
        self._callback = None

    def recover(self) -> None:
        """End a backward pass that has raised. Called before anything is done with gradients."""
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
        """End a pass of this thread that has raised: other ranks would wait for it during this forward."""
        if self._callback is not None and self._thread == threading.get_ident() and not in_backward():
            self._wait_until_dropped(PATIENCE / 100)
            if self._has_raised():
                self._end_failed()

    def _has_raised(self) -> bool:
        callback = self._callback
        return callback is not None and callback() is None

    def _wait_until_dropped(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while self._callback is not None and not self._has_raised() and time.monotonic() < until:
            time.sleep(0.0005)


def in_backward() -> bool:
    """Return whether autograd runs a backward pass in this thread."""
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
    """Notices when a backward pass begins at what the model returned: see [Note: the outermost pass]."""

    def __init__(self, hooks: weakref.ref[BackwardHooks]) -> None:
        self._hooks = hooks

    def __call__(self, module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        if torch.compiler.is_compiling():  # it takes no hooks on what it computes; those of parameters suffice
            return
        for leaf in torch.utils._pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(functools.partial(self._begin, threading.get_ident()))  # type: ignore[no-untyped-call]

    def _begin(self, thread: int, gradient: torch.Tensor) -> None:
        del gradient
        target = self._hooks()
        if target is not None:
            target.begin(thread)
