"""Optimizers, as a checkpoint sees them: what a rank writes of one, and what it wants of a saved one.

Three kinds: the fast lane, whose ranks hold ranges of parameters; the drop-in, whose ranks hold whole ones; and any
other, of which every rank holds all. Several of them are one (several.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardstep.checkpoint.contents import (
    MODEL,
    Holding,
    Loading,
    Trainer,
    model_entries,
    parts_of_range,
    parts_of_whole,
    state_key,
    wish_for_whole,
    wishes_for_range,
)
from shardstep.checkpoint.manifest import Contents
from shardstep.checkpoint.options import class_names, named_groups, take_options
from shardstep.checkpoint.several import Several
from shardstep.checkpoint.storage import Part, dtype_of
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.memory.views import flat_gradient
from shardstep.planned import params_of
from shardstep.planning import Layout, ParamSpec, Piece
from shardstep.sharded_optimizer import ShardedOptimizer
from shardstep.state.parts import PartOfTensor, parts_by_place
from shardstep.state.wire_format import Reader
from shardstep.stepping.average import AVERAGE
from shardstep.stepping.local_optimizer import apart
from shardstep.stepping.masters import MASTER, NARROW
from shardstep.stepping.rounding import COUNT


def trainer_of(optimizer: Any, model: nn.Module, rank: int, world_size: int) -> Trainer:
    if isinstance(optimizer, list | tuple):
        return Several([trainer_of(one, model, rank, world_size) for one in optimizer])
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"an optimizer is expected, or a list of them, got {type(optimizer).__name__}")
    names = _names_in(model, params_of(optimizer.param_groups))
    if isinstance(optimizer, ShardedOptimizer):
        return FastLane(optimizer, names)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        return DropIn(optimizer, names)
    return Plain(optimizer, names, rank, world_size)


def _names_in(model: nn.Module, params: list[torch.Tensor]) -> list[str]:
    """What the model that is saved calls them; an optimizer may know them by another name, of a module inside it."""
    known: dict[torch.Tensor, str] = {}
    for entry in model_entries(model)[0]:
        known.setdefault(entry.tensor, entry.key)
    unknown = [param for param in params if param not in known]
    if unknown:
        raise ValueError(
            f"the optimizer trains {len(unknown)} parameters that are not in the state_dict of this model, the first "
            f"of shape {tuple(unknown[0].shape)}: nothing would keep their values. Give the whole model"
        )
    return [known[param] for param in params]


def values_of(contents: Contents, name: str) -> dict[str, Any]:
    """What the saved state of a parameter has beside tensors."""
    text = contents.parameters[name].values
    return dict(Reader(text).state) if text else {}


def weight_key(contents: Contents, name: str, dtype: torch.dtype) -> str:
    """Under which a weight is stored; its master, if it was trained in 16 bits and is wanted in another dtype."""
    master, weight = state_key(name, MASTER), MODEL + name
    is_wanted = master in contents.tensors and dtype_of(contents.tensors[weight]) is not dtype
    return master if is_wanted else weight


class FastLane:
    """A ShardedOptimizer. Frozen parameters are the model's affair; their state is held by pieces as that of others."""

    def __init__(self, optimizer: ShardedOptimizer, names: list[str]) -> None:
        self._optimizer, self._engine = optimizer, optimizer._engine
        self._params = params_of(optimizer.param_groups)
        self._specs = [replace(spec, name=name) for spec, name in zip(self._engine.plan.params, names, strict=True)]
        rows = zip(self._params, self._specs, strict=True)
        self.names: Mapping[torch.Tensor, str] = {param: spec.name for param, spec in rows if spec.trainable}
        self.has_average = self._engine.share.average is not None
        self._own: dict[int, list[Piece]] = {}
        for piece in self._engine.plan.pieces_of(self._engine.channel.rank):
            self._own.setdefault(piece.param, []).append(piece)
        self._place = {param: place for place, param in enumerate(self._params)}

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        return {spec.name: spec for spec in self._specs}

    def groups(self) -> list[dict[str, Any]]:
        optimizer = self._optimizer
        names = [spec.name for spec in self._specs]
        return named_groups(optimizer.param_groups, names, class_names(optimizer._class, optimizer.param_groups))

    def facts(self) -> list[str]:
        return []  # each rank has another part

    # -- saving -------------------------------------------------------------------------------------------------------

    def weights(self, key: str, param: torch.Tensor) -> Iterator[Part]:
        place = self._place[param]
        for piece in self._own.get(place, ()):
            flat = flat_gradient(param, param.detach())[piece.start : piece.stop]
            yield from parts_of_range(key, param, flat, piece.start, piece.stop)

    def hold(self) -> Holding:
        held = Holding()
        entries = self._engine.share.entries()
        first = {piece.param for piece in entries if piece.start == 0}  # who has that writes what all pieces have
        for place, entry in parts_by_place(entries, self._params).items():
            name = self._specs[place].name
            for key, value in entry.items():
                if isinstance(value, PartOfTensor):
                    if value.is_whole and place not in first:
                        continue
                    held.state.setdefault(name, set()).add(key)
                    stored, shape = state_key(name, key), tuple(value.shape)
                    held.parts.extend(Part(stored, shape, offsets, block) for offsets, block in value.blocks())
                elif place in first and isinstance(value, torch.Tensor):
                    held.state.setdefault(name, set()).add(key)
                    held.parts.extend(parts_of_whole(state_key(name, key), value))
                elif place in first:
                    held.values.setdefault(name, {})[key] = value
        return held

    # -- loading ------------------------------------------------------------------------------------------------------

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        """Wishes for what this rank holds, of the parameters `names`; nothing of the optimizer's is touched before
        `commit`."""
        loading = Loading()
        entries: dict[Piece, dict[str, Any]] = {}
        weights: dict[Piece, torch.Tensor] = {}
        for place, pieces in self._own.items():
            spec, param = self._specs[place], self._params[place]
            if spec.name not in names:
                continue
            for piece in pieces:
                entry = entries[piece] = values_of(contents, spec.name)
                for key in self._keys(contents, spec.name, param):
                    entry[key] = self._wish(loading, contents, piece, spec, param, key)
                if spec.trainable and MODEL + spec.name in contents.tensors:
                    weights[piece] = self._wish_weights(loading, contents, piece, spec, param, entry)
        kept = {piece: entry for piece, entry in self._engine.share.entries().items() if piece not in entries}

        def commit() -> None:
            engine, own = self._engine, self._optimizer.param_groups
            names, loaded = [spec.name for spec in self._specs], apart(own)
            take_options(groups, loaded, names)
            taken = {**kept, **{piece: entry for piece, entry in entries.items() if entry}}
            for held in (kept, entries, loading.wishes):  # or it would be in memory twice, when it is joined into runs
                held.clear()
            engine.take_state(loaded, taken)  # first, and by all ranks or none: the class may refuse it
            take_options(groups, own, names)
            engine.take_weights(weights)
            weights.clear()

        loading.commit = commit
        return loading

    def _keys(self, contents: Contents, name: str, param: torch.Tensor) -> list[str]:
        share = self._engine.share
        wanted = {MASTER: share.masters is not None and param.dtype in NARROW, AVERAGE: share.average is not None}
        return [key for key in contents.parameters[name].state if wanted.get(key, True)]

    def _wish(
        self, loading: Loading, contents: Contents, piece: Piece, spec: ParamSpec, param: torch.Tensor, key: str
    ) -> torch.Tensor:
        stored = contents.tensors[state_key(spec.name, key)]
        dtype, device = dtype_of(stored), param.device
        is_cut = self._optimizer._layouts[spec.group] is Layout.FLAT or key in (MASTER, AVERAGE)
        if stored.shape == spec.shape and spec.shape and is_cut:
            target = torch.empty(piece.numel, dtype=dtype, device=device)
            loading.wishes.extend(wishes_for_range(state_key(spec.name, key), param, target, piece.start, piece.stop))
            return target
        # Counters stay on the host until the share puts them where its optimizer wants them.
        if stored.shape == spec.shape and spec.shape:
            whole = torch.empty_like(param.detach(), dtype=dtype)
        else:
            whole = torch.empty(stored.shape, dtype=dtype, device=device if stored.shape else "cpu")
        loading.wishes.append(wish_for_whole(state_key(spec.name, key), whole))
        return whole

    def _wish_weights(
        self,
        loading: Loading,
        contents: Contents,
        piece: Piece,
        spec: ParamSpec,
        param: torch.Tensor,
        entry: dict[str, Any],
    ) -> torch.Tensor:
        target = torch.empty(piece.numel, dtype=param.dtype, device=param.device)
        key = weight_key(contents, spec.name, param.dtype)
        loading.wishes.extend(wishes_for_range(key, param, target, piece.start, piece.stop))
        masters = self._engine.share.masters
        if masters is not None and param.dtype in NARROW and MASTER not in entry:
            wide = entry[MASTER] = torch.empty(piece.numel, dtype=torch.float32, device=param.device)
            loading.wishes.extend(wishes_for_range(MODEL + spec.name, param, wide, piece.start, piece.stop))
        return target


