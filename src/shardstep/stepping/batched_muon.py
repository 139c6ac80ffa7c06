"""torch.optim.Muon for many matrices at a time: those of one shape are stepped together.

The class launches two dozen kernels for each matrix, and on a GPU the host takes longer to launch them than the device
to run them. Here the Newton-Schulz iteration runs once for a whole stack of matrices, by batched products. Each product
rounds as the class's does, so results differ by no more than a library does that sums a product in another order.

[Note: stacks] Only the bfloat16 matrices that are iterated are copied into a stack. Parameters (or masters), gradients
and momenta stay where they are. Where neighbours of a batch are evenly spaced in all three, one strided view covers
them, and each operation is one launch for them; else there are several views. Momenta are allocated as one stack, and
gradients and parameters of one shape lie side by side in a bucket, so there is about one view for each bucket.

[Note: device] Nothing asks the device for a number: rates that are tensors there, the factor of clipping and the
verdict of a GradScaler are multiplied in. So a step can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.optimizers.local_optimizer import is_muon
from shardstep.optimizers.param_groups import copy_options
from shardstep.planning import Piece
from shardstep.stepping.masters import NARROW
from shardstep.stepping.steppers import Groups, Row, Scaling

# Elements of a batch at most: 12 matrices of 3072 x 768. The iteration has two stacks in bfloat16 and two of products,
# 4 to 8 bytes for each element, so it takes 256 MB. Smaller batches would leave processors of the GPU idle.
MOST_NUMEL = 32 * 1024**2
DEVICES = {"cuda"}  # where it is used; on the CPU launches cost nothing, and the class has the plain optimizer's bits

_MOMENTUM = "momentum_buffer"
_READ = {
    "params", "lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn",
}  # fmt: skip
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_MOST_STEPS = 99  # the class refuses more
_CHECKED = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")


def can_step(kind: Any, groups: Groups, master: str) -> bool:
    """Whether these groups, all of one class, are stepped in batches; `master` is ShardConfig's."""
    params = [param for group in groups for param in group["params"]]
    dtypes = {torch.float32 if p.dtype in NARROW and master != "none" else p.dtype for p in params}
    on_devices = bool(params) and {param.device.type for param in params} <= DEVICES
    return on_devices and all(why_not(kind, group, dtypes) is None for group in groups)


def why_not(kind: Any, group: Mapping[str, Any], dtypes: set[torch.dtype]) -> str | None:
    """Return why a group is left to the class; None if it is stepped here. `dtypes` are those of what is stepped."""
    if not is_muon(kind):
        return "it is not torch.optim.Muon itself"
    if unread := _unread_options():
        return f"torch.optim.Muon takes {unread[0]!r}, which is newer than this"
    if not dtypes <= set(_FLOATS):
        return "it has parameters that are not floating"
    coefficients = group["ns_coefficients"]
    numbers = [group[name] for name in ("weight_decay", "momentum", "eps", "ns_steps")]
    if any(isinstance(number, torch.Tensor) for number in (*numbers, *coefficients)):
        return "of the options only lr may be a tensor"
    lr = group["lr"]
    if isinstance(lr, torch.Tensor) and (lr.numel() != 1 or lr.requires_grad):
        return "a learning rate in a tensor must be one element that needs no gradient"
    if group["adjust_lr_fn"] not in (None, "original", "match_rms_adamw"):
        return f"adjust_lr_fn={group['adjust_lr_fn']!r} is not known here"
    if len(coefficients) != 3 or group["ns_steps"] > _MOST_STEPS:
        return "the class refuses its ns_coefficients or its ns_steps"
    if torch.bfloat16 in dtypes and not group["nesterov"]:
        return "without nesterov the class normalises a bfloat16 momentum in place, which is not repeated here"
    return None


@functools.cache
def _unread_options() -> list[str]:
    return [name for name in inspect.signature(torch.optim.Muon).parameters if name not in _READ]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Rows of one group whose matrices have one shape and dtype; `places` says where in the step's rows each is."""

    rows: tuple[Row, ...]
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Rates:
    """The factor of the weights and the factor of the update, which is subtracted: numbers, or tensors on a device."""

    keep: float | torch.Tensor
    subtract: float | torch.Tensor


