"""Who holds what: whole parameters dealt out by size, or one flat range cut evenly."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate, groupby, pairwise

from shardstep.planning.spec import ParamSpec


class Layout(Enum):
    """How finely a parameter may be cut."""

    WHOLE = (
        "whole"  # never: for optimizers that look at a whole matrix, and for torch's ZeroRedundancyOptimizer contract
    )
    FLAT = "flat"  # anywhere: perfectly balanced, for optimizers that treat every element alone
    AUTO = "auto"  # a wish, not a layout: the finest that the optimizer tolerates; runtime/probe.py finds it


def deal_whole(specs: Sequence[ParamSpec], world_size: int) -> list[tuple[int, int]]:
    """(parameter, rank) in the order of dealing: within each group the largest first, to the rank that holds least.

    Ties go to the lowest rank; a rank's load counts all groups, so a group added later moves nothing that was dealt
    before. The heap makes it P log N: a scan over 1,024 ranks for each of 10,000 parameters takes seconds.
    """
    loads = [(0, rank) for rank in range(world_size)]  # already a heap
    dealt: list[tuple[int, int]] = []
    in_group_order = sorted(range(len(specs)), key=lambda i: specs[i].group)
    for _, members in groupby(in_group_order, key=lambda i: specs[i].group):
        for param in sorted(members, key=lambda i: -specs[i].numel):
            load, rank = loads[0]
            heapq.heapreplace(loads, (load + specs[param].numel, rank))
            dealt.append((param, rank))
    return dealt


class FlatCuts:
    """Parameters one behind the other, and the places where they may be cut.

    A place is an end of a parameter, or a multiple of `alignment` elements from its beginning: there a kernel that
    takes several elements at a time begins anew anyway, so that every element is rounded as in the whole parameter.
    """

    def __init__(self, numels: Sequence[int], alignment: int) -> None:
        self._starts = list(accumulate(numels, initial=0))
        self._alignment = alignment
        self.total = self._starts.pop()
        self._numels = list(numels)

    def buckets(self, bucket_numel: int | None) -> list[int]:
        """The ends of buckets of about `bucket_numel` elements (None: one bucket), from 0 to the total."""
        step = bucket_numel or max(self.total, 1)
        inner = {self._nearest(place) for place in range(step, self.total, step)}
        return [0, *sorted(inner - {0, self.total}), self.total]

    def shares(self, start: int, stop: int, held: Sequence[int]) -> list[int]:
        """How many of the elements [start, stop) each rank holds, in order, given what each holds already.

        Every rank is brought as near to an equal share of everything so far as the places allow: what one bucket
        rounds up the next rounds down.
        """
        share = (sum(held) + stop - start) / len(held)
        wanted = accumulate((share - have for have in held), initial=float(start))
        ends = [min(max(self._nearest(round(place)), start), stop) for place in wanted]
        ends = [start, *accumulate(ends[1:-1], max), stop]
        return [after - before for before, after in pairwise(ends)]

    def _nearest(self, place: int) -> int:
        if not 0 < place < self.total:
            return place
        param = bisect_right(self._starts, place) - 1
        offset = place - self._starts[param]
        below = offset // self._alignment * self._alignment
        above = min(below + self._alignment, self._numels[param])
        return self._starts[param] + (below if offset - below <= above - offset else above)
