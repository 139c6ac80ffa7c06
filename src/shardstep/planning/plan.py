"""The plan: which rank holds which elements, and what travels together. A value; the same on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise

from shardstep.planning.layout import FlatCuts, Layout, deal_whole
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
class Bucket:
    """What travels together: pieces of one dtype on one device, in rank order. Rank r sends splits[r] elements."""

    pieces: tuple[Piece, ...]
    splits: tuple[int, ...]
    dtype: str
    device: str

    @property
    def numel(self) -> int:
        return sum(self.splits)


@dataclass(frozen=True, slots=True)
class Plan:
    """Who holds every element of every parameter. Hashable, comparable, printable; holds no tensor."""

    params: tuple[ParamSpec, ...]
    buckets: tuple[Bucket, ...]
    parked: tuple[Piece, ...]  # pieces of frozen parameters: they have a holder but are not sent
    world_size: int

    @property
    def pieces(self) -> Iterator[Piece]:
        return chain(chain.from_iterable(bucket.pieces for bucket in self.buckets), self.parked)

    def held(self) -> list[int]:
        """Elements held by each rank, frozen ones included."""
        totals = [0] * self.world_size
        for piece in self.pieces:
            totals[piece.rank] += piece.numel
        return totals

    def holders(self) -> list[int]:
        """The rank that holds each parameter; for plans of whole parameters."""
        ranks = [0] * len(self.params)
        for piece in self.pieces:
            ranks[piece.param] = piece.rank
        return ranks

    def to_json(self) -> str:
        """A text from which `from_json` makes an equal plan; the same on every rank and in every process."""
        return json.dumps(
            {
                "world_size": self.world_size,
                "params": [asdict(spec) for spec in self.params],
                "buckets": [
                    {
                        "dtype": bucket.dtype,
                        "device": bucket.device,
                        "splits": bucket.splits,
                        "pieces": [_row(piece) for piece in bucket.pieces],
                    }
                    for bucket in self.buckets
                ],
                "parked": [_row(piece) for piece in self.parked],
            },
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Plan:
        """The plan that `to_json` wrote; ValueError with every problem if the text does not describe one."""
        try:
            raw = json.loads(text)
            plan = Plan(
                params=tuple(ParamSpec(**{**spec, "shape": tuple(spec["shape"])}) for spec in raw["params"]),
                buckets=tuple(
                    Bucket(_pieces(b["pieces"]), tuple(b["splits"]), b["dtype"], b["device"]) for b in raw["buckets"]
                ),
                parked=_pieces(raw["parked"]),
                world_size=raw["world_size"],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"this text is not a plan written by Plan.to_json: {error!r}") from error
        _raise_if_any(find_problems(plan))
        return plan

    def digest(self) -> str:
        """Sixty-four hexadecimal digits that are equal exactly where plans are."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()


def make_plan(
    specs: Sequence[ParamSpec],
    layout: Layout,
    *,
    world_size: int,
    bucket_numel: int | None = None,
    alignment: int = 1,
    holders: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
) -> Plan:
    """Share out `specs` over `world_size` ranks.

    `order` is that in which the parameters lie in the buckets, by default that of `specs`.

    `holders[i]` is the rank that holds parameter i, where that was decided elsewhere (by DDP's buckets); WHOLE only.
    `bucket_numel` bounds what travels together (None: one bucket per dtype and device); a WHOLE parameter larger than
    that travels alone. `alignment` is the number of elements between two places where FLAT may cut a parameter.
    """
    if world_size < 1 or alignment < 1 or (bucket_numel is not None and bucket_numel < 1):
        raise ValueError(
            f"world_size, alignment and bucket_numel must be at least 1, got {world_size}, {alignment}, {bucket_numel}"
        )
    if layout is Layout.AUTO:
        raise ValueError("Layout.AUTO is a wish: ask shardstep.runtime.probe which layout the optimizer tolerates")
    classes: dict[tuple[str, str, bool], list[int]] = {}
    for index in range(len(specs)) if order is None else order:
        spec = specs[index]
        classes.setdefault((spec.device, spec.dtype, spec.trainable), []).append(index)
    if layout is Layout.WHOLE:
        dealt = deal_whole(specs, world_size) if holders is None else list(enumerate(holders))
        travelling, parked = _whole_buckets(specs, classes, world_size, bucket_numel, dealt)
    else:
        travelling, parked = _flat_buckets(specs, classes, world_size, bucket_numel, alignment)
    plan = Plan(tuple(specs), tuple(travelling), tuple(parked), world_size)
    _raise_if_any(find_problems(plan))
    return plan


_Classes = dict[tuple[str, str, bool], list[int]]


def _whole_buckets(
    specs: Sequence[ParamSpec],
    classes: _Classes,
    world_size: int,
    bucket_numel: int | None,
    dealt: Sequence[tuple[int, int]],
) -> tuple[list[Bucket], list[Piece]]:
    turn = {param: position for position, (param, _) in enumerate(dealt)}
    holder = dict(dealt)
    buckets: list[Bucket] = []
    parked: list[Piece] = []
    for (device, dtype, trainable), members in classes.items():
        for chunk in _chunks(specs, members, bucket_numel):
            in_rank_order = sorted(chunk, key=lambda param: (holder[param], turn[param]))
            pieces = tuple(Piece(param, 0, specs[param].numel, holder[param]) for param in in_rank_order)
            if trainable:
                buckets.append(Bucket(pieces, _splits(pieces, world_size), dtype, device))
            else:
                parked.extend(pieces)
    return buckets, parked


