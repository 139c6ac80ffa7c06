"""Batches of Muon's matrices on the CPU, where the class steps them otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from shardstep.stepping import batched_muon


@contextmanager
def by_batches() -> Iterator[None]:
    """What `shard` builds inside steps torch's Muon by batches on the CPU as well."""
    with mock.patch.object(batched_muon, "DEVICES", {"cpu", "cuda"}):
        yield
