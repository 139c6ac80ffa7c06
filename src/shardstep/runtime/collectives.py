"""Channels between ranks, and small or occasional messages. Those of every step: gathers.py and reductions.py.

[Note: order] A backend runs the collectives of a group in the order in which each rank issues them; ranks that issue
them in different orders hang. Everything in these three files is called from the thread that calls the optimizer, in
an order that follows from the plan alone, and the plan is the same on every rank (agreement.py sees to that).
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardstep.planning.chunks import plan_chunks

CHUNK_NBYTES = 32 * 1024 * 1024  # the largest message of `send_tensors`, and so the memory it needs

# Tensors from this size on travel from and into their own memory; smaller ones share a message. A copy through fresh
# memory costs more than a message: 18 ms for 42 MB, and as much memory.
IN_PLACE_NBYTES = 1024 * 1024

# What goes round the ring goes in pieces of this size: a rank passes on the first while the next are still coming.
RING_PIECE_NBYTES = 2 * 1024 * 1024

# Point-to-point messages match by peer and tag. A tag of our own keeps them apart from a program's own sends.
_TAG = 20_591
_tags_taken: dict[str, int] = {}


@dataclass(frozen=True)
class Channel:
    """The ranks of one process group, and where its messages live."""

    group: dist.ProcessGroup
    rank: int  # within the group
    global_rank: int
    world_size: int
    device: (
        torch.device
    )  # for small messages: the CPU where the backend takes it, so that reading them waits for nothing
    backends: dict[str, str]  # by type of device
    one_host: bool = True  # whether all ranks share a network interface; asked only where it matters


def open_channel(group: dist.ProcessGroup | None, accelerator: torch.device | None) -> Channel:
    """The channel of `group` (default: all ranks). `accelerator` is used where the backend takes no CPU tensors."""
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
    channel = Channel(chosen, rank, dist.get_global_rank(chosen, rank), dist.get_world_size(chosen), device, backends)
    if channel.world_size > 2 and takes_many_messages(channel, torch.device("cpu")):
        hosts = gather_records(channel, this_host()).read()
        channel = replace(channel, one_host=len(set(hosts)) == 1)
    return channel


def this_host() -> bytes:
    """The same for all processes that share this one's network, and for no others."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
    except OSError:  # not Linux
        name = socket.gethostname()
    return hashlib.sha256(name.encode()).digest()[:16]


