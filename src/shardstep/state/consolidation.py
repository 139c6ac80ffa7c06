"""Send optimizer state between ranks: all state to one rank, or each entry to its new holder, in bounded messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from shardstep.comm.agreement import Claim, Facts, agree, attempt
from shardstep.comm.channel import Channel
from shardstep.comm.tensors import receive_tensors, send_tensors
from shardstep.state.serialization import Decoder, encode, to_cpu


def consolidate(channel: Channel, read_local: Callable[[], Mapping[Any, Any]], to: int) -> dict[Any, Any] | None:
    """Return all ranks' state by parameter index, on the CPU, on rank `to`; return None on the other ranks.

    `read_local` returns this rank's part. Beside its own state, or the result, a rank needs memory for one message
    only. If one rank fails, all ranks raise before any state is sent.
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
            # Entries of no parameter are equal on all ranks; this rank's are kept.
            merged = {**receive_state(channel, source), **merged}
    return merged


def send_state(channel: Channel, text: str, tensors: Sequence[torch.Tensor], to: int) -> None:
    """Send a text and tensors that `encode` returned."""
    _send_text(channel, text, to)
    send_tensors(channel, tensors, to)


def receive_state(channel: Channel, source: int) -> dict[Any, Any]:
    """Receive the state that rank `source` sends by `send_state`, and return it on the CPU."""
    decoder = Decoder(_receive_text(channel, source).decode())
    receive_tensors(channel, decoder.buffers, source)
    return dict(decoder.state)


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
    """Send every entry from its old holder to its new one, and return this rank's entries afterwards.

    `moves[key]` are the old and the new holder; entries that do not concern this rank may be left out. Pairs of ranks
    communicate one after the other, in an order that is the same on all ranks. All that can fail on one rank (state
    that cannot be encoded, no memory for what is received) is done before another rank waits for a message; `action`
    then raises on all ranks.
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
    decoders = attempt(channel, action, lambda: {source: Decoder(text.decode()) for source, text in texts.items()})
    for source, to in pairs:
        if source == rank:
            send_tensors(channel, packed[to][1], to)
        else:
            receive_tensors(channel, decoders[source].buffers, source)
    for decoder in decoders.values():
        kept.update(decoder.state)
    return kept


def _check_target(channel: Channel, to: int) -> None:
    if isinstance(to, bool) or not isinstance(to, int):
        raise TypeError(f"to must be the number of a rank, got {to!r}")
    if not 0 <= to < channel.world_size:
        raise ValueError(
            f"there is no rank {to} in a group of {channel.world_size}; to must be 0 to {channel.world_size - 1}"
        )
