"""Assign whole parameters to ranks, so that the rank that steps longest takes as little time as possible.

[Note: how parameters are assigned] The largest parameter first, each to the rank that has least so far. This is done
with several measures: cost alone, and mixtures of cost and elements. The assignment with the lowest cost is chosen
among those that keep elements balanced enough: a rank with many elements runs out of memory, and a rank with few
receives more than DistributedDataParallel sends. The assignment by elements alone is always a candidate, and if it is
less balanced than the bounds, it sets them. So the cost is never worse than with that one.

Parameters of equal shape and cost may then be swapped. They are assigned in the order in which they are in the buckets,
each to the rank that has fewest elements so far: so many ranks hold, and send, a part of each bucket.

[Note: rows] Of N adjacent parameters of equal shape, each of N ranks may get one. Then all ranks step batches of the
same matrices, and hold ranges of equal size (make.py), which one collective sends. This is done only where it does not
worsen the balance: of 12 layers on 8 ranks 4 are left over, and assigned one by one they are balanced better.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from shardstep.planning.spec import ParamSpec

MOST_ELEMENTS = 1.3  # that a rank may hold, as a multiple of the mean
MOST_TRAFFIC = 1.05  # that a rank may have, as a multiple of DistributedDataParallel's
_PARTS_OF_COST = (1.0, 0.75, 0.5, 0.25)  # the share of cost in the measure to balance; the rest is elements
_TRIES = 32  # ranks that are tried for room: trying all of them would take P times N
_SCALE = 10**15  # measures are integers of this scale, so that no sum depends on its order


def assign_by_size(specs: Sequence[ParamSpec], world_size: int) -> list[tuple[int, int]]:
    """Return (parameter, rank): in each group the largest parameter first, each to the rank that holds least so far.

    Ties go to the lowest rank. A rank's load counts all groups, so a group that is added later leaves the earlier
    groups as they are. The heap makes it P log N: a scan over 1,024 ranks for each of 10,000 parameters takes seconds.
    """
    loads = [(0, rank) for rank in range(world_size)]  # already a heap
    assigned: list[tuple[int, int]] = []
    in_group_order = sorted(range(len(specs)), key=lambda i: specs[i].group)
    for _, members in groupby(in_group_order, key=lambda i: specs[i].group):
        for param in sorted(members, key=lambda i: -specs[i].numel):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + specs[param].numel, rank))
            assigned.append((param, rank))
    return assigned


@dataclass(frozen=True, slots=True)
class _Workload:
    """Elements and cost of every parameter, and the indices of those that are trained."""

    numels: list[int]
    costs: Sequence[int]
    trained: list[int]
    world_size: int

    def evaluate(self, holders: dict[int, int]) -> _Candidate:
        """Return `holders` together with the cost and the elements that each rank then has."""
        costs, numels = [0] * self.world_size, [0] * self.world_size
        for index, rank in holders.items():
            costs[rank] += self.costs[index]
            numels[rank] += self.numels[index]
        return _Candidate(holders, costs, numels)


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A possible assignment: the rank of each trained parameter, and the cost and elements of each rank."""

    holders: dict[int, int]
    costs: list[int]
    numels: list[int]

    @property
    def measure(self) -> tuple[int, int]:
        """What should be small: first the highest cost of a rank, for which all wait; then the most elements."""
        return max(self.costs), max(self.numels)

    def is_within(self, fewest: float, most: float) -> bool:
        return min(self.numels) >= fewest and max(self.numels) <= most


def assign_by_cost(
    specs: Sequence[ParamSpec], costs: Sequence[int], world_size: int, order: Iterable[int]
) -> list[tuple[int, int]]:
    """Return (parameter, rank), the costliest parameter first; `order` is the parameters' order in the buckets.

    Frozen parameters cost nothing; they come last and are assigned by their elements.
    """
    trained = [index for index, spec in enumerate(specs) if spec.trainable]
    work = _Workload([spec.numel for spec in specs], costs, trained, world_size)
    by_size = assign_by_size([specs[index] for index in trained], world_size)
    even = work.evaluate({trained[place]: rank for place, rank in by_size})
    fewest, most = _bounds(even.numels)
    candidates = [even, *(_assign_greedily(work, part, most) for part in _PARTS_OF_COST)]
    best = min((one for one in candidates if one.is_within(fewest, most)), key=lambda one: one.measure)
    in_order = [index for index in order if specs[index].trainable]
    alike = [(spec.shape, spec.dtype, spec.device, cost) for spec, cost in zip(specs, costs, strict=True)]
    in_rows = _assign_in_rows(work, in_order, alike)
    if in_rows.is_within(fewest, most) and max(in_rows.costs) <= max(best.costs):
        trained_holders, best = in_rows.holders, in_rows
    else:
        trained_holders = _swap_alike(best.holders, in_order, alike, work.numels)
    holders = trained_holders | _assign_frozen(specs, best.numels)
    # Parameters of equal cost are sorted by shape, so that matrices that are stepped as one batch are adjacent.
    costliest_first = sorted(
        holders, key=lambda i: (not specs[i].trainable, -costs[i], -work.numels[i], specs[i].shape, i)
    )
    return [(index, holders[index]) for index in costliest_first]


