"""Hooks that a model carries while it is sharded, and that its copies do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


class _Unscriptable:
    """An object that is a hook. torch.jit.script compiles hooks, and takes functions only: it asks for their name."""

    @property
    def __name__(self) -> str:
        raise RuntimeError(
            "torch.jit.script cannot compile a model with the hooks of shardstep.shard(...), nor a copy of one: call "
            "opt.close() first, or load its state_dict() into a model that was never sharded; torch.jit.trace takes it"
        )


class ModelHook(_Unscriptable):
    """A copy of the model, or one that was saved, has a hook in its place that does nothing.

    A function made inside another, as hooks often are, would keep the model from being pickled; and what a copy
    computes is not ours to wait for or to reduce.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Nothing, ())


def hook_first(module: nn.Module, hook: Callable[[nn.Module, Any], None]) -> RemovableHandle:
    """Before hooks that are there already.

    Not by `prepend=True`: that turns the order of the hooks, and not that in which their dict was filled, by which the
    compiler of torch 2.11 counts them; it then looks for the attributes of one hook in another.
    """
    handle = module.register_forward_pre_hook(hook)
    hooks = module._forward_pre_hooks
    for key in list(hooks)[:-1]:
        hooks[key] = hooks.pop(key)
    return handle


class _Nothing(_Unscriptable):
    """A hook that does nothing, before a forward or after it."""

    def __call__(self, *_: Any) -> None:
        return None
