"""What a program does with an optimizer's state and weights beside stepping: show, save, load, switch, average.

Loading changes nothing until nobody can refuse: state is prepared on all ranks, and then taken by all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.comm.agreement import Claim, Facts, agree, attempt
from shardstep.comm.control import open_poll
from shardstep.engine.context import ParamGroups, params_of
from shardstep.engine.runtime import Runtime
from shardstep.engine.step import Engine
from shardstep.optimizers.local_optimizer import build
from shardstep.optimizers.optimizer_copy import beside_state, run_post_hooks, run_pre_hooks
from shardstep.optimizers.param_groups import copy_groups, load_options, without_params
from shardstep.planning import Layout, ParamSpec, Piece, Plan
from shardstep.state.consolidation import consolidate
from shardstep.state.loaded_by_class import LoadedByClass
from shardstep.state.reading import read_saved
from shardstep.state.resharding import reshard
from shardstep.state.sharded_state import PartOfState, assemble, join_parts, parts_by_param
from shardstep.stepping.element_state import Entry
from shardstep.stepping.local_step import Prepared
from shardstep.stepping.masters import MASTER, Average, make_exact

# -- saving -----------------------------------------------------------------------------------------------------------


def consolidate_state(engine: Engine, groups: ParamGroups, to: int) -> None:
    """Bring all ranks' state to rank `to`, where `state_to_save` then returns it. On all ranks."""

    def named_pieces() -> dict[Any, Entry]:
        entries = engine.runtime.local_step.entries()
        return {(piece.param, piece.start, piece.stop): entry for piece, entry in entries.items()}

    merged = consolidate(engine.context.channel, named_pieces, to)
    if merged is not None:
        pieces = {Piece(param, start, stop, to): entry for (param, start, stop), entry in merged.items()}
        merged.clear()
        merged = assemble(pieces, params_of(groups))
    engine.saved.keep(merged, to)


def state_to_save(engine: Engine, groups: ParamGroups) -> dict[Any, Any]:
    """Return the state by the places of the parameters: the whole where it was consolidated, or this rank's part."""
    channel, runtime = engine.context.channel, engine.runtime
    if engine.saved.is_here:
        return {place: copy.copy(entry) for place, entry in engine.saved.read(channel.rank).items()}
    params = params_of(groups)
    own = parts_by_param(runtime.local_step.entries(), params)
    if channel.world_size == 1:
        return join_parts(own)
    if not own and engine.saved.is_new:
        return {}  # nor has any other rank
    # torch.distributed.checkpoint.state_dict wants an entry of every parameter, on every rank.
    return PartOfState({place: own.get(place, {}) for place in range(len(params))}, runtime.plan)


# -- loading ----------------------------------------------------------------------------------------------------------


def load_state_dict(optimizer: Optimizer, engine: Engine, state_dict: Mapping[str, Any]) -> None:
    """Load what `optimizer.load_state_dict` is given, on all ranks or on none."""
    failure, groups, runtime = None, optimizer.param_groups, engine.runtime
    recipe, plan, rank = runtime.recipe, runtime.plan, engine.context.channel.rank
    entries: dict[Piece, Entry] = {}
    others: dict[str, Any] = {}
    loaded = copy_groups(groups)  # this optimizer's own stay as they are until nobody can refuse
    try:
        state_dict = run_pre_hooks(optimizer, state_dict)
        trial = build(recipe.optimizer_class, without_params(groups), recipe.defaults, {})
        state_dict, plan, entries = read_saved(state_dict, groups, recipe.layouts, plan, rank, trial)
        load_options(trial.param_groups, loaded)
        others = copy.deepcopy(beside_state(state_dict))
        build(recipe.optimizer_class, without_params(loaded), recipe.defaults, {})  # refuses before anything is sent
        entries = copy.deepcopy(entries)
    except Exception as error:
        failure = error
    agree(engine.context.channel, Claim("load_state_dict", failure, Facts([plan.digest()])))
    _load(engine, loaded, plan, entries, others)
    load_options(loaded, groups)
    run_post_hooks(optimizer)


def _load(
    engine: Engine, groups: ParamGroups, plan: Plan, entries: Mapping[Piece, Entry], others: Mapping[str, Any]
) -> None:
    """Load state that was saved under `plan`; `others` is what was saved beside it. On all ranks."""
    channel, runtime, view = engine.context.channel, engine.runtime, CheckpointView(engine)
    own = reshard(channel, plan, runtime.plan, entries, "load")
    masters = {} if view.has_masters else {piece: entry[MASTER] for piece, entry in own.items() if MASTER in entry}
    view.take(attempt(channel, "load", lambda: view.prepare(groups, own, {}, others)), groups)
    if not view.has_masters:
        poll = open_poll(channel, lambda record: "load masters" if record[0] else "load no masters")
        poll.ask(bytes([bool(masters)]))
        if any(poll.answer().any):
            exact = partial(make_exact, runtime.memory, masters)
            engine.change_weights("load", exact, "Some weights may be what their masters say")


