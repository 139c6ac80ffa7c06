"""Save asynchronously: copy what is saved to host memory, and let a thread write it while training continues.

The thread has its own connections to the threads of the other ranks (comm/host_groups.py), because the program uses its
process groups meanwhile. It is not a daemon thread: a program that ends waits for it.

[Note: saves of several groups] All ranks of a save must learn whether it failed, so its error is raised by the next
call with the same process group; the ranks of another group may not call at the same time. A call with another group
only waits until the save is written.
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

Agree = Callable[[Exception | None], None]  # called on all ranks with this rank's failure; raises on all if one failed


class _FailedElsewhereError(Exception):
    """Another rank failed to write its part."""


class Saving:
    """A checkpoint that is being written. All ranks have one."""

    def __init__(self, ranks: Ranks, write: Callable[[Agree], None], hosts: HostGroups | None) -> None:
        self._ranks, self._hosts = ranks, hosts
        self._failure: Exception | None = None
        self._is_reported = False
        self._thread = threading.Thread(target=self._run, args=(write,), name="shardstep-save", daemon=False)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is complete, or raise on all ranks if one failed. Called on all ranks."""
        self.join()
        if not self._is_reported:
            self._is_reported = True
            self._ranks.agree("the previous save", self._failure)

    def join(self) -> None:
        """Return when this rank has stopped writing, whether or not it failed."""
        self._thread.join()

    def _run(self, write: Callable[[Agree], None]) -> None:
        try:
            write(self._agree)
        except _FailedElsewhereError:
            pass  # the rank that failed logs and reports the error
        except Exception as error:
            self._failure = error
            logger.error("a checkpoint could not be saved: %s", error)
        finally:
            self._hosts = None  # a program that keeps this object must not keep Gloo's threads alive until it exits

    def _agree(self, failure: Exception | None) -> None:
        failed = failure is not None
        if self._hosts is not None:
            failed = self._hosts.combine(bytes([failed])).highest != b"\0"
        if failure is not None:
            raise failure
        if failed:
            raise _FailedElsewhereError


_memory: torch.Tensor | None = None  # the host memory of the previous save, to be used again
_last: dict[int, tuple[Any, Saving]] = {}  # by the group's id; the group is kept so that its id is not used again
_hosts: dict[int, tuple[Any, HostGroups]] = {}  # by the group's id
for cache in (_last, _hosts):
    atexit.register(cache.clear)  # as in comm/host_groups.py: Gloo's threads end while the interpreter still runs


def finish_previous_save(ranks: Ranks) -> None:
    """Wait for previous saves, and raise on all of `ranks` if theirs failed. [Note: saves of several groups]"""
    for _, saving in _last.values():
        saving.join()
    _, own = _last.pop(id(_group_of(ranks)), (None, None))
    if own is not None:
        own.wait()


def start_save(ranks: Ranks, write: Callable[[Agree], None], memory: torch.Tensor) -> Saving:
    """Start a thread that calls `write`. `memory` is what `stage` returned; the next save uses it again."""
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
    """Return the parts, copied to host memory, and that memory; the previous save's is used again if its size fits."""
    sizes = [-(-part.values.nbytes // _ALIGNMENT) * _ALIGNMENT for part in parts]
    pinned = any(part.values.is_cuda for part in parts)
    memory = _memory if all(saving.is_done for _, saving in _last.values()) else None
    if memory is None or memory.numel() != sum(sizes) or memory.is_pinned() != pinned:
        memory = torch.empty(sum(sizes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    staged, place = [], 0
    for part, size in zip(parts, sizes, strict=True):
        values = part.values.detach()
        copy = memory[place : place + values.nbytes].view(values.dtype).view(values.shape)
        copy.copy_(values, non_blocking=values.is_cuda)  # _synchronize waits for CUDA devices only
        staged.append(replace(part, values=copy))
        place += size
    _synchronize(part.values.device for part in parts)
    return staged, memory


def _synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for all CUDA devices among `devices`: a model may be on several, none of them the current device."""
    for device in {one for one in devices if one.type == "cuda"}:
        torch.cuda.synchronize(device)
