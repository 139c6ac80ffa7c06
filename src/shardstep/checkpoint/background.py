"""Saving beside training: what is saved is copied, and a thread writes it.

The thread has connections of its own to those of the other ranks (comm/host_groups.py), because the program uses its
groups meanwhile. It is no daemon thread: a program that ends waits for it.

[Note: saves of several groups] What became of a save is agreed on by the ranks that made it, so it is said at the next
call of the same group: the ranks of another may be elsewhere. A call of another group only waits until it is written.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardstep.checkpoint.ranks import Ranks
from shardstep.checkpoint.storage import Part
from shardstep.comm.host_groups import HostGroups, separate_hosts

logger = logging.getLogger("shardstep")
_ALIGNMENT = 64

Verdict = Callable[[Exception | None], None]


class _FailedElsewhereError(Exception):
    """Another rank could not do its part."""


class Saving:
    """A checkpoint that is being written. Made on all ranks."""

    def __init__(self, ranks: Ranks, write: Callable[[Verdict], None], hosts: HostGroups | None) -> None:
        self._ranks, self._hosts = ranks, hosts
        self._failure: Exception | None = None
        self._is_told = False
        self._thread = threading.Thread(target=self._run, args=(write,), name="shardstep-save", daemon=False)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is there; raise on all ranks if one failed. Called on all ranks."""
        self.join()
        if not self._is_told:
            self._is_told = True
            self._ranks.agree("the save before", self._failure)

    def join(self) -> None:
        """Return when this rank writes no more. Says nothing of how it went."""
        self._thread.join()

    def _run(self, write: Callable[[Verdict], None]) -> None:
        try:
            write(self._verdict)
        except _FailedElsewhereError:
            pass  # that rank says why
        except Exception as error:
            self._failure = error
            logger.error("a checkpoint could not be saved: %s", error)
        finally:
            self._hosts = None  # who keeps what save returned does not keep Gloo's threads alive to the end

    def _verdict(self, failure: Exception | None) -> None:
        failed = failure is not None
        if self._hosts is not None:
            failed = self._hosts.combine(bytes([failed])).highest != b"\0"
        if failure is not None:
            raise failure
        if failed:
            raise _FailedElsewhereError


_memory: torch.Tensor | None = None  # of the save before, of any group: the next takes it again
_last: dict[int, tuple[Any, Saving]] = {}  # by group, which is kept with it: an id may be given again
_hosts: dict[int, tuple[Any, HostGroups]] = {}  # by group
for kept in (_last, _hosts):
    atexit.register(kept.clear)  # as in comm/host_groups.py: Gloo's threads end while the interpreter still runs


def finish_last(ranks: Ranks) -> None:
    """Wait for the saves before, and raise on all of these ranks if theirs failed. [Note: saves of several groups]"""
    for _, saving in _last.values():
        saving.join()
    _, own = _last.pop(id(_group_of(ranks)), (None, None))
    if own is not None:
        own.wait()


def start(ranks: Ranks, write: Callable[[Verdict], None], memory: torch.Tensor) -> Saving:
    global _memory
    _memory = memory
    group = _group_of(ranks)
    saving = Saving(ranks, write, _hosts_of(ranks))
    _last[id(group)] = (group, saving)
    return saving


def _group_of(ranks: Ranks) -> Any:
    return None if ranks.channel is None else ranks.channel.group


def _hosts_of(ranks: Ranks) -> HostGroups | None:
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
    memory = _memory if all(saving.is_done for _, saving in _last.values()) else None
    if memory is None or memory.numel() != sum(sizes) or memory.is_pinned() != pinned:
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    staged, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        values = part.values.detach()
        home = memory[place : place + values.nbytes].view(values.dtype).view(values.shape)
        home.copy_(values, non_blocking=values.is_cuda)  # only of CUDA's devices is the end waited for
        staged.append(replace(part, values=home))
        place += size
    _synchronize(part.values.device for part in parts)
    return staged, memory


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Of every one: a model may lie on several, and the current one may be none of them."""
    for device in {one for one in devices if one.type == "cuda"}:
        torch.cuda.synchronize(device)
