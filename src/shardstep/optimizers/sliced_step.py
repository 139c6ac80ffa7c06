"""Steps large parameters slice by slice on the CPU, so that what one operation writes is in the cache for the next.

AdamW as torch runs it on the CPU goes over the parameter, its gradient and both moments in eight passes. Over 77 MB
every pass comes from memory; over slices of half a megabyte seven of the eight come from the cache, and the step takes
a third of the time. The numbers are the same to the bit, for those optimizers of torch's that treat every element alone
(layout_trial.py finds them). Classes of other people are stepped as they are: what they keep, and where, is unknown. So
are parameters on a GPU, where the number of kernels counts; fused optimizers, which make a single pass and round
differently; foreach, which does one operation on all slices before the next; and optimizers with hooks on their steps.

[Note: why not fused] One thread, 30 M elements, torch 2.13: AdamW takes 1.8 to 3.9 of the time of slices (Adagrad 2.5,
SGD 0.9), with foreach=True 1.6 to 2.7, with fused=True 0.2 to 0.3. But fused has other bits, so programs choose it.

Nothing of this can be seen from outside: the state stays with the whole parameter, in its shape. The slices have
optimizers of their own, and hold nothing between steps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.optimizers.layout_trial import probe
from shardstep.optimizers.local_optimizer import is_of_torch
from shardstep.optimizers.param_groups import copy_options

SLICE_NBYTES = 512 * 1024  # a few of these, and what lies between, fit in a core's second-level cache
_SLICES_PER_BLOCK = 16  # slices with one optimizer: in the first step, that many have a state of their own at once
LEAST_NBYTES = 4 * 1024 * 1024  # smaller parameters stay in the third-level cache without slices
# Kernels leave their vector loop at the end of a tensor, and may round differently there: slices end where it goes on.
_ALIGNMENT = 64
CUT_ANYWHERE = (torch.float32, torch.float64)  # in these, a tensor may be cut at any element without changing a bit

MakeOptimizer = Callable[[list[dict[str, Any]]], Optimizer]


class ElementwiseGroups:
    """Knows which param groups have options under which the optimizer treats every element alone, by trying them."""

    def __init__(self, make: MakeOptimizer) -> None:
        self._make = make
        self._known: dict[int, bool] = {}

    def has(self, number: int, group: Mapping[str, Any]) -> bool:
        if group.get("fused") or group.get("foreach"):
            return False
        if number not in self._known:
            self._known[number] = self._try(group)
        return self._known[number]

    def _try(self, group: Mapping[str, Any]) -> bool:
        try:
            return probe(self._make, {}, [group], torch.device("cpu"), of_torch=True).is_elementwise
        except Exception:  # what the probe itself cannot do is no reason not to step
            return False


class SlicedStep:
    """Steps `whole`, its large parameters in slices. `make` builds another optimizer of its class and options."""

    def __init__(self, whole: Optimizer, make: MakeOptimizer, elementwise: ElementwiseGroups) -> None:
        self._whole, self._make, self._elementwise = whole, make, elementwise
        self._is_of_torch = is_of_torch(type(whole))
        self._blocks: dict[torch.Tensor, list[_Block]] = {}

    def step(self) -> Any:
        """Step all parameters once; return what the optimizer's own step returned."""
        if not self._is_of_torch or _has_hooks(self._whole):  # they would see half a step
            return step_as_a_part(self._whole)
        state = self._whole.state
        large = [
            (param, gradient, self._blocks_of(param, group))
            for number, group in enumerate(self._whole.param_groups)
            for param in group["params"]
            if (gradient := param.grad) is not None
            and _can_be_cut(param, gradient, state.get(param, {}))
            and self._elementwise.has(number, group)
        ]
        # Every parameter is stepped once: those in slices have no gradient while the others are stepped.
        for param, _, _ in large:
            param.grad = None
        try:
            result = step_as_a_part(self._whole)
        finally:
            for param, gradient, _ in large:
                param.grad = gradient
        for param, gradient, blocks in large:
            before = dict(state.get(param, {}))
            for block in blocks:
                try:
                    block.step(param, gradient, before)
                    if block.has_state():  # of an optimizer that keeps none there is no entry
                        block.take_back(state[param])
                finally:
                    block.release()
            torch.autograd.graph.increment_version(param)
        return result

    def _blocks_of(self, param: torch.Tensor, group: Mapping[str, Any]) -> list[_Block]:
        """Return the blocks of a parameter, with the options as they are now."""
        blocks = self._blocks.get(param)
        if blocks is None or blocks[0].whole_shape != param.shape:
            cuts = [*range(0, param.shape[0], _rows_per_slice(param)), param.shape[0]]
            bounds = list(pairwise(cuts))
            starts = range(0, len(bounds), _SLICES_PER_BLOCK)
            rows = [bounds[start : start + _SLICES_PER_BLOCK] for start in starts]
            blocks = self._blocks[param] = [_Block(param, row, group, self._make) for row in rows]
        for block in blocks:
            copy_options([group], block.optimizer.param_groups)
        return blocks