class BatchedMuon:
    """A `Stepper` of groups whose class is torch's Muon."""

    writes_values = False

    def __init__(self, groups: Sequence[int]) -> None:
        self.groups = groups

    def build(
        self, rows: Sequence[Sequence[Row]], state: dict[Any, Any], groups: Groups, counts: dict[Piece, torch.Tensor]
    ) -> None:
        del counts  # StochasticRounding counts the steps of Muon's parameters
        self._state = state
        self._options: dict[int, dict[str, Any]] = {number: {} for number in self.groups}
        self._batches = [list(_batches_of(together)) for together in rows]
        self._dtypes = {
            number: {row.tensor.dtype for together in rows for row in together if row.group == number}
            for number in self.groups
        }
        for batch in (batch for together in self._batches for batch in together):
            _stack_momenta(batch.rows, state)
        self.begin(groups)

    @property
    def temporary_nbytes(self) -> int:
        """Bytes for the largest batch: two stacks of matrices in bfloat16, and two of their products."""
        shapes = [(len(b.rows), *b.rows[0].tensor.shape) for together in self._batches for b in together]
        return max((4 * count * (m * n + min(m, n) ** 2) for count, m, n in shapes), default=0)

    def begin(self, groups: Groups) -> None:
        for number, own in self._options.items():
            before = [own.get(name) for name in _CHECKED]
            copy_options([groups[number]], [own])
            if not all(own[name] is value for name, value in zip(_CHECKED, before, strict=True)):
                reason = why_not(torch.optim.Muon, own, self._dtypes[number])
                if reason:
                    raise ValueError(f'param_groups[{number}]: {reason}. Pass ShardConfig(kernel="torch")')

    @torch.no_grad()
    def step(
        self,
        number: int,
        gradients: Sequence[torch.Tensor | None],
        scaling: Scaling | None,
        factor: torch.Tensor | None = None,
    ) -> None:
        for batch in self._batches[number]:
            given = [
                (row, g) for row, p in zip(batch.rows, batch.places, strict=True) if (g := gradients[p]) is not None
            ]
            if given:
                rows, own = [row for row, _ in given], [gradient for _, gradient in given]
                self._step_batch(rows, own, scaling, factor)

    def _step_batch(
        self,
        rows: Sequence[Row],
        gradients: Sequence[torch.Tensor],
        scaling: Scaling | None,
        factor: torch.Tensor | None,
    ) -> None:
        options, like = self._options[rows[0].group], rows[0].tensor
        momentum, nesterov = options["momentum"], options["nesterov"]
        update = torch.empty(len(rows), *like.shape, dtype=torch.bfloat16, device=like.device)
        spans = list(_spans(rows[0], [_memory_of(row) for row in rows], gradients, self._momenta(rows)))
        for place, _, gradient, buffer in spans:
            mean = _scaled(gradient.to(buffer.dtype), buffer, scaling, factor)
            buffer.lerp_(mean, 1 - momentum)
            if nesterov:
                torch.lerp(mean, buffer, momentum, out=update[place])
            else:
                update[place].copy_(buffer)
            del mean  # its memory is free for the iteration
        update = orthogonalise(update, options["ns_coefficients"], options["ns_steps"], options["eps"])
        rates = _rates_of(options, like, scaling)
        for place, param, _, _ in spans:
            _apply(param, update[place], rates)

    def _momenta(self, rows: Sequence[Row]) -> list[torch.Tensor]:
        """Return the momentum of each row; rows that have none yet get zeros, in one stack."""
        entries = [self._state.setdefault(row.tensor, {}) for row in rows]
        new = [(entry, row) for entry, row in zip(entries, rows, strict=True) if _MOMENTUM not in entry]
        if new:
            like = new[0][1].tensor
            stack = torch.zeros(len(new), like.numel(), dtype=like.dtype, device=like.device)
            for (entry, row), values in zip(new, stack, strict=True):
                entry[_MOMENTUM] = _matrix(values, row)
        return [entry[_MOMENTUM] for entry in entries]


def orthogonalise(
    stack: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return the matrices of a bfloat16 stack with singular values near one; `stack` is overwritten.

    Products are over the smaller side: X (X^T X) for tall matrices X, (X X^T) X for the others.
    """
    a, b, c = coefficients
    count, rows, columns = stack.shape
    side, tall = min(rows, columns), rows > columns
    # All iterations use the same memory, because the caller keeps the first stack alive.
    other, gram, series = torch.empty_like(stack), *stack.new_empty(2, count, side, side).unbind()
    stack.div_(torch.linalg.vector_norm(stack, dim=(1, 2), keepdim=True).clamp_(min=eps))
    for _ in range(steps):
        torch.bmm(*((stack.mT, stack) if tall else (stack, stack.mT)), out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=series)
        torch.baddbmm(stack, *((stack, series) if tall else (series, stack)), beta=a, out=other)
        stack, other = other, stack
    return stack


def _memory_of(row: Row) -> torch.Tensor:
    """Return the memory of what is stepped, its elements in the order in which they lie there."""
    if row.master is None and row.tensor.dtype is not row.values.dtype:  # stochastic rounding: float32 for this step
        return row.tensor.detach()
    return row.values if row.master is None else row.master


def _batches_of(rows: Sequence[Row]) -> Iterator[_Batch]:
    """Yield rows that can be stepped together, at most MOST_NUMEL elements in a batch, batches of about one size."""
    alike: dict[Any, list[int]] = {}
    for place, row in enumerate(rows):
        tensor = row.tensor
        key = (row.group, tensor.shape, row.stride, tensor.dtype, tensor.device, row.gradient_dtype)
        alike.setdefault(key, []).append(place)
    for places in alike.values():
        most = max(MOST_NUMEL // max(rows[places[0]].tensor.numel(), 1), 1)
        count = -(-len(places) // most)
        for part in range(count):
            chosen = places[part * len(places) // count : (part + 1) * len(places) // count]
            yield _Batch(tuple(rows[place] for place in chosen), tuple(chosen))


def _stack_momenta(rows: Sequence[Row], state: Mapping[Any, dict[str, Any]]) -> None:
    """Move momenta that were loaded, or came from an earlier plan, into one stack."""
    entries = [(row, state[row.tensor]) for row in rows if _MOMENTUM in state.get(row.tensor, {})]
    if entries:
        first = entries[0][1][_MOMENTUM]
        stack = torch.empty(len(entries), first.numel(), dtype=first.dtype, device=first.device)
        for (row, entry), values in zip(entries, stack, strict=True):
            entry[_MOMENTUM] = _matrix(values, row).copy_(entry[_MOMENTUM])


def _matrix(values: torch.Tensor, row: Row) -> torch.Tensor:
    """Return flat `values` in the shape and the memory order of a row's parameter."""
    return values.as_strided(row.tensor.shape, row.stride)


_Span = tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]


