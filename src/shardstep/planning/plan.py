"""The plan: which rank holds which elements, and what travels together. A value; the same on every rank.

[Note: size] With 1,024 ranks and 250 buckets there are a quarter of a million pieces, and every rank needs its own few
hundred. So a plan holds what does not depend on the number of ranks, the segments of each bucket, and works out the
pieces of a rank when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain

from shardstep.planning.spec import ParamSpec


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements [start, stop) of one flattened parameter, all held by one rank."""

    param: int  # index into Plan.params
    start: int
    stop: int
    rank: int  # rank within the group, never the global rank

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of one flattened parameter, and where in their bucket they begin."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """Where in the bucket they end."""
        return self.offset + self.stop - self.start


Placed = tuple[Piece, int]  # a piece, and where in its rank's range it begins


@dataclass(frozen=True, slots=True)
class EqualRanges:
    """Every rank holds as many elements of a bucket, padding at its end included: FLAT."""

    count: int
    width: int

    @property
    def numel(self) -> int:
        return self.count * self.width

    @property
    def are_even(self) -> bool:
        return True

    def bounds(self, rank: int) -> tuple[int, int]:
        return rank * self.width, (rank + 1) * self.width

    def over(self, segment: Segment, place: int, start: int, stop: int) -> Iterator[Piece]:
        """The pieces that hold elements [start, stop) of a segment, the one at `place`; without a look at others."""
        del place
        if segment.start == segment.stop:
            yield Piece(segment.param, segment.start, segment.stop, 0)
            return
        shift = segment.offset - segment.start
        first, last = max(start, segment.start) + shift, min(stop, segment.stop) + shift
        for rank in range(first // self.width, (last - 1) // self.width + 1):
            low, high = self.bounds(rank)
            begin, end = max(segment.offset, low), min(segment.end, high)
            yield Piece(segment.param, begin - shift, end - shift, rank)

    def placed(self, segments: Sequence[Segment], rank: int) -> Iterator[Placed]:
        """The pieces of a rank. What has no elements belongs to the first."""
        low, high = self.bounds(rank)
        if rank == 0:
            yield from ((Piece(s.param, s.start, s.stop, 0), 0) for s in segments if s.start == s.stop)
        for segment in segments[bisect_right(segments, low, key=_end_of) :]:
            if segment.offset >= high:
                return
            begin, end = max(segment.offset, low), min(segment.end, high)
            if begin < end:
                shift = segment.start - segment.offset
                yield Piece(segment.param, begin + shift, end + shift, rank), begin - low


def _end_of(segment: Segment) -> int:
    return segment.end


@dataclass(frozen=True, slots=True)
class WholeRanges:
    """Every segment has one holder; those of one rank lie side by side: WHOLE."""

    ends: tuple[int, ...]  # of each rank's range
    holders: tuple[int, ...]  # of each segment

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def numel(self) -> int:
        return self.ends[-1]

    @property
    def are_even(self) -> bool:
        """Whether every rank's has as many elements: then they travel as equal ranges do."""
        width = self.ends[0]
        return all(end == (rank + 1) * width for rank, end in enumerate(self.ends))

    def bounds(self, rank: int) -> tuple[int, int]:
        return (self.ends[rank - 1] if rank else 0), self.ends[rank]

    def over(self, segment: Segment, place: int, start: int, stop: int) -> Iterator[Piece]:
        """As those of equal ranges: here it is all of the segment."""
        del start, stop
        yield Piece(segment.param, segment.start, segment.stop, self.holders[place])

    def placed(self, segments: Sequence[Segment], rank: int) -> Iterator[Placed]:
        low, _ = self.bounds(rank)
        for segment, holder in zip(segments, self.holders, strict=True):
            if holder == rank:
                yield Piece(segment.param, segment.start, segment.stop, rank), segment.offset - low


