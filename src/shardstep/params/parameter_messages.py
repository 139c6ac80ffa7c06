"""What whole parameters contribute to a bucket, as flat tensors for the wire: each a `Message` of comm/transport.py."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from shardstep.params.views import ALIGNMENT_NBYTES, dense_view, move_in
from shardstep.planning import Bucket


class FlatMessage:
    """Parameters that live as views of one flat buffer: it is sent and received as it is."""

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
        """The views see the new values already."""

    def sent(self) -> None:
        """They have not changed."""

    def prepare(self) -> None:
        """Make the parameters views of the buffer, again if the program has given one other memory since."""
        for param, view in self._places:
            if param.data_ptr() == view.data_ptr():
                continue
            move_in(param, view, "build the optimizer after model.to(...)")


class ScatteredMessage:
    """Parameters that lie where the caller put them.

    They are packed for the wire, unless they lie one behind the other in one buffer, as a single one always does: then
    that memory is sent and received as it is. Where they lie is looked up every time: a program may move them.
    """

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        self._params = params
        self._numel = sum(param.numel() for param in params)
        self.nbytes = sum(param.nbytes for param in params)

    def prepare(self) -> None:
        """The parameters may lie anywhere, but must be as large as they were."""
        if self._resized():
            shapes = [tuple(param.shape) for param in self._params]
            raise RuntimeError(f"parameters changed their size; now they are {shapes}: build the optimizer again")

    def outgoing(self) -> torch.Tensor:
        if self._resized():
            return self._memory().zero_()  # `prepare` has raised, and so will every rank; this keeps them from waiting
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
        """They have not changed."""

    def _resized(self) -> bool:
        return sum(param.numel() for param in self._params) != self._numel

    def _memory(self) -> torch.Tensor:
        first = self._params[0]
        return torch.empty(self._numel, dtype=first.dtype, device=first.device)

    def _run(self) -> torch.Tensor | None:
        """The parameters as one tensor over their own memory; None if they do not lie one behind the other."""
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
    """One message per rank; moves the parameters into its buffer. A rank without parameters has an empty buffer."""
    sample = params[bucket.segments[0].param]
    return [[FlatMessage(members, sample.dtype, sample.device)] for members in _by_rank(bucket, params)]


def scattered_messages(
    bucket: Bucket, params: Sequence[torch.Tensor], in_place_nbytes: float
) -> list[list[ScatteredMessage]]:
    """The messages of each rank: one for every parameter of at least `in_place_nbytes`, the others packed together."""
    rows: list[list[ScatteredMessage]] = []
    for members in _by_rank(bucket, params):
        large = [[param] for param in members if param.nbytes >= in_place_nbytes]
        small = [param for param in members if 0 < param.nbytes < in_place_nbytes]
        rows.append([ScatteredMessage(group) for group in [*large, small] if group])
    return rows


def _by_rank(bucket: Bucket, params: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    ranks = range(bucket.ranges.count)
    return [[params[piece.param] for piece in bucket.pieces_of(rank)] for rank in ranks]
