"""Make a plan from descriptions of parameters, or from the JSON text of another plan."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate

from shardstep.planning.balance import assign_by_cost, assign_by_size
from shardstep.planning.plan import Bucket, EqualRanges, Plan, Segment, WholeRanges
from shardstep.planning.problems import find_problems
from shardstep.planning.spec import Layout, ParamSpec

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
    """Return a plan that distributes the elements of `specs` over `world_size` ranks.

    `layout` is that of all parameters, or one for each param group.
    `order` is the order of the parameters in the buckets; by default that of `specs`.
    `holders[i]` is the rank that holds parameter i, where DDP's buckets have decided it already; WHOLE only.
    `costs[i]` is how long the step of parameter i takes, in any unit. WHOLE balances costs, or elements without them.
    `bucket_numel` is the most elements of a bucket, without the padding to equal ranges (None: one bucket per dtype and
    device). A larger parameter has a bucket of its own under WHOLE, and is cut into several buckets under FLAT.
    `end_numel` makes the first and the last bucket smaller: they have only as many parameters as reach that size.
    `alignment`: parameters begin at multiples of so many elements, and FLAT cuts them at such multiples.
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
        for index in _find_bucket_starts(specs, members, end_numel)
    }
    if holders is None:
        uncut = sorted(index for members in whole.values() for index in members)
        assigned = _assign_whole(specs, uncut, world_size, costs, order)
    else:
        assigned = list(enumerate(holders))
    found = [
        *_whole_buckets(specs, whole, world_size, bucket_numel, ends, alignment, assigned),
        *_flat_buckets(specs, flat, world_size, bucket_numel, ends, alignment),
    ]
    found = _sort_by_completion(found, order)
    plan = Plan(
        tuple(specs),
        tuple(bucket for bucket, trainable in found if trainable),
        tuple(bucket for bucket, trainable in found if not trainable),
        world_size,
    )
    _raise_if_any(find_problems(plan))
    return plan


def _assign_whole(
    specs: Sequence[ParamSpec],
    whole: Sequence[int],
    world_size: int,
    costs: Sequence[int] | None,
    order: Sequence[int],
) -> list[tuple[int, int]]:
    """Return (parameter, rank) for the parameters that are not cut, in the order in which they were assigned."""
    own = [specs[index] for index in whole]
    if costs is None:
        assigned = assign_by_size(own, world_size)
    else:
        place = {index: number for number, index in enumerate(whole)}
        in_order = [place[index] for index in order if index in place]
        assigned = assign_by_cost(own, [costs[index] for index in whole], world_size, in_order)
    return [(whole[number], rank) for number, rank in assigned]


def _classes(
    specs: Sequence[ParamSpec], layout: Layout | Sequence[Layout], order: Sequence[int]
) -> tuple[_Classes, _Classes]:
    """Group the parameters that may share a bucket; return those that are not cut and those that are."""
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


def _sort_by_completion(found: Sequence[_Found], order: Sequence[int]) -> list[_Found]:
    """Sort buckets by when they are complete if parameters become ready in `order`; in that order they are sent.

    The buckets of a parameter that is cut into several stay together.
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
    assigned: Sequence[tuple[int, int]],
) -> Iterator[tuple[Bucket, bool]]:
    """Yield each bucket, and whether it is sent. In a bucket, parameters are sorted by rank, then by assignment."""
    turn = {param: position for position, (param, _) in enumerate(assigned)}
    holder = dict(assigned)
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
    """Yield each bucket, and whether it is sent. It is cut into one equal range for each rank, wherever the cuts fall.

    A bucket ends where a parameter ends, so that its memory is separate from other buckets'. Only a parameter that is
    larger than a bucket is spread over several consecutive ones, so that a large embedding is not one large message.
    """
    granule = world_size * alignment  # the smallest number of elements that can be cut into equal aligned ranges
    most = None if bucket_numel is None else -(-bucket_numel // granule) * granule
    for (device, dtype, trainable, wire), members in classes.items():
        for filled_in_order in _fill(specs, members, most, ends, alignment):
            segments = _by_group(specs, filled_in_order, alignment)
            filled = max((_aligned(segment.end, alignment) for segment in segments), default=0)
            width = -(-filled // granule) * alignment
            yield Bucket(tuple(segments), EqualRanges(world_size, width), dtype, device, wire), trainable


def _find_bucket_starts(specs: Sequence[ParamSpec], members: Sequence[int], end_numel: int | None) -> list[int]:
    """Return the parameters that begin the second and the last bucket if those at the ends are to be small.

    The list is empty if `end_numel` is None, or if there are too few parameters.
    """
    if end_numel is None:
        return []

    def count_until_full(sizes: Iterable[int]) -> int:
        """Return how many of these parameters reach `end_numel` together."""
        return 1 + sum(1 for filled in accumulate(sizes) if filled < end_numel)

    numels = [specs[param].numel for param in members]
    second, last = count_until_full(numels), len(members) - count_until_full(reversed(numels))
    return [members[second], members[last]] if second < last else []


def _fill(
    specs: Sequence[ParamSpec], members: Sequence[int], most: int | None, ends: Collection[int], alignment: int
) -> Iterator[list[Segment]]:
    """Yield the segments of each bucket; none has more than `most` elements."""
    segments: list[Segment] = []
    filled = 0
    for param in members:
        start, numel = 0, specs[param].numel
        full = param in ends or (most is not None and filled + _aligned(numel, alignment) > most)
        if filled and full:
            yield segments
            segments, filled = [], 0
        while most is not None and numel - start > most:
            # Only parameters without elements can come before it in the bucket, so it begins at offset 0.
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


_Unit = tuple[int, ...]  # parameters that stay in one bucket


def _find_rows(
    specs: Sequence[ParamSpec],
    members: Sequence[int],
    holder: Mapping[int, int],
    world_size: int,
    bucket_numel: int | None,
) -> tuple[list[_Unit], list[_Unit]]:
    """Return rows of parameters with equally many elements, one held by each rank; and the other parameters one by one.

    A bucket made of rows has ranges of the same size on every rank, so one collective sends it. There are no rows of
    parameters that would not fit into a bucket together, and none if there is only one bucket.
    """
    waiting: dict[int, dict[int, deque[int]]] = {}  # numel -> rank -> parameters that are in no row yet
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
    """Yield the parameters of each bucket: consecutive units of at most `bucket_numel` elements, or one larger unit."""
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
