"""The ranks of one process group: who they are, how their hosts reach each other, and tags that nobody else uses.

[Note: order] A backend runs the collectives of a group in the order in which each rank issues them; ranks that issue
them in different orders hang, or take one message for another. Everything that `comm/` sends is issued in an order that
follows from the plan alone, and the plan is the same on every rank (agreement.py sees to that).
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.host_groups import HostGroups, check_process, hosts_of

# Point-to-point messages match by peer and tag. A tag of our own keeps them apart from a program's own sends.
TAG = 20_591
_tags_taken: dict[str, int] = {}


@dataclass(frozen=True)
class Channel:
    """The ranks of one process group, and where its messages live."""

    group: dist.ProcessGroup
    rank: int  # within the group
    global_rank: int
    world_size: int
    device: torch.device  # for occasional tensors: the CPU where the backend takes it
    backends: dict[str, str]  # by type of device
    hosts: HostGroups | None  # how hosts combine what they have to say; None: by messages from each to each
    process: int = field(default_factory=os.getpid)

    def check_process(self) -> None:
        """Raise in a process that was forked from this one."""
        check_process(self.process)


def open_channel(group: dist.ProcessGroup | None, accelerator: torch.device | None) -> Channel:
    """The channel of `group` (default: all ranks). `accelerator`: where parameters lie, if not on the CPU alone.

    Called on all ranks of the group: the first time it may make a group for the hosts.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "there is no process group: start the program with torchrun and call "
            "torch.distributed.init_process_group() before building the optimizer"
        )
    chosen: Any = dist.group.WORLD if group is None else group
    rank = dist.get_rank(chosen)
    if rank < 0:
        raise RuntimeError(
            f"global rank {dist.get_rank()} is not a member of the given process group; "
            "build the optimizer only on the ranks that are in the group"
        )
    backends = dict(entry.split(":", 1) for entry in dist.get_backend_config(chosen).split(","))
    device = torch.device("cpu") if "cpu" in backends or accelerator is None else accelerator
    by_messages = backends.get("cpu") == "gloo" and accelerator is None
    alone = dist.get_world_size(chosen) == 1
    hosts = None if by_messages or alone else hosts_of(chosen, backends)
    return Channel(
        chosen, rank, dist.get_global_rank(chosen, rank), dist.get_world_size(chosen), device, backends, hosts
    )


def accelerator_among(tensors: Iterable[torch.Tensor]) -> torch.device | None:
    """The first device that is not the CPU."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)


def this_host() -> bytes:
    """The same for all processes that share this one's network, and for no others."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).digest()[:16]


def take_tags(channel: Channel) -> int:
    """The first of as many tags as there are ranks, which nothing else in this group uses.

    So a receive that an interrupted step left behind never takes the message of an optimizer that was built after it.
    The ranks of a group make them in the same order, so they count alike.
    """
    name = channel.group.group_name
    taken = _tags_taken.get(name, 0)
    _tags_taken[name] = taken + channel.world_size
    return TAG + 1 + taken


_NAMES = struct.Struct(">QQ")


def names_taken(channel: Channel) -> bytes:
    """How many tags and questions there were in this group so far: alike on all ranks, unless one has failed."""
    questions = 0 if channel.hosts is None else channel.hosts.questions
    return _NAMES.pack(_tags_taken.get(channel.group.group_name, 0), questions)


def go_on_from(channel: Channel, records: Iterable[bytes]) -> None:
    """Count on from the highest of what all ranks have taken."""
    tags, questions = (max(column) for column in zip(*map(_NAMES.unpack, records), strict=True))
    _tags_taken[channel.group.group_name] = tags
    if channel.hosts is not None:
        channel.hosts.questions = questions
