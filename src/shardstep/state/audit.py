"""Whether all ranks hold the same: parameters, buffers and options.

Data parallelism lives on that, and nothing says so when it ends: a weight written on one rank, a buffer that went its
own way, a bit that flipped. So every tensor is reduced to a number on each rank, and the numbers are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NoReturn

import torch

from shardstep.wire.channel import Channel
from shardstep.wire.records import Poll, open_poll

_CHUNK = 1 << 24  # elements whose weights are in memory at a time
_NBYTES = 8  # of the number of one tensor


class Audit:
    """Of one optimizer, made on all ranks; asked every few steps."""

    def __init__(self, channel: Channel) -> None:
        self._poll: Poll = open_poll(channel, lambda record: "compare what they hold")

    def check(self, tensors: Mapping[str, torch.Tensor], options: Sequence[str]) -> None:
        """Raise on all ranks if one holds something else. The host waits for the device."""
        names = ["the options in param_groups", *tensors]
        numbers = [checksum(tensor.detach()) for tensor in tensors.values()]
        told = [int.from_bytes(blake2b("\n".join(options).encode(), digest_size=7).digest(), "big"), *to_host(numbers)]
        record = b"".join(number.to_bytes(_NBYTES, "big", signed=True) for number in told)
        self._poll.ask(record)
        answer = self._poll.answer()
        if not answer.equal:
            _raise_first_difference(names, answer.rows())


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on every bit and on its place; it stays on the tensor's device."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = flat.reshape(-1).view(torch.uint8) if flat.element_size() % 4 else flat.reshape(-1).view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start + 1, start + 1 + len(part), device=tensor.device)
        total += (part * places).sum()  # sums of whole numbers do not depend on their order; overflow wraps alike
    return total


def to_host(numbers: Sequence[torch.Tensor]) -> list[int]:
    """With one wait for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(place)
    found = [0] * len(numbers)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([numbers[p] for p in places]).tolist(), strict=True):
            found[place] = value
    return found


def _raise_first_difference(names: Sequence[str], rows: Sequence[bytes]) -> NoReturn:
    """By what most ranks hold, or rank 0 where there are two of each."""
    for place, name in enumerate(names):
        held = [row[place * _NBYTES : (place + 1) * _NBYTES] for row in rows]
        if len(set(held)) > 1:
            usual = max(held, key=lambda one: (held.count(one), one == held[0]))
            odd = [rank for rank, one in enumerate(held) if one != usual]
            raise RuntimeError(
                f"audit: the ranks do not hold the same. First in: {name}; ranks that differ from the others: {odd}. "
                "Something was written on some ranks only: load a checkpoint on all of them"
            )
    raise AssertionError("records differ, and nothing in them does")
