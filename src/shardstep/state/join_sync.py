"""Options from a rank that still has inputs to those that have run out of them: there no scheduler runs any more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.comm.channel import Channel
from shardstep.state.consolidation import receive_state, send_state
from shardstep.state.serialization import encode

Groups = Sequence[dict[str, Any]]


def hand_over(
    channel: Channel, donor: int, away: Sequence[int], groups: Groups, told: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of rank `donor` for the ranks that are `away`; called on all ranks. Returns what it has `told`."""
    if channel.rank == donor:
        text, tensors = encode({"options": [sendable(group) for group in groups], "told": told})
        for rank in away:
            send_state(channel, text, tensors, rank)
    elif channel.rank in away:
        received = receive_state(channel, donor)
        for theirs, ours in zip(received["options"], groups, strict=True):
            for key, value in theirs.items():
                _take(ours, key, value)
        return dict(received["told"])
    return dict(told)


@torch.no_grad()
def _take(group: dict[str, Any], key: str, value: Any) -> None:
    """A tensor stays the one that it was, on its device: a scheduler, or a graph, may hold it."""
    own = group.get(key)
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor) and own.shape == value.shape:
        own.copy_(value)
    else:
        group[key] = value


def sendable(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options that can be sent; an object of the program's own is the same on every rank anyway."""
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {key: value for key, value in options.items() if _can_be_sent(value)}


def _can_be_sent(value: Any) -> bool:
    try:
        encode({"value": value})
    except TypeError:
        return False
    return True
