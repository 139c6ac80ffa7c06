"""Check that all ranks have equal parameters, buffers and options.

Data parallelism relies on that, and no error is raised when it ends: when a program writes to a weight on one rank
only, a buffer is updated differently, or a bit flips. So each rank computes a checksum of every tensor, and the
checksums are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NoReturn

import torch

from shardstep.comm.channel import Channel
from shardstep.comm.control import Poll, open_poll

_WIDTH = 4096  # elements of a row: element i of each row is multiplied by weight i
_ROWS = 1 << 12  # rows that are multiplied at a time, which bounds the memory needed
_NBYTES = 8  # of one checksum


class Audit:
    """Compares the ranks of one optimizer every few steps. Constructed on all ranks."""

    def __init__(self, channel: Channel) -> None:
        self._poll: Poll = open_poll(channel, lambda record: "compare what they hold")

    def check(self, tensors: Mapping[str, torch.Tensor], options: Sequence[str]) -> None:
        """Raise on all ranks if tensors or options differ between ranks. The host waits for the device."""
        names = ["the options in param_groups", *tensors]
        of_options = int.from_bytes(blake2b("\n".join(options).encode(), digest_size=7).digest(), "big")
        checksums = [of_options, *to_host([checksum(tensor.detach()) for tensor in tensors.values()])]
        record = b"".join(number.to_bytes(_NBYTES, "big", signed=True) for number in checksums)
        self._poll.ask(record)
        answer = self._poll.answer()
        if not answer.equal:
            _raise_first_difference(names, answer.rows())


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Return a number, on the tensor's device, that depends on every bit and its position."""
    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    words = flat.reshape(-1).view(_WORDS[min(flat.element_size(), 4)])
    weights = _weights(tensor.device)
    count = len(words) // _WIDTH
    # Multiplying 32-bit words by odd numbers modulo 2**32 is a bijection: words that differ have products that differ.
    # Sums of integers do not depend on the order of the addends.
    tail = words[count * _WIDTH :]
    total = (tail * weights[: len(tail)]).sum(dtype=torch.int64)
    rows = words[: count * _WIDTH].view(count, _WIDTH)
    for start in range(0, count, _ROWS):
        sums = (rows[start : start + _ROWS] * weights).sum(1, dtype=torch.int64)
        places = torch.arange(start, start + len(sums), device=tensor.device)
        total += (sums * (2 * places + 3)).sum()
    return total


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Return odd 32-bit numbers that are equal on all ranks; even a 16-bit word times one of them fills 32 bits."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, (_WIDTH,), dtype=torch.int64, generator=generator, device="cpu")
    return (drawn | 1).to(torch.int32).to(device)


def to_host(numbers: Sequence[torch.Tensor]) -> list[int]:
    """Return the values of scalar tensors; the host waits once for each device."""
    by_device: dict[torch.device, list[int]] = {}
    for place, number in enumerate(numbers):
        by_device.setdefault(number.device, []).append(place)
    found = [0] * len(numbers)
    for places in by_device.values():
        for place, value in zip(places, torch.stack([numbers[p] for p in places]).tolist(), strict=True):
            found[place] = value
    return found


def _raise_first_difference(names: Sequence[str], rows: Sequence[bytes]) -> NoReturn:
    """Raise an error that names the first difference, and the ranks that differ from the majority, or from rank 0 where
    as many ranks have another value."""
    for place, name in enumerate(names):
        held = [row[place * _NBYTES : (place + 1) * _NBYTES] for row in rows]
        if len(set(held)) > 1:
            usual = max(held, key=lambda one: (held.count(one), one == held[0]))
            odd = [rank for rank, one in enumerate(held) if one != usual]
            raise RuntimeError(
                f"audit: ranks have different values. First in: {name}; ranks that differ from the others: {odd}. "
                "A value was changed on some ranks only: load a checkpoint on all ranks"
            )
    raise AssertionError("the ranks' records differ, but no checksum in them does")
