"""Parameters as views of flat buffers: moved in, moved out, and in which order their elements lie."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# CUDA's fused and foreach kernels read four elements at a time where pointers allow it, and round differently where
# they do not. So every view starts where a tensor of its own might, and rounds as the plain optimizer does.
ALIGNMENT_NBYTES = 64

# Sharded parameters are of a class of their own. Inside this, torch does not look what that class wants of it each time
# something is asked of one: with thousands of them, that costs more than what is asked.
quickly: Any = torch._C.DisableTorchFunctionSubclass


_tensor: Any = torch.Tensor
# Not by the parameter's own class, which tells the optimizer of writes (guard.py).
_set_data: Any = _tensor.data.__set__


def move_in(param: torch.Tensor, view: torch.Tensor, remedy: str) -> None:
    """Make `param` the view, with its values; `remedy` is for one that has become something else."""
    if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"a parameter of shape {tuple(view.shape)}, {view.dtype} on {view.device} became one of shape "
            f"{tuple(param.shape)}, {param.dtype} on {param.device}; {remedy}"
        )
    view.copy_(param.detach())
    _set_data(param, view)


Span = tuple[int, int]  # addresses: the first, and that behind the last


def span_of(buffer: torch.Tensor) -> Span:
    return buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes


def move_out(params: Iterable[torch.Tensor], buffers: Iterable[Span]) -> None:
    """Give parameters that lie in these buffers memory of their own."""
    leaving = list(buffers)
    for param in params:
        if param.numel() and any(start <= param.data_ptr() < stop for start, stop in leaving):
            _set_data(param, param.detach().clone())


def dense_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """`like.numel()` elements of `buffer` in the shape of `like`, and in its memory format where that is dense."""
    order = storage_order(like)
    view = buffer[offset : offset + like.numel()].view([like.shape[dim] for dim in order])
    return view.permute([order.index(dim) for dim in range(like.dim())])


def separate_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """The same with a storage of its own size, which is that part of the buffer's.

    torch saves a tensor with all of its storage: of a view, the whole buffer would be written.
    """
    view = dense_view(buffer, offset, like)
    start = view.storage_offset() * view.element_size()
    part: Any = view.untyped_storage()[start : start + view.nbytes]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())


def storage_order(tensor: torch.Tensor) -> list[int]:
    """The dims from slowest to fastest in memory (channels_last: 0, 2, 3, 1); the natural order if it is not dense."""
    natural = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return natural
    order = sorted(natural, key=lambda dim: (-tensor.stride()[dim], dim))
    return order if _is_dense(tensor, order) else natural


def _is_dense(tensor: torch.Tensor, order: list[int]) -> bool:
    """Whether its elements lie side by side, with these dims from slowest to fastest."""
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride()[dim] != step:
            return False
        step *= tensor.shape[dim]
    return True


def flat_gradient(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The elements of `gradient` in the order in which those of `param` lie in memory."""
    flat = gradient.detach()
    if param.is_contiguous() and gradient.is_contiguous():  # most are, and there may be thousands of them
        flat = flat.view(-1)
    else:
        flat = flat.permute(storage_order(param)).reshape(-1)
    # A single element may have any stride, and the wire takes bytes that lie side by side.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
