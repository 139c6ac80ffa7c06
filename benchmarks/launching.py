"""What benchmarks that start their own ranks share: starting them, on one machine or on hosts, launch after launch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from hosts import linked_hosts, run_on_hosts
from rich.console import Console

Result = dict[str, Any]  # what rank 0 of one launch wrote


class Launch(Protocol):
    """One process group of a benchmark."""

    @property
    def ranks(self) -> int: ...
    @property
    def rate(self) -> str | None:
        """Of a host's link; None: all ranks on this machine's loopback."""

    @property
    def title(self) -> str: ...

    def command(self, out: Path) -> list[str]:
        """Of one rank: the worker and its arguments; rank 0 writes its result to `out`."""


def start(launch: Launch, out: Path) -> Result:
    """Start the ranks, wait, and read what rank 0 wrote."""
    if launch.rate is not None:
        with linked_hosts(launch.ranks, launch.rate):
            run_on_hosts([sys.executable, *launch.command(out)], launch.ranks)
    else:
        starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.ranks)]
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}  # as in drop_in.py
        done = subprocess.run([*starter, *launch.command(out)], env=os.environ | settings, check=False)
        if done.returncode:
            raise RuntimeError(f"the ranks ended with status {done.returncode}; see above")
    result: Result = json.loads(out.read_text())
    return result | {"title": launch.title}


def start_all(planned: Sequence[Launch], console: Console) -> list[Result] | None:
    """One launch after the other; None if one of them failed."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, launch in enumerate(planned, start=1):
            console.print(f"[bold]launch {number} of {len(planned)}: {launch.title}")
            try:
                results.append(start(launch, Path(folder) / f"{number}.json"))
            except RuntimeError as error:
                console.print(f"{launch.title}: {error}", style="red", markup=False)
                return None
    return results
