"""Memory: what one rank contributes to a bucket, as one flat tensor for the wire."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from shardstep.planning import Bucket


class FlatSegment:
    """Parameters that live as views of one flat buffer: it is sent and received as it is."""

    def __init__(self, params: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.numel = sum(param.numel() for param in params)
        self.device = device
        self.buffer = torch.empty(self.numel, dtype=dtype, device=device)
        offset = 0
        for param in params:
            view = dense_view(self.buffer, offset, param)
            view.copy_(param.detach())
            param.data = view
            offset += param.numel()

    def outgoing(self) -> torch.Tensor:
        return self.buffer

    def landing(self) -> torch.Tensor:
        return self.buffer

    def landed(self, values: torch.Tensor) -> None:
        """The views see the new values already."""


class ScatteredSegment:
    """Parameters that lie where the caller put them.

    They are packed for the wire, unless they lie one behind the other in one buffer: then that buffer is sent and
    received as it is. Where they lie is looked up every time, because a program may move them between steps.
    """

    def __init__(self, params: Sequence[torch.Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self.numel = sum(param.numel() for param in params)
        self._params = [param for param in params if param.numel()]
        self.device = device
        self._dtype = dtype

    def outgoing(self) -> torch.Tensor:
        run = self._run()
        return torch.cat([param.detach().reshape(-1) for param in self._params]) if run is None else run

    def landing(self) -> torch.Tensor:
        run = self._run()
        return torch.empty(self.numel, dtype=self._dtype, device=self.device) if run is None else run

    def landed(self, values: torch.Tensor) -> None:
        if values.data_ptr() == self._params[0].data_ptr():
            return
        parts = torch.split(values, [param.numel() for param in self._params])
        for param, part in zip(self._params, parts, strict=True):
            param.detach().copy_(part.view(param.shape))

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
        return first.as_strided((self.numel,), (1,), first.storage_offset())


def make_segments(
    bucket: Bucket, params: Sequence[torch.Tensor], kind: type[FlatSegment] | type[ScatteredSegment]
) -> list[FlatSegment | ScatteredSegment]:
    """The segments of a bucket of whole parameters, one per rank. FlatSegment moves the parameters into a buffer."""
    by_rank: list[list[torch.Tensor]] = [[] for _ in bucket.splits]
    for piece in bucket.pieces:
        by_rank[piece.rank].append(params[piece.param])
    sample = params[bucket.pieces[0].param]
    return [kind(members, sample.dtype, sample.device) for members in by_rank]


def move_out(params: Iterable[torch.Tensor], buffers: Sequence[torch.Tensor]) -> None:
    """Give parameters that are views of `buffers` memory of their own, so that the buffers can be freed."""
    storages = {buffer.untyped_storage().data_ptr() for buffer in buffers if buffer.numel()}
    for param in params:
        if param.numel() and param.untyped_storage().data_ptr() in storages:
            param.data = param.detach().clone()


def dense_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """`like.numel()` elements of `buffer` in the shape of `like`, and in its memory format where that is dense."""
    order = storage_order(like)
    view = buffer[offset : offset + like.numel()].view([like.shape[dim] for dim in order])
    return view.permute([order.index(dim) for dim in range(like.dim())])


def storage_order(tensor: torch.Tensor) -> list[int]:
    """The dims from slowest to fastest in memory (channels_last: 0, 2, 3, 1); the natural order if it is not dense."""
    natural = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return natural
    order = sorted(natural, key=lambda dim: (-tensor.stride()[dim], dim))
    return order if tensor.permute(order).is_contiguous() else natural
