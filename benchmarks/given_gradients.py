"""A model of which benchmarks look at the optimizer alone: its backward pass only hands out gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SEED = 20
Shape = tuple[int, ...]


class GivenGradients(torch.autograd.Function):
    """A backward pass that takes next to no time: it hands out copies of gradients that were there before."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *params: Tensor) -> Tensor:
        ctx.gradients = gradients
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        # Copies, for an optimizer may write into its gradients or keep them.
        return (None, *(gradient.clone() for gradient in ctx.gradients))


class Listed(nn.Module):
    def __init__(self, shapes: Sequence[Shape], device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(SEED)
        self.parts = nn.ParameterList([nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        loss: Tensor = GivenGradients.apply(gradients, *self.parts)
        return loss