class _Block:
    """Neighbouring slices of one parameter, along its first dimension, and the optimizer that steps them."""

    def __init__(
        self, param: torch.Tensor, bounds: list[tuple[int, int]], group: Mapping[str, Any], make: MakeOptimizer
    ) -> None:
        self.whole_shape = param.shape
        self._bounds = bounds
        self._tensors = [param.detach()[start:stop].requires_grad_() for start, stop in bounds]
        options = {key: value for key, value in group.items() if key != "param_names"}
        self.optimizer = make([{**options, "params": self._tensors}])
        self.release()

    def step(self, param: torch.Tensor, gradient: torch.Tensor, before: Mapping[str, Any]) -> None:
        """Step these slices of `param`; `before` is the state that the whole had before any slice was stepped."""
        values = param.detach()
        for tensor, (start, stop) in zip(self._tensors, self._bounds, strict=True):
            tensor.data = values[start:stop]
            tensor.grad = gradient[start:stop]
            if before:
                self.optimizer.state[tensor] = {
                    key: _part(value, self.whole_shape, start, stop) for key, value in before.items()
                }
        step_as_a_part(self.optimizer)

    def has_state(self) -> bool:
        """Whether the optimizer keeps any state for its slices."""
        return self._tensors[0] in self.optimizer.state

    def take_back(self, after: dict[str, Any]) -> None:
        """Write the slices' state into `after`, that of the whole. What is kept per element was stepped in views of it
        already, except what is new; the rest is the same in every slice."""
        for key, first in self.optimizer.state[self._tensors[0]].items():
            if not _has_shape(first, self._tensors[0].shape):
                after[key] = first
                continue
            if not _has_shape(after.get(key), self.whole_shape):
                after[key] = first.new_zeros(self.whole_shape)  # not empty: a later block may fail, and leave its part
            for tensor, (start, stop) in zip(self._tensors, self._bounds, strict=True):
                ours, theirs = after[key][start:stop], self.optimizer.state[tensor][key]
                if ours.data_ptr() != theirs.data_ptr():
                    ours.copy_(theirs)

    def release(self) -> None:
        """Drop all references to the parameter, its gradient and its state."""
        for tensor in self._tensors:
            tensor.grad = None
            tensor.data = tensor.data.new_empty(0)
        self.optimizer.state.clear()


def _has_hooks(optimizer: Optimizer) -> bool:
    """Whether the optimizer has hooks on its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def step_as_a_part(optimizer: Optimizer) -> Any:
    """Step an optimizer that is a part of the one that the program steps.

    Global hooks on optimizer steps are meant for the program's optimizer; here they would be called for every part. So
    the class's own function is called, without torch's wrapper.
    """
    step: Any = type(optimizer).step
    is_as_torch_made_it = getattr(step, "hooked", False) and "step" not in vars(optimizer)
    if _has_hooks(optimizer) or not is_as_torch_made_it:
        return optimizer.step()
    return step.__wrapped__(optimizer)


def _rows_per_slice(param: torch.Tensor) -> int:
    """Return how many rows fill a slice and end on a multiple of the alignment."""
    row = param[0].numel()
    unit = _ALIGNMENT // math.gcd(row, _ALIGNMENT)
    return max(SLICE_NBYTES // (row * param.element_size() * unit), 1) * unit


def _can_be_cut(param: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, Any]) -> bool:
    """Whether a parameter is large enough for slices, and its gradient and state can be cut like it."""

    def lies_like_param(value: torch.Tensor) -> bool:
        return value.layout is torch.strided and value.shape == param.shape and value.is_contiguous()

    return (
        param.device.type == "cpu"
        and param.dtype in CUT_ANYWHERE
        and param.numel() * param.element_size() >= LEAST_NBYTES
        and gradient.dtype is param.dtype
        and lies_like_param(param)
        and lies_like_param(gradient)
        and _rows_per_slice(param) < param.shape[0]
        and all(
            value.numel() <= 1 or lies_like_param(value) for value in state.values() if isinstance(value, torch.Tensor)
        )
    )


def _has_shape(value: Any, shape: torch.Size) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == shape


def _part(value: Any, whole_shape: torch.Size, start: int, stop: int) -> Any:
    """Return the part of a state value that belongs to rows [start, stop), or a copy of a counter for each slice."""
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value[start:stop] if value.shape == whole_shape else value.clone()
