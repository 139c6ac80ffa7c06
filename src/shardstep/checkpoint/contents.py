"""What a rank has to write of a model and its optimizer, as blocks of tensors that have names.

model.<name>                    as in the model's state_dict
optim.state.<name>.<key>        of the optimizer's state, in the parameter's shape where it is kept by element
optim.options.<n>, extra.<n>    tensors among the options, and among what the program adds
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardstep.checkpoint.storage import Part, Wish
from shardstep.memory.views import storage_order
from shardstep.planning import ParamSpec
from shardstep.planning.geometry import boxes, reordered, split

MODEL, STATE = "model.", "optim.state."
MOST_NBYTES = 64 * 1024 * 1024  # of one stored block, which is what a reader holds beside its own


@dataclass
class Holding:
    """What one rank writes of the optimizer: blocks, and what its state has beside tensors, by parameter."""

    parts: list[Part] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    state: dict[str, set[str]] = field(default_factory=dict)  # names of the tensors in the state of each parameter


class Trainer(Protocol):
    """An optimizer, as a checkpoint sees it."""

    names: Mapping[torch.Tensor, str]  # of the parameters of which ranks hold parts
    has_average: bool

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        """All that it trains, by name."""

    def hold(self) -> Holding:
        """What this rank writes of the state. Views, where that is possible."""

    def weights(self, name: str, param: torch.Tensor) -> Iterator[Part]:
        """What this rank writes of a parameter that is trained."""

    def groups(self) -> list[dict[str, Any]]:
        """Options, with the names of parameters as "params"."""


def state_key(name: str, key: str) -> str:
    return f"{STATE}{name}.{key}"


def unwrapped(model: nn.Module) -> nn.Module:
    """Without what DistributedDataParallel and torch.compile put round it, and into its names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


# -- blocks ------------------------------------------------------------------------------------------------------------


def blocks(like: torch.Tensor, start: int, stop: int, itemsize: int) -> Iterator[tuple[Any, Any, slice, list[int]]]:
    """Of elements [start, stop) of `like`, in the order in which they lie in memory: offsets, sizes, where the elements
    are within them, and the shape that they have there."""
    order = storage_order(like)
    shape = [like.shape[dim] for dim in order]
    for whole in boxes(shape, start, stop):
        for box in split(whole, max(1, MOST_NBYTES // itemsize)):
            offsets, sizes = reordered(box, order)
            yield offsets, sizes, slice(box.start - start, box.start - start + box.numel), list(box.sizes)


def parts_of_range(key: str, like: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> Iterator[Part]:
    """Elements [start, stop) of a tensor like `like`, given flat and in the order of its memory."""
    back = _natural(like)
    for offsets, _, span, shape in blocks(like, start, stop, values.element_size()):
        yield Part(key, tuple(like.shape), offsets, values[span].view(shape).permute(back))


def parts_of_whole(key: str, values: torch.Tensor) -> Iterator[Part]:
    shape = tuple(values.shape)
    for whole in boxes(shape, 0, values.numel()):
        for box in split(whole, max(1, MOST_NBYTES // max(1, values.element_size()))):
            block = values
            for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                block = block.narrow(dim, offset, size)
            yield Part(key, shape, box.offsets, block)


def wishes_for_range(key: str, like: torch.Tensor, target: torch.Tensor, start: int, stop: int) -> Iterator[Wish]:
    """The same, to be read: `target` is flat."""
    back = _natural(like)
    for offsets, _, span, shape in blocks(like, start, stop, target.element_size()):
        yield Wish(key, offsets, target[span].view(shape).permute(back))


def wish_for_whole(key: str, target: torch.Tensor) -> Wish:
    return Wish(key, (0,) * target.dim(), target)


def _natural(like: torch.Tensor) -> list[int]:
    order = storage_order(like)
    return [order.index(dim) for dim in range(like.dim())]


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a model's state_dict: a tensor, and the key under which the same tensor came before, if it did."""

    key: str
    tensor: torch.Tensor
    same_as: str | None


def model_entries(model: nn.Module) -> tuple[list[Entry], dict[str, Any]]:
    """The tensors of a model's state_dict, and what is no tensor in it."""
    seen: dict[tuple[Any, ...], str] = {}
    found: list[Entry] = []
    others: dict[str, Any] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            others[key] = value
            continue
        mark = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
        found.append(Entry(key, value, seen.get(mark)))
        seen.setdefault(mark, key)
    return found, others


def model_parts(entries: Sequence[Entry], trainer: Trainer | None, rank: int, world_size: int) -> Iterator[Part]:
    """What this rank writes of the model: of trained parameters what it holds, of the rest its turn."""
    names = {} if trainer is None else trainer.names
    for entry in entries:
        if trainer is not None and entry.same_as is None and entry.tensor in names:
            yield from trainer.weights(MODEL + entry.key, entry.tensor)
    for entry, owner in zip(shared_entries(entries, trainer), dealt(entries, trainer, world_size), strict=True):
        if owner == rank:
            yield from parts_of_whole(MODEL + entry.key, entry.tensor.detach())


def shared_entries(entries: Sequence[Entry], trainer: Trainer | None) -> list[Entry]:
    """What every rank has and no rank holds: buffers, and parameters that are not trained."""
    names = {} if trainer is None else trainer.names
    return [entry for entry in entries if entry.same_as is None and entry.tensor not in names]


def dealt(entries: Sequence[Entry], trainer: Trainer | None, world_size: int) -> list[int]:
    """Who writes, and reads, each of the shared ones: the same on every rank, and about as many bytes each."""
    load = [0] * world_size
    owners = []
    for entry in shared_entries(entries, trainer):
        owners.append(load.index(min(load)))
        load[owners[-1]] += entry.tensor.nbytes
    return owners
