"""Every message between ranks. No other file issues one.

[Note: order] A backend runs the collectives of a group in the order in which each rank issues them; ranks that issue
them in different orders hang. Everything here is called from the thread that calls the optimizer, in an order that
follows from the plan alone, and the plan is the same on every rank (agreement.py sees to that).
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

# A message from this size on may go from rank to rank, round the ring, instead of from its holder to everyone.
RING_NBYTES = 256 * 1024
# In pieces of this size, so that a rank passes on the first while the next are still coming.
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


class Message(Protocol):
    """Parameters of one rank that travel together."""

    nbytes: int
    needs_memory: bool  # whether `landing` takes memory that the parameters do not have already

    def prepare(self) -> None:
        """Called on every rank before every step; may raise, the other methods do not."""

    def outgoing(self) -> torch.Tensor:
        """Their values as one flat tensor; called on the rank that holds them."""

    def landing(self) -> torch.Tensor:
        """Where the values may be received."""

    def landed(self, values: torch.Tensor) -> None:
        """The values have arrived in what `landing` returned."""


class Gather(Protocol):
    """Gives every rank the messages of every rank; made once for a plan and used at every step, in this order.

    On one rank there is nothing to do.
    """

    def expect(self) -> None:
        """Other ranks' parameters may be written from now on."""

    def send(self) -> None:
        """This rank's parameters are final."""

    hops: int  # how many ranks a message may pass through

    def pass_on(self, distance: int) -> None:
        """Pass on what comes to this rank for others, from the rank that is so far behind it in the ring."""

    def finish(self) -> None:
        """Return when every message has arrived."""


def make_gathers(
    channel: Channel, buckets: Sequence[tuple[torch.device, Sequence[Sequence[Message]]]], *, ring: bool = True
) -> Sequence[Gather]:
    """One gather for each bucket: the device of its parameters, and the messages of each rank.

    Without `ring` every rank sends to all others itself: for gathers that ranks finish when each likes, so that none
    would wait for another to pass something on.
    """
    load = [0] * channel.world_size  # of a whole step: what a rank sends in one bucket it may spare in the next
    for _, rows in buckets:
        for rank, row in enumerate(rows):
            load[rank] += sum(message.nbytes for message in row)
    overloaded = [share * (len(load) - 1) > sum(load) for share in load]
    in_ring = [ring and (heavy or not channel.one_host) for heavy in overloaded]
    return [
        DirectGather(channel, rows, in_ring) if takes_many_messages(channel, device) else BroadcastGather(channel, rows)
        for device, rows in buckets
    ]


def finish_gathers(gathers: Sequence[Gather]) -> None:
    """Return when everything has arrived. Passed on first, and in the order in which it comes: the rank before this one
    sends its own parts of all gathers, then those of the rank before it, and so on."""
    for distance in range(1, max((gather.hops for gather in gathers), default=0) + 1):
        for gather in gathers:
            gather.pass_on(distance)
    for gather in gathers:
        gather.finish()


def takes_many_messages(channel: Channel, device: torch.device) -> bool:
    """Whether a message costs less than a copy there, so that large parameters travel from their own memory."""
    return device.type == "cpu" and channel.backends.get("cpu") == "gloo"


class BroadcastGather:
    """One broadcast per message. On a GPU nothing here waits: it is all enqueued on the current stream.

    Messages that need memory go one after the other, so that they need it for one of them only.
    """

    def __init__(self, channel: Channel, messages: Sequence[Sequence[Message]]) -> None:
        self._channel = channel
        sendable = [(source, message) for source, row in enumerate(messages) for message in row if message.nbytes]
        self._sendable = sendable if channel.world_size > 1 else []
        self._work: list[Any] = []

    def expect(self) -> None:
        """A broadcast is one call on all ranks."""

    def send(self) -> None:
        for source, message in self._sendable:
            if not message.needs_memory:
                values = as_bytes(message.outgoing())
                self._work.append(dist.broadcast(values, group=self._channel.group, group_src=source, async_op=True))

    hops = 0

    def pass_on(self, distance: int) -> None:
        """The backend does."""

    def finish(self) -> None:
        for work in self._work:
            work.wait()
        self._work = []
        for source, message in self._sendable:
            if message.needs_memory:
                own = source == self._channel.rank
                values = message.outgoing() if own else message.landing()
                dist.broadcast(as_bytes(values), group=self._channel.group, group_src=source)
                if not own:
                    message.landed(values)


def _take_tags(channel: Channel) -> int:
    """The first of as many tags as there are ranks, which no other gather of this group uses.

    So a receive that an interrupted step left behind never takes the message of an optimizer that was built after it.
    The ranks of a group make their gathers in the same order, so they count alike.
    """
    name = channel.group.group_name
    taken = _tags_taken.get(name, 0)
    _tags_taken[name] = taken + channel.world_size
    return _TAG + 1 + taken


