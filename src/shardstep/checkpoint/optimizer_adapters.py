"""Optimizers, as a checkpoint sees them: what a rank writes of one, and what it wants of a saved one.

Three kinds: the fast lane, whose ranks hold ranges of parameters; the drop-in, whose ranks hold whole ones; and any
other, of which every rank holds all. Several of them are one (several.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.optim import Optimizer

from shardstep.checkpoint.contents import (
    MODEL,
    Loading,
    OptimizerAdapter,
    StateToSave,
    model_entries,
    parts_of_range,
    parts_of_whole,
    request_for_whole,
    requests_for_range,
    state_key,
)
from shardstep.checkpoint.manifest import Contents
from shardstep.checkpoint.options import class_names, lineages, named_groups, take_options
from shardstep.checkpoint.several import CombinedAdapter
from shardstep.checkpoint.storage import Part, ReadRequest, dtype_of
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.engine.context import params_of
from shardstep.optimizer import ShardedOptimizer
from shardstep.optimizers.local_optimizer import is_of_torch
from shardstep.optimizers.optimizer_copy import OptimizerCopy, run_post_hooks, run_pre_hooks
from shardstep.optimizers.param_groups import copy_groups, load_options
from shardstep.params.views import flat_gradient
from shardstep.planning import Layout, ParamSpec, Piece
from shardstep.state.serialization import Decoder
from shardstep.state.sharded_state import PartOfTensor, parts_by_param
from shardstep.stepping.element_state import COUNT
from shardstep.stepping.masters import AVERAGE, MASTER, NARROW, is_kept


def adapter_for(optimizer: Any, model: nn.Module, rank: int, world_size: int) -> OptimizerAdapter:
    if isinstance(optimizer, list | tuple):
        return CombinedAdapter([adapter_for(one, model, rank, world_size) for one in optimizer])
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
    return dict(Decoder(text).state) if text else {}


def weight_key(contents: Contents, name: str, dtype: torch.dtype, *, keeps_master: bool) -> str:
    """Under which a weight is stored; its master, if the weight was rounded from that, and is wanted exact."""
    master, weight = state_key(name, MASTER), MODEL + name
    if master not in contents.tensors:
        return weight
    stored = dtype_of(contents.tensors[weight])
    return master if stored is not dtype or (stored not in NARROW and not keeps_master) else weight


class FastLane:
    """A ShardedOptimizer. Frozen parameters are the model's affair; their state is held by pieces as that of others."""

    def __init__(self, optimizer: ShardedOptimizer, names: list[str]) -> None:
        optimizer.check_open()
        self._optimizer, self._view = optimizer, optimizer.checkpoint_view()
        self._params = params_of(optimizer.param_groups)
        self._specs = [replace(spec, name=name) for spec, name in zip(self._view.specs, names, strict=True)]
        self.parameters: Mapping[str, ParamSpec] = {spec.name: spec for spec in self._specs}
        rows = zip(self._params, self._specs, strict=True)
        self.names: Mapping[torch.Tensor, str] = {param: spec.name for param, spec in rows if spec.trainable}
        self.has_average = self._view.has_average
        self._own: dict[int, list[Piece]] = {}
        for piece in self._view.pieces:
            self._own.setdefault(piece.param, []).append(piece)
        self._place = {param: place for place, param in enumerate(self._params)}

    def lineages(self) -> list[list[str]]:
        return lineages(self._view.optimizer_class, self._optimizer.param_groups)

    def groups(self) -> list[dict[str, Any]]:
        own, names = self._optimizer.param_groups, [spec.name for spec in self._specs]
        return named_groups(own, names, class_names(self._view.optimizer_class, own))

    def facts(self) -> list[str]:
        return []  # each rank has another part

    # -- saving -------------------------------------------------------------------------------------------------------

    def weights(self, key: str, param: torch.Tensor) -> Iterator[Part]:
        place = self._place[param]
        for piece in self._own.get(place, ()):
            flat = flat_gradient(param, param.detach())[piece.start : piece.stop]
            yield from parts_of_range(key, param, self._exact.get(piece, flat), piece.start, piece.stop)

    @cached_property
    def _exact(self) -> Mapping[Piece, torch.Tensor]:
        return self._view.exact_weights()

    def state_to_save(self) -> StateToSave:
        held = StateToSave()
        entries = self._view.entries()
        first = {piece.param for piece in entries if piece.start == 0}  # who has that writes what all pieces have
        for place, entry in parts_by_param(entries, self._params).items():
            name = self._specs[place].name
            for key, value in entry.items():
                if key == MASTER and self._specs[place].trainable and self._specs[place].wire:
                    continue  # it is the weight: see _exact
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
        """Wishes for what this rank holds: state of the parameters `names`, and every weight that is there. Nothing of
        the optimizer's is touched before `commit`."""
        _warn_of_hooks(self._optimizer)
        loading = Loading()
        entries = self._view.entries()  # what is not loaded stays
        weights: dict[Piece, torch.Tensor] = {}
        for place, pieces in self._own.items():
            spec, param = self._specs[place], self._params[place]
            stored = contents.tensors.get(MODEL + spec.name)
            has_weight = spec.trainable and stored is not None and stored.shape == spec.shape
            # What goes with the class, and what with the weight.
            wanted = (MASTER, AVERAGE) if has_weight else ()
            keys = [key for key in self._keys(contents, spec.name) if spec.name in names or key in wanted]
            for piece in pieces:
                kept = {key: value for key, value in entries.get(piece, {}).items() if key not in wanted}
                if not is_of_torch(self._view.optimizer_class):  # its own code may write to what stays, and then refuse
                    kept = copy.deepcopy(kept)
                entry = values_of(contents, spec.name) if spec.name in names else kept
                for key in keys:
                    entry[key] = self._request(loading, contents, piece, spec, param, key)
                if has_weight:
                    weights[piece] = self._request_weights(loading, contents, piece, spec, param, entry)
                entries[piece] = entry
        groups_of = self._optimizer.param_groups
        loaded, made = copy_groups(groups_of), []

        def check() -> None:
            take_options(groups, loaded, [spec.name for spec in self._specs])
            taken = {piece: entry for piece, entry in entries.items() if entry}
            for held in (entries, loading.requests):  # or it would be in memory twice, when it is joined into runs
                held.clear()
            made.append(self._view.prepare(loaded, taken, weights, {}))

        def commit() -> None:
            self._view.take(made.pop(), loaded)
            load_options(loaded, groups_of)
            self._view.take_weights(weights)
            weights.clear()

        loading.check, loading.commit = check, commit
        loading.commit_is_collective = True
        loading.finish = lambda: run_post_hooks(self._optimizer)
        return loading

    def _keys(self, contents: Contents, name: str) -> list[str]:
        wanted = {MASTER: self.keeps_master(name), AVERAGE: self.has_average}
        saved = contents.parameters[name].state if name in contents.parameters else ()
        return [key for key in saved if wanted.get(key, True)]

    def keeps_master(self, name: str) -> bool:
        return self._view.has_masters and is_kept(self.parameters[name])

    def _request(
        self, loading: Loading, contents: Contents, piece: Piece, spec: ParamSpec, param: torch.Tensor, key: str
    ) -> torch.Tensor:
        stored = contents.tensors[state_key(spec.name, key)]
        dtype, device = dtype_of(stored), param.device
        is_cut = self._view.layouts[spec.group] is Layout.FLAT or key in (MASTER, AVERAGE)
        if stored.shape == spec.shape and spec.shape and is_cut:
            target = torch.empty(piece.numel, dtype=dtype, device=device)
            loading.requests.extend(
                requests_for_range(state_key(spec.name, key), param, target, piece.start, piece.stop)
            )
            return target
        # Counters stay on the host until the share puts them where its optimizer wants them.
        if stored.shape == spec.shape and spec.shape:
            whole = torch.empty_like(param.detach(), dtype=dtype)
        else:
            whole = torch.empty(stored.shape, dtype=dtype, device=device if stored.shape else "cpu")
        loading.requests.append(request_for_whole(state_key(spec.name, key), whole))
        return whole

    def _request_weights(
        self,
        loading: Loading,
        contents: Contents,
        piece: Piece,
        spec: ParamSpec,
        param: torch.Tensor,
        entry: dict[str, Any],
    ) -> torch.Tensor:
        keeps_master = self.keeps_master(spec.name)
        key = weight_key(contents, spec.name, param.dtype, keeps_master=keeps_master)
        if MASTER in entry and (spec.wire or key != MODEL + spec.name):
            return cast(torch.Tensor, entry[MASTER])  # it is rounded when it becomes the weight
        is_master = keeps_master and MASTER not in entry
        target = torch.empty(piece.numel, dtype=torch.float32 if is_master else param.dtype, device=param.device)
        loading.requests.extend(requests_for_range(key, param, target, piece.start, piece.stop))
        if is_master:
            entry[MASTER] = target
        return target