class _Whole:
    """What the other two have in common: state of whole parameters, under torch's own keys."""

    names: Mapping[torch.Tensor, str] = {}  # of trained parameters no rank holds a part
    has_average = False

    def __init__(self, optimizer: Any, names: list[str]) -> None:
        self._optimizer, self._names = optimizer, names
        self._params = params_of(optimizer.param_groups)

    def weights(self, key: str, param: torch.Tensor) -> Iterator[Part]:
        raise AssertionError("every rank has all weights")

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        return {
            name: ParamSpec(name, tuple(param.shape), str(param.dtype).removeprefix("torch."), str(param.device), 0)
            for name, param in zip(self._names, self._params, strict=True)
        }

    def _hold(self, entries: Mapping[Any, Mapping[str, Any]]) -> Holding:
        held = Holding()
        for place, entry in entries.items():
            if not isinstance(place, int):
                raise TypeError(f"the optimizer's state has an entry {place!r} that belongs to no parameter")
            name = self._names[place]
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    held.state.setdefault(name, set()).add(key)
                    held.parts.extend(parts_of_whole(state_key(name, key), value))
                else:
                    held.values.setdefault(name, {})[key] = value
        return held

    def _load(
        self, contents: Contents, groups: list[dict[str, Any]], names: set[str], mine: Callable[[int], bool]
    ) -> Loading:
        """The state_dict of the unsharded optimizer; tensors of parameters that are not `mine` take no memory."""
        loading = Loading()
        state: dict[int, dict[str, Any]] = {}
        for place, name in enumerate(self._names):
            if name not in names:
                continue
            entry = values_of(contents, name)
            for key in contents.parameters[name].state:
                if key in (MASTER, AVERAGE, COUNT):
                    continue
                stored = contents.tensors[state_key(name, key)]
                if stored.shape and not mine(place):
                    entry[key] = torch.empty((), dtype=dtype_of(stored)).expand(stored.shape)
                    continue
                entry[key] = torch.empty(stored.shape, dtype=dtype_of(stored), device="cpu")
                loading.wishes.append(wish_for_whole(state_key(name, key), entry[key]))
            if entry:
                state[place] = entry

        def commit() -> None:
            loaded = apart(self._optimizer.param_groups)  # or they would be changed where its own code refuses the rest
            take_options(groups, loaded, self._names)
            self._optimizer.load_state_dict({"state": state, "param_groups": _by_place(loaded)})

        loading.commit = commit
        return loading


