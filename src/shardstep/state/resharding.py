"""State that follows its elements from one plan to another, whoever holds them before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from shardstep.memory.views import flat_gradient
from shardstep.planning import Bucket, Layout, Piece, Plan, plan_from_json
from shardstep.state.consolidation import move_state
from shardstep.state.state_dict import check_saved_groups, check_state_dict
from shardstep.stepping.entries import Entry, cut_entry, join_entries
from shardstep.wire.channel import Channel


class _Fragment(NamedTuple):
    """Elements that have one holder before and one after."""

    old: Piece
    new: Piece
    start: int
    stop: int


def reshard(channel: Channel, old: Plan, new: Plan, entries: Mapping[Piece, Entry]) -> dict[Piece, Entry]:
    """This rank's state by the pieces of `new`, from every rank's by the pieces of `old`. Called on all ranks.

    The first parameters of `new` are those of `old`. A piece without state before has none afterwards. Only what this
    rank holds before or after is looked at: with a thousand ranks that is a thousandth of it.
    """
    fragments = _fragments(old, new, channel.rank)
    local = {
        number: cut_entry(entries[part.old], part.old, part.start, part.stop)
        for number, part in enumerate(fragments)
        if part.old in entries
    }
    # What both ends of a move call it: a number would differ, because each rank counts its own fragments.
    names = [(part.new.param, part.start, part.stop) for part in fragments]
    moved = move_state(
        channel,
        {names[number]: entry for number, entry in local.items()},
        {name: (part.old.rank, part.new.rank) for name, part in zip(names, fragments, strict=True)},
    )
    by_piece: dict[Piece, list[int]] = {}
    for number, part in enumerate(fragments):
        if part.new.rank == channel.rank and names[number] in moved:
            by_piece.setdefault(part.new, []).append(number)
    return {
        piece: join_entries(
            [moved[names[number]] for number in numbers], [fragments[n].stop - fragments[n].start for n in numbers]
        )
        for piece, numbers in by_piece.items()
    }


def _has_shape_of(value: Any, param: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == param.shape


def _fragments(old: Plan, new: Plan, rank: int) -> list[_Fragment]:
    """What `rank` holds before or after, by the order of parameters and elements."""
    before, after = _Holders(old), _Holders(new)
    leaving = [
        _Fragment(one, other, max(one.start, other.start), min(one.stop, other.stop))
        for one in old.pieces_of(rank)
        for other in after.over(one)
    ]
    coming = [
        _Fragment(one, other, max(one.start, other.start), min(one.stop, other.stop))
        for other in new.pieces_of(rank)
        if other.param < len(old.params)
        for one in before.over(other)
        if one.rank != rank
    ]
    return sorted([*leaving, *coming], key=lambda part: (part.new.param, part.start, part.stop))


class _Holders:
    """Who holds which elements of a plan's parameters."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._buckets: dict[int, list[Bucket]] = {}  # by parameter
        for bucket in (*plan.buckets, *plan.parked):
            for segment in bucket.segments:
                self._buckets.setdefault(segment.param, []).append(bucket)

    def over(self, piece: Piece) -> list[Piece]:
        """The pieces that have elements in common with another plan's; or nothing, if it has none."""
        return [
            other
            for bucket in self._buckets[piece.param]
            for other in bucket.over(piece.param, piece.start, piece.stop)
        ]


def cut_whole(
    state: Mapping[Any, Any], keys: Sequence[Any], plan: Plan, rank: int, params: Sequence[torch.Tensor | None]
) -> dict[Piece, Entry]:
    """What a rank takes from the state_dict of the plain optimizer; `keys[i]` is the saved key of parameter i.

    `params`: tensors in a parameter's shape become flat, in the order of its memory; where None, they keep it.
    """
    found: dict[Piece, Entry] = {}
    for piece in plan.pieces_of(rank):
        if state.get(keys[piece.param]):
            whole = Piece(piece.param, 0, plan.params[piece.param].numel, rank)
            entry = state[keys[piece.param]]
            param = params[piece.param]
            if param is not None:
                entry = {n: flat_gradient(param, v) if _has_shape_of(v, param) else v for n, v in entry.items()}
            found[piece] = cut_entry(entry, whole, piece.start, piece.stop)
    return found


def read_saved(
    state_dict: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    layouts: Sequence[Layout],
    plan: Plan,
    rank: int,
    trial: Optimizer,
) -> tuple[Plan, dict[Piece, Entry]]:
    """What a rank loads, and the plan under which it was saved: its own part, or that of the plain optimizer.

    `trial` has the options of `groups` alone; what does not fit is refused with the reason.
    """
    if isinstance(state_dict, Mapping) and "param_groups" in state_dict:
        check_saved_groups(state_dict["param_groups"], plan.params, trial)
    if "shardstep" in state_dict:
        return read_shard(state_dict, rank, plan)
    keys = check_state_dict(state_dict, plan.params, [len(group["params"]) for group in groups], type(trial))
    flat = [
        param if layout is Layout.FLAT else None
        for group, layout in zip(groups, layouts, strict=True)
        for param in group["params"]
    ]
    return plan, cut_whole(state_dict["state"], keys, plan, rank, flat)


def read_shard(state_dict: Mapping[str, Any], rank: int, plan: Plan) -> tuple[Plan, dict[Piece, Entry]]:
    """The plan under which a rank's state was saved, and the state by its pieces."""
    saved = plan_from_json(state_dict["shardstep"]["plan"])
    if saved.world_size != plan.world_size or state_dict["shardstep"]["rank"] != rank:
        raise ValueError(
            f"this is the state of rank {state_dict['shardstep']['rank']} of {saved.world_size}, "
            f"and this is rank {rank} of {plan.world_size}; every rank loads what it saved itself"
        )
    if [spec.shape for spec in saved.params] != [spec.shape for spec in plan.params]:
        raise ValueError("the state_dict was saved for other parameters: their shapes differ")
    held: dict[int, list[Piece]] = {}
    for piece in saved.pieces_of(rank):
        held.setdefault(piece.param, []).append(piece)
    found: dict[Piece, Entry] = {}
    for param, own in sorted(held.items()):
        own.sort(key=lambda piece: piece.start)
        entry = state_dict["state"].get(param)
        if not entry:
            continue
        offset, total = 0, sum(piece.numel for piece in own)
        run = Piece(param, 0, total, rank)  # the elements of all own pieces, one behind the other
        for piece in own:
            found[piece] = cut_entry(entry, run, offset, offset + piece.numel)
            offset += piece.numel
    return saved, found
