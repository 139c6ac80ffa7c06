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
    """One bucket of a plan and its memory."""

    bucket: Bucket
    values: torch.Tensor  # flat, of all ranks; the padding between two parameters is sent too
    rank: int  # this rank

    def range_of(self, rank: int) -> torch.Tensor:
        """Return the values that `rank` steps."""
        low, high = self.bucket.ranges.bounds(rank)
        return self.values[low:high]

    @cached_property
    def own(self) -> torch.Tensor:
        """This rank's range."""
        return self.range_of(self.rank)

    @cached_property
    def placed(self) -> list[tuple[Piece, int]]:
        """This rank's pieces, and the offset of each in its range."""
        return self.bucket.placed(self.rank)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Cut `values`, which are as long as this rank's range, into one tensor for each of its pieces."""
        return [values[offset : offset + piece.numel] for piece, offset in self.placed]


class FlatMemory:
    """The memory of a plan. Buckets that share a parameter are contiguous; others have memory of their own.

    Parameters are moved by one stretch of contiguous buckets after the other, and the memory that they leave is free
    for the next: so building it takes memory for one stretch beyond the model, and not for a second model.
    """

    def __init__(self, plan: Plan, params: Sequence[torch.Tensor], rank: int, *, stored: bool = True) -> None:
        """With `stored=False` buffers are on the meta device, to try a plan with, and parameters stay as they are."""
        self.plan = plan
        self.titles = RangeNames(plan)
        self.homes: dict[int, torch.Tensor] = {}  # by the index of each sharded parameter: its view
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
        self._expected = _addresses(list(self.homes.values()))

    def adopt(self) -> None:
        """Make the parameters views of the buffers again, if the program has given one other memory."""
        params = list(self.params.values())
        found = _addresses(params)
        if found == self._expected:
            return
        rows = zip(params, self.homes.items(), found, self._expected, strict=True)
        for param, (index, view), address, expected in rows:
            if address != expected:
                move_in(param, view, _remedy(self.plan, index))


def _remedy(plan: Plan, param: int) -> str:
    return f"it is {plan.params[param].name}: call shard(...) after model.to(...), or once more"


def _stretches(buckets: Sequence[Bucket]) -> Iterator[list[Bucket]]:
    """Yield groups of buckets that must be contiguous, because a parameter continues from one to the next."""
    stretch: list[Bucket] = []
    for bucket in buckets:
        if stretch and not bucket.follows:
            yield stretch
            stretch = []
        stretch.append(bucket)
    if stretch:
        yield stretch


def _addresses(tensors: Sequence[torch.Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Return the address and the strides of each tensor."""
    with quickly():
        return list(zip(map(torch.Tensor.data_ptr, tensors), map(torch.Tensor.stride, tensors), strict=True))