def _bounds(numels: Sequence[int]) -> tuple[float, float]:
    """Return the fewest and the most elements that a rank may have; `numels` are those of the assignment by elements.

    A rank sends and receives what it does not hold: all elements but its own, and under DDP all but the mean.
    """
    count, mean = len(numels), sum(numels) / len(numels)
    fewest = mean * (1 - (MOST_TRAFFIC - 1) * (count - 1))
    return min(fewest, *numels), max(MOST_ELEMENTS * mean, *numels)


def _assign_greedily(work: _Workload, part: float, most: float) -> _Candidate:
    """Assign the largest parameter first, each to the rank that has least and has room for its elements.

    Large and least are meant by a measure in which `part` is the share of the cost. Ties go to the rank with fewer
    elements, then to the first. The heap makes it P log N.
    """
    total_cost = max(sum(work.costs[index] for index in work.trained), 1)
    total_numel = max(sum(work.numels[index] for index in work.trained), 1)
    weights = {
        index: round(_SCALE * (part * work.costs[index] / total_cost + (1 - part) * work.numels[index] / total_numel))
        for index in work.trained
    }
    ranks = [(0, 0, rank) for rank in range(work.world_size)]  # already a heap
    holders: dict[int, int] = {}
    for index in sorted(work.trained, key=lambda i: (-weights[i], -work.numels[i], i)):
        weight, numel, rank = _pop_with_room(ranks, most - work.numels[index])
        heapq.heappush(ranks, (weight + weights[index], numel + work.numels[index], rank))
        holders[index] = rank
    return work.evaluate(holders)


def _assign_in_rows(work: _Workload, order: Sequence[int], alike: Sequence[Hashable]) -> _Candidate:
    """Assign one of every N adjacent parameters that are alike to each rank, and the rest by cost: [Note: rows]."""
    members: dict[Hashable, list[int]] = {}
    for index in order:
        members.setdefault(alike[index], []).append(index)
    count, holders, row_of = work.world_size, dict[int, int](), dict[int, int]()
    for those in members.values():
        in_rows = len(those) - len(those) % count
        holders |= {index: place % count for place, index in enumerate(those[:in_rows])}
        row_of |= {index: place // count for place, index in enumerate(those[:in_rows])}
    rest = [index for index in order if index not in holders]
    holders |= _assign_greedily(_Workload(work.numels, work.costs, rest, count), 1.0, float("inf")).holders
    # Parameters may be swapped only within their row.
    kinds: list[Hashable] = [(kind, row_of.get(index)) for index, kind in enumerate(alike)]
    return work.evaluate(_swap_alike(holders, order, kinds, work.numels))


def _pop_with_room(ranks: list[tuple[int, int, int]], most: float) -> tuple[int, int, int]:
    """Pop the first of a heap of (measure, elements, rank) that has at most `most` elements.

    If none of the first few has, pop the very first: the candidate is then out of bounds and not chosen, or no worse
    than the assignment by elements.
    """
    passed: list[tuple[int, int, int]] = []
    while ranks and len(passed) < _TRIES and ranks[0][1] > most:
        passed.append(heapq.heappop(ranks))
    chosen = heapq.heappop(ranks) if ranks and ranks[0][1] <= most else passed.pop(0)
    for other in passed:
        heapq.heappush(ranks, other)
    return chosen


def _assign_frozen(specs: Sequence[ParamSpec], numels: Sequence[int]) -> dict[int, int]:
    """Assign frozen parameters, each to the rank that holds least; `numels` are the trained elements of each rank."""
    ranks = [(numel, rank) for rank, numel in enumerate(numels)]
    heapq.heapify(ranks)
    holders: dict[int, int] = {}
    for index in sorted((i for i, spec in enumerate(specs) if not spec.trainable), key=lambda i: -specs[i].numel):
        numel, rank = ranks[0]
        heapq.heapreplace(ranks, (numel + specs[index].numel, rank))
        holders[index] = rank
    return holders


def _swap_alike(
    holders: dict[int, int], order: Sequence[int], alike: Sequence[Hashable], numels: Sequence[int]
) -> dict[int, int]:
    """Return `holders` with parameters that are `alike` swapped, so that adjacent parameters have different ranks."""
    left: dict[Hashable, Counter[int]] = {}
    for index in order:
        left.setdefault(alike[index], Counter())[holders[index]] += 1
    waiting = {kind: [(0, rank) for rank in sorted(ranks)] for kind, ranks in left.items()}
    got: Counter[int] = Counter()  # elements of each rank so far
    swapped: dict[int, int] = {}
    for index in order:
        kind = alike[index]
        rank = swapped[index] = _least_loaded(waiting[kind], got)
        got[rank] += numels[index]
        left[kind][rank] -= 1
        if not left[kind][rank]:
            heapq.heappop(waiting[kind])
    return swapped


def _least_loaded(waiting: list[tuple[int, int]], got: Mapping[int, int]) -> int:
    """Return the first rank of a heap of (elements, rank), after updating outdated entries at its top from `got`."""
    numel, rank = waiting[0]
    while got[rank] != numel:
        heapq.heapreplace(waiting, (got[rank], rank))
        numel, rank = waiting[0]
    return rank
