"""Estimate how long the step of one parameter takes, in whole picoseconds: sums of integers are equal on all ranks.

[Note: where the figures come from] The launches of a step of `torch.optim.Muon` on one matrix, some two dozen, take
the host 0.37 to 0.48 ms on an H200 with torch 2.11, for anything from 8 x 8 to 1024 x 4096: the device has less to do
than that, so small matrices all cost the same. From 2048 x 2048 on the device decides: a step makes 500 to 630 TFLOP/s
in bf16, all its passes included, and one long `lerp_` 4.3 TB/s. What is computed below is within an eighth of all that
was measured from 768 x 768 to 8192 x 8192, but for 1024 x 4096 (0.48 ms) and 768 x 2304 (0.44 ms). Two CPU cores that
are shared with others make 60 to 250 GFLOP/s of the same products. Only ratios decide who holds what, and a wrong one
costs time, never correctness.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from shardstep.planning.spec import ParamSpec

PICOSECONDS = 10**12


@dataclass(frozen=True, slots=True)
class Machine:
    """The speed of one kind of device."""

    nbytes: float  # bytes that its memory moves in a second
    products: float  # multiply-adds of large matrices in a second, as optimizers compute them
    launch: float  # seconds that the step of one parameter takes at least, however small it is


_CPU = Machine(nbytes=20e9, products=50e9, launch=2e-4)
_ACCELERATOR = Machine(nbytes=4.0e12, products=315e12, launch=3.8e-4)


def machine_of(device: str) -> Machine:
    """Return the speed for a device such as "cuda" or "cuda:0". Models are not told apart: ranks may have different
    ones, and must compute the same costs."""
    return _CPU if device.startswith("cpu") else _ACCELERATOR


@dataclass(frozen=True, slots=True)
class Cost:
    """Coefficients for the seconds that the step of an m x n matrix (m <= n) takes. A vector has no matrix products."""

    per_byte: float  # of the parameter: for all passes over it, its gradient and its state
    per_mmn: float = 0.0  # factor of m * m * n
    per_mmm: float = 0.0  # factor of m * m * m
    least: float = 0.0  # seconds that every parameter takes at least

    def of(self, spec: ParamSpec) -> int:
        """Return picoseconds; 0 for a parameter that is frozen or has no elements."""
        if not spec.trainable or not spec.numel:
            return 0
        m, n = _matrix_dims(spec.shape)
        seconds = self.per_byte * spec.numel * itemsize_of(spec.dtype)
        if m:
            seconds += self.per_mmn * m * m * n + self.per_mmm * m**3
        return max(round(max(seconds, self.least) * PICOSECONDS), 1)


def elementwise_cost(device: str) -> Cost:
    """Return AdamW's cost: it reads the parameter, the gradient and two moments, and writes all but the gradient. One
    launch steps many parameters, so there is no least cost of a single one."""
    return Cost(per_byte=7 / machine_of(device).nbytes)


def muon_cost(device: str, iterations: int = 5, *, batched: bool = False) -> Cost:
    """Return Muon's cost. Each iteration makes two products of m * m * n multiply-adds and one of m * m * m; momentum,
    weight decay and a cast read or write the matrix some fourteen times. In a batch matrices share their launches."""
    machine = machine_of(device)
    product = iterations / machine.products
    return Cost(14 / machine.nbytes, per_mmn=2 * product, per_mmm=product, least=0.0 if batched else machine.launch)


def _matrix_dims(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (m, n) of a matrix, with m <= n. Of a tensor with more dims, all but the first are flattened into one."""
    if len(shape) < 2:
        return 0, math.prod(shape)
    rows, columns = shape[0], math.prod(shape[1:])
    return min(rows, columns), max(rows, columns)


def itemsize_of(dtype: str) -> int:
    """Return the bytes of one element: 2 for "bfloat16", 1 for "bool"."""
    bits = re.search(r"\d+", dtype)
    return 1 if bits is None else max(int(bits[0]) // 8, 1)