def _by_place(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    packed, start = [], 0
    for group in groups:
        stop = start + len(group["params"])
        packed.append({**group, "params": list(range(start, stop))})
        start = stop
    return packed


class Plain(_Whole):
    """Any optimizer of which every rank holds all; the ranks take turns in writing."""

    def __init__(self, optimizer: Optimizer, names: list[str], rank: int, world_size: int) -> None:
        super().__init__(optimizer, names)
        self._rank, self._world_size = rank, world_size

    def facts(self) -> list[str]:
        """All of it, as far as it can be seen without reading tensors: each rank writes a part of what it has."""
        state = self._optimizer.state_dict()["state"]
        return [
            f"state of {name}: " + ", ".join(f"{key} {_brief(value)}" for key, value in state.get(place, {}).items())
            for place, name in enumerate(self._names)
        ]

    def groups(self) -> list[dict[str, Any]]:
        own = self._optimizer.param_groups
        return named_groups(own, self._names, class_names(type(self._optimizer), own))

    def hold(self) -> Holding:
        state = self._optimizer.state_dict()["state"]
        return self._hold({place: entry for place, entry in state.items() if self._is_mine(place)})

    def _is_mine(self, place: Any) -> bool:
        return not isinstance(place, int) or place % self._world_size == self._rank

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        return self._load(contents, groups, names, lambda place: True)


def _brief(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


class DropIn(_Whole):
    """shardstep.ZeroRedundancyOptimizer: every parameter's state is on one rank."""

    def facts(self) -> list[str]:
        return []

    def groups(self) -> list[dict[str, Any]]:
        own = self._optimizer.param_groups
        return named_groups(own, self._names, class_names(type(self._optimizer.optim), own))

    def hold(self) -> Holding:
        self._optimizer._check_overlap_initialized()
        return self._hold(self._optimizer._shard.entries())

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        self._optimizer._check_overlap_initialized()
        holders, rank = self._optimizer._shard.plan.holders(), self._optimizer.rank
        return self._load(contents, groups, names, lambda place: holders[place] == rank)
