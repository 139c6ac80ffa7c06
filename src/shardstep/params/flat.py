"""Parameters as views of flat buffers, in which every bucket of a plan is one range."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from shardstep.params.profiler_ranges import RangeNames
from shardstep.params.views import dense_view, move_in, quickly, separate_view
from shardstep.planning import Bucket, Piece, Plan


@dataclass(frozen=True)
class BucketMemory:
    """One bucket of a plan, and where its values lie."""

    bucket: Bucket
    values: torch.Tensor  # flat, of all ranks; what lies between two parameters is no one's, and travels too
    rank: int  # this one

    def range_of(self, rank: int) -> torch.Tensor:
        low, high = self.bucket.ranges.bounds(rank)
        return self.values[low:high]

    @cached_property
    def own(self) -> torch.Tensor:
        """This rank's range."""
        return self.range_of(self.rank)

    @cached_property
    def placed(self) -> list[tuple[Piece, int]]:
        """This rank's pieces, and where in its range each begins."""
        return self.bucket.placed(self.rank)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """By this rank's pieces, what lies in a range like its own."""
        return [values[offset : offset + piece.numel] for piece, offset in self.placed]


class FlatMemory:
    """The memory of a plan. Buckets that share a parameter lie one behind the other; others have memory of their own.

    Parameters move in one stretch of buckets after the other, and what they leave is free for the next: so it takes a
    stretch of memory beyond the model, and not a second model.
    """

    def __init__(self, plan: Plan, params: Sequence[torch.Tensor], rank: int, *, stored: bool = True) -> None:
        """Unless it is `stored` there are shapes alone, to try a plan with: parameters stay where they are."""
        self.plan = plan
        self.titles = RangeNames(plan)
        self.homes: dict[int, torch.Tensor] = {}  # of every parameter that travels: its view
        self.buckets: list[BucketMemory] = []
        for stretch in _stretches(plan.buckets):
            sample = params[stretch[0].segments[0].param]
            device = sample.device if stored else "meta"
            values = torch.zeros(sum(b.numel for b in stretch), dtype=sample.dtype, device=device)
            start = 0
            for bucket in stretch:
                for segment in bucket.segments:
                    if segment.start == 0:
                        param = params[segment.param]
                        view = separate_view if stored else dense_view
                        home = self.homes[segment.param] = view(values, start + segment.offset, param)
                        if stored:
                            move_in(param, home, _remedy(plan, segment.param))
                self.buckets.append(BucketMemory(bucket, values[start : start + bucket.numel], rank))
                start += bucket.numel
        self.params = {index: params[index] for index in self.homes}
        self.frozen = {index: param for index, param in enumerate(params) if index not in self.homes}
        self._expected = _whereabouts(list(self.homes.values()))

    def adopt(self) -> None:
        """Make the parameters views of the buffers again, if the program has given one other memory since."""
        params = list(self.params.values())
        found = _whereabouts(params)
        if found == self._expected:
            return
        rows = zip(params, self.homes.items(), found, self._expected, strict=True)
        for param, (index, view), place, expected in rows:
            if place != expected:
                move_in(param, view, _remedy(self.plan, index))


def _remedy(plan: Plan, param: int) -> str:
    return f"it is {plan.params[param].name}: call shard(...) after model.to(...), or once more"


def _stretches(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Buckets that lie one behind the other because a parameter goes through them."""
    stretch: list[Bucket] = []
    for bucket in buckets:
        if stretch and not bucket.follows:
            yield stretch
            stretch = []
        stretch.append(bucket)
    if stretch:
        yield stretch


def _whereabouts(tensors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Where each lies, and in which order."""
    with quickly():
        return list(zip(map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors), strict=True))
