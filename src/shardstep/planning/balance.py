"""Whole parameters dealt by what they cost: all ranks wait for the one that steps longest.

[Note: how it is dealt] Largest first, each to the rank that has least; by cost alone, and by mixtures of cost and
elements. The best by cost is taken among those that leave elements even enough: a rank with many has no memory left,
and one with few receives more than DistributedDataParallel sends. The dealing by elements is always among them, and
where whole parameters leave it less even than that, it sets the bounds. So cost is never worse than with it.

Parameters of one shape and cost may change places. They are given out in the order in which they lie in the buckets,
each to the rank that has got least so far: so the ranges of a bucket are spread over ranks, which send them together.

[Note: rows] Of N neighbours of one shape each of N ranks may get one. Then all ranks step batches of the same matrices,
and hold ranges of the same size (make.py), which travel by one collective. It is done where all of it costs no balance:
of 12 layers over 8 ranks, 4 are left over, and one by one they are dealt more evenly.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardstep.planning.layout import deal_whole
from shardstep.planning.spec import ParamSpec

MOST_ELEMENTS = 1.3  # of a rank, over the mean
MOST_TRAFFIC = 1.05  # of a rank, over DistributedDataParallel's
_PARTS_OF_COST = (1.0, 0.75, 0.5, 0.25)  # in the measure by which is dealt; the rest is elements
_TRIES = 32  # ranks that are looked at for room; a scan of all would make it P times N
_SCALE = 10**15  # of a measure: integers, so that no sum depends on its order


@dataclass(frozen=True, slots=True)
class _Load:
    """What is to be dealt: elements and cost of every parameter, and which of them travel."""

    numels: list[int]
    costs: Sequence[int]
    moving: list[int]
    world_size: int

    def dealt(self, holders: dict[int, int]) -> _Dealt:
        costs, numels = [0] * self.world_size, [0] * self.world_size
        for index, rank in holders.items():
            costs[rank] += self.costs[index]
            numels[rank] += self.numels[index]
        return _Dealt(holders, costs, numels)


@dataclass(frozen=True, slots=True)
class _Dealt:
    """The rank of each parameter that travels, and what each rank has."""

    holders: dict[int, int]
    costs: list[int]
    numels: list[int]

    @property
    def measure(self) -> tuple[int, int]:
        """What is to be small: all wait for the rank with most; then the memory of the fullest."""
        return max(self.costs), max(self.numels)

    def is_within(self, fewest: float, most: float) -> bool:
        return min(self.numels) >= fewest and max(self.numels) <= most


def deal_by_cost(
    specs: Sequence[ParamSpec], costs: Sequence[int], world_size: int, order: Iterable[int]
) -> list[tuple[int, int]]:
    """(parameter, rank), the costliest first; `order` is that in which the parameters lie in the buckets.

    What is frozen costs nothing, and is dealt last, by elements.
    """
    moving = [index for index, spec in enumerate(specs) if spec.trainable]
    load = _Load([spec.numel for spec in specs], costs, moving, world_size)
    by_elements = deal_whole([specs[index] for index in moving], world_size)
    even = load.dealt({moving[place]: rank for place, rank in by_elements})
    fewest, most = _bounds(even.numels)
    found = [even, *(_deal(load, part, most) for part in _PARTS_OF_COST)]
    best = min((dealt for dealt in found if dealt.is_within(fewest, most)), key=lambda dealt: dealt.measure)
    travelling = [index for index in order if specs[index].trainable]
    alike = [(spec.shape, spec.dtype, spec.device, cost) for spec, cost in zip(specs, costs, strict=True)]
    in_rows = _deal_in_rows(load, travelling, alike)
    if in_rows.is_within(fewest, most) and max(in_rows.costs) <= max(best.costs):
        moving_holders, best = in_rows.holders, in_rows
    else:
        moving_holders = _spread(best.holders, travelling, alike, load.numels)
    holders = moving_holders | _deal_frozen(specs, best.numels)
    # Of one cost by shape: matrices that are stepped as one batch lie side by side.
    costliest_first = sorted(
        holders, key=lambda i: (not specs[i].trainable, -costs[i], -load.numels[i], specs[i].shape, i)
    )
    return [(index, holders[index]) for index in costliest_first]


def _bounds(numels: Sequence[int]) -> tuple[float, float]:
    """How few elements a rank may have, and how many, if these are the ranks' when they are dealt evenly.

    A rank sends and receives what it does not hold: the total but its own, and under DDP the total but the mean.
    """
    count, mean = len(numels), sum(numels) / len(numels)
    fewest = mean * (1 - (MOST_TRAFFIC - 1) * (count - 1))
    return min(fewest, *numels), max(MOST_ELEMENTS * mean, *numels)


def _deal(load: _Load, part: float, most: float) -> _Dealt:
    """Largest first by a measure of which `part` is the cost, each to the rank that has least of it and has room for
    the elements; ties go to the rank with fewer elements, then the first. The heap makes it P log N."""
    whole_cost = max(sum(load.costs[index] for index in load.moving), 1)
    whole_numel = max(sum(load.numels[index] for index in load.moving), 1)
    weights = {
        index: round(_SCALE * (part * load.costs[index] / whole_cost + (1 - part) * load.numels[index] / whole_numel))
        for index in load.moving
    }
    ranks = [(0, 0, rank) for rank in range(load.world_size)]  # already a heap
    holders: dict[int, int] = {}
    for index in sorted(load.moving, key=lambda i: (-weights[i], -load.numels[i], i)):
        weight, numel, rank = _pop_with_room(ranks, most - load.numels[index])
        heapq.heappush(ranks, (weight + weights[index], numel + load.numels[index], rank))
        holders[index] = rank
    return load.dealt(holders)


def _deal_in_rows(load: _Load, order: Sequence[int], alike: Sequence[Hashable]) -> _Dealt:
    """One of every N neighbours that are alike to each rank, and the rest by cost: see [Note: rows]."""
    members: dict[Hashable, list[int]] = {}
    for index in order:
        members.setdefault(alike[index], []).append(index)
    count, holders, row_of = load.world_size, dict[int, int](), dict[int, int]()
    for those in members.values():
        in_rows = len(those) - len(those) % count
        holders |= {index: place % count for place, index in enumerate(those[:in_rows])}
        row_of |= {index: place // count for place, index in enumerate(those[:in_rows])}
    rest = [index for index in order if index not in holders]
    holders |= _deal(_Load(load.numels, load.costs, rest, count), 1.0, float("inf")).holders
    # Within a row they may change places.
    kinds: list[Hashable] = [(kind, row_of.get(index)) for index, kind in enumerate(alike)]
    return load.dealt(_spread(holders, order, kinds, load.numels))


def _pop_with_room(ranks: list[tuple[int, int, int]], most: float) -> tuple[int, int, int]:
    """The first of a heap of (measure, elements, rank) that has at most so many elements; the very first if none of a
    few has: what comes of it is not taken then, or is no worse than the dealing by elements."""
    passed: list[tuple[int, int, int]] = []
    while ranks and len(passed) < _TRIES and ranks[0][1] > most:
        passed.append(heapq.heappop(ranks))
    chosen = heapq.heappop(ranks) if ranks and ranks[0][1] <= most else passed.pop(0)
    for other in passed:
        heapq.heappush(ranks, other)
    return chosen


def _deal_frozen(specs: Sequence[ParamSpec], numels: Sequence[int]) -> dict[int, int]:
    """Each to the rank that holds least."""
    ranks = [(numel, rank) for rank, numel in enumerate(numels)]
    heapq.heapify(ranks)
    holders: dict[int, int] = {}
    for index in sorted((i for i, spec in enumerate(specs) if not spec.trainable), key=lambda i: -specs[i].numel):
        numel, rank = ranks[0]
        heapq.heapreplace(ranks, (numel + specs[index].numel, rank))
        holders[index] = rank
    return holders


def _spread(
    holders: dict[int, int], order: Sequence[int], alike: Sequence[Hashable], numels: Sequence[int]
) -> dict[int, int]:
    """The same, but that parameters which are `alike` have changed places."""
    left: dict[Hashable, Counter[int]] = {}
    for index in order:
        left.setdefault(alike[index], Counter())[holders[index]] += 1
    waiting = {kind: [(0, rank) for rank in sorted(ranks)] for kind, ranks in left.items()}
    got: Counter[int] = Counter()  # elements of each rank so far
    spread: dict[int, int] = {}
    for index in order:
        kind = alike[index]
        rank = spread[index] = _with_least(waiting[kind], got)
        got[rank] += numels[index]
        left[kind][rank] -= 1
        if not left[kind][rank]:
            heapq.heappop(waiting[kind])
    return spread


def _with_least(waiting: list[tuple[int, int]], got: Mapping[int, int]) -> int:
    """The first rank of a heap of (elements, rank), once those that have got more since are brought up to date."""
    numel, rank = waiting[0]
    while got[rank] != numel:
        heapq.heapreplace(waiting, (got[rank], rank))
        numel, rank = waiting[0]
    return rank
