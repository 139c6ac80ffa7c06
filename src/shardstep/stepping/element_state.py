"""The state of a piece, cut and joined: with its parameter, in runs, and over several pieces."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.planning import Piece
from shardstep.planning.runs import Run

Entry = dict[str, Any]  # the state of one piece; tensors with as many elements as the piece are cut with it


def cut_entry(entry: Mapping[str, Any], piece: Piece, start: int, stop: int) -> Entry:
    """The state of elements [start, stop) of a parameter, from that of a piece which contains them."""
    if (start, stop) == (piece.start, piece.stop):
        return dict(entry)
    # Copies throughout: two pieces must not count their steps in one tensor, nor keep a larger one alive.
    return {
        name: value.reshape(-1)[start - piece.start : stop - piece.start].clone()
        if _is_cut(value, piece.numel)
        else copy.deepcopy(value)
        for name, value in entry.items()
    }


def _is_cut(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == numel


def join_entries(entries: Sequence[Entry], numels: Sequence[int]) -> Entry:
    """The state of consecutive pieces as that of one."""
    if len(entries) == 1:
        return dict(entries[0])
    return {
        name: _cat([entry[name] for entry in entries])
        if all(_is_cut(entry[name], numel) for entry, numel in zip(entries, numels, strict=True))
        else entries[0][name]
        for name in entries[0]
    }


def cut_from_run(entry: Mapping[str, Any], run: Run, offset: int, numel: int) -> Entry:
    """The state of one piece of a run. Views of what is kept per element, copies of counters."""
    if len(run.pieces) == 1:
        return dict(entry)
    return {
        name: value[offset : offset + numel] if _is_cut(value, run.numel) else copy.deepcopy(value)
        for name, value in entry.items()
    }


def join_in_run(run: Run, entries: Mapping[Piece, Entry], like: torch.Tensor) -> Entry:
    """The state of a run from those of its pieces, which count alike; on the device of `like`."""
    first = run.pieces[0]
    if len(run.pieces) == 1:
        return dict(entries[first])
    joined = dict(entries[first])
    for name, value in entries[first].items():
        if _is_cut(value, first.numel):
            whole = joined[name] = torch.zeros(run.numel, dtype=value.dtype, device=like.device)
            for piece, offset in zip(run.pieces, run.offsets, strict=True):
                whole[offset : offset + piece.numel] = entries[piece][name]
    return joined


def counts_alike(one: Entry | None, piece: Piece, other: Entry | None, neighbour: Piece) -> bool:
    """Whether the states of two pieces differ only in what is kept per element, so that they can be one."""
    if one is None or other is None:
        return one is other
    return list(one) == list(other) and all(
        _is_cut(other[name], neighbour.numel) and other[name].dtype is value.dtype
        if _is_cut(value, piece.numel)
        else _equal(value, other[name])
        for name, value in one.items()
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def on_device_of(tensor: torch.Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]) -> Entry:
    """State where the optimizer expects it: with its tensor. Counters where it makes them, if no kernel reads them."""
    with_tensor = bool(group.get("capturable") or group.get("fused"))
    counters = tensor.device if with_tensor else torch.get_default_device()
    return {
        name: value.to(tensor.device if value.dim() else counters) if isinstance(value, torch.Tensor) else value
        for name, value in entry.items()
    }


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was received lies on the CPU, what was kept on the parameter's device: there they go."""
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.cat([part.to(device) for part in parts])
