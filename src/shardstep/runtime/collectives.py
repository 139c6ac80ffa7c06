"""Every message between ranks. No other file issues one.

[Note: order] A backend runs the collectives of a group in the order in which each rank issues them; ranks that issue
them in different orders hang. Everything here is called from the thread that calls the optimizer, in an order that
follows from the plan alone, and the plan is the same on every rank (agreement.py sees to that).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardstep.planning.chunks import plan_chunks

CHUNK_NBYTES = 32 * 1024 * 1024  # the largest message of `send_tensors`, and so the memory it needs

# Point-to-point messages match by peer and tag. A tag of our own keeps them apart from a program's own sends.
_TAG = 20_591


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
    return Channel(chosen, rank, dist.get_global_rank(chosen, rank), dist.get_world_size(chosen), device, backends)


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


class Segment(Protocol):
    """What one rank contributes to a bucket."""

    numel: int
    device: torch.device

    def outgoing(self) -> torch.Tensor:
        """The values as one flat tensor; called on the rank that holds them."""

    def landing(self) -> torch.Tensor:
        """Where the values may be received."""

    def landed(self, values: torch.Tensor) -> None:
        """The values have arrived in what `landing` returned."""


def gather_bucket(channel: Channel, segments: Sequence[Segment]) -> None:
    """Give every rank the segment of every rank."""
    kind = segments[0].device.type
    if kind == "cpu" and channel.backends.get(kind) == "gloo":
        _gather_in_pairs(channel, segments)
    else:
        _gather_by_broadcast(channel, segments)


def _gather_in_pairs(channel: Channel, segments: Sequence[Segment]) -> None:
    """In round k every rank sends to the rank k above it and receives from the rank k below.

    Gloo's broadcasts take 1.5 times as long at two ranks and 2.4 times at four, for the same bytes. One round at a
    time, so that scattered parameters need memory for one other rank's segment, not for all.
    """
    own = segments[channel.rank]
    outgoing = as_bytes(own.outgoing()) if own.numel else None
    for shift in range(1, channel.world_size):
        to, source = (channel.rank + shift) % channel.world_size, (channel.rank - shift) % channel.world_size
        work: list[Any] = []
        landing = None
        if segments[source].numel:
            landing = segments[source].landing()
            work.append(dist.irecv(as_bytes(landing), group=channel.group, group_src=source, tag=_TAG))
        if outgoing is not None:
            work.append(dist.isend(outgoing, group=channel.group, group_dst=to, tag=_TAG))
        for pending in work:
            pending.wait()
        if landing is not None:
            segments[source].landed(landing)


def _gather_by_broadcast(channel: Channel, segments: Sequence[Segment]) -> None:
    """One broadcast per holder. On a GPU nothing here waits: it is all enqueued on the current stream."""
    for source, segment in enumerate(segments):
        if segment.numel == 0:
            continue
        values = segment.outgoing() if source == channel.rank else segment.landing()
        dist.broadcast(as_bytes(values), group=channel.group, group_src=source)
        if source != channel.rank:
            segment.landed(values)


def send_tensors(channel: Channel, tensors: Sequence[torch.Tensor], to: int) -> None:
    """Send flat tensors to rank `to` in messages of at most CHUNK_NBYTES; they may lie on any device."""
    for parts in _messages(tensors):
        message = parts[0] if _in_place(channel, parts) else torch.cat([part.to(channel.device) for part in parts])
        dist.send(message, group=channel.group, group_dst=to, tag=_TAG)


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


def _messages(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """The byte ranges that travel together, message by message."""
    flat = [as_bytes(tensor) for tensor in tensors]
    for spans in plan_chunks([len(one) for one in flat], CHUNK_NBYTES):
        yield [flat[span.tensor][span.start : span.stop] for span in spans]


def _in_place(channel: Channel, parts: Sequence[torch.Tensor]) -> bool:
    return len(parts) == 1 and parts[0].device == channel.device


def as_bytes(flat: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: backends differ in the dtypes they take, and none refuses bytes."""
    return flat.detach().view(torch.uint8)
