"""What lives as long as an optimizer, whatever its plan is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardstep.comm.agreement import Agreement, FinalAgreement
from shardstep.comm.call_order import CallOrder
from shardstep.comm.channel import Channel
from shardstep.comm.transport import Transport
from shardstep.config import ShardConfig
from shardstep.params.views import quickly
from shardstep.params.weight_arrival import Readers
from shardstep.planning import Layout
from shardstep.planning.cost import Cost
from shardstep.stepping.step_preconditions import StepPreconditions

ParamGroups = Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the local optimizers are made."""

    optimizer_class: type[Optimizer]
    defaults: Mapping[str, Any]
    layouts: Sequence[Layout]  # of each group
    elementwise: Sequence[bool]  # of each group: whether it is, as far as a trial has seen
    costs: Sequence[Cost]  # of each group: what stepping a parameter costs


@dataclass(frozen=True, slots=True)
class Context:
    """Everything that lives as long as the optimizer, whatever its plan is."""

    model: nn.Module
    config: ShardConfig
    channel: Channel
    transport: Transport
    call_order: CallOrder
    agreement: Agreement  # at the end of every step
    final_agreement: FinalAgreement  # at the end of what cannot be taken back
    preconditions: StepPreconditions
    readers: Readers


def params_of(groups: ParamGroups) -> list[torch.Tensor]:
    return [param for group in groups for param in group["params"]]


def trainable_of(groups: ParamGroups) -> tuple[bool, ...]:
    with quickly():
        return tuple([bool(param.requires_grad) for group in groups for param in group["params"]])
