"""Norms of gradients of which every rank holds a part: each computes what it holds, and one small sum adds up.

Nothing here asks a device for a number: what comes out is a tensor where the gradients are. The norm of order 0 counts,
as torch's does: of a parameter its elements, and of all parameters those that have one that is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardstep.comm.transport import Transport


def total_norm(
    transport: Transport, values: Sequence[torch.Tensor], norm_type: float, like: torch.Tensor
) -> torch.Tensor:
    """The norm of all that all ranks hold, the same on every rank; in double precision, on the device of `like`."""
    norms = [norm.to(like.device) for norm in _norms(values, norm_type)]
    together = torch.stack(norms) if norms else torch.zeros(1, dtype=torch.float64, device=like.device)
    local = together.amax(0, keepdim=True) if math.isinf(norm_type) else together.pow(norm_type).sum(0, keepdim=True)
    return _join(transport, local, norm_type)[0]


def norms_by_parameter(
    transport: Transport,
    pieces: Sequence[tuple[int, torch.Tensor]],
    count: int,
    norm_type: float,
    like: torch.Tensor,
) -> torch.Tensor:
    """The norm of each of `count` parameters. `pieces` are (parameter, flat gradient) of what this rank holds."""
    local = torch.zeros(count, dtype=torch.float64, device=like.device)
    for (param, _), norm in zip(pieces, _norms([values for _, values in pieces], norm_type), strict=True):
        value = norm.to(like.device)
        if math.isinf(norm_type):
            local[param] = torch.maximum(local[param], value)
        else:
            local[param] += value**norm_type if norm_type else value
    return _join(transport, local, norm_type)


def _join(transport: Transport, local: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Norms from the parts of them that each rank has: sums of powers, or the highest."""
    if math.isinf(norm_type):
        # Backends differ in what is higher, a number or nan: so that goes beside it.
        high, is_nan = transport.add_up(
            torch.stack([local.nan_to_num(0.0, posinf=math.inf), local.isnan().double()]), highest=True
        )
        return torch.where(is_nan > 0, torch.nan, high)
    added = transport.add_up(local)
    return added.pow(1.0 / norm_type) if norm_type else added


def _norms(values: Sequence[torch.Tensor], norm_type: float) -> list[torch.Tensor]:
    """Of each tensor, in double precision; those of a dtype and device in one call."""
    norms = [value.new_zeros((), dtype=torch.float64) if not value.numel() else value for value in values]
    classes: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, value in enumerate(values):
        if value.numel():
            classes.setdefault((value.dtype, value.device), []).append(place)
    for (dtype, _), places in classes.items():
        wide = torch.promote_types(dtype, torch.float32)
        chosen = [values[place] for place in places]
        found = torch._foreach_norm(chosen, norm_type, dtype=None if wide is dtype else wide)
        for place, norm in zip(places, torch.stack(found).double().unbind(), strict=True):
            norms[place] = norm
    return norms
