from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from worker_pool import WorkerPool


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[[int], WorkerPool]]:
    """`workers(2).run(body, ...)` runs `body` on two ranks; each world size has one pool for the whole session."""
    pools: dict[int, WorkerPool] = {}

    def pool_of(world_size: int) -> WorkerPool:
        if world_size not in pools:
            pools[world_size] = WorkerPool(world_size)
        return pools[world_size]

    yield pool_of
    for pool in pools.values():
        pool.close()
