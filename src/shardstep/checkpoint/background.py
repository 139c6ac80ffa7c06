"""Saving beside training: what is saved is copied, and a thread writes it.

The thread has a channel of its own to those of the other ranks (wire/hosts.py): the program's groups are in use. It is
no daemon: a program that ends waits for it.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardstep.checkpoint.ranks import Ranks
from shardstep.checkpoint.storage import Part
from shardstep.wire.hosts import Hosts, separate_hosts

logger = logging.getLogger("shardstep")
_ALIGNMENT = 64

Verdict = Callable[[Exception | None], None]


class _FailedElsewhereError(Exception):
    """Another rank could not do its part."""


class Saving:
    """A checkpoint that is being written. Made on all ranks."""

    def __init__(
        self, ranks: Ranks, write: Callable[[Verdict], None], memory: torch.Tensor, hosts: Hosts | None
    ) -> None:
        self._ranks, self._write, self._hosts, self.memory = ranks, write, hosts, memory
        self._failure: Exception | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._run, name="shardstep-save", daemon=False)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is there; raise on all ranks if one failed. Called on all ranks."""
        self._thread.join()
        if not self._is_told:
            self._is_told = True
            self._ranks.agree("the save before", self._failure)

    def _run(self) -> None:
        try:
            self._write(self._verdict)
        except _FailedElsewhereError:
            pass  # that rank says why
        except Exception as error:
            self._failure = error
            logger.error("a checkpoint could not be saved: %s", error)

    def _verdict(self, failure: Exception | None) -> None:
        failed = failure is not None
        if self._hosts is not None:
            failed = self._hosts.combine(bytes([failed])).highest != b"\0"
        if failure is not None:
            raise failure
        if failed:
            raise _FailedElsewhereError


_last: Saving | None = None
_hosts: dict[int, tuple[Any, Hosts]] = {}  # by channel
atexit.register(_hosts.clear)  # as in wire/hosts.py: Gloo's threads end while the interpreter still runs


def finish_last() -> None:
    """Wait for the save before, and raise if it failed; on all ranks."""
    if _last is not None:
        _last.wait()


def start(ranks: Ranks, write: Callable[[Verdict], None], memory: torch.Tensor) -> Saving:
    global _last
    _last = Saving(ranks, write, memory, _hosts_of(ranks))
    return _last


def _hosts_of(ranks: Ranks) -> Hosts | None:
    if ranks.channel is None or ranks.world_size == 1:
        return None
    group = ranks.channel.group
    if id(group) not in _hosts or _hosts[id(group)][0] is not group:
        _hosts[id(group)] = (group, separate_hosts(group, "checkpoints"))
    return _hosts[id(group)][1]


def stage(parts: Sequence[Part]) -> tuple[list[Part], torch.Tensor]:
    """The same parts, copied to the host; and their memory, which the next save takes again if it has the size."""
    sizes = [-(-part.values.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts]
    pinned = any(part.values.is_cuda for part in parts)
    memory = _last.memory if _last is not None and _last.is_done else None
    if memory is None or memory.numel() != sum(sizes) or memory.is_pinned() != pinned:
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    staged, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        values = part.values.detach()
        home = memory[place : place + values.nbytes].view(values.dtype).view(values.shape)
        home.copy_(values, non_blocking=True)
        staged.append(replace(part, values=home))
        place += size
    if pinned:
        torch.cuda.synchronize()
    return staged, memory