def _flat_buckets(
    specs: Sequence[ParamSpec], classes: _Classes, world_size: int, bucket_numel: int | None, alignment: int
) -> tuple[list[Bucket], list[Piece]]:
    """Each class is one flat range of elements, cut into equal buckets and each bucket into equal shares.

    Bucket boundaries fall inside parameters: one large embedding does not make one large message.
    """
    held = [0] * world_size
    buckets: list[Bucket] = []
    parked: list[Piece] = []
    for (device, dtype, trainable), members in classes.items():
        cuts = FlatCuts([specs[param].numel for param in members], alignment)
        shares: list[list[int]] = []
        for start, stop in pairwise(cuts.buckets(bucket_numel)):
            shares.append(cuts.shares(start, stop, held))
            held = [have + more for have, more in zip(held, shares[-1], strict=True)]
        for share, pieces in zip(shares, _cut_pieces(specs, members, shares), strict=True):
            if trainable:
                buckets.append(Bucket(pieces, tuple(share), dtype, device))
            else:
                parked.extend(pieces)
    return buckets, parked


def _cut_pieces(
    specs: Sequence[ParamSpec], members: Sequence[int], shares: Sequence[Sequence[int]]
) -> Iterator[tuple[Piece, ...]]:
    """Walk the parameters and the shares together; yields the pieces of one bucket at a time."""
    queue = iter(members)
    param = next(queue)
    offset = 0
    for bucket, share in enumerate(shares):
        pieces: list[Piece] = []
        for rank, numel in enumerate(share):
            left = numel
            while left:
                taken = min(left, specs[param].numel - offset)
                if taken or specs[param].numel == 0:
                    pieces.append(Piece(param, offset, offset + taken, rank))
                offset += taken
                left -= taken
                if left:
                    param, offset = next(queue), 0
        if bucket == len(shares) - 1:  # parameters without elements at the very end
            last = max((rank for rank, numel in enumerate(share) if numel), default=0)
            rest = [param, *queue] if offset == 0 else list(queue)
            pieces.extend(Piece(empty, 0, 0, last) for empty in rest)
        yield tuple(pieces)


def _chunks(specs: Sequence[ParamSpec], members: Sequence[int], bucket_numel: int | None) -> Iterator[list[int]]:
    """Consecutive parameters that together stay within `bucket_numel`, or one alone that does not."""
    chunk: list[int] = []
    filled = 0
    for param in members:
        if chunk and bucket_numel is not None and filled + specs[param].numel > bucket_numel:
            yield chunk
            chunk, filled = [], 0
        chunk.append(param)
        filled += specs[param].numel
    if chunk:
        yield chunk


def find_problems(plan: Plan) -> list[str]:
    """Every way in which `plan` is not a partition, as sentences; empty if it is one."""
    problems = [
        f"{piece} names a parameter or a rank that does not exist"
        for piece in plan.pieces
        if not (0 <= piece.param < len(plan.params) and 0 <= piece.rank < plan.world_size)
    ]
    if problems:
        return problems
    return [*_coverage_problems(plan), *_bucket_problems(plan)]


def _coverage_problems(plan: Plan) -> Iterator[str]:
    """Elements without a holder, or with two."""
    by_param: list[list[Piece]] = [[] for _ in plan.params]
    for piece in plan.pieces:
        by_param[piece.param].append(piece)
    for spec, pieces in zip(plan.params, by_param, strict=True):
        if not pieces:
            yield f"{spec.name}: no rank holds it"
            continue
        pieces.sort(key=lambda piece: (piece.start, piece.stop))
        if any(piece.start > piece.stop for piece in pieces):
            yield f"{spec.name}: a piece ends before it starts"
        ends = [0, *accumulate((piece.stop for piece in pieces), max)]
        for piece, covered in zip(pieces, ends, strict=False):
            if piece.start > covered:
                yield f"{spec.name}: no rank holds elements {covered} to {piece.start}"
            elif piece.start < covered:
                yield f"{spec.name}: elements {piece.start} to {min(covered, piece.stop)} are held twice"
        if ends[-1] != spec.numel:
            yield f"{spec.name}: pieces end at {ends[-1]}, the parameter at {spec.numel}"


def _bucket_problems(plan: Plan) -> Iterator[str]:
    """Buckets that mix what cannot travel together, or whose splits do not add up."""
    for number, bucket in enumerate(plan.buckets):
        if bucket.splits != _splits(bucket.pieces, plan.world_size):
            yield f"bucket {number}: splits {bucket.splits} are not the sizes of its pieces by rank"
        if any(a.rank > b.rank for a, b in zip(bucket.pieces, bucket.pieces[1:], strict=False)):
            yield f"bucket {number}: pieces are not in rank order"
        for piece in bucket.pieces:
            spec = plan.params[piece.param]
            if (spec.dtype, spec.device) != (bucket.dtype, bucket.device):
                yield f"{spec.name}: {spec.dtype} on {spec.device} cannot travel in bucket {number}"
            if not spec.trainable:
                yield f"{spec.name}: frozen, but travels in bucket {number}"
    for piece in plan.parked:
        if plan.params[piece.param].trainable:
            yield f"{plan.params[piece.param].name}: trainable, but does not travel"


def _splits(pieces: Sequence[Piece], world_size: int) -> tuple[int, ...]:
    totals = [0] * world_size
    for piece in pieces:
        totals[piece.rank] += piece.numel
    return tuple(totals)


def _row(piece: Piece) -> tuple[int, int, int, int]:
    return (piece.param, piece.start, piece.stop, piece.rank)


def _pieces(rows: Sequence[Sequence[int]]) -> tuple[Piece, ...]:
    return tuple(Piece(*row) for row in rows)


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("not a partition of the parameters:\n  " + "\n  ".join(problems))
