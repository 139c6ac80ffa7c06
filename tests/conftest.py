from __future__ import annotations

from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch

from worker_pool import WorkerPool

# How long an example takes says how busy the machine is; every test has a time-out of its own.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


def pytest_report_header() -> str:
    return f"torch {torch.__version__}"


@pytest.fixture(scope="session")
def workers() -> Iterator[Callable[..., WorkerPool]]:
    """`workers(2).run(body, ...)` runs `body` on two ranks; each world size has one pool for the whole session."""
    pools: dict[tuple[int, str], WorkerPool] = {}

    def pool_of(world_size: int, backend: str = "gloo") -> WorkerPool:
        if (world_size, backend) not in pools:
            pools[world_size, backend] = WorkerPool(world_size, backend)
        return pools[world_size, backend]

    yield pool_of
    for pool in pools.values():
        pool.close()