class _Whole:
    """What the other two have in common: state of whole parameters, under torch's own keys."""

    names: Mapping[torch.Tensor, str] = {}  # of trained parameters no rank holds a part
    has_average = False

    def keeps_master(self, name: str) -> bool:
        return False

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

    def _state_to_save(self, entries: Mapping[Any, Mapping[str, Any]]) -> StateToSave:
        held = StateToSave()
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
        self, contents: Contents, groups: list[dict[str, Any]], names: set[str], own: Mapping[Any, Any]
    ) -> tuple[list[ReadRequest], Callable[[], dict[str, Any]]]:
        """Wishes, and what gives the state_dict of the unsharded optimizer when they have been read.

        `own` is the state that this rank has, and has for every parameter that it holds: what is not loaded stays. Of
        parameters that are not among them tensors take no memory.
        """
        requests: list[ReadRequest] = []
        state: dict[int, dict[str, Any]] = {}
        for place, name in enumerate(self._names):
            if name not in names:
                if own.get(place):
                    state[place] = own[place]
                continue
            entry = values_of(contents, name)
            for key in contents.parameters[name].state:
                if key in (MASTER, AVERAGE, COUNT):
                    continue
                stored = contents.tensors[state_key(name, key)]
                if stored.shape and place not in own:
                    entry[key] = torch.empty((), dtype=dtype_of(stored)).expand(stored.shape)
                    continue
                entry[key] = torch.empty(stored.shape, dtype=dtype_of(stored), device="cpu")
                requests.append(request_for_whole(state_key(name, key), entry[key]))
            if entry:
                state[place] = entry

        def read() -> dict[str, Any]:
            loaded = copy_groups(
                self._optimizer.param_groups
            )  # or they would be changed where its own code refuses the rest
            take_options(groups, loaded, self._names)
            return {"state": state, "param_groups": _by_place(loaded)}

        return requests, read


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

    def lineages(self) -> list[list[str]]:
        return lineages(type(self._optimizer), self._optimizer.param_groups)

    def state_to_save(self) -> StateToSave:
        state = self._optimizer.state_dict()["state"]
        return self._state_to_save({place: entry for place, entry in state.items() if self._is_mine(place)})

    def _is_mine(self, place: Any) -> bool:
        return not isinstance(place, int) or place % self._world_size == self._rank

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        optimizer = self._optimizer
        own = {place: {} for place in range(len(self._names))} | optimizer.state_dict()["state"]
        requests, read = self._load(contents, groups, names, own)
        made: list[OptimizerCopy] = []

        def check() -> None:
            state_dict = run_pre_hooks(optimizer, read())
            made.append(OptimizerCopy(optimizer))
            made[0].load(state_dict)

        return Loading(requests, check, lambda: made.pop().take(), lambda: run_post_hooks(optimizer))


