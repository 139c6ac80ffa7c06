"""Stochastic rounding to bfloat16: up or down at random, so that the mean of many roundings is the number itself.

A weight in bfloat16 has eight bits: an update below a 512th of it is lost when every step rounds to the nearest. Here
the sixteen bits that go are compared with sixteen bits of noise, and the chance to round up is what they say, exactly.

[Note: noise] It depends on the seed, on the step, on the parameter and on the element's place in it, and on nothing
else: however many ranks there are, and wherever pieces and blocks are cut, the bits are the same. The hash is a mix of
32 bits, twice: once with the element's index, once with a second key. Its multipliers are a pair that hash-prospector's
search found (github.com/skeeto/hash-prospector; flipping a bit of what goes in flips each that comes out with a chance
of 0.5 to within 0.003); both are below 2^31, so that in 64 bits no product overflows, and torch, which has no 32 bits
without a sign, gets the same as the kernel. Sixteen of its bits, the upper ones, must be even and not depend on those
of neighbours or of the step before; nobody needs it to resist an attack. `device_code.py` has the same once more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

MASK = 0xFFFFFFFF
MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)
SALTS = (0x243F6A88, 0x05A308D3)  # of the two keys: digits of pi
_CHUNK = 1 << 20  # elements at a time: there are some temporary tensors of 64 bits

Bits = TypeVar("Bits", int, torch.Tensor)


def mix(bits: Bits) -> Bits:
    """Apply a pseudo-random permutation of the numbers below 2^32."""
    first, second = MULTIPLIERS
    bits = ((bits ^ (bits >> 15)) * first) & MASK
    bits = ((bits ^ (bits >> 12)) * second) & MASK
    return bits ^ (bits >> 15)


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of one parameter in one step. `step` counts from 1, like the optimizer's after it was advanced."""

    seed: int
    step: int
    param: int

    def keys(self) -> tuple[int, int]:
        return self._key(SALTS[0]), self._key(SALTS[1])

    def _key(self, salt: int) -> int:
        key = mix(salt ^ (self.seed & MASK))
        for word in (self.seed >> 32, self.step, self.param):
            key = mix((key + word) & MASK)
        return key

    def bits(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """Return sixteen random bits for each of the parameter's elements [start, stop), in int64."""
        first, second = self.keys()
        index = torch.arange(start, stop, dtype=torch.int64, device=device or "cpu")
        mixed = mix(((index & MASK) + first) & MASK)
        return mix(mixed ^ ((index >> 32) + second) & MASK) >> 16


def round_to_bfloat16(values: torch.Tensor, noise: Noise, start: int = 0) -> torch.Tensor:
    """Round float32 values stochastically; they are elements of the parameter from `start` on."""
    if values.dtype is not torch.float32:
        raise TypeError(f"stochastic rounding is from float32, not from {values.dtype}: call .float() before")
    flat = values.detach().reshape(-1)
    rounded = torch.empty_like(flat, dtype=torch.bfloat16)
    for at in range(0, flat.numel(), _CHUNK):
        part = flat[at : at + _CHUNK]
        below = noise.bits(start + at, start + at + part.numel(), part.device)
        upper = ((part.view(torch.int32).to(torch.int64) & MASK) + below) >> 16
        signed = ((upper ^ 0x8000) - 0x8000).to(torch.int16).view(torch.bfloat16)
        # Noise would make infinity of some that are not a number.
        rounded[at : at + _CHUNK] = torch.where(part.isfinite(), signed, part.to(torch.bfloat16))
    return rounded.view(values.shape)
