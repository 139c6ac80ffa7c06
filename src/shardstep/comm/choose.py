"""Which transport: decided once, when an optimizer is built."""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.channel import Channel
from shardstep.comm.gloo import GlooMessages
from shardstep.comm.host_groups import HostGroups, timeout_of
from shardstep.comm.mixed import MixedDevices
from shardstep.comm.nccl import Collectives
from shardstep.comm.single import SingleRank
from shardstep.comm.transport import Transport
from shardstep.torch_internals import count_process_groups, process_groups_counted_as


def open_transport(
    channel: Channel,
    tensors: Sequence[torch.Tensor],
    owner: Any | None = None,
    *,
    ordered_sums: bool = False,
    awaited_singly: bool = False,
) -> Transport:
    """For what lies on the devices of `tensors`. Called on all ranks.

    `awaited_singly`: parameters are used as they come, bucket by bucket, and not when all are there.

    `owner` issues collectives in an order of its own (in backward): it gets a communicator that no other owner has
    while it lives. Without one, everything is issued in the order of the program, and the group itself will do.
    """
    if channel.world_size == 1:
        return SingleRank()
    devices = {tensor.device.type: tensor.device for tensor in tensors}
    found: dict[str, Transport] = {}
    for kind, device in sorted(devices.items()):
        if kind == "cpu" and channel.backends.get("cpu") == "gloo":
            found[kind] = GlooMessages(channel)
        else:
            known = _communicators_of(channel)
            group = channel.group if owner is None else known.take_free(channel, kind, owner)
            if kind == "cuda" and known.are_shared():
                _warn_of_one_queue()
            found[kind] = Collectives(
                channel, group, device, known.are_shared, ordered_sums=ordered_sums, awaited_singly=awaited_singly
            )
    return next(iter(found.values())) if len(found) == 1 else MixedDevices(found)


def _warn_of_one_queue() -> None:
    """Ranks may reduce two models' buckets in different orders, each waiting for what the other has not begun."""
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        warnings.warn(
            "CUDA_DEVICE_MAX_CONNECTIONS=1 lets one kernel wait for another of the same process, and there are two "
            "sharded models: if one backward pass goes through both, and ranks use different layers, it hangs. Unset "
            "it, or give each model a backward pass of its own",
            stacklevel=5,
        )


class _Communicators:
    """The communicators of one group: itself, and as many more as there were optimizers at a time."""

    def __init__(self, group: Any) -> None:
        self.groups: list[Any] = [group]
        self.owners: list[weakref.ref[Any] | None] = [None]

    def _taken(self) -> list[bool]:
        return [owner is not None and owner() is not None for owner in self.owners]

    def are_shared(self) -> bool:
        """Whether more than one optimizer is alive here."""
        return sum(self._taken()) > 1

    def take_free(self, channel: Channel, kind: str, owner: Any) -> Any:
        """One that is free on every rank: an optimizer that is gone here may still be alive elsewhere."""
        assert isinstance(channel.hosts, HostGroups), "where there are collectives, hosts combine"
        taken = channel.hosts.combine(bytes(self._taken())).highest
        place = next(place for place in itertools.count() if place == len(taken) or not taken[place])
        if place == len(self.groups):
            self.groups.append(_new_group(channel, kind))
            self.owners.append(None)
        self.owners[place] = weakref.ref(owner)
        return self.groups[place]


def _new_group(channel: Channel, kind: str) -> Any:
    """Make a group of the same ranks; only these call. Meanwhile all of them count the same number of groups.

    The number is higher than that of any group made here before: torch counts fewer when a program destroys a group,
    and would give the name of a group that still lives a second time.
    """
    global _highest_count
    assert channel.hosts is not None
    own = max(count_process_groups(), _highest_count + 1)
    _highest_count = int.from_bytes(channel.hosts.combine(own.to_bytes(4, "big")).highest, "big")
    with process_groups_counted_as(_highest_count):
        return dist.new_group(
            dist.get_process_group_ranks(channel.group),
            timeout=timeout_of(channel.group),
            backend=channel.backends[kind],
            use_local_synchronization=True,
        )


_highest_count = 0  # under which a group was made here
_communicators: dict[str, _Communicators] = {}


def _communicators_of(channel: Channel) -> _Communicators:
    name = channel.group.group_name
    if name not in _communicators or _communicators[name].groups[0] is not channel.group:
        _communicators[name] = _Communicators(channel.group)
    return _communicators[name]


def release(owner: Any) -> None:
    """`owner` is closed: on this rank its communicator is free."""
    for known in _communicators.values():
        known.owners = [None if holder is not None and holder() is owner else holder for holder in known.owners]
