"""Reports to a `Recorder` every collective, message and optimizer step that goes through torch.

It stands between torch and the program: at the methods of torch's process groups, which all calls of
`torch.distributed` come down to, and at a stand-in for the device's streams (stand_in_streams.py). It knows no name of
the package, so that a recording stays the same while the package is rewritten. What torch sends from C++ is not seen:
DDP's own all-reduces.

What Gloo cannot do is done here in its place, so that everything takes NCCL's way: calls that go to the backend in one
launch run one by one, and a collective that the program waits for later is over when the call returns, as if the
backend ran them in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import optim
from torch._C._distributed_c10d import Backend
from torch.distributed import distributed_c10d

from recorder import Recorder, flat_tensors
from stand_in_streams import stand_in_streams

# One name for what versions of torch name differently, by the method of torch's process group.
COLLECTIVES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "_allgather_base": "all_gather",
    "all_gather_single": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "allgather_into_tensor_coalesced": "all_gather together",
    "all_gather_single_coalesced": "all_gather together",
    "reduce_scatter_tensor_coalesced": "reduce_scatter together",
    "reduce_scatter_single_coalesced": "reduce_scatter together",
    "allreduce_coalesced": "all_reduce together",
    "allgather": "all_gather of lists",
    "allgather_coalesced": "all_gather of lists together",
    "reduce_scatter": "reduce_scatter of lists",
    "alltoall": "all_to_all of lists",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
STEPPED = (optim.AdamW, optim.SGD, optim.Adafactor, optim.Muon)  # classes whose steps are marked
MESSAGES = {"send": "send", "recv": "receive", "recv_anysource": "receive from any rank"}


class AsyncWork:
    """The backend's work of an asynchronous call; a wait for it, which is one of the current stream, is recorded."""

    def __init__(self, record: Recorder, work: Any, line: str) -> None:
        self._record, self._work, self._line = record, work, line

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        self._record.note(f"{self._record.streams.current_stream()} waits for: {self._line}")
        return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def is_control(target: type) -> bool:
    """Return whether calls of a group of this class belong to the control exchange.

    Hosts talk by Gloo's groups that are made for them alone, without one of torch's process groups round them: those
    carry parameters, gradients, norms and state. If hosts are to talk in another way, only this has to tell it.
    """
    return issubclass(target, Backend)


# -- hooks in torch ----------------------------------------------------------------------------------------------------


@contextmanager
def recorded(record: Recorder) -> Iterator[None]:
    """Record everything that goes through torch while this context is open."""
    with ExitStack() as stack:
        record.streams = stack.enter_context(stand_in_streams(record))
        for target in (dist.ProcessGroup, Backend):
            wrap = _controlling if is_control(target) else _carrying
            for method in (*COLLECTIVES, *MESSAGES):
                if hasattr(target, method):
                    hooked = wrap(record, method, getattr(target, method))
                    stack.enter_context(mock.patch.object(target, method, hooked))
        stack.enter_context(mock.patch.object(torch._C.Future, "wait", _waiting(record, torch._C.Future.wait)))
        stack.enter_context(mock.patch.object(dist, "new_group", _grouping(record, dist.new_group)))
        stack.enter_context(mock.patch.object(distributed_c10d, "_coalescing_manager", _launching(record)))
        for kind in STEPPED:
            stack.enter_context(mock.patch.object(kind, "step", _stepping(record, kind)))
        yield


def _carrying(record: Recorder, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        everything = (*args, *kwargs.values())
        if method in MESSAGES:
            peer = next((one for one in everything if isinstance(one, int)), -1)
            line = record.message(MESSAGES[method], group, flat_tensors(everything), peer)
            return AsyncWork(record, original(group, *args, **kwargs), line)
        line = record.collective(COLLECTIVES[method], group, everything)
        work = original(group, *args, **kwargs)
        if line.endswith(" async"):
            work.wait()  # a backend that runs in order: who waits for the last one has waited for all
            return AsyncWork(record, work, line)
        return work

    return call


def _controlling(record: Recorder, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    name = {**COLLECTIVES, **MESSAGES}[method]

    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        nbytes = sum(tensor.nbytes for tensor in flat_tensors((*args, *kwargs.values())))
        record.control(f"{name} {nbytes} bytes")
        return original(group, *args, **kwargs)

    return call


def _waiting(record: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def wait(future: Any) -> Any:
        record.note(f"{record.streams.current_stream()} waits for a future")
        return original(future)

    return wait


def _grouping(record: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        record.note(f"make a process group of ranks {ranks}")
        if kwargs.get("backend") == "nccl":
            kwargs["backend"] = "gloo"
        return original(ranks, *args, **kwargs)

    return new_group


def _launching(record: Recorder) -> Callable[..., Any]:
    @contextmanager
    def one_launch(*args: Any, **kwargs: Any) -> Iterator[None]:
        del args, kwargs
        record.note("in one launch:")
        record.indent += 1
        try:
            yield
        finally:
            record.indent -= 1

    return one_launch


def _stepping(record: Recorder, kind: type[optim.Optimizer]) -> Callable[..., Any]:
    """Return the step of a class of torch's, without torch's hooks, that marks every call outside of building."""
    original: Any = kind.step
    original = original.__wrapped__ if getattr(original, "hooked", False) else original

    @functools.wraps(original)
    def step(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not record.is_building:
            record.mark(f"{kind.__name__} steps")
        return original(optimizer, *args, **kwargs)

    return step
