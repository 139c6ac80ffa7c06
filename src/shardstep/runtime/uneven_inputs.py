"""Ranks that ran out of inputs still hold a share of the parameters, but have no gradients for them.

Under torch's Join such a rank goes on taking part in `step`, while its `p.grad` stay those of its last batch:
DistributedDataParallel gives the reduced gradients to the ranks that are still running, and to those alone. Stepping
its share with them would be wrong without a word. So a rank that is still running hands them over.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardstep.planning import Plan
from shardstep.runtime.collectives import Channel, gather_records, receive_tensors, send_tensors
from shardstep.runtime.local_optimizer import dealt_to


def hand_over_gradients(channel: Channel, plan: Plan, params: Sequence[torch.Tensor], joined: bool) -> None:
    """Give every rank that has `joined` the gradients of its parameters; called by all ranks before the step."""
    away = [record == b"\1" for record in gather_records(channel, b"\1" if joined else b"\0").read()]
    if not any(away) or all(away):
        return
    donor = away.index(False)
    for rank, is_away in enumerate(away):
        if is_away and channel.rank in (donor, rank):
            held = [params[index] for index in dealt_to(plan, rank)]
            _send(channel, held, rank) if channel.rank == donor else _receive(channel, held, donor)


def _send(channel: Channel, params: Sequence[torch.Tensor], to: int) -> None:
    gradients = [param.grad for param in params]
    present = torch.tensor([gradient is not None for gradient in gradients], dtype=torch.uint8)
    send_tensors(channel, [present], to)
    send_tensors(channel, [gradient.reshape(-1) for gradient in gradients if gradient is not None], to)


def _receive(channel: Channel, params: Sequence[torch.Tensor], source: int) -> None:
    present = torch.empty(len(params), dtype=torch.uint8)
    receive_tensors(channel, [present], source)
    landing: list[torch.Tensor] = []
    for param, has_gradient in zip(params, present.tolist(), strict=True):
        param.grad = torch.empty_like(param, memory_format=torch.contiguous_format) if has_gradient else None
        if param.grad is not None:
            landing.append(param.grad.view(-1))
    receive_tensors(channel, landing, source)
