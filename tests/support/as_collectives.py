"""The way of NCCL without a GPU: Gloo's collectives, and hosts that combine their records.

What is chosen by the kind of backend is chosen as for NCCL, because the channel says that it has another than Gloo's
messages. Gloo runs a collective when it is called and not on a stream of its own; all else is the same code.
`by_collectives("nccl")` chooses by the name of NCCL as well; it needs a stand-in for what Gloo cannot do (recorder.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch

from shardstep import optimizer as sharded_optimizer
from shardstep.comm.channel import Channel, open_channel
from shardstep.drop_in import optimizer as drop_in


def open_for_collectives(group: Any, accelerator: torch.device | None, backend: str = "GLOO") -> Channel:
    del accelerator
    channel = open_channel(group, torch.device("cpu"))  # not by messages: hosts combine
    return dataclasses.replace(channel, backends={"cpu": backend})  # torch knows Gloo by "GLOO" too


@contextmanager
def by_collectives(backend: str = "GLOO") -> Iterator[None]:
    """What `shard` and the drop-in build inside goes by collectives."""
    chosen = partial(open_for_collectives, backend=backend)
    with (
        mock.patch.object(sharded_optimizer, "open_channel", chosen),
        mock.patch.object(drop_in, "open_channel", chosen),
    ):
        yield
