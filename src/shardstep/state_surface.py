"""The part of a sharded optimizer that shows, saves and loads its state."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch.distributed.checkpoint.state_dict import _init_optim_state
from torch.optim import Optimizer

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.channel import Channel
from shardstep.engine.planned import params_of
from shardstep.engine.step import Engine
from shardstep.optimizers.local_optimizer import apart, build, load_options, without_params
from shardstep.optimizers.optimizer_copy import beside_state, run_post_hooks, run_pre_hooks
from shardstep.planning import Layout, Piece
from shardstep.state.consolidation import consolidate
from shardstep.state.reading import read_saved
from shardstep.state.sharded_state import PartOfState, assemble, join_parts, parts_by_param
from shardstep.state.state_dict import ShownState, pack_groups, shown_state
from shardstep.stepping.element_state import Entry


class StateSurface(Optimizer):
    """The part of a ShardedOptimizer that shows, saves and loads state."""

    _engine: Engine
    _channel: Channel
    _class: Any
    _defaults: dict[str, Any]
    _layouts: Sequence[Layout]
    _ready: bool
    _is_averaged: bool

    @property
    def state(self) -> Any:
        """By parameter, the elements of the state that this rank holds, flat and in order. Writing to it raises."""
        shown = shown_state(self._engine.share.entries(), params_of(self.param_groups))
        if not shown and sys._getframe(1).f_code is _init_optim_state.__code__:
            raise RuntimeError(
                "this sharded optimizer has no state yet, and torch.distributed.checkpoint.state_dict would make some "
                "by a step of its own: load with shardstep.load(path, model, opt), after `shardstep convert` where "
                "torch has written it; or give opt.load_state_dict() the whole state"
            )
        return shown

    @state.setter
    def state(self, value: Any) -> None:
        """torch.optim.Optimizer's constructor sets an empty one; nobody else can."""
        if self._ready:
            ShownState().update(value)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all ranks' state to rank `to` of the group, where `state_dict()` then returns it. On all ranks."""
        self._engine.synchronize()
        self.check_whole("consolidate_state_dict")
        merged = consolidate(self._channel, self._named_pieces, to)
        if merged is not None:
            pieces = {Piece(param, start, stop, to): entry for (param, start, stop), entry in merged.items()}
            merged.clear()
            merged = assemble(pieces, params_of(self.param_groups))
        self._engine.saved.keep(merged, to)

    def _named_pieces(self) -> dict[Any, Entry]:
        entries = self._engine.share.entries()
        return {(piece.param, piece.start, piece.stop): entry for piece, entry in entries.items()}

    def state_dict(self) -> dict[str, Any]:
        """As that of the plain optimizer: state by the number of the parameter, and its name in the group.

        On one rank, and on the rank to which it was consolidated since the last step, the whole. Elsewhere it is this
        rank's part: torch.distributed.checkpoint saves and loads it, as does this optimizer; it cannot be pickled.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.synchronize()
        saved: dict[str, Any] = {"state": self._state_to_save(), "param_groups": pack_groups(self.param_groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def _state_to_save(self) -> dict[Any, Any]:
        if self._engine.saved.is_here:
            return {place: copy.copy(entry) for place, entry in self._engine.saved.read(self._channel.rank).items()}
        params = params_of(self.param_groups)
        own = parts_by_param(self._engine.share.entries(), params)
        if self._channel.world_size == 1:
            return join_parts(own)
        if not own and self._engine.saved.is_new:
            return {}  # nor has any other rank
        # torch.distributed.checkpoint.state_dict wants an entry of every parameter, on every rank.
        return PartOfState({place: own.get(place, {}) for place in range(len(params))}, self._engine.plan)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state_dict, of this or of the plain optimizer, or this rank's part. Called on all ranks.

        Parameters are found by their names, in whatever order they were saved; by their places, if it has no names.
        """
        self._check_not_averaged()
        self._engine.check_not_joined("load_state_dict")
        self._engine.synchronize()
        failure, plan = None, self._engine.plan
        entries: dict[Piece, Entry] = {}
        others: dict[str, Any] = {}
        loaded = apart(self.param_groups)  # this optimizer's own stay as they are until nobody can refuse
        try:
            state_dict = run_pre_hooks(self, state_dict)
            trial = build(self._class, without_params(self.param_groups), self._defaults, {})
            rank = self._channel.rank
            state_dict, plan, entries = read_saved(state_dict, self.param_groups, self._layouts, plan, rank, trial)
            load_options(trial.param_groups, loaded)
            others = copy.deepcopy(beside_state(state_dict))
            build(self._class, without_params(loaded), self._defaults, {})  # refuses before anything is sent
            entries = copy.deepcopy(entries)
        except Exception as error:
            failure = error
        agree(self._channel, Claim("load_state_dict", failure, Facts([plan.digest()])))
        self._engine.load(loaded, plan, entries, others)
        load_options(loaded, self.param_groups)
        run_post_hooks(self)

    def check_whole(self, what: str) -> None:
        """Raise where ranks hold something else than the weights and the state of the last step."""
        self._check_not_averaged()
        self._engine.check_not_joined(what)
        self._engine.check_not_stepped(what)

    def _check_not_averaged(self) -> None:
        if self._is_averaged:
            raise RuntimeError("inside ema() the model has averages of its weights: step, load and add groups outside")
