"""Tables on the device that tell a kernel which pieces to step and where they lie; built once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.stepping.kernel.rules import Rule, is_decoupled

# Columns of the table of pieces, int64: addresses, and what a piece is.
VALUES, MASTER, FIRST, SECOND, LARGEST, STEP, NUMEL, GROUP, PARAM, START = range(10)
ROW = 16  # columns: a row is a cache line
COMMON = 16  # numbers that the elements of a piece have in common: half a line

VECTOR_NBYTES = 16  # what a thread reads at a time, if everything begins at a multiple of it
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class KernelPiece:
    """Elements of one parameter, or of neighbours with the same options, that lie side by side, and their state.

    Everything is contiguous and of the same number of elements; `master` is float32, the moments are of one dtype.
    Whoever gives memory of these another place makes a new `KernelStep`.
    """

    values: torch.Tensor  # what the model computes with
    step: torch.Tensor  # float32, one element: the steps taken so far. Of SGD: 0 if `first` is still to be filled
    group: int = 0
    first: torch.Tensor | None = None  # exp_avg, momentum_buffer
    second: torch.Tensor | None = None  # exp_avg_sq
    largest: torch.Tensor | None = None  # max_exp_avg_sq
    master: torch.Tensor | None = None  # None: `values` are also what is stepped
    gradient_dtype: torch.dtype | None = None  # None: that of `values`
    # For noise only: which parameter of the model, and where in it the piece begins. With stochastic rounding a piece
    # is of one parameter, or noise would depend on how ranks cut and join pieces.
    param: int = 0
    start: int = 0

    @property
    def gradients(self) -> torch.dtype:
        return self.gradient_dtype or self.values.dtype

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name in ("values", "master", "first", "second", "largest"):
            tensor = getattr(self, name)
            if tensor is not None:
                yield name, tensor


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Elements that one program of the kernel steps, and the warps that do it."""

    numel: int = 1_024
    warps: int = 4


@dataclass(frozen=True, slots=True)
class Variant:
    """Everything that a kernel is compiled for. Pieces of one variant are stepped in one launch."""

    rule: Rule
    values: torch.dtype
    gradients: torch.dtype
    moments: torch.dtype
    master: bool
    decoupled: bool
    amsgrad: bool
    momentum: bool
    nesterov: bool
    stochastic: bool


def variant_of(rule: Rule, piece: KernelPiece, group: Mapping[str, Any], *, stochastic: bool) -> Variant:
    return Variant(
        rule=rule,
        values=piece.values.dtype,
        gradients=piece.gradients,
        moments=torch.float32 if piece.first is None else piece.first.dtype,
        master=piece.master is not None,
        decoupled=is_decoupled(rule, group),
        amsgrad=rule is Rule.ADAM and bool(group.get("amsgrad")),
        momentum=rule is Rule.SGD and bool(group.get("momentum")),
        nesterov=rule is Rule.SGD and bool(group.get("nesterov")),
        stochastic=stochastic,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The pieces of one variant."""

    variant: Variant
    pieces: tuple[int, ...]  # indices into all pieces
    blocks: torch.Tensor  # int64, on the device: piece << 32 | which of its blocks
    aligned: bool  # all but the gradients begin at a multiple of VECTOR_NBYTES


class Table:
    """A row for each piece, and for each variant a number for each block.

    A block's number costs eight bytes, beside some 28,000 that the block's step moves. The other way, to search the
    pieces' first blocks in every program, would put several loads in a row before the first that does something.
    """

    def __init__(self, pieces: Sequence[KernelPiece], variants: Sequence[Variant], shape: BlockShape) -> None:
        self.device = pieces[0].values.device
        # Not only for the checks: their memory must not go to others as long as its address is in the table.
        self.pieces = tuple(pieces)
        rows = [_row(piece) for piece in pieces]
        self.rows = torch.tensor(rows, dtype=torch.int64, device="cpu").to(self.device)
        self.batches = tuple(self._batch(variant, variants, shape) for variant in dict.fromkeys(variants))

    def _batch(self, variant: Variant, variants: Sequence[Variant], shape: BlockShape) -> Batch:
        chosen = tuple(index for index, other in enumerate(variants) if other == variant)
        parts = [torch.zeros(0, dtype=torch.int64, device="cpu")]
        for index in chosen:
            count = -(-self.pieces[index].values.numel() // shape.numel)
            parts.append((index << 32) + torch.arange(count, dtype=torch.int64, device="cpu"))
        addresses = [tensor.data_ptr() for index in chosen for _, tensor in self.pieces[index].tensors()]
        return Batch(variant, chosen, torch.cat(parts).to(self.device), are_aligned(addresses))


def are_aligned(addresses: Sequence[int]) -> bool:
    return all(address % VECTOR_NBYTES == 0 for address in addresses)


def _row(piece: KernelPiece) -> list[int]:
    row = [0] * ROW
    named = dict(piece.tensors())
    for column, name in enumerate(("values", "master", "first", "second", "largest")):
        row[column] = named[name].data_ptr() if name in named else 0
    row[STEP], row[NUMEL], row[GROUP] = piece.step.data_ptr(), piece.values.numel(), piece.group
    row[PARAM], row[START] = piece.param, piece.start
    return row


def find_problems(pieces: Sequence[KernelPiece], variants: Sequence[Variant], groups: int) -> list[str]:
    """Return every reason why these pieces cannot be stepped, as sentences; empty if there is none."""
    problems = [
        f"piece {index}: {words}"
        for index, (piece, variant) in enumerate(zip(pieces, variants, strict=True))
        for words in _problems_of(piece, variant)
    ]
    problems += [f"piece {i}: there is no group {p.group}" for i, p in enumerate(pieces) if not 0 <= p.group < groups]
    if len({piece.values.device for piece in pieces}) > 1:
        problems.append("all pieces must lie on one device: make a KernelStep for each")
    if len({piece.step.data_ptr() for piece in pieces}) < len(pieces):
        problems.append("two pieces share a step count, which would be advanced twice: give each its own")
    return problems


def _problems_of(piece: KernelPiece, variant: Variant) -> Iterator[str]:
    for name, tensor in piece.tensors():
        if tensor.numel() != piece.values.numel() or not tensor.is_contiguous():
            yield f"{name} must be contiguous, with {piece.values.numel()} elements"
        if tensor.device != piece.values.device:
            yield f"{name} is on {tensor.device}, values on {piece.values.device}"
        if tensor.dtype not in FLOATS:
            yield f"{name} is {tensor.dtype}, not one of {FLOATS}"
    if piece.gradients not in FLOATS:
        yield f"its gradient is {piece.gradients}, not one of {FLOATS}"
    needed = {
        "first": variant.rule is not Rule.SGD or variant.momentum,
        "second": variant.rule is Rule.ADAM,
        "largest": variant.amsgrad,
    }
    for name, is_needed in needed.items():
        moment = getattr(piece, name)
        if is_needed and moment is None:
            yield f"{name} is missing, which its options need"
        if is_needed and moment is not None and moment.dtype is not variant.moments:
            yield f"{name} is {moment.dtype}, first is {variant.moments}"
    if piece.master is not None and piece.master.dtype is not torch.float32:
        yield f"master is {piece.master.dtype}, not float32"
    if piece.step.dtype is not torch.float32 or piece.step.numel() != 1 or piece.step.device != piece.values.device:
        yield "step must be one float32 on the device of values"
    if variant.stochastic and (piece.master is not None or piece.values.dtype is not torch.bfloat16):
        yield "a seed is for bfloat16 values without a master"
