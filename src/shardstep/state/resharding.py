"""State that follows its elements from one plan to another, whoever holds them before and after."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardstep.planning import Bucket, Piece, Plan
from shardstep.state.consolidation import move_state
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