class DirectGather:
    """Messages from rank to rank, received while this rank still steps.

    Gloo's broadcasts take 1.5 times as long at two ranks and 2.4 times at four for the same bytes, and start only when
    the slowest rank has stepped. Here a rank that holds less sends while the others still compute.

    A message goes one of two ways. Straight from its holder to every other rank: fastest on one host. Or round the
    ring, in pieces: each rank passes on to the next what it has from the one before. Then every link carries every byte
    once, and no two ranks send to the same one at a time, which on slow links loses a third of their rate. It is also
    the way where whole parameters make uneven shares, and one rank alone would send more than all parameters once.
    """

    def __init__(self, channel: Channel, messages: Sequence[Sequence[Message]], in_ring: Sequence[bool]) -> None:
        """`in_ring[r]`: the messages of rank r go round the ring."""
        self._channel = channel
        self._messages = [[message for message in row if message.nbytes] for row in messages]
        self._in_ring = in_ring
        self._before = (channel.rank - 1) % channel.world_size
        self._next = (channel.rank + 1) % channel.world_size
        self.hops = max(channel.world_size - 2, 0)
        self._tag = _take_tags(channel)
        self._arriving: list[tuple[Message, torch.Tensor]] = []
        self._carried: dict[int, list[tuple[torch.Tensor, Any]]] = {}  # by holder: pieces to pass on, when they come
        self._work: list[Any] = []

    def expect(self) -> None:
        if self._work or self._carried:
            raise RuntimeError(
                "an earlier step was interrupted half-way, so the ranks may hold different parameters; "
                "build the optimizer again and load a checkpoint"
            )
        for holder in self._from_nearest():
            for message in self._messages[holder]:
                values = message.landing()
                self._arriving.append((message, values))
                if not self._goes_round(holder, message):
                    self._work.append(self._irecv(as_bytes(values), holder, holder))
                    continue
                for piece in _ring_pieces(values):
                    work = self._irecv(piece, self._before, holder)
                    if self._next == holder:
                        self._work.append(work)
                    else:
                        self._carried.setdefault(holder, []).append((piece, work))

    def send(self) -> None:
        own = self._channel.rank
        for message in self._messages[own]:
            values = message.outgoing()
            if self._goes_round(own, message):
                for piece in _ring_pieces(values):
                    self._isend(piece, self._next, own)
            else:
                for to in reversed(self._from_nearest()):
                    self._isend(as_bytes(values), to, own)

    def pass_on(self, distance: int) -> None:
        holder = (self._channel.rank - distance) % self._channel.world_size
        for piece, work in self._carried.pop(holder, ()):
            work.wait()
            self._isend(piece, self._next, holder)

    def finish(self) -> None:
        for work in self._work:
            work.wait()
        for message, values in self._arriving:
            message.landed(values)
        self._arriving, self._work = [], []

    def _goes_round(self, holder: int, message: Message) -> bool:
        return self._in_ring[holder] and message.nbytes >= RING_NBYTES

    def _from_nearest(self) -> list[int]:
        """The other ranks, the one before this first; so not everybody starts with rank 0."""
        count = self._channel.world_size
        return [(self._channel.rank - distance) % count for distance in range(1, count)]

    def _irecv(self, values: torch.Tensor, source: int, holder: int) -> Any:
        return dist.irecv(values, group=self._channel.group, group_src=source, tag=self._tag + holder)

    def _isend(self, values: torch.Tensor, to: int, holder: int) -> None:
        self._work.append(dist.isend(values, group=self._channel.group, group_dst=to, tag=self._tag + holder))


def _ring_pieces(values: torch.Tensor) -> Sequence[torch.Tensor]:
    flat = as_bytes(values)
    return torch.tensor_split(flat, -(-len(flat) // RING_PIECE_NBYTES))


class Reduction(Protocol):
    """A bucket of gradients on its way to the ranks that hold it."""

    def finish(self) -> list[torch.Tensor]:
        """This rank's range as every rank computed it, in rank order. Sums are taken by the caller, always alike."""


def start_reduction(channel: Channel, chunks: Sequence[torch.Tensor], tag: int) -> Reduction:
    """Send `chunks[r]` to rank r; they must not change before `finish`. `tag` is from `take_reduction_tag`."""
    if takes_many_messages(channel, chunks[0].device):
        return DirectReduction(channel, chunks, tag)
    return ExchangedReduction(channel, chunks)


def take_reduction_tag(channel: Channel) -> int:
    """A tag that no other reduction or gather of this group uses. Called in the same order on every rank."""
    return _take_tags(channel)


class DirectReduction:
    """Every rank sends to every other: half the bytes of Gloo's own reduce_scatter, which is an all-reduce inside."""

    def __init__(self, channel: Channel, chunks: Sequence[torch.Tensor], tag: int) -> None:
        own, count = channel.rank, channel.world_size
        self._arrivals = [chunks[own] if rank == own else torch.empty_like(chunks[own]) for rank in range(count)]
        self._work: list[Any] = []
        for shift in range(1, count):
            source, to = (own - shift) % count, (own + shift) % count
            if chunks[own].numel():
                landing = as_bytes(self._arrivals[source])
                self._work.append(dist.irecv(landing, group=channel.group, group_src=source, tag=tag))
            if chunks[to].numel():
                self._work.append(dist.isend(as_bytes(chunks[to]), group=channel.group, group_dst=to, tag=tag))
        self._chunks = chunks  # what is being sent must live

    def finish(self) -> list[torch.Tensor]:
        for work in self._work:
            work.wait()
        return self._arrivals


class ExchangedReduction:
    """One all-to-all: what NCCL's reduce-scatter moves, and it takes uneven ranges."""

    def __init__(self, channel: Channel, chunks: Sequence[torch.Tensor]) -> None:
        count, own = channel.world_size, chunks[channel.rank]
        self._outgoing = torch.cat(list(chunks))
        self._landing = own.new_empty(count * own.numel())
        self._count = count
        splits = [chunk.numel() for chunk in chunks]
        self._work = dist.all_to_all_single(
            self._landing, self._outgoing, [own.numel()] * count, splits, group=channel.group, async_op=True
        )

    def finish(self) -> list[torch.Tensor]:
        self._work.wait()
        return list(self._landing.chunk(self._count)) if self._landing.numel() else [self._landing] * self._count


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
