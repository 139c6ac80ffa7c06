"""A process group of many ranks of which only this one is there: its collectives return at once and do nothing.

torch's own fake group copies a bucket rank by rank, thousands of tiny copies that no backend has its host do, and
leaves the caches full of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardstep.comm import host_groups

NAME = "nobody"


class Done(dist._Work):  # type: ignore[name-defined,misc]
    def wait(self, timeout: Any = None) -> bool:
        return True


sent: Counter[str] = Counter()  # collectives, by name


def nothing(name: str) -> Callable[..., Any]:
    def count(*_: Any) -> Any:
        sent[name] += 1
        return Done()

    return count


class Nobody(dist.ProcessGroup):
    """One rank of many."""

    def getBackendName(self) -> str:  # noqa: N802, the name is torch's
        return NAME

    @property
    def group_name(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        """There is one."""

    allreduce, broadcast, reduce = nothing("all-reduce"), nothing("broadcast"), nothing("reduce")
    # Each by its name in 2.11 and in 2.13.
    _allgather_base = all_gather_single = nothing("all-gather")
    _reduce_scatter_base = reduce_scatter_single = nothing("reduce-scatter")


def join_nobody(ranks: int) -> None:
    """Rank 0 of as many; of their hosts' tree it is the first on every level, and so has most to do."""
    dist.Backend.register_backend(NAME, lambda store, rank, size, timeout: Nobody(rank, size), devices=["cpu"])
    dist.init_process_group(NAME, store=FakeStore(), rank=0, world_size=ranks)
    below = []
    while ranks > host_groups.FAN ** (len(below) + 1):
        below.append(Nobody(0, host_groups.FAN))
    everyone = host_groups.HostGroups(0, ranks, below, Nobody(0, -(-ranks // host_groups.FAN ** len(below))))
    host_groups._known[NAME] = (dist.group.WORLD, everyone)
