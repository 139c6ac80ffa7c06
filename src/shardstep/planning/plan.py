"""The plan: which rank holds which elements, and which of them are sent together. It is equal on all ranks.

[Note: size] With 1,024 ranks and 250 buckets there are a quarter of a million pieces, and every rank needs only its own
few hundred. So a plan stores the segments of each bucket, whose number does not depend on the number of ranks, and
computes the pieces of a rank when they are asked for.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import attrgetter

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
    """Elements [start, stop) of one flattened parameter, which begin at `offset` in their bucket."""

    param: int
    start: int
    stop: int
    offset: int

    @property
    def end(self) -> int:
        """The offset in the bucket behind the last element."""
        return self.offset + self.stop - self.start


Placed = tuple[Piece, int]  # a piece, and its offset in its rank's range


@dataclass(frozen=True, slots=True)
class EqualRanges:
    """FLAT: every rank holds equally many elements of a bucket, which is padded at its end for that."""

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
        """Yield the pieces that hold elements [start, stop) of a segment. `place` is its index in the bucket."""
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
        """Yield the pieces of a rank, with their offsets. Parameters without elements belong to rank 0."""
        low, high = self.bounds(rank)
        if rank == 0:
            yield from ((Piece(s.param, s.start, s.stop, 0), 0) for s in segments if s.start == s.stop)
        for segment in segments[bisect_right(segments, low, key=attrgetter("end")) :]:
            if segment.offset >= high:
                return
            begin, end = max(segment.offset, low), min(segment.end, high)
            if begin < end:
                shift = segment.start - segment.offset
                yield Piece(segment.param, begin + shift, end + shift, rank), begin - low


@dataclass(frozen=True, slots=True)
class WholeRanges:
    """WHOLE: every segment is held by one rank, and the segments of one rank are adjacent."""

    ends: tuple[int, ...]  # where each rank's range ends
    holders: tuple[int, ...]  # the rank that holds each segment

    @property
    def count(self) -> int:
        return len(self.ends)

    @property
    def numel(self) -> int:
        return self.ends[-1]

    @property
    def are_even(self) -> bool:
        """Whether all ranks' ranges have equally many elements, so that they can be sent as `EqualRanges` are."""
        width = self.ends[0]
        return all(end == (rank + 1) * width for rank, end in enumerate(self.ends))

    def bounds(self, rank: int) -> tuple[int, int]:
        return (self.ends[rank - 1] if rank else 0), self.ends[rank]

    def over(self, segment: Segment, place: int, start: int, stop: int) -> Iterator[Piece]:
        """Yield the piece that holds the segment at index `place`; it is held whole, whatever `start` and `stop`."""
        del start, stop
        yield Piece(segment.param, segment.start, segment.stop, self.holders[place])

    def placed(self, segments: Sequence[Segment], rank: int) -> Iterator[Placed]:
        low, _ = self.bounds(rank)
        for segment, holder in zip(segments, self.holders, strict=True):
            if holder == rank:
                yield Piece(segment.param, segment.start, segment.stop, rank), segment.offset - low


@dataclass(frozen=True, slots=True)
class Bucket:
    """What one collective sends: consecutive segments of one dtype, on one device, in one encoding. Rank r holds the
    elements `ranges.bounds(r)`."""

    segments: tuple[Segment, ...]
    ranges: EqualRanges | WholeRanges
    dtype: str
    device: str
    wire: str = ""  # the encoding in which values travel (comm/encoding.py); empty: as they are

    @property
    def numel(self) -> int:
        """Elements that are sent: those of the segments, and the padding between and behind them."""
        return self.ranges.numel

    @property
    def follows(self) -> bool:
        """Whether its memory follows that of the bucket before it, because a parameter is spread over both."""
        return bool(self.segments) and self.segments[0].start > 0

    @property
    def pieces(self) -> Iterator[Piece]:
        """The pieces of all ranks, in rank order."""
        return chain.from_iterable(self.pieces_of(rank) for rank in range(self.ranges.count))

    def pieces_of(self, rank: int) -> list[Piece]:
        return [piece for piece, _ in self.placed(rank)]

    def placed(self, rank: int) -> list[Placed]:
        """Return the pieces of a rank and the offset of each in the rank's range, sorted by offset."""
        return list(self.ranges.placed(self.segments, rank))

    def over(self, param: int, start: int, stop: int) -> list[Piece]:
        """Return the pieces of all ranks that hold elements [start, stop) of a parameter; its one piece if empty."""
        return [
            piece
            for place, segment in enumerate(self.segments)
            if segment.param == param and (max(start, segment.start) < min(stop, segment.stop) or start == stop)
            for piece in self.ranges.over(segment, place, start, stop)
        ]

    def sent(self, rank: int) -> tuple[int, int]:
        """Return how many elements a rank sends: of gradients to their holders, and of its weights to all other ranks.

        With equal ranges on N ranks, each number is (N - 1)/N of the bucket.
        """
        low, high = self.ranges.bounds(rank)
        return self.numel - (high - low), (high - low) * (self.ranges.count - 1)

    def holdings(self) -> Iterator[tuple[int, int]]:
        """Yield (rank, number of elements); a rank may come several times, or not at all."""
        if isinstance(self.ranges, WholeRanges):
            yield from zip(self.ranges.holders, (s.stop - s.start for s in self.segments), strict=True)
        else:
            yield from ((piece.rank, piece.numel) for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rank holds which elements of every parameter. Hashable, comparable, printable; holds no tensor."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    parked: tuple[Bucket, ...]  # of frozen parameters, which have holders but are not sent
    world_size: int

    @property
    def pieces(self) -> Iterator[Piece]:
        """The pieces of all ranks. There may be very many: see [Note: size]."""
        return chain.from_iterable(bucket.pieces for bucket in chain(self.buckets, self.parked))

    def pieces_of(self, rank: int) -> list[Piece]:
        """Return the pieces of one rank, with those of frozen parameters."""
        return [piece for bucket in chain(self.buckets, self.parked) for piece in bucket.pieces_of(rank)]

    def held(self) -> list[int]:
        """Return how many elements each rank holds, with those of frozen parameters."""
        held = [0] * self.world_size
        for bucket in chain(self.buckets, self.parked):
            for rank, numel in bucket.holdings():
                held[rank] += numel
        return held

    def holders(self) -> list[int]:
        """Return the rank that holds each parameter, for a plan in which no parameter is cut."""
        ranks = [0] * len(self.params)
        for bucket in chain(self.buckets, self.parked):
            assert isinstance(bucket.ranges, WholeRanges), "holders() needs a plan with Layout.WHOLE only"
            for segment, holder in zip(bucket.segments, bucket.ranges.holders, strict=True):
                ranks[segment.param] = holder
        return ranks

    def to_json(self) -> str:
        """Return a JSON text that describes the whole plan; equal plans have equal texts on all ranks."""
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
        """Return the SHA-256 of the plan's text: ranks compare digests to find out whether their plans are equal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def _bucket_to_json(bucket: Bucket) -> dict[str, object]:
    return {
        "dtype": bucket.dtype,
        "device": bucket.device,
        "wire": bucket.wire,
        "ranges": asdict(bucket.ranges),
        "segments": [(s.param, s.start, s.stop, s.offset) for s in bucket.segments],
    }
