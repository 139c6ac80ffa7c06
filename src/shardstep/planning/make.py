"""From descriptions of parameters to a plan, and from a text back to one."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from shardstep.planning.balance import deal_by_cost
from shardstep.planning.layout import Layout, deal_whole
from shardstep.planning.plan import Bucket, EqualRanges, Plan, Segment, WholeRanges
from shardstep.planning.problems import find_problems
from shardstep.planning.spec import ParamSpec

_Classes = dict[tuple[str, str, bool, str], list[int]]
_Found = tuple[Bucket, bool]  # a bucket, and whether it travels


def make_plan(
    specs: Sequence[ParamSpec],
    layout: Layout | Sequence[Layout],
    *,
    world_size: int,
    bucket_numel: int | None = None,
    end_numel: int | None = None,
    alignment: int = 1,
    holders: Sequence[int] | None = None,
    order: Sequence[int] | None = None,
    costs: Sequence[int] | None = None,
) -> Plan:
    """Share out `specs` over `world_size` ranks; `layout` of all of them, or of each group.

    `order` is that in which the parameters lie in the buckets, by default that of `specs`.

    `holders[i]` is the rank that holds parameter i, where that was decided elsewhere (by DDP's buckets); WHOLE only.
    `costs[i]` is what stepping parameter i takes, in any unit: by that WHOLE deals, or else by elements.
    `bucket_numel` bounds what travels together (None: one bucket per dtype and device), but for the padding to equal
    ranges; a WHOLE parameter larger than that travels alone, a FLAT one in several buckets. The first bucket and the
    last end, or begin, with the parameter that brings them to `end_numel`. Parameters begin at multiples of `alignment`
    elements, and FLAT cuts them at multiples of it.
    """
    if world_size < 1 or alignment < 1 or (bucket_numel is not None and bucket_numel < 1):
        raise ValueError(
            f"world_size, alignment and bucket_numel must be at least 1, got {world_size}, {alignment}, {bucket_numel}"
        )
    order = range(len(specs)) if order is None else order
    whole, flat = _classes(specs, layout, order)
    ends = {
        index
        for classes in (whole, flat)
        for members in classes.values()
        for index in _set_apart(specs, members, end_numel)
    }
    if holders is None:
        dealt = _deal(specs, sorted(index for members in whole.values() for index in members), world_size, costs, order)
    else:
        dealt = list(enumerate(holders))
    found = [
        *_whole_buckets(specs, whole, world_size, bucket_numel, ends, alignment, dealt),
        *_flat_buckets(specs, flat, world_size, bucket_numel, ends, alignment),
    ]
    found = _as_they_fill(found, order)
    plan = Plan(
        tuple(specs),
        tuple(bucket for bucket, trainable in found if trainable),
        tuple(bucket for bucket, trainable in found if not trainable),
        world_size,
    )
    _raise_if_any(find_problems(plan))
    return plan


def _deal(
    specs: Sequence[ParamSpec],
    whole: Sequence[int],
    world_size: int,
    costs: Sequence[int] | None,
    order: Sequence[int],
) -> list[tuple[int, int]]:
    """(parameter, rank) of those that stay whole."""
    own = [specs[index] for index in whole]
    if costs is None:
        dealt = deal_whole(own, world_size)
    else:
        place = {index: number for number, index in enumerate(whole)}
        in_order = [place[index] for index in order if index in place]
        dealt = deal_by_cost(own, [costs[index] for index in whole], world_size, in_order)
    return [(whole[number], rank) for number, rank in dealt]


def _classes(
    specs: Sequence[ParamSpec], layout: Layout | Sequence[Layout], order: Sequence[int]
) -> tuple[_Classes, _Classes]:
    """What may share a bucket: of parameters that stay whole, and of those that are cut."""
    found: dict[Layout, _Classes] = {Layout.WHOLE: {}, Layout.FLAT: {}}
    for index in order:
        spec = specs[index]
        kind = layout if isinstance(layout, Layout) else layout[spec.group]
        if kind is Layout.AUTO:
            raise ValueError(
                "Layout.AUTO must be resolved first: shardstep.optimizers.layout_policy chooses a layout for each group"
            )
        found[kind].setdefault((spec.device, spec.dtype, spec.trainable, spec.wire), []).append(index)
    return found[Layout.WHOLE], found[Layout.FLAT]


def _as_they_fill(found: Sequence[_Found], order: Sequence[int]) -> list[_Found]:
    """In the order in which they are complete when parameters come in `order`: so they are sent.

    Buckets that lie one behind the other stay together.
    """
    place = {param: number for number, param in enumerate(order)}
    stretches: list[list[_Found]] = []
    for row in found:
        if stretches and row[0].follows:
            stretches[-1].append(row)
        else:
            stretches.append([row])

    def complete(stretch: Sequence[_Found]) -> int:
        return max((place[segment.param] for bucket, _ in stretch for segment in bucket.segments), default=0)

    return [row for stretch in sorted(stretches, key=complete) for row in stretch]


def _whole_buckets(
    specs: Sequence[ParamSpec],
    classes: _Classes,
    world_size: int,
    bucket_numel: int | None,
    ends: Collection[int],
    alignment: int,
    dealt: Sequence[tuple[int, int]],
) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket, and whether it travels. Within a bucket by rank, as they were dealt."""
    turn = {param: position for position, (param, _) in enumerate(dealt)}
    holder = dict(dealt)
    for (device, dtype, trainable, wire), members in classes.items():
        rows, rest = _find_rows(specs, members, holder, world_size, bucket_numel)
        in_rows, one_by_one = _chunks(specs, rows, bucket_numel, ends), _chunks(specs, rest, bucket_numel, ends)
        for chunk in (*in_rows, *one_by_one):
            in_rank_order = sorted(chunk, key=lambda param: (holder[param], turn[param]))
            offsets = list(accumulate((_aligned(specs[p].numel, alignment) for p in in_rank_order), initial=0))
            segments = [Segment(p, 0, specs[p].numel, at) for p, at in zip(in_rank_order, offsets, strict=False)]
            widths = [0] * world_size
            for param in in_rank_order:
                widths[holder[param]] += _aligned(specs[param].numel, alignment)
            ranges = WholeRanges(tuple(accumulate(widths)), tuple(holder[param] for param in in_rank_order))
            yield Bucket(tuple(segments), ranges, dtype, device, wire), trainable


def _flat_buckets(
    specs: Sequence[ParamSpec],
    classes: _Classes,
    world_size: int,
    bucket_numel: int | None,
    ends: Collection[int],
    alignment: int,
) -> Iterator[tuple[Bucket, bool]]:
    """Each bucket, and whether it travels: cut into one equal range for each rank, wherever that falls.

    A bucket ends where a parameter ends, so that its memory is its own; only a parameter that is larger than a bucket
    goes through several, and these lie one behind the other, so that one large embedding is not one large message.
    """
    granule = world_size * alignment  # the least that can be cut equally
    most = None if bucket_numel is None else -(-bucket_numel // granule) * granule
    for (device, dtype, trainable, wire), members in classes.items():
        for filled_in_order in _fill(specs, members, most, ends, alignment):
            segments = _by_group(specs, filled_in_order, alignment)
            filled = max((_aligned(segment.end, alignment) for segment in segments), default=0)
            width = -(-filled // granule) * alignment
            yield Bucket(tuple(segments), EqualRanges(world_size, width), dtype, device, wire), trainable


def _set_apart(specs: Sequence[ParamSpec], members: Sequence[int], end_numel: int | None) -> list[int]:
    """The parameters that begin the second bucket and the last one, if the ends are to be small; none of a few."""
    if end_numel is None:
        return []

    def reaches(sizes: Iterable[int]) -> int:
        """How many of these come to `end_numel`."""
        return 1 + sum(1 for filled in accumulate(sizes) if filled < end_numel)

    numels = [specs[param].numel for param in members]
    second, last = reaches(numels), len(members) - reaches(reversed(numels))
    return [members[second], members[last]] if second < last else []


def _fill(
    specs: Sequence[ParamSpec], members: Sequence[int], most: int | None, ends: Collection[int], alignment: int
) -> Iterator[list[Segment]]:
    """The segments of one bucket after the other; none is filled beyond `most`."""
    segments: list[Segment] = []
    filled = 0
    for param in members:
        start, numel = 0, specs[param].numel
        full = param in ends or (most is not None and filled + _aligned(numel, alignment) > most)
        if filled and full:
            yield segments
            segments, filled = [], 0
        while most is not None and numel - start > most:
            # Before it there is nothing, or parameters without elements: a bucket that goes on with one begins with it.
            yield [*segments, Segment(param, start, start + most, 0)]
            segments = []
            start += most
        segments.append(Segment(param, start, numel, filled))
        filled += _aligned(numel - start, alignment)
    if segments:
        yield segments


def _by_group(specs: Sequence[ParamSpec], segments: list[Segment], alignment: int) -> list[Segment]:
    """Return the segments with those of one param group side by side: such neighbours are stepped as one tensor.

    Unchanged where a parameter goes through several buckets, as its parts must lie one behind the other.
    """
    if any(segment.stop - segment.start < specs[segment.param].numel for segment in segments):
        return segments
    params = sorted((segment.param for segment in segments), key=lambda param: specs[param].group)
    offsets = accumulate((_aligned(specs[param].numel, alignment) for param in params), initial=0)
    return [Segment(param, 0, specs[param].numel, at) for param, at in zip(params, offsets, strict=False)]


_Unit = tuple[int, ...]  # parameters that stay together


def _find_rows(
    specs: Sequence[ParamSpec],
    members: Sequence[int],
    holder: Mapping[int, int],
    world_size: int,
    bucket_numel: int | None,
) -> tuple[list[_Unit], list[_Unit]]:
    """Rows of parameters with the same number of elements, one of each rank; and the rest, one by one.

    A bucket of rows has equal ranges, of the same size on every rank. None of what would not fit into a bucket, and
    none if all is to be in one bucket.
    """
    waiting: dict[int, dict[int, deque[int]]] = {}  # by elements, and by rank; ranks without any are not in it
    rows: list[_Unit] = []
    for param in members:
        numel = specs[param].numel
        if world_size == 1 or bucket_numel is None or numel * world_size > bucket_numel:
            continue
        by_rank = waiting.setdefault(numel, {})
        by_rank.setdefault(holder[param], deque()).append(param)
        if len(by_rank) == world_size:
            rows.append(tuple(held.popleft() for held in by_rank.values()))
            waiting[numel] = {rank: held for rank, held in by_rank.items() if held}
    found = {param for row in rows for param in row}
    return rows, [(param,) for param in members if param not in found]


def _chunks(
    specs: Sequence[ParamSpec], units: Sequence[_Unit], bucket_numel: int | None, ends: Collection[int]
) -> Iterator[list[int]]:
    """Consecutive units that together stay within `bucket_numel`, or one alone that does not."""
    chunk: list[int] = []
    filled = 0
    for unit in units:
        numel = sum(specs[param].numel for param in unit)
        full = any(param in ends for param in unit) or (bucket_numel is not None and filled + numel > bucket_numel)
        if chunk and full:
            yield chunk
            chunk, filled = [], 0
        chunk.extend(unit)
        filled += numel
    if chunk:
        yield chunk


def _aligned(numel: int, alignment: int) -> int:
    return -(-numel // alignment) * alignment


def _raise_if_any(problems: Sequence[str]) -> None:
    if problems:
        raise ValueError("not a partition of the parameters:\n  " + "\n  ".join(problems))
