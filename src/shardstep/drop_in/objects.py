"""Python objects between ranks, read without running anything that they bring along."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.channel import open_channel
from shardstep.comm.tensors import broadcast_bytes


def _broadcast_object(obj: Any, src_rank: int, group: Any = None, device: torch.device | str = "cpu") -> Any:
    """`obj` of global rank `src_rank` on every rank of `group`, tensors on `device`.

    What arrives is read with torch's weights_only loader: tensors and plain containers, never code. The source returns
    its own object.
    """
    device = torch.device(device)
    channel = open_channel(group, device if device.type != "cpu" else None)
    source = dist.get_group_rank(channel.group, src_rank)
    packed = io.BytesIO()
    if channel.rank == source:
        torch.save(obj, packed)
    length = broadcast_bytes(channel, packed.tell().to_bytes(8, "big"), 8, source)
    data = broadcast_bytes(channel, packed.getvalue(), int.from_bytes(length, "big"), source)
    return obj if channel.rank == source else torch.load(io.BytesIO(data), map_location=device, weights_only=True)


def _recursive_copy_to_device(value: Any, non_blocking: bool, device: torch.device) -> Any:
    """The same structure of lists, tuples and dicts with its tensors on `device`; other values as they are."""
    if isinstance(value, torch.Tensor):
        return value.to(device=device, non_blocking=non_blocking)
    if isinstance(value, Mapping):
        return {key: _recursive_copy_to_device(item, non_blocking, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_recursive_copy_to_device(item, non_blocking, device) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
