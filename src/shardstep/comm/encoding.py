"""How the values of a bucket are written for the wire: as they are, or in fewer bits.

A bucket says by name which encoding it has (Bucket.wire). The ranks that hold its values keep them exact
(stepping/masters.py); what travels is encoded once, and every rank, the holder too, continues with what the others can
decode. So all ranks have the same bits. Gradients are sent in the encoding's dtype as well, unless the program asks for
another one.

[Note: in place] What is encoded takes less room than what it becomes. So values are encoded, sent, received and decoded
in the front part of their own memory. Half of them can be decoded at once, behind the encoded form of the others; then
half of those, and so on; the last go by way of a little memory that was taken when the gathers were made. So nothing of
a step takes memory for what travels, and can fail on one rank while the others wait for what it sends.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from shardstep.comm.transport import Memory
from shardstep.planning import Bucket

# Of the memory that was taken before: 8 MB of bf16. A bucket of 64 MB is decoded in five launches.
SCRATCH_NUMEL = 4 * 1024**2
_SCRATCH = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Encoding:
    """Values rounded to a dtype of fewer bits."""

    dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.dtype)

    def front(self, values: torch.Tensor) -> torch.Tensor:
        """The part of the memory of `values` in which their encoded form is received: see [Note: in place]."""
        return values.view(self.dtype)[: values.numel()]

    @torch.no_grad()
    def encode_front(self, values: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """Write the encoded form of `values` over their front part; return `front(values)`."""
        encoded, numel = self.front(values), values.numel()
        start = min(numel, len(scratch))
        encoded[:start].copy_(scratch[:start].copy_(values[:start]))
        while start < numel:  # what is written lies before what is still to be read
            stop = min(start * values.element_size() // self.dtype.itemsize, numel)
            encoded[start:stop].copy_(values[start:stop])
            start = stop
        return encoded

    @torch.no_grad()
    def decode_front(self, values: torch.Tensor, scratch: torch.Tensor) -> None:
        """What lies in `front(values)` becomes `values`."""
        encoded, stop = self.front(values), values.numel()
        while stop > len(scratch):
            # Numbers from `start` on are written behind the encoded form of all that is still to be read.
            start = -(-stop * self.dtype.itemsize // values.element_size())
            values[start:stop].copy_(encoded[start:stop])
            stop = start
        values[:stop].copy_(scratch[:stop].copy_(encoded[:stop]))

    @torch.no_grad()
    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Make `values` what other ranks decode. Returns their encoded form."""
        encoded = self.encode(values)
        values.copy_(encoded)
        return encoded


_ENCODINGS = {"bf16": Encoding(torch.bfloat16)}


def encoding_named(wire: str) -> Encoding:
    return _ENCODINGS[wire]


def encoding_of(bucket: Bucket) -> Encoding | None:
    """None: its values travel as they are."""
    return encoding_named(bucket.wire) if bucket.wire else None


Scratch = Mapping[torch.device, torch.Tensor]


def make_scratch(memory: Iterable[Memory]) -> Scratch:
    """Memory for the gathers of these buckets, which run one after the other on each device."""
    return {device: torch.empty(numel, dtype=_SCRATCH, device=device) for device, numel in _numels(memory).items()}


def scratch_nbytes(memory: Iterable[Memory]) -> int:
    return sum(_numels(memory).values()) * _SCRATCH.itemsize


def _numels(memory: Iterable[Memory]) -> dict[torch.device, int]:
    numels: dict[torch.device, int] = {}
    for one in memory:
        if one.bucket.wire:
            device = one.values.device
            numels[device] = max(numels.get(device, 0), min(one.values.numel(), SCRATCH_NUMEL))
    return numels


def round_all(memory: Iterable[Memory]) -> None:
    """On every rank, of weights that are exact and the same on all of them."""
    for one in memory:
        encoding = encoding_of(one.bucket)
        if encoding is not None:
            encoding.round(one.values)


def gradient_dtype(memory: Memory, asked: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which the gradients of a bucket travel; `asked` is what the program wants, if anything."""
    own, encoding = memory.values.dtype, encoding_of(memory.bucket)
    if own.is_complex:  # a cast would drop half of each number
        return own
    return asked or (own if encoding is None else encoding.dtype)


def sent_nbytes(memory: Memory, numel: int) -> int:
    """What so many values of a bucket take on the wire."""
    encoding = encoding_of(memory.bucket)
    return numel * memory.values.element_size() if encoding is None else encoding.nbytes(numel)
