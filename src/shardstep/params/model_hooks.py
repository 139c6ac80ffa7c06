"""Hooks on the modules of a sharded model, which copies of the model do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class ModelHook:
    """A hook that is copied and pickled as one that does nothing.

    A copy of the model has no weights to wait for and no gradients to reduce. A local function, as hooks often are,
    would keep the model from being pickled at all.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Nothing, ())

    @property
    def __name__(self) -> str:
        """torch.jit.script asks for it: it compiles hooks, and takes functions only."""
        raise RuntimeError(
            "torch.jit.script cannot compile a model with the hooks of shardstep.shard(...), nor a copy of one: call "
            "opt.close() first, or load its state_dict() into a model that was never sharded; torch.jit.trace takes it"
        )


class _Nothing(ModelHook):
    """A hook that does nothing, before a forward or after it."""

    def __call__(self, *_: Any) -> None:
        return None


def hook_first(module: nn.Module, hook: Callable[[nn.Module, Any], None]) -> RemovableHandle:
    """Register a forward pre-hook that runs before those that `module` has.

    `prepend=True` changes the order in which hooks run, but not the order of the dict that they were put into. The
    compiler of torch 2.11 goes by that one, and looks for the attributes of one hook in another.
    """
    handle = module.register_forward_pre_hook(hook)
    hooks = module._forward_pre_hooks
    for key in list(hooks)[:-1]:
        hooks[key] = hooks.pop(key)
    return handle
