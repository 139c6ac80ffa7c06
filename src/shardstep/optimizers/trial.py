"""Runs an optimizer on tiny tensors, in one or several instances, and compares what their steps leave behind.

Nothing that a program can see is changed. The tensors are made here, options are copied, and the random number
generators (torch's, Python's and numpy's) are restored afterwards.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from shardstep.optimizers.optimizer_copy import Counters

# Rounding may differ between the middle of a tensor and its end, where kernels leave their vector loop.
_RELATIVE = 1e-3
_OF_LARGEST = 1e-6  # of the largest element of a tensor: absolute tolerance of its smallest
_OF_A_WEIGHT = 4e-6  # absolute tolerance of a weight's move: the resolution of float32 at the size of these weights
_RATE = 1e-2  # the least learning rate of a trial: a schedule may begin with 0, at which no weight would move
_NOT_OPTIONS = ("params", "param_names")

Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What is left after the last step, by parameter and by instance."""

    moved: Tensors  # by how much each parameter has changed
    states: list[Mapping[str, Any]]
    options: list[Mapping[str, Any]]  # of each instance: its param group
    own: list[Mapping[str, Any]]  # of each instance: attributes that steps have changed, and state of no parameter

    @property
    def is_finite(self) -> bool:
        return all(bool(value.isfinite().all()) for value in self.moved)


@dataclass(frozen=True, slots=True)
class Trial:
    """`optimizer_class` with the options of one param group."""

    optimizer_class: Callable[..., Optimizer]
    defaults: Mapping[str, Any]
    options: Mapping[str, Any]
    with_closure: bool = False  # step it with a closure, as programs step those that ask for one

    def run(self, instances: Sequence[Tensors], gradients: Sequence[Tensors], seed: int = 1) -> Outcome:
        """Step copies of the tensors, each row of `instances` by one optimizer, with `gradients[t]` in step t."""
        _seed(seed)
        params = [[value.clone().requires_grad_() for value in row] for row in instances]
        optimizers = [self.make(row) for row in params]
        counters = [Counters(optimizer) for optimizer in optimizers]
        flat = [param for row in params for param in row]
        for number, row in enumerate(gradients):

            def give(row: Tensors = row, number: int = number) -> torch.Tensor:
                """Set gradients, and return a loss that depends on the step only."""
                for param, gradient in zip(flat, row, strict=True):
                    param.grad = gradient.clone()
                return torch.tensor(2.0 / (1 + number), device=flat[0].device)

            give()
            for optimizer in optimizers:
                optimizer.step(give) if self.with_closure else optimizer.step()  # type: ignore[arg-type]
        before = [value for row in instances for value in row]
        return Outcome(
            [param.detach() - value for param, value in zip(flat, before, strict=True)],
            [
                dict(optimizer.state.get(param, {}))
                for optimizer, row in zip(optimizers, params, strict=True)
                for param in row
            ],
            [_without(optimizer.param_groups[0]) for optimizer in optimizers],
            [_kept_by_itself(*pair) for pair in zip(optimizers, counters, strict=True)],
        )

    def make(self, params: Tensors) -> Optimizer:
        return self.optimizer_class([{**_moving(self.options), "params": params}], **_moving(self.defaults))


def _kept_by_itself(optimizer: Optimizer, counters: Counters) -> dict[str, Any]:
    of_nobody = {str(key): value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    return {**of_nobody, **counters.advanced()}


def _without(options: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in _NOT_OPTIONS}


def _moving(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the options with a learning rate at which weights move."""
    copied = copy.deepcopy(_without(options))
    rate = copied.get("lr")
    if isinstance(rate, int | float | torch.Tensor) and abs(float(rate)) < _RATE:
        copied["lr"] = torch.full_like(rate, _RATE) if isinstance(rate, torch.Tensor) else _RATE
    return copied


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


@contextmanager
def no_trace(device: torch.device) -> Iterator[None]:
    """A context in which any random generator may be used; all of them are restored afterwards."""
    numpy = sys.modules.get("numpy")
    python_state, numpy_state = random.getstate(), numpy and numpy.random.get_state()
    with ExitStack() as stack:
        # Generators of other devices are not used: everything inside runs on `device`.
        devices = [device] if device.type == "cuda" else []
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type="cuda"))
        # On a busy machine several threads would make a product of tiny matrices take milliseconds.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        if "torch._dynamo" in sys.modules:
            # A class that compiles its step would do so here for every shape, for minutes.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            yield
        finally:
            random.setstate(python_state)
            if numpy is not None:
                numpy.random.set_state(numpy_state)


class CommunicatesError(RuntimeError):
    """An optimizer tried to send or receive; nothing was sent."""


class NoCommunication(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which a collective raises before it reaches the process group."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func.namespace in ("c10d", "_c10d_functional"):
            raise CommunicatesError(func.__name__)
        return func(*args, **(kwargs or {}))


# -- comparing ---------------------------------------------------------------------------------------------------------


Alike = Callable[[Any, Any], bool]


def first_difference(one: Mapping[str, Any], other: Mapping[str, Any], close: Alike) -> str | None:
    """Return the first name whose values differ; `close` compares two tensors or numbers."""
    names = [*one, *(name for name in other if name not in one)]
    return next((n for n in names if n not in one or n not in other or not alike(one[n], other[n], close)), None)


def alike(one: Any, other: Any, close: Alike) -> bool:
    """Whether two values are alike; objects that are neither numbers nor made of them are if their types are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        try:
            return one.shape == other.shape and close(one.detach(), other.detach())
        except (RuntimeError, NotImplementedError, TypeError):  # a tensor class without these operations
            return True
    if isinstance(one, int | float) and isinstance(other, int | float):
        return close(*(torch.tensor(number, dtype=torch.float64, device="cpu") for number in (one, other)))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return first_difference(one, other, close) is None
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(alike(a, b, close) for a, b in zip(one, other, strict=True))
    if isinstance(one, str) or one is None or other is None:
        return bool(one == other)
    return type(one) is type(other)


def exactly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits, as the same operations on the same values give."""
    return torch.equal(one, other) or torch.equal(one.nan_to_num(), other.nan_to_num())


def nearly(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors differ by rounding only, relative to the largest element: 1e-6 is not nearly 2e-6."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    largest = float(one.abs().max().nan_to_num(0.0, 0.0, 0.0)) if one.numel() else 0.0
    return torch.allclose(one, other.to(one.dtype), _RELATIVE, _OF_LARGEST * largest, equal_nan=True)


def nearly_moved(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two changes of weights differ by rounding only, also by that of the weights themselves."""
    return torch.allclose(one, other, _RELATIVE, _OF_A_WEIGHT, equal_nan=True)
