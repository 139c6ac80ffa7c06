"""Which transport: decided once, when an optimizer is built."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardstep.wire.alone import Alone
from shardstep.wire.by_device import ByDevice
from shardstep.wire.channel import Channel
from shardstep.wire.collectives import Collectives
from shardstep.wire.hosts import Hosts
from shardstep.wire.messages import Messages
from shardstep.wire.transport import Transport


def open_transport(
    channel: Channel, tensors: Sequence[torch.Tensor], owner: Any | None = None, *, ordered_sums: bool = False
) -> Transport:
    """For what lies on the devices of `tensors`. Called on all ranks.

    `owner` issues collectives in an order of its own (in backward): it gets a communicator that no other owner has
    while it lives. Without one, everything is issued in the order of the program, and the group itself will do.
    """
    if channel.world_size == 1:
        return Alone()
    devices = {tensor.device.type: tensor.device for tensor in tensors}
    found: dict[str, Transport] = {}
    for kind, device in sorted(devices.items()):
        if kind == "cpu" and channel.backends.get("cpu") == "gloo":
            found[kind] = Messages(channel)
        else:
            group = channel.group if owner is None else _communicator_for(channel, kind, owner)
            found[kind] = Collectives(channel, group, device, ordered_sums=ordered_sums)
    return next(iter(found.values())) if len(found) == 1 else ByDevice(found)


class _Communicators:
    """The communicators of one group: itself, and as many more as there were optimizers at a time."""

    def __init__(self, group: Any) -> None:
        self.groups: list[Any] = [group]
        self.owners: list[weakref.ref[Any] | None] = [None]

    def free(self) -> bytes:
        """Flags: 1 where one is taken here."""
        taken = [owner is not None and owner() is not None for owner in self.owners]
        return bytes(taken)

    def take(self, place: int, owner: Any, global_ranks: Sequence[int], backend: str) -> Any:
        if place == len(self.groups):
            self.groups.append(dist.new_group(list(global_ranks), backend=backend, use_local_synchronization=True))
            self.owners.append(None)
        self.owners[place] = weakref.ref(owner)
        return self.groups[place]


_communicators: dict[str, _Communicators] = {}


def _communicator_for(channel: Channel, kind: str, owner: Any) -> Any:
    """One that is free on every rank: an optimizer that is gone here may still be alive elsewhere."""
    name = channel.group.group_name
    if name not in _communicators or _communicators[name].groups[0] is not channel.group:
        _communicators[name] = _Communicators(channel.group)
    known = _communicators[name]
    assert isinstance(channel.hosts, Hosts), "where there are collectives, hosts combine"
    taken = channel.hosts.combine(known.free()).highest
    place = next(place for place in itertools.count() if place == len(taken) or not taken[place])
    return known.take(place, owner, dist.get_process_group_ranks(channel.group), channel.backends[kind])


def release(owner: Any) -> None:
    """`owner` is closed: on this rank its communicator is free."""
    for known in _communicators.values():
        known.owners = [None if holder is not None and holder() is owner else holder for holder in known.owners]
