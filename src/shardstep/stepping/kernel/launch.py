"""Steps pieces with the kernels of device_code.py; the host never waits for a value on the device.

[Note: what the host sends] Two small tables may change from step to step: options, when a scheduler has set one, and
the addresses of gradients, when the allocator gave them other memory. Each is compared with what was sent last, and
sent only if it differs, in one copy from pinned memory. That memory is taken anew each time: torch's allocator does not
give it to the next before the copy is done, so the host need not wait for it, nor keep a ring of buffers. Addresses
rather than one base and offsets: gradients may come from anywhere, and with the same memory in every step nothing is
sent either way.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from shardstep.stepping.kernel import rules
from shardstep.stepping.kernel.rules import Rule
from shardstep.stepping.kernel.table import (
    COMMON,
    VECTOR_NBYTES,
    Batch,
    BlockShape,
    KernelPiece,
    Table,
    are_aligned,
    find_problems,
    variant_of,
)

_LANES = 128  # pieces that one program of `prepare` looks after
_SHAPE = BlockShape()


def is_available(device: torch.device) -> bool:
    """Whether a KernelStep can be built for tensors there."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


class KernelStep:
    """Steps `pieces` in one pass over their memory.

    `groups` are param groups as torch's optimizers have them; their options are read when `step` is called. With a
    `seed`, bfloat16 values are rounded stochastically (stochastic.py). A step is enqueued on the current stream, and
    can be captured in a CUDA graph; its gradients are read there and left as they are. If steps come on several
    streams, each must wait for the one before: they share their tables.
    """

    def __init__(
        self,
        rule: Rule,
        pieces: Sequence[KernelPiece],
        groups: Sequence[Mapping[str, Any]],
        *,
        seed: int | None = None,
        shape: BlockShape = _SHAPE,
    ) -> None:
        if not pieces:
            raise ValueError("there is no piece to step: make no KernelStep where a rank holds nothing")
        self._rule, self._groups, self._seed = rule, groups, seed
        known = [groups[piece.group] if 0 <= piece.group < len(groups) else {} for piece in pieces]
        variants = [
            variant_of(rule, piece, group, stochastic=seed is not None)
            for piece, group in zip(pieces, known, strict=True)
        ]
        problems = find_problems(pieces, variants, len(groups))
        if seed is not None and not 0 <= seed < 2**63:
            problems.append(f"the seed is {seed}, not a number from 0 to 2^63 - 1")
        if problems:
            raise ValueError("; ".join(problems))
        self._table = Table(pieces, variants, shape)
        self._code: Any = importlib.import_module("shardstep.stepping.kernel.device_code")
        self._launches = [_Launch(batch, self._code.tl, shape) for batch in self._table.batches]
        self._values = [piece.values for piece in pieces]
        self._dtypes = [piece.gradients for piece in pieces]
        device = self._device = self._table.device
        self._scalars = torch.zeros(len(groups), rules.SCALARS, dtype=torch.float64, device=device)
        self._sent_scalars: list[float] = []
        self._addresses = torch.zeros(len(pieces), dtype=torch.int64, device=device)
        self._sent_addresses: list[int] = []
        self._common = torch.zeros(len(pieces), COMMON, dtype=torch.float32, device=device)
        self._keys = torch.zeros(len(pieces), 2, dtype=torch.int32, device=device)
        self._one, self._zero = torch.ones((), device=device), torch.zeros((), device=device)
        self._grid = (-(-len(pieces) // _LANES),)

    @torch.no_grad()
    def step(
        self,
        gradients: Sequence[torch.Tensor | None],
        grad_scale: torch.Tensor | None = None,
        clip: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        """Step with one gradient for each piece, or None for a piece that is not stepped. The rest are scalars on the
        device.

        Gradients are divided by `grad_scale` and multiplied with `clip`. Where `found_inf` is not 0 nothing changes,
        nor is the step counted.
        """
        with self._on_device():
            self._take_options()
            self._take_gradients(gradients)
            self._code.prepare[self._grid](
                self._table.rows,
                self._addresses,
                self._scalars,
                self._common,
                self._keys,
                self._one if grad_scale is None else grad_scale,
                self._one if clip is None else clip,
                self._zero if found_inf is None else found_inf,
                self._seed or 0,
                len(self._values),
                RULE=int(self._rule),
                STOCHASTIC=self._seed is not None,
                LANES=_LANES,
            )
            for launch in self._launches:
                if launch.grid[0]:
                    self._code.step_blocks[launch.grid](
                        launch.blocks,
                        self._table.rows,
                        self._addresses,
                        self._common,
                        self._keys,
                        ALIGNED=launch.aligned,
                        **launch.constants,
                    )
        torch.autograd.graph.increment_version(self._values)

    def _on_device(self) -> AbstractContextManager[Any]:
        """Kernels are launched on the current device, whatever their tensors say."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def _take_options(self) -> None:
        scalars = [number for group in self._groups for number in rules.scalars_of(self._rule, group)]
        if scalars != self._sent_scalars:
            self._check_variants()
            _send(scalars, self._scalars.view(-1))
            self._sent_scalars = scalars
        for number, group in enumerate(self._groups):
            lr = rules.lr_on_device(group)
            if lr is not None:
                self._scalars[number, rules.LR].copy_(lr.reshape(()), non_blocking=True)

    def _check_variants(self) -> None:
        """An option that a kernel was compiled for cannot change; those that are numbers can."""
        pieces, stochastic = self._table.pieces, self._seed is not None
        for batch in self._table.batches:
            for piece in (pieces[index] for index in batch.pieces):
                now = variant_of(self._rule, piece, self._groups[piece.group], stochastic=stochastic)
                if now != batch.variant:
                    raise RuntimeError(
                        f"options of group {piece.group} ask for {now}, and the kernel was made for {batch.variant}: "
                        "make a new KernelStep"
                    )

    def _take_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        # One without elements has no address, and is counted all the same: it gets one that nobody reads.
        addresses = [0 if gradient is None else gradient.data_ptr() or VECTOR_NBYTES for gradient in gradients]
        if addresses == self._sent_addresses:
            return
        self._check_gradients(gradients)
        for launch in self._launches:
            launch.look_at(addresses)
        _send(addresses, self._addresses)
        self._sent_addresses = addresses

    def _check_gradients(self, gradients: Sequence[torch.Tensor | None]) -> None:
        if len(gradients) != len(self._values):
            raise ValueError(f"there are {len(self._values)} pieces, and {len(gradients)} gradients")
        for index, (gradient, values, dtype) in enumerate(zip(gradients, self._values, self._dtypes, strict=True)):
            if gradient is not None and (
                gradient.dtype is not dtype
                or gradient.numel() != values.numel()
                or gradient.device != values.device
                or not gradient.is_contiguous()
            ):
                raise ValueError(
                    f"the gradient of piece {index} must be contiguous, {values.numel()} elements of {dtype} on "
                    f"{values.device}; it is {gradient.numel()} of {gradient.dtype} on {gradient.device}"
                )


class _Launch:
    """The launch of one batch: what its kernel is compiled for, and over how many blocks it goes."""

    def __init__(self, batch: Batch, tl: Any, shape: BlockShape) -> None:
        variant = batch.variant
        kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
        self._batch = batch
        self.blocks, self.grid, self.aligned = batch.blocks, (batch.blocks.numel(),), False
        self.constants = {
            "RULE": int(variant.rule),
            "VALUE": kinds[variant.values],
            "GRADIENTS": kinds[variant.gradients],
            "MOMENT": kinds[variant.moments],
            "HAS_MASTER": variant.master,
            "IS_DECOUPLED": variant.decoupled,
            "AMSGRAD": variant.amsgrad,
            "HAS_MOMENTUM": variant.momentum,
            "NESTEROV": variant.nesterov,
            "STOCHASTIC": variant.stochastic,
            "BLOCK": shape.numel,
            "num_warps": shape.warps,
        }

    def look_at(self, addresses: Sequence[int]) -> None:
        """Check again whether all addresses are aligned: those of the gradients have changed."""
        self.aligned = self._batch.aligned and are_aligned([addresses[index] for index in self._batch.pieces])


def _send(numbers: Sequence[float], table: torch.Tensor) -> None:
    """Copy numbers into a table on the device without waiting; see [Note: what the host sends]."""
    if table.device.type == "cpu":
        table.copy_(torch.tensor(numbers, dtype=table.dtype, device="cpu"))
        return
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "options or the memory of gradients changed while a CUDA graph is captured, and a replay would not find "
            "what the host sends now: step once with these gradients and options before, and capture then"
        )
    table.copy_(torch.tensor(numbers, dtype=table.dtype, device="cpu", pin_memory=True), non_blocking=True)
