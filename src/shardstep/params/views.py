"""Views of flat buffers: how parameters are moved into and out of them, and the order of elements in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

# CUDA's fused and foreach kernels read four elements at a time where pointers allow it, and round differently where
# they do not. So every view starts where a tensor of its own might, and rounds as the plain optimizer does.
ALIGNMENT_NBYTES = 64

# Sharded parameters are of a subclass (proxy.py). Inside this, torch does not look for its `__torch_function__` at each
# use of one: with thousands of parameters, looking costs more than the use.
quickly: Any = torch._C.DisableTorchFunctionSubclass


_tensor: Any = torch.Tensor
# Not by the parameter's own class, which reports this to the optimizer (proxy.py).
_set_data: Any = _tensor.data.__set__


def move_in(param: torch.Tensor, view: torch.Tensor, remedy: str) -> None:
    """Make `param` the view, with its values. If the two do not match, raise an error that ends with `remedy`."""
    if (param.shape, param.dtype, param.device) != (view.shape, view.dtype, view.device):
        raise RuntimeError(
            f"a parameter of shape {tuple(view.shape)}, {view.dtype} on {view.device} became one of shape "
            f"{tuple(param.shape)}, {param.dtype} on {param.device}; {remedy}"
        )
    view.copy_(param.detach())
    _set_data(param, view)


Span = tuple[int, int]  # addresses: the first, and the one after the last


def span_of(buffer: torch.Tensor) -> Span:
    """Return the addresses of `buffer`, which is contiguous."""
    return buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes


def move_out(params: Iterable[torch.Tensor], buffers: Iterable[Span]) -> None:
    """Give parameters that are views of these buffers memory of their own."""
    leaving = list(buffers)
    for param in params:
        if param.numel() and any(start <= param.data_ptr() < stop for start, stop in leaving):
            _set_data(param, param.detach().clone())


def dense_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return elements of `buffer` from `offset` as a view like `like`: its shape, and its memory format if dense."""
    order = storage_order(like)
    view = buffer[offset : offset + like.numel()].view([like.shape[dim] for dim in order])
    return view.permute([order.index(dim) for dim in range(like.dim())])


def separate_view(buffer: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    """Return the same view with a storage of its own size, over the same memory.

    torch saves a tensor with all of its storage: for a plain view it would write the whole buffer.
    """
    view = dense_view(buffer, offset, like)
    start = view.storage_offset() * view.element_size()
    part: Any = view.untyped_storage()[start : start + view.nbytes]
    return view.new_empty(0).set_(part, 0, view.shape, view.stride())


def storage_order(tensor: torch.Tensor) -> list[int]:
    """Return the dims from slowest to fastest in memory (channels_last: 0, 2, 3, 1), or as they are if not dense."""
    natural = list(range(tensor.dim()))
    if tensor.is_contiguous():
        return natural
    order = sorted(natural, key=lambda dim: (-tensor.stride()[dim], dim))
    return order if _is_dense(tensor, order) else natural


def _is_dense(tensor: torch.Tensor, order: list[int]) -> bool:
    """Return whether the elements are contiguous in memory when the dims go from slowest to fastest as in `order`."""
    step = 1
    for dim in reversed(order):
        if tensor.shape[dim] != 1 and tensor.stride()[dim] != step:
            return False
        step *= tensor.shape[dim]
    return True


def flat_gradient(param: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return the elements of `gradient` in the order that those of `param` have in memory."""
    flat = gradient.detach()
    if param.is_contiguous() and gradient.is_contiguous():  # most are, and there may be thousands of them
        flat = flat.view(-1)
    else:
        flat = flat.permute(storage_order(param)).reshape(-1)
    # A single element may have any stride, and messages are sent from contiguous memory.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
