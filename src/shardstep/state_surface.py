"""A sharded optimizer's state: shown, saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from shardstep.engine import Engine
from shardstep.planned import params_of
from shardstep.planning import Layout, Piece
from shardstep.state.resharding import read_saved
from shardstep.state.state_dict import ShownState, pack_groups, shown_state
from shardstep.stepping.entries import Entry
from shardstep.stepping.local_optimizer import build, copy_options, without_params
from shardstep.wire.agreement import Claim, Facts, agree
from shardstep.wire.channel import Channel


class StateSurface(Optimizer):
    """The part of a ShardedOptimizer that has to do with state."""

    _engine: Engine
    _channel: Channel
    _class: Any
    _defaults: dict[str, Any]
    _layouts: Sequence[Layout]
    _ready: bool
    _is_averaged: bool

    @property
    def state(self) -> Any:
        """This rank's state by parameter: flat, the elements it holds, in order. To look at: writing to it raises."""
        return shown_state(self._engine.share.entries(), params_of(self.param_groups))

    @state.setter
    def state(self, value: Any) -> None:
        """torch.optim.Optimizer's constructor sets an empty one; nobody else can."""
        if self._ready:
            ShownState().update(value)

    def state_dict(self) -> dict[str, Any]:
        """This rank's state and all options. `load_state_dict` takes it on as many ranks as it was saved on."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.synchronize()
        place = {param: i for i, param in enumerate(params_of(self.param_groups))}
        saved = {
            "state": {place[param]: entry for param, entry in self.state.items()},
            "param_groups": pack_groups(self.param_groups),
            "shardstep": {"plan": self._engine.plan.to_json(), "rank": self._channel.rank},
        }
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or the state_dict of the plain optimizer. On all ranks."""
        self._check_not_averaged()
        self._engine.check_not_joined("load_state_dict")
        self._engine.synchronize()
        failure, plan = None, self._engine.plan
        entries: dict[Piece, Entry] = {}
        before = [{**group} for group in self.param_groups]
        try:
            state_dict = dict(state_dict)  # hooks may change it, and the caller's stays as it is
            for first in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = first(self, state_dict) or state_dict
            trial = build(self._class, without_params(self.param_groups), self._defaults, {})
            plan, entries = read_saved(state_dict, self.param_groups, self._layouts, plan, self._channel.rank, trial)
            copy_options(state_dict["param_groups"], self.param_groups)
        except Exception as error:
            failure = error
        try:
            agree(self._channel, Claim("load_state_dict", failure, Facts([plan.digest()])))
        except Exception:
            copy_options(before, self.param_groups)
            raise
        self._engine.load(self.param_groups, plan, copy.deepcopy(entries))
        for last in self._optimizer_load_state_dict_post_hooks.values():
            last(self)

    def check_whole(self, what: str) -> None:
        """Raise where ranks hold something else than the weights and the state of the last step."""
        self._check_not_averaged()
        self._engine.check_not_joined(what)
        self._engine.check_not_stepped(what)

    def _check_not_averaged(self) -> None:
        if self._is_averaged:
            raise RuntimeError("inside ema() the model has averages of its weights: step, load and add groups outside")
