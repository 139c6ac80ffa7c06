"""Occasional tensors: values of one rank for all, and state from one rank to another, in bounded messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardstep.comm.channel import TAG, Channel
from shardstep.planning.chunks import Span, plan_chunks

CHUNK_NBYTES = 32 * 1024 * 1024  # the largest message, and so the memory it needs

# Tensors from this size on travel from and into their own memory; smaller ones share a message. A copy through fresh
# memory costs more than a message: 18 ms for 42 MB, and as much memory.
IN_PLACE_NBYTES = 1024 * 1024


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


def broadcast_tensors(channel: Channel, tensors: Sequence[torch.Tensor], source: int) -> None:
    """Give every rank the values of rank `source`, in place; small tensors of one dtype and device share a message."""
    classes: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        classes.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())
    for members in classes.values():
        for spans in plan_chunks([t.nbytes for t in members], limit=CHUNK_NBYTES, large=IN_PLACE_NBYTES):
            _broadcast_together(channel, [(members[span.tensor], span) for span in spans], source)


def _broadcast_together(channel: Channel, parts: Sequence[tuple[torch.Tensor, Span]], source: int) -> None:
    """A large one where it lies, if its bytes lie side by side there; others through memory of their own."""
    first, span = parts[0]
    if len(parts) == 1 and first.is_contiguous():
        dist.broadcast(as_bytes(first.view(-1))[span.start : span.stop], group=channel.group, group_src=source)
        return
    packed = torch.cat([as_bytes(tensor.contiguous().view(-1))[span.start : span.stop] for tensor, span in parts])
    dist.broadcast(packed, group=channel.group, group_src=source)
    if channel.rank != source:
        sizes = [span.stop - span.start for _, span in parts]
        for (tensor, span), values in zip(parts, torch.split(packed, sizes), strict=True):
            _write_bytes(tensor, span.start, values)


def _write_bytes(tensor: torch.Tensor, start: int, values: torch.Tensor) -> None:
    if tensor.is_contiguous():
        as_bytes(tensor.view(-1))[start : start + len(values)] = values
        return
    flat = tensor.clone(memory_format=torch.contiguous_format).view(-1)
    as_bytes(flat)[start : start + len(values)] = values
    # Where it is expanded, all along a dim is the same memory, and torch refuses to write it more than once.
    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    tensor[once].copy_(flat.view(tensor.shape)[once])


def send_tensors(channel: Channel, tensors: Sequence[torch.Tensor], to: int) -> None:
    """Send flat tensors to rank `to` in messages of at most CHUNK_NBYTES; they may lie on any device."""
    for parts in _messages(tensors):
        packed = None if _in_place(channel, parts) else torch.cat([part.to(channel.device) for part in parts])
        _message(channel, dist.isend, parts[0] if packed is None else packed, to)
        del packed  # before the next one is made: one message of memory, not two


def receive_tensors(channel: Channel, landing: Sequence[torch.Tensor], source: int) -> None:
    """Receive what rank `source` sends by `send_tensors` into flat tensors of the same sizes and dtypes."""
    for parts in _messages(landing):
        if _in_place(channel, parts):
            _message(channel, dist.irecv, parts[0], source)
            continue
        sizes = [len(part) for part in parts]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=channel.device)
        _message(channel, dist.irecv, message, source)
        for part, values in zip(parts, torch.split(message, sizes), strict=True):
            part.copy_(values)
        del message, values


def _message(channel: Channel, way: Any, values: torch.Tensor, peer: int) -> None:
    """To or from another rank. As a batch of one: otherwise NCCL makes a communicator of its own for each pair."""
    for work in dist.batch_isend_irecv([dist.P2POp(way, values, group=channel.group, tag=TAG, group_peer=peer)]):
        work.wait()


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
