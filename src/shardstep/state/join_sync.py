"""Copy the options of a rank that still has inputs to ranks in torch's Join without inputs, where no scheduler runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.comm.channel import Channel
from shardstep.state.consolidation import receive_state, send_state
from shardstep.state.serialization import encode

Groups = Sequence[dict[str, Any]]


def hand_over(
    channel: Channel, donor: int, away: Sequence[int], groups: Groups, values: Mapping[str, Any]
) -> dict[str, Any]:
    """Copy the options of rank `donor` into the groups of the ranks that are `away`; return the donor's `values`.

    Called on all ranks. A rank that is neither gets its own `values` back.
    """
    if channel.rank == donor:
        text, tensors = encode({"options": [sendable(group) for group in groups], "values": values})
        for rank in away:
            send_state(channel, text, tensors, rank)
    elif channel.rank in away:
        received = receive_state(channel, donor)
        for theirs, ours in zip(received["options"], groups, strict=True):
            for key, value in theirs.items():
                _set_option(ours, key, value)
        return dict(received["values"])
    return dict(values)


@torch.no_grad()
def _set_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option. A tensor is written in place, because a scheduler or a CUDA graph may refer to it."""
    own = group.get(key)
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
        own.copy_(value)
    else:
        group[key] = value


def sendable(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that can be encoded. Objects of other classes are left out: each rank has its own."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value for key, value in options.items() if _can_be_sent(value)}


def _can_be_sent(value: Any) -> bool:
    try:
        encode({"value": value})
    except TypeError:
        return False
    return True
