"""Norms of gradients of which every rank holds a part: each computes what it holds, and one small exchange adds up."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import torch

from shardstep.runtime.collectives import Channel, gather_records


def norms_by_parameter(
    channel: Channel, pieces: Sequence[tuple[int, torch.Tensor]], count: int, norm_type: float
) -> list[float]:
    """The norm of each of `count` parameters. `pieces` are (parameter, flat gradient) of what this rank holds."""
    local = [0.0] * count
    for (param, _), norm in zip(pieces, _norms([values for _, values in pieces], norm_type), strict=True):
        local[param] = _join([local[param], norm], norm_type)
    form = struct.Struct(f"<{count}d")
    if channel.world_size == 1:
        return local
    rows = [form.unpack(record) for record in gather_records(channel, form.pack(*local)).read()]
    return [_join(column, norm_type) for column in zip(*rows, strict=True)]


def total_norm(channel: Channel, values: Sequence[torch.Tensor], norm_type: float) -> float:
    """The norm of everything that all ranks hold, the same on every rank."""
    local = _join(_norms(values, norm_type), norm_type)
    if channel.world_size == 1:
        return local
    records = gather_records(channel, struct.pack("<d", local)).read()
    return _join([struct.unpack("<d", record)[0] for record in records], norm_type)


def _norms(values: Sequence[torch.Tensor], norm_type: float) -> list[float]:
    """Of each tensor; those of a dtype and device together: one call, and the host waits once."""
    norms = [0.0] * len(values)
    classes: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, value in enumerate(values):
        if value.numel():
            classes.setdefault((value.dtype, value.device), []).append(place)
    for (dtype, _), places in classes.items():
        wide = torch.promote_types(dtype, torch.float32)
        chosen = [values[place] for place in places]
        found = torch._foreach_norm(chosen, norm_type, dtype=None if wide is dtype else wide)
        for place, norm in zip(places, torch.stack(found).tolist(), strict=True):
            norms[place] = norm
    return norms


def _join(norms: Sequence[float], norm_type: float) -> float:
    """The norm of a vector from the norms of its parts."""
    if math.isinf(norm_type):
        return math.nan if any(map(math.isnan, norms)) else max(norms, default=0.0)
    return float(math.fsum(norm**norm_type for norm in norms) ** (1.0 / norm_type))
