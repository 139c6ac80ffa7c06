"""What a rank has to write of a model and its optimizer, as blocks of tensors that have names.

model.<name>                    as in the model's state_dict
optim.state.<name>.<key>        of the optimizer's state, in the parameter's shape where it is kept by element
optim.options.<n>, extra.<n>    tensors among the options, and among what the program adds
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardstep.checkpoint.storage import Part, Wish
from shardstep.planning import ParamSpec
from shardstep.state.blocks import blocks_of_range, blocks_of_whole

MODEL, STATE = "model.", "optim.state."


@dataclass
class Holding:
    """What one rank writes of the optimizer: blocks, and what its state has beside tensors, by parameter."""

    parts: list[Part] = field(default_factory=list)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    state: dict[str, set[str]] = field(default_factory=dict)  # names of the tensors in the state of each parameter


@dataclass
class Loading:
    """What a rank reads, and three calls that take it over. Each is made when all ranks have made the one before."""

    wishes: list[Wish] = field(default_factory=list)
    check: Callable[[], None] = lambda: None  # runs code of the class, which may refuse; changes and sends nothing
    commit: Callable[[], None] = lambda: None  # makes it the optimizer's
    finish: Callable[[], None] = lambda: None  # calls the program's hooks, which see all that is loaded
    commit_is_collective: bool = False  # all ranks must make that call, or those that do would wait for the others


class Trainer(Protocol):
    """An optimizer, as a checkpoint sees it."""

    names: Mapping[torch.Tensor, str]  # of the parameters of which ranks hold parts
    has_average: bool

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        """All that it trains, by name."""

    def keeps_master(self, name: str) -> bool:
        """Whether it keeps exact values of a parameter beside the parameter itself."""

    def hold(self) -> Holding:
        """What this rank writes of the state. Views, where that is possible."""

    def weights(self, name: str, param: torch.Tensor) -> Iterator[Part]:
        """What this rank writes of a parameter that is trained."""

    def groups(self) -> list[dict[str, Any]]:
        """Options, with the names of parameters as "params"."""

    def lineages(self) -> list[list[str]]:
        """Return for each group the names of its optimizer's class and of its base classes."""

    def facts(self) -> list[str]:
        """What of its state must be the same on every rank."""


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


def parts_of_range(key: str, like: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> Iterator[Part]:
    """Elements [start, stop) of a tensor like `like`, given flat and in the order of its memory."""
    for offsets, block in blocks_of_range(like, values, start, stop):
        yield Part(key, tuple(like.shape), offsets, block)


def parts_of_whole(key: str, values: torch.Tensor) -> Iterator[Part]:
    for offsets, block in blocks_of_whole(values):
        yield Part(key, tuple(values.shape), offsets, block)


def wishes_for_range(key: str, like: torch.Tensor, target: torch.Tensor, start: int, stop: int) -> Iterator[Wish]:
    """The same, to be read: `target` is flat."""
    for offsets, block in blocks_of_range(like, target, start, stop):
        yield Wish(key, offsets, block)


def wish_for_whole(key: str, target: torch.Tensor) -> Wish:
    return Wish(key, (0,) * target.dim(), target)


# -- the model ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Entry:
    """One key of a model's state_dict: a tensor, and the key under which the same tensor came before, if it did."""

    key: str
    tensor: torch.Tensor
    same_as: str | None

    def __str__(self) -> str:
        tied = f", the same as {self.same_as}" if self.same_as else ""
        return f"{self.key}: shape {tuple(self.tensor.shape)}, {self.tensor.dtype}{tied}"


def model_entries(model: nn.Module) -> tuple[list[Entry], dict[str, Any]]:
    """The parameters and buffers in a model's state_dict; and what else is in it, which only its own code can load."""
    seen: dict[tuple[Any, ...], str] = {}
    found: list[Entry] = []
    others: dict[str, Any] = {}
    own = {id(one) for one in (*model.parameters(), *model.buffers())}
    for key, value in model.state_dict(keep_vars=True).items():
        if id(value) not in own:
            others[key] = value
            continue
        if value.layout is not torch.strided:
            raise TypeError(
                f"{key} has layout {value.layout}: checkpoints have dense tensors; register it as a buffer "
                "with persistent=False, or keep it dense"
            )
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
    """Who writes, and reads, each of the shared ones: the same on every rank, and about as many bytes each.

    Buffers are all the first rank's: between two steps ranks may have different ones, and DDP goes on with those.
    """
    load = [0] * world_size
    owners = []
    for entry in shared_entries(entries, trainer):
        owners.append(load.index(min(load)) if isinstance(entry.tensor, nn.Parameter) else 0)
        load[owners[-1]] += entry.tensor.nbytes
    return owners
