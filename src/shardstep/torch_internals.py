"""What torch has no argument, callback or hook for: read from frames of its functions, and set in one of its tables.

No other file inspects a frame or writes into a private table of torch. Every function here says why torch leaves no
other way. tests/params/test_torch_internals.py calls the functions of torch that are named here, and fails when one of
them has another name or other variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

Variables = Mapping[str, Any]  # of a running function, by name

# frame_at(1) is the frame of the function that called the one that asks: in a property, the reader.
frame_at: Callable[[int], FrameType] = sys._getframe


def variables_of_unscale(frame: FrameType, optimizer: object) -> Variables | None:
    """Return the variables of `frame` if it is a GradScaler that unscales the gradients of `optimizer`, or else None.

    The scaler reads `param.grad` of every parameter of the optimizer. An optimizer has no method that the scaler calls
    instead, and a property is not told who reads it. Variables that are used: inv_scale, found_inf, allow_fp16.
    """
    if frame.f_code is not torch.amp.GradScaler._unscale_grads_.__code__:
        return None
    variables = frame.f_locals
    return variables if variables["optimizer"] is optimizer else None


def variables_of_zero_grad(frame: FrameType) -> Variables | None:
    """Return the variables of `frame` if it is nn.Module.zero_grad, or else None.

    torch has hooks for forward, backward and state_dict of a module, and none for zero_grad. It may be called on the
    model, on a module inside it, or on one that holds the model. Variables that are used: self, set_to_none.
    """
    return frame.f_locals if frame.f_code is nn.Module.zero_grad.__code__ else None


def name_of(frame: FrameType) -> str:
    """Return the name of the function that `frame` runs, for an error; of a comprehension, the function around it."""
    named = frame
    while named.f_code.co_name.startswith("<") and named.f_back is not None:
        named = named.f_back
    return named.f_code.co_name


def is_init_optim_state(frame: FrameType) -> bool:
    """Return whether `frame` is torch.distributed.checkpoint's, which makes state by a step with gradients of zero.

    It reads `optimizer.state`, and if that is empty sets gradients and learning rates before it calls anything of the
    optimizer: an error that is raised later would leave these behind.
    """
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    return module is not None and frame.f_code is module._init_optim_state.__code__


def variables_of_join() -> Variables:
    """Return the variables of the torch Join that is being made.

    Join asks every optimizer for its hook and passes on the caller's keyword arguments alone: neither the other
    optimizers nor whether it is enabled. Variables that are used: self, joinables, enable.
    """
    frame: FrameType | None = frame_at(1)
    while frame is not None and frame.f_code is not Join.__init__.__code__:
        frame = frame.f_back
    if frame is None:
        raise RuntimeError("join_hook() is for torch.distributed.algorithms.join.Join to call")
    return frame.f_locals


def count_process_groups() -> int:
    """Return the number of process groups that this rank is in, as torch counts them."""
    return len(dist.distributed_c10d._world.pg_names)


_OWN_NUMBERS = 1_000_000  # from here on: torch does not get so far by counting


@contextmanager
def process_groups_counted_as(count: int) -> Iterator[None]:
    """Inside, torch counts `count` process groups, which are at least those that there are.

    new_group(use_local_synchronization=True) is the one call that only the group's members make. It names the group
    after its ranks and a count, and takes no name: up to torch 2.14 of the groups that this rank is in, then of those
    that it has made. Either may differ between ranks, which would then wait for each other under different names.
    """
    world: Any = dist.distributed_c10d._world
    names: dict[Any, Any] = world.pg_names
    added = {object(): f"shardstep/{number}" for number in range(count - len(names))}
    made = world.group_count
    names.update(added)
    world.group_count = _OWN_NUMBERS + count
    try:
        yield
    finally:
        world.group_count = made  # other calls name groups after it, on ranks that are not here
        for stand_in in added:
            del names[stand_in]
