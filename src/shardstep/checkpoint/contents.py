"""Collect what a rank writes of a model and its optimizer: blocks of named tensors.

model.<name>                    a tensor of the model's state_dict
optim.state.<name>.<key>        a tensor of the optimizer's state, in the parameter's shape if it is kept per element
optim.options.<n>, extra.<n>    tensors among the options, and among what the program adds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardstep.checkpoint.storage import Part, ReadRequest
from shardstep.planning import ParamSpec
from shardstep.state.blocks import blocks_of_range, blocks_of_whole

MODEL, STATE = "model.", "optim.state."


@dataclass
class StateToSave:
    """What one rank writes of the optimizer's state."""

    parts: list[Part] = field(default_factory=list)  # blocks of tensors
    values: dict[str, dict[str, Any]] = field(default_factory=dict)  # parameter -> state that is not a tensor
    state: dict[str, set[str]] = field(default_factory=dict)  # parameter -> names of its state's tensors


@dataclass
class Loading:
    """What a rank reads, and three calls that apply it. All ranks finish one call before any rank makes the next."""

    requests: list[ReadRequest] = field(default_factory=list)
    check: Callable[[], None] = lambda: None  # runs code of the optimizer's class, which may refuse; changes nothing
    commit: Callable[[], None] = lambda: None  # changes the optimizer
    finish: Callable[[], None] = lambda: None  # calls the program's hooks, which see the loaded state
    commit_is_collective: bool = False  # whether ranks wait for each other in `commit`


class OptimizerAdapter(Protocol):
    """What saving and loading need of an optimizer; one class for each kind (optimizer_adapters.py)."""

    names: Mapping[torch.Tensor, str]  # names of the parameters whose elements are held by different ranks
    has_average: bool

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        """All parameters of the optimizer, by name."""

    def keeps_master(self, name: str) -> bool:
        """Whether the optimizer keeps an fp32 master weight of the parameter."""

    def state_to_save(self) -> StateToSave:
        """Return what this rank writes of the state, as views where that is possible."""

    def weights(self, name: str, param: torch.Tensor) -> Iterator[Part]:
        """Yield what this rank writes of a trained parameter."""

    def groups(self) -> list[dict[str, Any]]:
        """Return the options, with the names of parameters as "params"."""

    def lineages(self) -> list[list[str]]:
        """Return for each group the names of its optimizer's class and of its base classes."""

    def facts(self) -> list[str]:
        """Return lines about the state that must be equal on all ranks."""


def state_key(name: str, key: str) -> str:
    return f"{STATE}{name}.{key}"


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside of DistributedDataParallel and torch.compile, whose wrappers change parameters' names."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


# -- blocks ------------------------------------------------------------------------------------------------------------


def parts_of_range(key: str, like: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> Iterator[Part]:
    """Yield the parts of elements [start, stop) of a tensor like `like`; `values` has them flat, in memory order."""
    for offsets, block in blocks_of_range(like, values, start, stop):
        yield Part(key, tuple(like.shape), offsets, block)


def parts_of_whole(key: str, values: torch.Tensor) -> Iterator[Part]:
    """Yield the parts of all elements of a tensor."""
    for offsets, block in blocks_of_whole(values):
        yield Part(key, tuple(values.shape), offsets, block)


def numbered_parts(prefix: str, tensors: Sequence[torch.Tensor]) -> list[Part]:
    """Return parts for the flat tensors that `encode` has returned, with keys <prefix>.<number>."""
    return [Part(f"{prefix}.{number}", tuple(one.shape), (0,), one) for number, one in enumerate(tensors)]


def requests_for_range(
    key: str, like: torch.Tensor, target: torch.Tensor, start: int, stop: int
) -> Iterator[ReadRequest]:
    """Yield requests that read elements [start, stop) of a tensor like `like` into `target`, which is flat."""
    for offsets, block in blocks_of_range(like, target, start, stop):
        yield ReadRequest(key, offsets, block)


def request_for_whole(key: str, target: torch.Tensor) -> ReadRequest:
    return ReadRequest(key, (0,) * target.dim(), target)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One key of a model's state_dict. A tied tensor has several; all but the first refer to the first."""

    key: str
    tensor: torch.Tensor
    same_as: str | None  # the first key of the same tensor, or None if this is the first

    def __str__(self) -> str:
        tied = f", the same as {self.same_as}" if self.same_as else ""
        return f"{self.key}: shape {tuple(self.tensor.shape)}, {self.tensor.dtype}{tied}"


def model_entries(model: nn.Module) -> tuple[list[ModelEntry], dict[str, Any]]:
    """Return the parameters and buffers in a model's state_dict, and the values that only the model can load."""
    seen: dict[tuple[Any, ...], str] = {}
    found: list[ModelEntry] = []
    others: dict[str, Any] = {}
    own = {id(one) for one in (*model.parameters(), *model.buffers())}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) not in own:
            others[key] = value
            continue
        if value.layout is not torch.strided:
            raise TypeError(
                f"{key} has layout {value.layout}, and checkpoints can only contain dense tensors: register it as a "
                "buffer with persistent=False, or make it dense"
            )
        memory = (value.data_ptr(), value.dtype, value.shape, value.stride()) if value.numel() else (id(value),)
        found.append(ModelEntry(key, value, seen.get(memory)))
        seen.setdefault(memory, key)
    return found, others


def model_parts(
    entries: Sequence[ModelEntry], adapter: OptimizerAdapter | None, rank: int, world_size: int
) -> Iterator[Part]:
    """Yield what this rank writes of the model: its ranges of trained parameters, and some of the other tensors."""
    names = {} if adapter is None else adapter.names
    for entry in entries:
        if adapter is not None and entry.same_as is None and entry.tensor in names:
            yield from adapter.weights(MODEL + entry.key, entry.tensor)
    for entry, owner in zip(shared_entries(entries, adapter), assign_owners(entries, adapter, world_size), strict=True):
        if owner == rank:
            yield from parts_of_whole(MODEL + entry.key, entry.tensor.detach())


def shared_entries(entries: Sequence[ModelEntry], adapter: OptimizerAdapter | None) -> list[ModelEntry]:
    """Return the entries of which every rank has a copy: buffers, and parameters that are not trained."""
    names = {} if adapter is None else adapter.names
    return [entry for entry in entries if entry.same_as is None and entry.tensor not in names]


def assign_owners(entries: Sequence[ModelEntry], adapter: OptimizerAdapter | None, world_size: int) -> list[int]:
    """Return the rank that writes, and reads, each shared entry; ranks get about equally many bytes.

    Rank 0 gets all buffers: they may differ between ranks, and DDP continues with those of rank 0.
    """
    load = [0] * world_size
    owners = []
    for entry in shared_entries(entries, adapter):
        owners.append(load.index(min(load)) if isinstance(entry.tensor, nn.Parameter) else 0)
        load[owners[-1]] += entry.tensor.nbytes
    return owners