def _spans(like: Row, *columns: Sequence[torch.Tensor]) -> Iterator[_Span]:
    """Yield a slice of the batch, and for each column the stack of its matrices there: see [Note: stacks]."""
    count, start = len(columns[0]), 0
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
    storages = [[tensor.untyped_storage().data_ptr() for tensor in column] for column in columns]
    while start < count:
        stop = start + 1
        while stop < count and all(
            _continues(where, start, stop) and held[stop] == held[start]
            for where, held in zip(addresses, storages, strict=True)
        ):
            stop += 1
        param, gradient, buffer = (
            _stacked(column[start], where[start:stop], like) for column, where in zip(columns, addresses, strict=True)
        )
        yield slice(start, stop), param, gradient, buffer
        start = stop


def _continues(addresses: Sequence[int], start: int, stop: int) -> bool:
    """Whether the address at `stop` is as far from the one before it as the second is from the first."""
    step = addresses[start + 1] - addresses[start]
    return step > 0 and addresses[stop] - addresses[stop - 1] == step


def _stacked(first: torch.Tensor, addresses: Sequence[int], like: Row) -> torch.Tensor:
    step = (addresses[1] - addresses[0]) // first.element_size() if len(addresses) > 1 else first.numel()
    return first.as_strided((len(addresses), *like.tensor.shape), (step, *like.stride))


def _scaled(
    gradient: torch.Tensor, buffer: torch.Tensor, scaling: Scaling | None, factor: torch.Tensor | None
) -> torch.Tensor:
    """Return the gradient divided by a GradScaler's scale, times `factor`; the momentum itself if the step is skipped.

    So a skipped step leaves the momentum unchanged, and the products get no infinite or NaN values.
    """
    if scaling is not None and scaling.grad_scale is not None:
        gradient = gradient / scaling.grad_scale.to(gradient.device)
    if factor is not None:
        gradient = gradient * factor.to(gradient.device)
    if scaling is not None:
        gradient = torch.where(_skips(scaling, gradient), buffer, gradient)
    return gradient


def _skips(scaling: Scaling, like: torch.Tensor) -> torch.Tensor:
    return scaling.found_inf.to(like.device).reshape(()) != 0


def _rates_of(options: Mapping[str, Any], like: torch.Tensor, scaling: Scaling | None) -> _Rates:
    lr = options["lr"]
    if isinstance(lr, torch.Tensor):
        lr = lr.detach().reshape(())
    decay, subtract = lr * options["weight_decay"], lr * _ratio(options["adjust_lr_fn"], *like.shape)
    if isinstance(lr, torch.Tensor) and lr.device.type == "cpu":
        decay, subtract = float(decay), float(subtract)
    if scaling is not None:  # by products: torch.where would copy a number to the device, and wait for that
        steps = _skips(scaling, like).logical_not().to(torch.float32)
        decay, subtract = steps * decay, steps * subtract
    return _Rates(1 - decay, subtract)


@functools.cache
def _ratio(adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Return the factor of the learning rate for a matrix of this shape."""
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


def _apply(param: torch.Tensor, update: torch.Tensor, rates: _Rates) -> None:
    keep, subtract = rates.keep, rates.subtract
    if isinstance(keep, torch.Tensor):
        keep = _with_dims(keep, param)
    if isinstance(keep, torch.Tensor) or keep != 1:
        param.mul_(keep)
    if isinstance(subtract, torch.Tensor):
        param.addcmul_(update, _with_dims(subtract, param), value=-1)
    else:
        param.add_(update, alpha=-subtract)


def _with_dims(number: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the number with dims, so that torch's type promotion counts it and does not round it to 16 bits."""
    return number.to(like.device, torch.promote_types(like.dtype, torch.float32)).view(1, 1, 1)