class PendingRecords:
    """Records on their way to every rank. `read` waits for them and for nothing that was enqueued later."""

    def __init__(self, work: Any, landing: torch.Tensor) -> None:
        self._work = work
        self._landing = landing
        self._copied: torch.cuda.Event | None = None
        if landing.is_cuda:
            # The copy to the host is enqueued now, behind the collective. Made in `read`, it would queue behind a
            # whole forward and backward pass and hold up the host for as long.
            work.wait()
            self._landing = torch.empty(landing.shape, dtype=landing.dtype, pin_memory=True)
            self._landing.copy_(landing, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[bytes]:
        if self._copied is None:
            self._work.wait()
        else:
            self._copied.synchronize()
        return [record.numpy().tobytes() for record in self._landing]


class Records(Protocol):
    """A few bytes from every rank."""

    def read(self) -> list[bytes]:
        """In rank order, once all are there."""


class DirectRecords:
    """Records in one message from each rank to each other one.

    A gather takes several turns, and behind megabytes on the same connections each of its messages would wait for them.
    These are on their way at once, and what is sent later stays behind them. Only where `takes_many_messages`.
    """

    def __init__(self, channel: Channel, record: bytes, tag: int) -> None:
        self._own = torch.frombuffer(bytearray(record), dtype=torch.uint8)
        self._landing = self._own.repeat(channel.world_size, 1)
        self._work: list[Any] = []
        for other in range(channel.world_size):
            if other != channel.rank:
                self._work.append(dist.irecv(self._landing[other], group=channel.group, group_src=other, tag=tag))
                self._work.append(dist.isend(self._own, group=channel.group, group_dst=other, tag=tag))

    def read(self) -> list[bytes]:
        for work in self._work:
            work.wait()
        return [record.numpy().tobytes() for record in self._landing]


def gather_records(channel: Channel, record: bytes) -> PendingRecords:
    """Start giving every rank the record of every rank. All records have the same length."""
    own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(channel.device)
    landing = torch.empty(channel.world_size, len(own), dtype=torch.uint8, device=channel.device)
    work = dist.all_gather(list(landing), own, group=channel.group, async_op=True)
    return PendingRecords(work, landing)


def broadcast_bytes(channel: Channel, payload: bytes | None, nbytes: int, source: int) -> bytes:
    """`payload` of rank `source`, on every rank; all ranks know its length."""
    if nbytes == 0:
        return b""
    if channel.rank == source:
        message = torch.frombuffer(bytearray(payload or b""), dtype=torch.uint8).to(channel.device)
    else:
        message = torch.empty(nbytes, dtype=torch.uint8, device=channel.device)
    dist.broadcast(message, group=channel.group, group_src=source)
    return message.cpu().numpy().tobytes()


def takes_many_messages(channel: Channel, device: torch.device) -> bool:
    """Whether a message costs less than a copy there, so that large parameters travel from their own memory."""
    return device.type == "cpu" and channel.backends.get("cpu") == "gloo"


def take_tags(channel: Channel) -> int:
    """The first of as many tags as there are ranks, which no other exchange of this group uses.

    So a receive that an interrupted step left behind never takes the message of an optimizer that was built after it.
    The ranks of a group make them in the same order, so they count alike.
    """
    name = channel.group.group_name
    taken = _tags_taken.get(name, 0)
    _tags_taken[name] = taken + channel.world_size
    return _TAG + 1 + taken


def broadcast_tensors(channel: Channel, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Give every rank the values of rank `source`, in place; tensors of one dtype and device share a message."""
    classes: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        classes.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in classes.values():
        for parts in plan_chunks([t.nbytes for t in members], limit=CHUNK_NBYTES, large=CHUNK_NBYTES):
            whole = [members[span.tensor] for span in parts]
            packed = torch.cat([as_bytes(t.reshape(-1))[s.start : s.stop] for t, s in zip(whole, parts, strict=True)])
            dist.broadcast(packed, group=channel.group, group_src=source)
            if channel.rank == source:
                continue
            for tensor, span, values in zip(
                whole, parts, torch.split(packed, [s.stop - s.start for s in parts]), strict=True
            ):
                _write_bytes(tensor, span.start, values)


def _write_bytes(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    if tensor.is_contiguous():
        as_bytes(tensor.view(-1))[start : start + len(values)] = values
        return
    flat = tensor.contiguous().view(-1)
    as_bytes(flat)[start : start + len(values)] = values
    tensor.copy_(flat.view(tensor.shape))


def send_tensors(channel: Channel, tensors: Sequence[torch.Tensor], to: int) -> None:
    """Send flat tensors to rank `to` in messages of at most CHUNK_NBYTES; they may lie on any device."""
    for parts in _messages(tensors):
        packed = None if _in_place(channel, parts) else torch.cat([part.to(channel.device) for part in parts])
        dist.send(parts[0] if packed is None else packed, group=channel.group, group_dst=to, tag=_TAG)
        del packed  # before the next one is made: one message of memory, not two


def receive_tensors(channel: Channel, landing: Sequence[torch.Tensor], source: int) -> None:
    """Receive what rank `source` sends by `send_tensors` into flat tensors of the same sizes and dtypes."""
    for parts in _messages(landing):
        if _in_place(channel, parts):
            dist.recv(parts[0], group=channel.group, group_src=source, tag=_TAG)
            continue
        sizes = [len(part) for part in parts]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=channel.device)
        dist.recv(message, group=channel.group, group_src=source, tag=_TAG)
        for part, values in zip(parts, torch.split(message, sizes), strict=True):
            part.copy_(values)
        del message, values


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The byte ranges that travel together, message by message."""
    flat = [as_bytes(tensor) for tensor in tensors]
    for spans in plan_chunks([len(one) for one in flat], limit=CHUNK_NBYTES, large=IN_PLACE_NBYTES):
        yield [flat[span.tensor][span.start : span.stop] for span in spans]


def _in_place(channel: Channel, parts: Sequence[torch.Tensor]) -> bool:
    return len(parts) == 1 and parts[0].device == channel.device


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: backends differ in the dtypes they take, and none refuses bytes."""
    return flat.detach().view(torch.uint8)


def ring_pieces(flat: torch.Tensor) -> Sequence[torch.Tensor]:
    """What goes round the ring, in pieces; none of nothing."""
    return torch.tensor_split(flat, -(-flat.nbytes // RING_PIECE_NBYTES)) if flat.nbytes else ()
