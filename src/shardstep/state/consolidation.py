"""All ranks' state on one rank. Only that rank receives; every other rank sends its own part, in bounded messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardstep.comm.agreement import Claim, Facts, agree, attempt
from shardstep.comm.channel import Channel
from shardstep.comm.tensors import receive_tensors, send_tensors
from shardstep.state.serialization import Reader, encode, to_cpu


def consolidate(channel: Channel, read_local: Callable[[], Mapping[Any, Any]], to: int) -> dict[Any, Any] | None:
    """The state of all ranks by parameter index, on the CPU, on rank `to`; None on the others.

    `read_local` gives this rank's part. A sender holds its own state and one message; the receiver adds to the result
    one message. If any rank cannot take part, every rank raises before anything is sent.
    """
    text, failure = "", None
    tensors: list[torch.Tensor] = []
    merged: dict[Any, Any] = {}
    try:
        _check_target(channel, to)
        local = read_local()
        text, tensors = encode(local)
        if channel.rank == to:
            merged = to_cpu(local)
    except Exception as error:
        failure = error
    agree(channel, Claim("consolidate_state_dict", failure, Facts([f"to={to}"])))
    if channel.rank != to:
        send_state(channel, text, tensors, to)
        return None
    for source in range(channel.world_size):
        if source != to:
            # What is not keyed by a parameter is the same on every rank; this rank's own is kept.
            merged = {**receive_state(channel, source), **merged}
    return merged


def send_state(channel: Channel, text: str, tensors: Sequence[torch.Tensor], to: int) -> None:
    """Send what `encode` made."""
    _send_text(channel, text, to)
    send_tensors(channel, tensors, to)


def receive_state(channel: Channel, source: int) -> dict[Any, Any]:
    """What another rank sends by `send_state`, on the CPU."""
    reader = Reader(_receive_text(channel, source).decode())
    receive_tensors(channel, reader.landing, source)
    return dict(reader.state)


def _send_text(channel: Channel, text: str, to: int) -> None:
    packed = text.encode()
    send_tensors(channel, [torch.tensor([len(packed)], device="cpu")], to)
    send_tensors(channel, [torch.frombuffer(bytearray(packed), dtype=torch.uint8)], to)


def _receive_text(channel: Channel, source: int) -> bytes:
    length = torch.zeros(1, dtype=torch.int64, device="cpu")
    receive_tensors(channel, [length], source)
    packed = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    receive_tensors(channel, [packed], source)
    return packed.numpy().tobytes()


def move_state(
    channel: Channel, state: Mapping[Any, Any], moves: Mapping[Any, tuple[int, int]], action: str
) -> dict[Any, Any]:
    """This rank's state after every entry has gone from its old holder to its new one: `moves[key]`.

    `moves` are those that this rank takes part in, or more. Pairs of ranks talk one after the other, in an order that
    is the same on every rank. What can fail on one rank (state that cannot be sent, no memory for what comes) is done
    before a message is under way that another rank waits for, and then `action` raises on all.
    """
    rank = channel.rank
    kept = {key: entry for key, entry in state.items() if moves[key][1] == rank}
    pairs = sorted({(old, new) for old, new in moves.values() if old != new and rank in (old, new)})

    def pack() -> dict[int, tuple[str, list[torch.Tensor]]]:
        leaving: dict[int, dict[Any, Any]] = {to: {} for source, to in pairs if source == rank}
        for key, entry in state.items():
            if moves[key][0] == rank != moves[key][1]:
                leaving[moves[key][1]][key] = entry
        return {to: encode(entries) for to, entries in leaving.items()}

    packed = attempt(channel, action, pack)
    texts: dict[int, bytes] = {}
    for source, to in pairs:
        if source == rank:
            _send_text(channel, packed[to][0], to)
        else:
            texts[source] = _receive_text(channel, source)
    coming = attempt(channel, action, lambda: {source: Reader(text.decode()) for source, text in texts.items()})
    for source, to in pairs:
        if source == rank:
            send_tensors(channel, packed[to][1], to)
        else:
            receive_tensors(channel, coming[source].landing, source)
    for reader in coming.values():
        kept.update(reader.state)
    return kept


def _check_target(channel: Channel, to: int) -> None:
    if isinstance(to, bool) or not isinstance(to, int):
        raise TypeError(f"to must be the number of a rank, got {to!r}")
    if not 0 <= to < channel.world_size:
        raise ValueError(
            f"there is no rank {to} in a group of {channel.world_size}; to must be 0 to {channel.world_size - 1}"
        )
