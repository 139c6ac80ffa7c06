"""What a plan of whole parameters sends at every step: its messages, and the gathers that carry them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardstep.comm.transport import Message, Transport, finish_gathers
from shardstep.params.parameter_messages import flat_messages, scattered_messages
from shardstep.planning import Plan


class ParameterMessages:
    """Gives every rank the parameters that the others stepped. Made anew with every plan."""

    def __init__(self, transport: Transport, plan: Plan, params: Sequence[torch.Tensor], *, bucket_view: bool) -> None:
        self.buffers: list[list[torch.Tensor]] = []  # with bucket views: by bucket and rank
        self._messages: list[Message] = []
        buckets = []
        for bucket in plan.buckets:
            device = params[bucket.segments[0].param].device
            rows: Sequence[Sequence[Message]]
            if bucket_view:
                rows = flat = flat_messages(bucket, params)
                self.buffers.append([message.buffer for row in flat for message in row])
            else:
                rows = scattered_messages(bucket, params, transport.in_place_nbytes(device))
            buckets.append((device, rows))
            self._messages.extend(message for row in rows for message in row)
        self._gathers = transport.message_gathers(buckets)

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
        """Everything that is done from now on finds the parameters of every rank."""
        finish_gathers(self._gathers)
