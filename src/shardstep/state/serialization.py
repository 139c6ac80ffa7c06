"""Encode state as JSON and tensors, which ranks send each other instead of pickles.

Reading a pickle can run code. This format has only None, booleans, numbers, strings, lists, tuples, dicts, dtypes and
tensors; decoding cannot create anything else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from shardstep.params.views import storage_order

# These types are written as they are; every other value is written as [tag, content], with a one-letter tag.
_PLAIN = (bool, int, float, str)


def encode(state: Mapping[Any, Any]) -> tuple[str, list[torch.Tensor]]:
    """Return `state` as a JSON text and the flat tensors to which it refers. Tensors dense in memory are not copied."""
    tensors: list[torch.Tensor] = []
    return json.dumps(_to_json(state, tensors, "state", ()), separators=(",", ":")), tensors


def _to_json(value: Any, tensors: list[torch.Tensor], path: str, above: tuple[Any, ...]) -> Any:
    """Return what JSON can write for `value`; `above` are the lists and dicts that contain it."""
    if isinstance(value, torch.Tensor):
        return _tensor_to_json(value, tensors, path)
    if value is None or type(value) in _PLAIN:
        return value
    # NumPy's float64 is a float, and an enumeration may be an int or a str, whose own str() is "Mode.A".
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, complex):
        return ["c", [value.real, value.imag]]
    if isinstance(value, torch.dtype):
        return ["y", str(value).removeprefix("torch.")]
    if any(one is value for one in above):
        raise TypeError(f"{path} contains itself: leave it out, or store a copy in it")
    inside = (*above, value)
    if isinstance(value, list | tuple):
        tag = "l" if isinstance(value, list) else "t"
        return [tag, [_to_json(item, tensors, f"{path}[{i}]", inside) for i, item in enumerate(value)]]
    if isinstance(value, Mapping):
        return [
            "d",
            [
                [_to_json(key, tensors, path, inside), _to_json(item, tensors, f"{path}[{key!r}]", inside)]
                for key, item in value.items()
            ],
        ]
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be sent without pickling; "
        "keep only numbers, strings, lists, dicts and tensors in the optimizer's state"
    )


def _tensor_to_json(value: torch.Tensor, tensors: list[torch.Tensor], path: str) -> Any:
    if value.layout is not torch.strided or type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise TypeError(
            f"{path} is a {type(value).__name__} with layout {value.layout}, which cannot be sent: use a plain dense "
            "tensor"
        )
    if value.is_meta:
        raise TypeError(
            f"{path} is a tensor on the meta device, which has no values: put it on a device, or leave it out"
        )
    if value.is_quantized:
        raise TypeError(f"{path} is a quantized tensor: keep its int_repr(), scale and zero point, or its dequantize()")
    value = value.detach().resolve_conj().resolve_neg()  # lazy conj and neg flags are not sent, so apply them
    order = storage_order(value)
    tensors.append(value.permute(order).contiguous().view(-1))
    return ["T", [str(value.dtype).removeprefix("torch."), list(value.shape), order]]


class Decoder:
    """Decodes a text made by `encode`. Receive the tensors into `buffers`; the tensors in `state` are views of them."""

    def __init__(self, text: str) -> None:
        self.buffers: list[torch.Tensor] = []
        self.state: Any = self._from_json(json.loads(text))

    def _from_json(self, raw: Any) -> Any:
        if raw is None or type(raw) in _PLAIN:
            return raw
        tag, content = raw
        if tag == "T":
            return self._tensor(*content)
        if tag == "d":
            return {self._from_json(key): self._from_json(item) for key, item in content}
        if tag == "c":
            return complex(*content)
        if tag == "y":
            return _dtype(content)
        if tag not in ("l", "t"):
            raise ValueError(f"unknown tag {tag!r} in an encoded state")
        items = [self._from_json(item) for item in content]
        return items if tag == "l" else tuple(items)

    def _tensor(self, dtype: str, shape: list[int], order: list[int]) -> torch.Tensor:
        stored = torch.empty([shape[dim] for dim in order], dtype=_dtype(dtype), device="cpu")
        self.buffers.append(stored.view(-1))
        return stored.permute([order.index(dim) for dim in range(len(shape))])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype of torch {torch.__version__}")
    return dtype


def to_cpu(value: Any) -> Any:
    """Return the same structure with every tensor copied to the CPU, so that later steps do not change it."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: to_cpu(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [to_cpu(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value
