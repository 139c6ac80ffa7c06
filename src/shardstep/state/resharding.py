"""State that follows its elements from one plan to another, whoever holds them before and after."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from shardstep.planning import Piece, Plan
from shardstep.planning.runs import Run
from shardstep.runtime.collectives import Channel
from shardstep.runtime.flat_memory import flat_gradient
from shardstep.state.consolidation import move_state

Entry = dict[str, Any]  # the state of one piece; tensors with as many elements as the piece are cut with it


class _Fragment(NamedTuple):
    """Elements that have one holder before and one after."""

    old: Piece
    new: Piece
    start: int
    stop: int


def reshard(channel: Channel, old: Plan, new: Plan, entries: Mapping[Piece, Entry]) -> dict[Piece, Entry]:
    """This rank's state by the pieces of `new`, from every rank's by the pieces of `old`. Called on all ranks.

    The first parameters of `new` are those of `old`. A piece without state before has none afterwards.
    """
    fragments = list(_fragments(old, new))
    local = {
        number: cut_entry(entries[part.old], part.old, part.start, part.stop)
        for number, part in enumerate(fragments)
        if part.old in entries
    }
    moved = move_state(channel, local, [part.old.rank for part in fragments], [part.new.rank for part in fragments])
    by_piece: dict[Piece, list[int]] = {}
    for number, part in enumerate(fragments):
        if part.new.rank == channel.rank and number in moved:
            by_piece.setdefault(part.new, []).append(number)
    return {
        piece: join_entries(
            [moved[number] for number in numbers], [fragments[n].stop - fragments[n].start for n in numbers]
        )
        for piece, numbers in by_piece.items()
    }


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


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


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
    """State where the optimizer expects it: with its tensor; counters on the CPU, unless a kernel reads them."""
    counters_too = bool(group.get("capturable") or group.get("fused"))
    return {
        name: value.to(tensor.device)
        if isinstance(value, torch.Tensor) and (value.dim() > 0 or counters_too)
        else value
        for name, value in entry.items()
    }


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was received lies on the CPU, what was kept on the parameter's device: there they go."""
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.cat([part.to(device) for part in parts])


def _fragments(old: Plan, new: Plan) -> list[_Fragment]:
    before = _by_param(old)
    after = _by_param(new)
    found: list[_Fragment] = []
    for param in range(len(old.params)):
        for one in before[param]:
            for other in after[param]:
                start, stop = max(one.start, other.start), min(one.stop, other.stop)
                if start < stop or (one.numel == 0 and other.numel == 0):
                    found.append(_Fragment(one, other, start, stop))
    return found


def _by_param(plan: Plan) -> list[list[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in plan.params]
    for piece in plan.pieces:
        pieces[piece.param].append(piece)
    return [sorted(row, key=lambda piece: piece.start) for row in pieces]


def cut_whole(
    state: Mapping[Any, Any], keys: Sequence[Any], plan: Plan, rank: int, params: Sequence[torch.Tensor] | None
) -> dict[Piece, Entry]:
    """What a rank takes from the state_dict of the plain optimizer; `keys[i]` is the saved key of parameter i.

    `params`: tensors in a parameter's shape become flat, in the order of its memory; None: they keep their shape.
    """
    found: dict[Piece, Entry] = {}
    for piece in plan.pieces:
        if piece.rank == rank and state.get(keys[piece.param]):
            whole = Piece(piece.param, 0, plan.params[piece.param].numel, rank)
            entry = state[keys[piece.param]]
            if params is not None:
                param = params[piece.param]
                entry = {n: flat_gradient(param, v) if _has_shape_of(v, param) else v for n, v in entry.items()}
            found[piece] = cut_entry(entry, whole, piece.start, piece.stop)
    return found


def read_shard(state_dict: Mapping[str, Any], rank: int, plan: Plan) -> tuple[Plan, dict[Piece, Entry]]:
    """The plan under which a rank's state was saved, and the state by its pieces."""
    saved = Plan.from_json(state_dict["shardstep"]["plan"])
    if saved.world_size != plan.world_size or state_dict["shardstep"]["rank"] != rank:
        raise ValueError(
            f"this is the state of rank {state_dict['shardstep']['rank']} of {saved.world_size}, "
            f"and this is rank {rank} of {plan.world_size}; every rank loads what it saved itself"
        )
    if [spec.shape for spec in saved.params] != [spec.shape for spec in plan.params]:
        raise ValueError("the state_dict was saved for other parameters: their shapes differ")
    found: dict[Piece, Entry] = {}
    for param, pieces in enumerate(_by_param(saved)):
        own = [piece for piece in pieces if piece.rank == rank]
        entry = state_dict["state"].get(param)
        if not own or not entry:
            continue
        offset, total = 0, sum(piece.numel for piece in own)
        run = Piece(param, 0, total, rank)  # the elements of all own pieces, one behind the other
        for piece in own:
            found[piece] = cut_entry(entry, run, offset, offset + piece.numel)
            offset += piece.numel
    return saved, found
