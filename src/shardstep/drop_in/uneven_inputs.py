"""Ranks that ran out of inputs still hold a share of the parameters, but have no gradients for them.

Under torch's Join such a rank goes on taking part in `step`, while its `p.grad` stay those of its last batch:
DistributedDataParallel gives the reduced gradients to the ranks that are still running, and to those alone; and its
scheduler no longer runs. Stepping its share with what it has would be wrong without a word. So a rank that is still
running hands over the gradients and the options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from shardstep.comm.channel import Channel
from shardstep.comm.control import Poll
from shardstep.drop_in.local_shard import Groups, params_of
from shardstep.optimizers.local_optimizer import dealt_to
from shardstep.optimizers.param_groups import copy_options
from shardstep.planning import Plan
from shardstep.state.consolidation import receive_state, send_state
from shardstep.state.join_sync import sendable
from shardstep.state.serialization import encode


def hand_over(channel: Channel, poll: Poll, plan: Plan, groups: Groups, *, joined: bool) -> None:
    """Give every rank that has `joined` what it lacks for its share; called by all ranks before the step.

    A gradient that a device is still computing is waited for here, and here only: where a rank has run out of inputs.
    """
    poll.ask(bytes([joined]))
    answer = poll.answer()
    if answer.equal:  # all are still running, or none is
        return
    away = [record == b"\1" for record in answer.rows()]
    donor, params = away.index(False), params_of(groups)
    for rank, is_away in enumerate(away):
        if is_away and channel.rank == donor:
            gradients = {index: _describe(params[index].grad) for index in dealt_to(plan, rank)}
            options = [sendable(group) for group in groups]
            send_state(channel, *encode({"gradients": gradients, "options": options}), rank)
        elif is_away and channel.rank == rank:
            received = receive_state(channel, donor)
            copy_options(received["options"], groups)
            for index, described in received["gradients"].items():
                params[index].grad = _restore(described, params[index])


def _describe(gradient: torch.Tensor | None) -> Any:
    if gradient is None or gradient.layout is torch.strided:
        return gradient
    gradient = gradient.coalesce()
    return {"indices": gradient.indices(), "values": gradient.values(), "size": tuple(gradient.shape)}


def _restore(described: Any, param: torch.Tensor) -> torch.Tensor | None:
    if isinstance(described, Mapping):
        described = torch.sparse_coo_tensor(
            described["indices"], described["values"], described["size"], is_coalesced=True, check_invariants=False
        )
    return None if described is None else described.to(param.device)
