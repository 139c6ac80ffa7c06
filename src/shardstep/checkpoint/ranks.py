"""Those who save or load together: the ranks of a process group, or one process without any."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.channel import Channel
from shardstep.comm.tensors import broadcast_bytes, broadcast_tensors


@dataclass(frozen=True, slots=True)
class Ranks:
    channel: Channel | None  # None: alone, without a process group

    @property
    def rank(self) -> int:
        return 0 if self.channel is None else self.channel.rank

    @property
    def world_size(self) -> int:
        return 1 if self.channel is None else self.channel.world_size

    def agree(self, action: str, failure: Exception | None, *facts: str) -> None:
        """Return on every rank, or raise on every rank."""
        if self.channel is not None:
            agree(self.channel, Claim(action, failure, Facts(facts)))
        elif failure is not None:
            raise failure

    def told(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self.channel is None or self.channel.world_size == 1:
            return text
        payload = text.encode()
        length = broadcast_bytes(self.channel, len(payload).to_bytes(8, "big"), 8, 0)
        return broadcast_bytes(self.channel, payload, int.from_bytes(length, "big"), 0).decode()

    def give(self, tensor: torch.Tensor, source: int) -> None:
        """Every rank gets the values of one, in place."""
        if self.channel is not None and self.channel.world_size > 1:
            broadcast_tensors(self.channel, [tensor], source)
