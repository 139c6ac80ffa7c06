"""Whether all ranks hold the same: parameters, buffers and options.

Data parallelism lives on that, and nothing says so when it ends: a weight written on one rank, a buffer that went its
own way, a bit that flipped. So every tensor is reduced to a number on each rank, and the numbers are compared.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import NoReturn

import torch

from shardstep.comm.channel import Channel
from shardstep.comm.control import Poll, open_poll

_WIDTH = 4096  # elements of a row, each with a weight of its own
_ROWS = 1 << 12  # that are multiplied at a time
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
    words = flat.reshape(-1).view(_WORDS[min(flat.element_size(), 4)])
    weights = _weights(tensor.device)
    whole = len(words) // _WIDTH
    # Products of 32 bits with odd numbers wrap, and lose nothing: two words that differ have products that differ. Sums
    # of whole numbers do not depend on their order.
    tail = words[whole * _WIDTH :]
    total = (tail * weights[: len(tail)]).sum(dtype=torch.int64)
    rows = words[: whole * _WIDTH].view(whole, _WIDTH)
    for start in range(0, whole, _ROWS):
        sums = (rows[start : start + _ROWS] * weights).sum(1, dtype=torch.int64)
        places = torch.arange(start, start + len(sums), device=tensor.device)
        total += (sums * (2 * places + 3)).sum()
    return total


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@functools.cache
def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers, the same everywhere; the sixteen bits of bfloat16 are enough for a product to fill thirty-two."""
    generator = torch.Generator("cpu").manual_seed(1)
    drawn = torch.randint(-(2**31), 2**31, (_WIDTH,), dtype=torch.int64, generator=generator, device="cpu")
    return (drawn | 1).to(torch.int32).to(device)


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
