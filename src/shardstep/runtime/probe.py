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
_RELATIVE, _ABSOLUTE = 1e-5, 1e-7
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

    def run(params: list[torch.Tensor], gradients: list[list[torch.Tensor]]) -> None:
        kept = copy.deepcopy({key: value for key, value in options.items() if key not in ("params", "param_names")})
        optimizer = optimizer_class([{**kept, "params": params}], **copy.deepcopy(dict(defaults)))
        for row in gradients:
            for param, gradient in zip(params, row, strict=True):
                param.grad = gradient
            optimizer.step()

    for shapes in _SHAPES:
        values, gradients = _numbers(shapes, device)
        whole = [value.clone().requires_grad_() for value in values]
        try:
            run(whole, [[g.clone() for g in row] for row in gradients])
        except Exception as error:
            reason = f"{name} refuses tiny tensors of shapes {shapes}: {error}"
            continue
        cut = [part.requires_grad_() for value in values for part in _cut(value)]
        try:
            run(cut, [[part for gradient in row for part in _cut(gradient)] for row in gradients])
        except Exception as error:
            return f"{name} refuses flat pieces of a parameter: {error}"
        expected = [part for value in whole for part in _cut(value.detach())]
        same = all(torch.allclose(a, b, _RELATIVE, _ABSOLUTE) for a, b in zip(cut, expected, strict=True))
        return "" if same else f"{name} treats the elements of a parameter together: cut up, it gives other numbers"
    return reason


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
