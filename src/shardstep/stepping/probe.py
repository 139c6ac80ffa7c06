"""Which layouts an optimizer tolerates: found by running it on tiny tensors, whole against cut."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.planning import Layout

_STEPS = 3
_CUTS = (0, 5, 16, 24)
# Rounding may differ between the middle of a tensor and its end, where kernels leave their vector loop.
_RELATIVE, _ABSOLUTE = 1e-3, 1e-6
_LEAST_RATE, _RATE = 1e-3, 1e-2
# An optimizer that wants matrices refuses vectors, and says so by raising.
_SHAPES = (((6, 4), (24,)), ((6, 4),))


def finest_layout(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    option_sets: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> tuple[Layout, str]:
    """The finest layout that gives the numbers of the whole, and why it is not finer ("" if it cannot be finer).

    `option_sets` are the options of the param groups. Nothing that a caller can see is changed: not the options, not
    the state of the random number generators.
    """
    # The generator of another device is left alone: what runs here runs on `device`.
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        for options in option_sets:
            reason = _why_not_flat(optimizer_class, defaults, options, device)
            if reason:
                return Layout.WHOLE, reason
    return Layout.FLAT, ""


def _why_not_flat(
    optimizer_class: Callable[..., Optimizer],
    defaults: Mapping[str, Any],
    options: Mapping[str, Any],
    device: torch.device,
) -> str:
    name = getattr(optimizer_class, "__name__", str(optimizer_class))

    def run(instances: list[list[torch.Tensor]], gradients: list[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Step the tensors, those of one list by one optimizer; `gradients[t]` are those of step t, in order."""
        params = [[value.clone().requires_grad_() for value in values] for values in instances]
        optimizers = [optimizer_class([{**_moving(options), "params": row}], **_moving(defaults)) for row in params]
        flat = [param for row in params for param in row]
        for row in gradients:
            for param, gradient in zip(flat, row, strict=True):
                param.grad = gradient.clone()
            for optimizer in optimizers:
                optimizer.step()
        return [param.detach() for param in flat]

    reason = ""
    for shapes in _SHAPES:
        values, gradients = _numbers(shapes, device)
        try:
            whole = run([values], gradients)
        except Exception as error:
            reason = f"{name} refuses tiny tensors of shapes {shapes}: {error}"
            continue
        if not _same(run([[value] for value in values], gradients), whole, values):
            raise ValueError(
                f"{name} treats all parameters together, so that stepping them on several ranks would silently compute "
                "something else. Use it unsharded, or choose an optimizer that treats parameters separately"
            )
        try:
            cut = run(
                [[part] for value in values for part in _cut(value)],
                [[part for gradient in row for part in _cut(gradient)] for row in gradients],
            )
        except Exception as error:
            return f"{name} refuses flat pieces of a parameter: {error}"
        pieces = [[part for value in row for part in _cut(value)] for row in (whole, values)]
        same = _same(cut, *pieces)
        return "" if same else f"{name} treats the elements of a parameter together: cut up, it gives other numbers"
    return reason


def _moving(options: Mapping[str, Any]) -> dict[str, Any]:
    """A copy with a learning rate at which something happens: a schedule may begin with none."""
    copied = copy.deepcopy({key: value for key, value in options.items() if key not in ("params", "param_names")})
    if "lr" in copied and abs(float(copied["lr"])) < _LEAST_RATE:
        copied["lr"] = torch.full_like(copied["lr"], _RATE) if isinstance(copied["lr"], torch.Tensor) else _RATE
    return copied


def _same(ours: Sequence[torch.Tensor], others: Sequence[torch.Tensor], before: Sequence[torch.Tensor]) -> bool:
    """Whether both have moved alike, measured by how far they moved."""
    return all(
        torch.allclose(one - start, two - start, _RELATIVE, _ABSOLUTE)
        for one, two, start in zip(ours, others, before, strict=True)
    )


def _numbers(
    shapes: Sequence[tuple[int, ...]], device: torch.device
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """Values and gradients whose scale grows along each parameter, so that a norm over a piece is not one of all."""
    generator = torch.Generator().manual_seed(11)
    scale = torch.logspace(-2, 1, 24)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        return (torch.randn(24, generator=generator) * scale).view(shape).to(device)

    return [draw(shape) for shape in shapes], [[draw(shape) for shape in shapes] for _ in range(_STEPS)]


def _cut(value: torch.Tensor) -> list[torch.Tensor]:
    flat = value.reshape(-1)
    return [flat[start:stop].clone() for start, stop in pairwise(_CUTS)]
