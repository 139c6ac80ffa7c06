"""Another plan, because the facts have changed: a parameter was frozen or unfrozen, or a group was added.

First comes what may be refused, of which nothing is left if a rank raises: the class sees tensors without storage, and
state travels into memory of its own. Then memory moves, bucket by bucket, because there is no room for a second model:
from there on there is no way back, and whatever fails closes the optimizer on all ranks (`Engine.replan`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shardstep.comm.agreement import attempt
from shardstep.engine.build import connect, make_parts, plan_for
from shardstep.engine.context import Context, ParamGroups, Recipe, params_of
from shardstep.engine.runtime import Runtime
from shardstep.gradients.sharded import Kept
from shardstep.optimizers.trial import no_trace
from shardstep.params.views import Span, move_out, span_of
from shardstep.planning import Piece, Plan
from shardstep.state.resharding import reshard
from shardstep.stepping.element_state import Entry

_GRADIENT = "shardstep.gradient"  # a gradient that moves with the state of its piece


@dataclass(frozen=True, slots=True)
class NextPlan:
    """A plan that the optimizer's class accepts on all ranks, and for which nothing is built yet."""

    plan: Plan
    recipe: Recipe


@dataclass(frozen=True, slots=True)
class Moved:
    """What this rank holds under the next plan, on its way there."""

    entries: dict[Piece, Entry]  # emptied when it is taken
    gradients: Kept
    counters: Mapping[str, Any]  # numbers that the optimizer's class has counted on its instances


def try_plan(
    context: Context,
    runtime: Runtime,
    groups: ParamGroups,
    trainable: Sequence[bool],
    recipe: Recipe | None = None,
) -> NextPlan:
    """Return a plan for what has changed; raise on all ranks if one of them cannot have it. Nothing is changed."""
    wanted = runtime.recipe if recipe is None else recipe

    def build_without_memory() -> NextPlan:
        runtime.memory.adopt()
        runtime.local_step.check_may_move()
        plan = plan_for(context, wanted, groups, trainable)
        parts = make_parts(context, wanted, plan, groups, stored=False)
        with no_trace(params_of(groups)[0].device):
            parts.local_step.try_class(groups)
        return NextPlan(plan, wanted)

    return attempt(context.channel, "a new plan", build_without_memory)


def move_state(context: Context, runtime: Runtime, to: NextPlan, added: Sequence[torch.Tensor]) -> Moved:
    """Send state and gradients to the ranks that hold them next. The old Runtime keeps its own: nothing is changed.

    On all ranks; `added` parameters become what they are on the first.
    """

    def collect() -> tuple[Kept, dict[Piece, Entry], Mapping[str, Any]]:
        runtime.local_step.check_may_move()  # a step may have been made since it was tried
        kept, entries = runtime.gradients.kept(), runtime.local_step.entries()
        for piece, gradient in kept.by_piece.items():
            entries[piece] = {**entries.get(piece, {}), _GRADIENT: gradient}
        return kept, entries, runtime.local_step.counted()

    kept, entries, counters = attempt(context.channel, "a new plan", collect)
    moved = reshard(context.channel, runtime.plan, to.plan, entries, "a new plan")
    del entries
    with torch.no_grad():  # the last that ranks wait for: a rank that fails behind it can say so
        context.transport.broadcast(added)
    gradients = {piece: entry.pop(_GRADIENT) for piece, entry in moved.items() if _GRADIENT in entry}
    entries = {piece: moved.pop(piece) for piece in list(moved) if moved[piece]}
    return Moved(entries, Kept(kept.phase, kept.used, gradients), counters)


def leave(runtime: Runtime) -> list[Span]:
    """Detach the old Runtime from the model; return where its buffers lie.

    Nothing may hold on to those but the parameters that have not moved yet: each is free when all of its parameters
    have left it, so that a new plan takes no second model.
    """
    runtime.gradients.hooks.remove()
    runtime.weights.abandon()
    return [span_of(bucket.values) for bucket in runtime.memory.buckets]


def build_from(context: Context, to: NextPlan, groups: ParamGroups, moved: Moved) -> Runtime:
    """Return the Runtime of the next plan, with the optimizers' state."""
    parts = make_parts(context, to.recipe, to.plan, groups)
    parts.local_step.build(groups, moved.entries, moved.counters)
    return connect(context, parts, groups)


def settle_in(runtime: Runtime, moved: Moved, buffers: Sequence[Span]) -> None:
    """Move frozen parameters out of the old `buffers`, and give the new Runtime the gradients."""
    pairs = zip(runtime.params, runtime.trainable, strict=True)
    move_out([param for param, moves in pairs if not moves], buffers)
    runtime.gradients.take_over(moved.gradients)
