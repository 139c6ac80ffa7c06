"""Whole parameters as flat tensors to be sent: each class is a `Message` of comm/transport.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shardstep.params.views import ALIGNMENT_NBYTES, dense_view, move_in
from shardstep.planning import Bucket


class FlatMessage:
    """Parameters that are views of one flat buffer, which is sent and received as it is."""

    def __init__(self, params: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        unit = 1 if device.type == "cpu" else max(ALIGNMENT_NBYTES // dtype.itemsize, 1)
        starts = [0, *accumulate(-(-param.numel() // unit) * unit for param in params)]
        self.buffer = torch.zeros(starts[-1], dtype=dtype, device=device)
        self.nbytes = self.buffer.nbytes
        self._places = [
            (param, dense_view(self.buffer, start, param)) for start, param in zip(starts, params, strict=False)
        ]
        self.prepare()

    def outgoing(self) -> torch.Tensor:
        return self.buffer

    def landing(self) -> torch.Tensor:
        return self.buffer

    def landed(self, values: torch.Tensor) -> None:
        """No-op: the views have the new values already."""

    def sent(self) -> None:
        """No-op: the parameters were sent as they are."""

    def prepare(self) -> None:
        """Make the parameters views of the buffer, or again if the program has given one other memory."""
        for param, view in self._places:
            if param.data_ptr() == view.data_ptr():
                continue
            move_in(param, view, "build the optimizer after model.to(...)")


class ScatteredMessage:
    """Parameters in the memory that the program gave them.

    They are packed to be sent, unless they are contiguous in one storage, as a single one always is: then that memory
    is sent and received as it is. That is looked up every time: a program may give them other memory.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._numel = sum(param.numel() for param in params)
        self.nbytes = sum(param.nbytes for param in params)

    def prepare(self) -> None:
        """Raise if the parameters have changed their size; they may have other memory."""
        if self._resized():
            shapes = [tuple(param.shape) for param in self._params]
            raise RuntimeError(f"parameters changed their size; now they are {shapes}: build the optimizer again")

    def outgoing(self) -> torch.Tensor:
        if self._resized():
            return self._memory().zero_()  # `prepare` has raised, and every rank will; until then they expect a message
        run = self._run()
        return torch.cat([param.detach().reshape(-1) for param in self._params]) if run is None else run

    def landing(self) -> torch.Tensor:
        run = None if self._resized() else self._run()
        return self._memory() if run is None else run

    def landed(self, values: torch.Tensor) -> None:
        if self._resized() or values.data_ptr() == self._params[0].data_ptr():
            return
        parts = torch.split(values, [param.numel() for param in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.detach().copy_(part.view(param.shape))

    def sent(self) -> None:
        """No-op: the parameters were sent as they are."""

    def _resized(self) -> bool:
        return sum(param.numel() for param in self._params) != self._numel

    def _memory(self) -> torch.Tensor:
        first = self._params[0]
        return torch.empty(self._numel, dtype=first.dtype, device=first.device)

    def _run(self) -> torch.Tensor | None:
        """Return the parameters as one tensor over their own memory, or None if they are not contiguous."""
        first = self._params[0].detach()
        storage = first.untyped_storage().data_ptr()
        expected = first.data_ptr()
        for param in self._params:
            if (
                param.data_ptr() != expected
                or not param.is_contiguous()
                or param.untyped_storage().data_ptr() != storage
            ):
                return None
            expected += param.numel() * param.element_size()
        return first.as_strided((self._numel,), (1,), first.storage_offset())


def flat_messages(bucket: Bucket, params: Sequence[torch.Tensor]) -> list[list[FlatMessage]]:
    """Return one message per rank, and move the parameters into its buffer, which may be empty."""
    sample = params[bucket.segments[0].param]
    return [[FlatMessage(members, sample.dtype, sample.device)] for members in _by_rank(bucket, params)]


def scattered_messages(
    bucket: Bucket, params: Sequence[torch.Tensor], in_place_nbytes: float
) -> list[list[ScatteredMessage]]:
    """Return each rank's messages: one for every parameter of at least `in_place_nbytes`, and one for all others."""
    rows: list[list[ScatteredMessage]] = []
    for members in _by_rank(bucket, params):
        large = [[param] for param in members if param.nbytes >= in_place_nbytes]
        small = [param for param in members if 0 < param.nbytes < in_place_nbytes]
        rows.append([ScatteredMessage(group) for group in [*large, small] if group])
    return rows


def _by_rank(bucket: Bucket, params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    ranks = range(bucket.ranges.count)
    return [[params[piece.param] for piece in bucket.pieces_of(rank)] for rank in ranks]
