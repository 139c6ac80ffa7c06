"""What a GradScaler tells the optimizer that it lets step."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scaling:
    """On the device, by the names of the attributes that torch's classes read.

    Where `found_inf` is 1 nothing is stepped, and no step is counted. Gradients are divided by `grad_scale`.
    """

    found_inf: torch.Tensor
    grad_scale: torch.Tensor | None