class CheckpointView:
    """What a checkpoint reads and writes of a sharded optimizer: this rank's pieces, under the plan that is current."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        recipe, plan, local_step = self._runtime.recipe, self._runtime.plan, self._runtime.local_step
        self.channel = engine.context.channel
        self.optimizer_class: type[Optimizer] = recipe.optimizer_class
        self.layouts: Sequence[Layout] = recipe.layouts  # of each group
        self.specs: Sequence[ParamSpec] = plan.params
        self.pieces: Sequence[Piece] = plan.pieces_of(self.channel.rank)
        self.has_average, self.has_masters = local_step.average is not None, local_step.masters is not None

    @property
    def _runtime(self) -> Runtime:
        return self._engine.runtime  # not kept here: the memory of an old plan would be kept with it

    def entries(self) -> dict[Piece, Entry]:
        """Return the state of every piece that this rank holds, masters and averages among it."""
        return self._runtime.local_step.entries()

    def exact_weights(self) -> Mapping[Piece, torch.Tensor]:
        """Return the values from which weights are rounded to travel: in a checkpoint these are the weights."""
        masters = self._runtime.local_step.masters
        return {} if masters is None else masters.of_encoded()

    def prepare(
        self,
        groups: ParamGroups,
        entries: dict[Piece, Entry],
        weights: Mapping[Piece, torch.Tensor],
        others: Mapping[str, Any],
    ) -> Prepared:
        """Make what takes the loaded state of this rank's pieces.

        `groups` have the options that are loaded, and then what the class makes of them. The class may refuse: nothing
        is changed but `groups`, and `entries`, which is emptied so that nothing is held twice.
        """
        self._runtime.memory.adopt()
        recipe, local_step, master = self._runtime.recipe, self._runtime.local_step, self._engine.context.config.master
        loaded = LoadedByClass(
            recipe.optimizer_class, recipe.defaults, groups, recipe.layouts, self._runtime.plan, master
        )
        counted = loaded.run(self.pieces, entries, weights, local_step.counted(), others)
        return local_step.prepare(groups, entries, counted)

    def take(self, made: Prepared, groups: ParamGroups) -> None:
        """Take the state that was prepared, on all ranks. No code of the class runs here."""
        with self._engine.closing("load", "The optimizer's state is neither what it was nor what was saved"):
            self._runtime.timing.stepped.clear()  # what a pass that failed had stepped, what is loaded replaces
            self._runtime.local_step.take(made, groups)
        self._engine.saved.loaded()

    def take_weights(self, weights: Mapping[Piece, torch.Tensor]) -> None:
        """Give this rank's pieces these values, and all ranks their new weights. On all ranks."""

        @torch.no_grad()
        def copy_own() -> None:
            for bucket in self._runtime.memory.buckets:
                for piece, offset in bucket.placed:
                    if piece in weights:
                        bucket.own[offset : offset + piece.numel].copy_(weights[piece])

        self._engine.change_weights("load", copy_own, "Weights may be loaded in part")


# -- modes and averages -----------------------------------------------------------------------------------------------


def switch_mode(engine: Engine, groups: ParamGroups, mode: str) -> None:
    """Call `train()` or `eval()` of the class, which may change weights, on all ranks."""
    local_step = engine.runtime.local_step
    engine.change_weights(f"{mode}()", lambda: local_step.switch(groups, mode), "Weights may be switched in part")


@contextmanager
def averaged(engine: Engine) -> Iterator[None]:
    """Inside, all ranks' parameters are the average. On all ranks."""
    average = engine.runtime.local_step.average
    if average is None:
        raise RuntimeError("there is no average: pass config=ShardConfig(ema=0.999)")
    engine.check_not_joined("ema()")
    engine.check_not_stepped("ema()")
    is_left_by_error = True
    try:
        engine.change_weights("ema()", average.swap_in)
        yield
        is_left_by_error = False
    finally:
        _restore(engine, average, is_left_by_error)


def _restore(engine: Engine, average: Average, is_left_by_error: bool) -> None:
    """Make the weights what they were. A rank with an error does not wait for the others before it raises."""
    channel = engine.context.channel
    if channel.world_size > 1:
        poll = open_poll(channel, lambda record: "leave ema()")
        with suppress(Exception) if is_left_by_error else nullcontext():  # that error says why
            poll.ask(bytes([is_left_by_error]), soon=True)
        if is_left_by_error or poll.answer().any[0]:
            engine.runtime.weights.restore_later(poll, average.swap_out)
            return
    left = "Some weights may be averages"
    try:
        engine.change_weights("the end of ema()", average.swap_out, left)
    except BaseException as error:
        if not engine.lost:  # refused before anything was changed: all of them are averages
            engine.lose("the end of ema()", left, error)
        raise
