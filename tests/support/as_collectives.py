"""The way of NCCL without a GPU: Gloo's collectives, and hosts that combine their records.

What is chosen by the kind of backend is chosen as for NCCL, because the channel says that it has another than Gloo's
messages. Gloo runs a collective when it is called and not on a stream of its own; all else is the same code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from shardstep import optimizer as sharded_optimizer
from shardstep.comm.channel import Channel, open_channel
from shardstep.drop_in import optimizer as drop_in


def open_for_collectives(group: Any, accelerator: torch.device | None) -> Channel:
    del accelerator
    channel = open_channel(group, torch.device("cpu"))  # not by messages: hosts combine
    return dataclasses.replace(channel, backends={"cpu": "GLOO"})  # torch knows it by this name too


@contextmanager
def by_collectives() -> Iterator[None]:
    """What `shard` and the drop-in build inside goes by collectives."""
    with (
        mock.patch.object(sharded_optimizer, "open_channel", open_for_collectives),
        mock.patch.object(drop_in, "open_channel", open_for_collectives),
    ):
        yield