def _brief(value: Any) -> str:
    return f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__


class DropIn(_Whole):
    """shardstep.ZeroRedundancyOptimizer: every parameter's state is on one rank."""

    def facts(self) -> list[str]:
        return []

    def groups(self) -> list[dict[str, Any]]:
        own = self._optimizer.param_groups
        return named_groups(own, self._names, class_names(type(self._optimizer.optim), own))

    def lineages(self) -> list[list[str]]:
        return lineages(type(self._optimizer.optim), self._optimizer.param_groups)

    def state_to_save(self) -> StateToSave:
        return self._state_to_save(self._optimizer.checkpoint_view().entries())

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        optimizer, view = self._optimizer, self._optimizer.checkpoint_view()
        mine = [place for place, rank in enumerate(view.plan.holders()) if rank == optimizer.rank]
        requests, read = self._load(contents, groups, names, {place: {} for place in mine} | view.entries())
        made: list[Any] = []
        return Loading(
            requests,
            lambda: made.append(optimizer.prepare_state(read())),
            lambda: optimizer.take_state(made.pop()),
            lambda: run_post_hooks(optimizer),
        )


def _warn_of_hooks(optimizer: Any) -> None:
    if getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None):
        warnings.warn(
            "register_load_state_dict_pre_hook: shardstep.load calls no such hook of shard(...), because ranks read "
            "their own parts, and none has a state_dict to show; opt.load_state_dict() does",
            stacklevel=6,
        )