@dataclass(frozen=True, slots=True)
class Bucket:
    """What travels together: segments of one dtype on one device, one behind the other, in one encoding. Rank r holds
    `bounds(r)`."""

    segments: tuple[Segment, ...]
    ranges: EqualRanges | WholeRanges
    dtype: str
    device: str
    wire: str = ""  # the encoding in which values travel (comm/encoding.py); empty: as they are

    @property
    def numel(self) -> int:
        """With what lies between segments and behind the last: it travels too."""
        return self.ranges.numel

    @property
    def follows(self) -> bool:
        """Whether it lies right behind the bucket before it, because a parameter goes through both."""
        return bool(self.segments) and self.segments[0].start > 0

    @property
    def pieces(self) -> Iterator[Piece]:
        """Of all ranks, in rank order."""
        return chain.from_iterable(self.pieces_of(rank) for rank in range(self.ranges.count))

    def pieces_of(self, rank: int) -> list[Piece]:
        return [piece for piece, _ in self.placed(rank)]

    def placed(self, rank: int) -> list[Placed]:
        """The pieces of a rank and where in its range each begins, in that order."""
        return list(self.ranges.placed(self.segments, rank))

    def over(self, param: int, start: int, stop: int) -> list[Piece]:
        """The pieces, of whatever rank, that hold elements [start, stop) of a parameter; all of it, if it has none."""
        return [
            piece
            for place, segment in enumerate(self.segments)
            if segment.param == param and (max(start, segment.start) < min(stop, segment.stop) or start == stop)
            for piece in self.ranges.over(segment, place, start, stop)
        ]

    def sent(self, rank: int) -> tuple[int, int]:
        """Elements that a rank sends: gradients to those that hold them, and what it holds to everyone.

        Of equal ranges among N ranks each is (N - 1)/N of the bucket.
        """
        low, high = self.ranges.bounds(rank)
        return self.numel - (high - low), (high - low) * (self.ranges.count - 1)

    def holdings(self) -> Iterator[tuple[int, int]]:
        """Yield a rank and how many elements of parameters it holds; one rank may come several times, or never."""
        if isinstance(self.ranges, WholeRanges):
            yield from zip(self.ranges.holders, (s.stop - s.start for s in self.segments), strict=True)
        else:
            yield from ((piece.rank, piece.numel) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds every element of every parameter. Hashable, comparable, printable; holds no tensor."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    parked: tuple[Bucket, ...]  # frozen parameters: they have holders but are not sent
    world_size: int

    @property
    def pieces(self) -> Iterator[Piece]:
        """Of all ranks. There may be very many: see [Note: size]."""
        return chain.from_iterable(bucket.pieces for bucket in chain(self.buckets, self.parked))

    def pieces_of(self, rank: int) -> list[Piece]:
        """Of one rank, frozen ones included."""
        return [piece for bucket in chain(self.buckets, self.parked) for piece in bucket.pieces_of(rank)]

    def held(self) -> list[int]:
        """Elements held by each rank, frozen ones included."""
        held = [0] * self.world_size
        for bucket in chain(self.buckets, self.parked):
            for rank, numel in bucket.holdings():
                held[rank] += numel
        return held

    def holders(self) -> list[int]:
        """The rank that holds each parameter; for plans of whole parameters."""
        ranks = [0] * len(self.params)
        for bucket in chain(self.buckets, self.parked):
            assert isinstance(bucket.ranges, WholeRanges), "parameters that are cut have several holders"
            for segment, holder in zip(bucket.segments, bucket.ranges.holders, strict=True):
                ranks[segment.param] = holder
        return ranks

    def to_json(self) -> str:
        """Return the whole plan as text; the same on every rank and in every process."""
        return json.dumps(
            {
                "world_size": self.world_size,
                "params": [asdict(spec) for spec in self.params],
                "buckets": [_bucket_to_json(bucket) for bucket in self.buckets],
                "parked": [_bucket_to_json(bucket) for bucket in self.parked],
            },
            separators=(",", ":"),
        )

    def digest(self) -> str:
        """Sixty-four hexadecimal digits that are equal exactly where plans are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _bucket_to_json(bucket: Bucket) -> dict[str, object]:
    return {
        "dtype": bucket.dtype,
        "device": bucket.device,
        "wire": bucket.wire,
        "ranges": asdict(bucket.ranges),
        "segments": [(s.param, s.start, s.stop, s.offset) for s in bucket.segments],
    }
