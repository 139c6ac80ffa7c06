"""Finds tensors over the same memory: sharding moves a parameter, and what shared memory with it would not follow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The memory of a tensor: addresses [start, stop) on a device, perhaps with gaps."""

    name: str
    tensor: torch.Tensor
    start: int
    stop: int

    @property
    def is_dense(self) -> bool:
        return self.stop - self.start <= self.tensor.nbytes


def places_of(named: Iterable[tuple[str, torch.Tensor]]) -> list[Place]:
    """Return the memory of each tensor that has any."""
    found = []
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.nbytes and tensor.device.type != "meta":
            start = tensor.data_ptr()
            found.append(Place(name, tensor, start, start + _span(tensor) * tensor.element_size()))
    return found


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return whether elements of `tensor` share memory: it is expanded along a dim, or holds overlapping windows."""
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return tensor.numel() > 0 and (0 in strides or _span(tensor) < tensor.numel())


def sharing(places: Sequence[Place]) -> Iterator[tuple[Place, Place]]:
    """Yield the pairs that have an element in common."""
    open_places: list[Place] = []
    for place in sorted(places, key=lambda place: (str(place.tensor.device), place.start)):
        device = place.tensor.device
        open_places = [other for other in open_places if other.tensor.device == device and other.stop > place.start]
        for other in open_places:
            if (place.is_dense and other.is_dense) or _have_common_elements(other, place):
                yield other, place
        open_places.append(place)


def _span(tensor: torch.Tensor) -> int:
    """Return the distance from the first element to the last, counted in elements, with both of them."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _have_common_elements(first: Place, second: Place) -> bool:
    """Return whether two tensors whose address ranges overlap share an element; columns of one matrix do not."""
    size, distance = first.tensor.element_size(), second.start - first.start
    if size != second.tensor.element_size() or distance % size:
        return True
    numbers = torch.arange((max(first.stop, second.stop) - first.start) // size, device="cpu")
    taken = torch.zeros(len(numbers), dtype=torch.bool, device="cpu")
    taken[numbers.as_strided(first.tensor.shape, first.tensor.stride()).reshape(-1)] = True
    return bool(taken[numbers.as_strided(second.tensor.shape, second.tensor.stride(), distance // size)].any())
