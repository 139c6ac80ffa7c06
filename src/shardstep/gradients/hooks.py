"""From autograd to the pass: which gradient is there, and when a backward pass is over.

[Note: the outermost pass] The end of a pass is a callback that autograd runs for the graph on which it was queued. With
reentrant checkpointing a backward pass runs others inside itself, and a callback queued from a parameter's hook would
end with the inner one, too early. So it is queued when the gradient of the model's output comes, which is always in the
outermost; from a parameter's hook only where the loss does not go through the model's forward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from shardstep.gradients.passes import GradientPass
from shardstep.gradients.wrapped import refuse_inside_ddp
from shardstep.memory.model_hooks import ModelHook


class BackwardHooks:
    """Tells `current` of the gradients of `params`, by their place; `done` is called at the end of a reduced pass."""

    def __init__(
        self,
        model: nn.Module,
        params: Sequence[torch.Tensor],
        current: GradientPass,
        done: Callable[[], None] | None,
    ) -> None:
        self._pass = current
        self.syncs = True  # whether gradients are reduced now: not inside no_sync()
        self._done = done
        self._task: int | None = None  # autograd's, at whose end the pass ends
        # The hooks live as long as the parameters; a reference to this object would keep it alive as long.
        me = weakref.ref(self)
        act = _when_ready(me)
        self._handles: list[RemovableHandle] = [
            param.register_post_accumulate_grad_hook(current.order.hook(place, act))  # type: ignore[no-untyped-call]
            for place, param in enumerate(params)
            if param.requires_grad
        ]
        self._handles.append(model.register_forward_pre_hook(_BeforeCall(me)))
        self._handles.append(model.register_forward_hook(_AfterCall(me)))

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def ready(self, place: int) -> None:
        if self.syncs:
            self.arm()
            self._pass.ready(place)

    def arm(self) -> None:
        """Queue the end of the pass that runs now."""
        if self._task is None:
            self._task = torch._C._current_graph_task_id()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        ended = self._pass.end_of_backward()
        self._task = None  # not before: if the end raises, `recover` is to make another
        if ended and self._done is not None:
            self._done()

    def recover(self) -> None:
        """If a backward pass has raised half-way, end it: the other ranks wait for the rest of its messages."""
        if self._task is not None and not in_backward():
            self._pass.end(failed=True)
            self._task = None


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
            target.recover()
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
                leaf.register_hook(self._arm)  # type: ignore[no-untyped-call]

    def _arm(self, gradient: torch.Tensor) -> None:
        del gradient
        target = self._hooks()
        if target is not None and target.syncs:
            target.arm()
