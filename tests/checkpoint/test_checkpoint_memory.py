"""Loading: no rank has more in memory than its part, and one stored block."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from repository import SUPPORT
from shardstep.state.blocks import MOST_NBYTES

pytestmark = pytest.mark.slow  # make test-slow

WORKER = SUPPORT / "checkpoint_memory.py"
SLACK = 16 * 2**20  # what Python and Gloo take by the way


def launch(ranks: int, *arguments: str) -> None:
    # Memory that is freed goes back to the system at once: otherwise malloc's own keeping is what is measured.
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MALLOC_MMAP_THRESHOLD_": "65536"}
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    subprocess.run([*starter, WORKER, *arguments], env=os.environ | settings, check=True, timeout=60)


@pytest.mark.parametrize(("kind", "ranks"), [("shard", 1), ("shard", 2), ("plain", 2)])
def test_a_load_takes_no_more_than_this_ranks_part_and_one_block(tmp_path, kind, ranks):
    """Its part: its state, which it goes on holding, and its weights until all ranks have read theirs."""
    launch(ranks, kind, str(tmp_path))
    for rank in range(ranks):
        row = json.loads((tmp_path / f"took-{rank}.json").read_text())
        assert row["took"] <= row["state"] + row["weights"] + MOST_NBYTES + SLACK
