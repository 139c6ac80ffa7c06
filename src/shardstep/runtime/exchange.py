"""What a plan of whole parameters sends at every step: its messages, and the gathers that carry them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardstep.planning import Plan
from shardstep.runtime.buffers import flat_messages, scattered_messages
from shardstep.runtime.collectives import IN_PLACE_NBYTES, Channel, takes_many_messages
from shardstep.runtime.gathers import Message, finish_gathers, make_gathers


class Exchange:
    """Gives every rank the parameters that the others stepped. Made anew with every plan."""

    def __init__(self, channel: Channel, plan: Plan, params: Sequence[torch.Tensor], *, bucket_view: bool) -> None:
        self.buffers: list[list[torch.Tensor]] = []  # with bucket views: by bucket and rank
        self._messages: list[Message] = []
        buckets = []
        for bucket in plan.buckets:
            device = params[bucket.pieces[0].param].device
            rows: Sequence[Sequence[Message]]
            if bucket_view:
                rows = flat = flat_messages(bucket, params)
                self.buffers.append([message.buffer for row in flat for message in row])
            else:
                in_place = IN_PLACE_NBYTES if takes_many_messages(channel, device) else math.inf
                rows = scattered_messages(bucket, params, in_place)
            buckets.append((device, rows))
            self._messages.extend(message for row in rows for message in row)
        self._gathers = make_gathers(channel, buckets)

    def prepare(self) -> None:
        """Raise if a parameter cannot travel as planned. Before anything is posted: a receive cannot be taken back."""
        for message in self._messages:
            message.prepare()

    def expect(self) -> None:
        """Other ranks' parameters may be written from now on."""
        for gather in self._gathers:
            gather.expect()

    def send(self) -> None:
        """This rank's parameters are final."""
        for gather in self._gathers:
            gather.send()

    def finish(self) -> None:
        """Return when every parameter has arrived."""
        finish_gathers(self._gathers)
