"""Move optimizer state between ranks when a new plan changes which rank holds which elements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardstep.comm.agreement import attempt
from shardstep.comm.channel import Channel
from shardstep.planning import Bucket, Piece, Plan
from shardstep.state.consolidation import move_state
from shardstep.stepping.element_state import Entry, cut_entry, join_entries


class _Fragment(NamedTuple):
    """Elements [start, stop) of one parameter that are in one piece of the old plan and in one of the new plan."""

    old: Piece
    new: Piece
    start: int
    stop: int


def reshard(channel: Channel, old: Plan, new: Plan, entries: Mapping[Piece, Entry], action: str) -> dict[Piece, Entry]:
    """Return this rank's state for its pieces of plan `new`. Called on all ranks, with their state for plan `old`.

    The first parameters of `new` are those of `old`. A piece without state has none afterwards. Time grows with what
    this rank holds before or after, not with the number of ranks. `entries` are not changed. If one rank fails, all
    ranks raise.
    """
    if old == new:
        return {piece: dict(entry) for piece, entry in entries.items()}
    fragments, local = attempt(channel, action, lambda: _cut(old, new, entries, channel.rank))
    ranks = {_name(part): (part.old.rank, part.new.rank) for part in fragments}
    moved = move_state(channel, local, ranks, action)
    return attempt(channel, action, lambda: _join(fragments, moved, channel.rank))


_Name = tuple[int, int, int]
_State = dict[_Name, Entry]


def _name(part: _Fragment) -> _Name:
    """Return a name that sender and receiver both know; numbers would differ, as each rank counts its own fragments."""
    return part.new.param, part.start, part.stop


def _cut(old: Plan, new: Plan, entries: Mapping[Piece, Entry], rank: int) -> tuple[list[_Fragment], _State]:
    fragments = _fragments(old, new, rank)
    return fragments, {
        _name(part): cut_entry(entries[part.old], part.old, part.start, part.stop)
        for part in fragments
        if part.old in entries
    }


def _join(fragments: Sequence[_Fragment], moved: Mapping[_Name, Entry], rank: int) -> dict[Piece, Entry]:
    by_piece: dict[Piece, list[_Fragment]] = {}
    for part in fragments:
        if part.new.rank == rank and _name(part) in moved:
            by_piece.setdefault(part.new, []).append(part)
    return {
        piece: join_entries([moved[_name(part)] for part in parts], [part.stop - part.start for part in parts])
        for piece, parts in by_piece.items()
    }


def _fragments(old: Plan, new: Plan, rank: int) -> list[_Fragment]:
    """Return what `rank` holds before or after, in the order of parameters and elements."""
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
    """An index of a plan's segments by parameter, to find the holders of a range without a search."""

    def __init__(self, plan: Plan) -> None:
        self._places: dict[int, list[tuple[Bucket, int]]] = {}  # parameter -> (bucket, index of a segment in it)
        for bucket in (*plan.buckets, *plan.parked):
            for place, segment in enumerate(bucket.segments):
                self._places.setdefault(segment.param, []).append((bucket, place))

    def over(self, piece: Piece) -> list[Piece]:
        """Return the pieces that overlap with `piece`, which is of another plan."""
        start, stop = piece.start, piece.stop
        return [
            other
            for bucket, place in self._places[piece.param]
            if max(start, (segment := bucket.segments[place]).start) < min(stop, segment.stop) or start == stop
            for other in bucket.ranges.over(segment, place, start, stop)
        ]
