"""When the optimizer steps: after the backward pass, or inside it. Chosen once; nothing else asks which it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.algorithms.join import Joinable

from shardstep.comm.channel import Channel
from shardstep.drop_in.local_shard import Groups, LocalShard
from shardstep.planning import Plan
from shardstep.state.saved_state import SavedState

Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """What a strategy works on."""

    channel: Channel
    shard: LocalShard
    saved: SavedState


class Strategy(Protocol):
    """Everything that differs. `groups` are those of all parameters, as the program has them now."""

    buffers: list[list[torch.Tensor]]  # with bucket views: by bucket and rank

    def step(self, groups: Groups, closure: Any, kwargs: Mapping[str, Any], joinable: Joinable) -> Any:
        """The program's own call of `step`."""

    def local_step(self, groups: Groups, gradients: Gradients | None, closure: Any, kwargs: Mapping[str, Any]) -> Any:
        """Step this rank's parameters, and send nothing."""

    def sync(self, groups: Groups) -> None:
        """Give every rank what every other rank has stepped."""

    def take_part(self, groups: Groups) -> None:
        """This rank has run out of inputs, and others step."""

    def check_may_grow(self) -> None:
        """Raise if no param group can be added."""

    def grow(self, groups: Groups, plan: Plan) -> None:
        """A param group was added, on all ranks; `plan` has it."""

    def check_has_state(self) -> None:
        """Raise if there is no state to save or load yet."""

    def reloaded(self) -> None:
        """The local optimizer has loaded a state."""
