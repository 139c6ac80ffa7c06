"""Starts the ranks of `gpu.py` and `gpu_training.py`.

Several processes on one GPU, side by side under NVIDIA's multi-process service.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

Result = dict[str, Any]  # what rank 0 of one launch wrote

SERVICE = "nvidia-cuda-mps-control"
SERVICE_SECONDS = 60  # in which it starts, or ends
LAST_WORDS_SECONDS = 15  # for the ranks that are left when one has failed, to fail by themselves and say why
SOURCE = Path(__file__).parents[1] / "src"


@dataclass(frozen=True, slots=True)
class Launch:
    """One process group of the benchmark."""

    title: str
    ranks: int
    arguments: tuple[str, ...]  # of the worker
    seconds: int  # after which it has failed
    worker: str = "gpu_worker.py"  # which program a rank is

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name(self.worker))
        return [sys.executable, worker, *self.arguments, "--out", str(out)]


@contextmanager
def side_by_side() -> Iterator[dict[str, str]]:
    """The service while inside, and the variables by which a process finds it; none where it is not installed, or runs.

    Without it processes that share a GPU take turns on it, and a collective, which needs all of them at once, costs
    milliseconds however small it is.
    """
    control = shutil.which(SERVICE)
    if control is None or "CUDA_MPS_PIPE_DIRECTORY" in os.environ:  # whoever has set that has started it
        yield {}
        return
    with ExitStack() as folders:
        names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY")
        # Its last log lines may come when the folder is being deleted.
        made = [tempfile.TemporaryDirectory(ignore_cleanup_errors=True) for _ in names]
        found = dict(zip(names, map(folders.enter_context, made), strict=True))
        # The daemon keeps what it is given as output: a pipe would never end.
        quiet: dict[str, Any] = {"env": os.environ | found, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        try:
            subprocess.run([control, "-d"], stdin=subprocess.DEVNULL, check=True, timeout=SERVICE_SECONDS, **quiet)
        except subprocess.SubprocessError as error:
            raise RuntimeError(f"the multi-process service does not start: {error}; it needs root") from error
        try:
            yield found
        finally:
            with suppress(subprocess.SubprocessError):  # the results are worth more than an orderly end
                subprocess.run([control], input=b"quit\n", check=True, timeout=SERVICE_SECONDS, **quiet)


def start(launch: Launch, out: Path, settings: dict[str, str]) -> Result:
    """Start the ranks, wait, and read what rank 0 wrote; RuntimeError if one fails or all take too long."""
    port = free_port()
    ranks = [
        subprocess.Popen(launch.command(out), env=os.environ | settings | rank_settings(rank, launch.ranks, port))
        for rank in range(launch.ranks)
    ]
    try:
        wait_for(ranks, time.monotonic() + launch.seconds)
    finally:
        end(ranks)
    result: Result = json.loads(out.read_text())
    out.unlink()  # or the next launch could seem to have written it
    return result | {"title": launch.title}


def rank_settings(rank: int, ranks: int, port: int) -> dict[str, str]:
    paths = [str(SOURCE), os.environ.get("PYTHONPATH", "")]
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_HOSTID": f"host{rank}",  # NCCL refuses two ranks on one GPU of one host
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_for(ranks: Sequence[subprocess.Popen[bytes]], deadline: float) -> None:
    while any(rank.poll() is None for rank in ranks):
        failed = [(number, rank.returncode) for number, rank in enumerate(ranks) if rank.poll()]
        if failed:
            let_speak(ranks)
            break
        if time.monotonic() > deadline:
            raise RuntimeError("the ranks took too long and were ended")
        time.sleep(0.1)
    failed = [(number, rank.returncode) for number, rank in enumerate(ranks) if rank.poll()]
    if failed:
        raise RuntimeError("; ".join(f"rank {number} ended with status {code}" for number, code in failed))


def let_speak(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + LAST_WORDS_SECONDS
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.1)


def end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    for rank in ranks:
        rank.wait()


def start_all(planned: Sequence[Launch], console: Console) -> tuple[list[Result], list[str]]:
    """One launch after the other: what they found, and which failed.

    A launch that fails does not cost the others, for time on a GPU is dear; but the service starts anew after it: a
    process that dies can leave it broken.
    """
    results: list[Result] = []
    failures: list[str] = []
    waiting = deque(planned)
    while waiting:
        try:
            with side_by_side() as settings:
                start_until_one_fails(waiting, settings, results, console)
        except StoppedError:
            failures.append(f"ended from outside with {len(waiting)} launches to come")
            break
        except RuntimeError as error:
            failures.append(str(error))
            console.print(failures[-1], style="red", markup=False)
            if not isinstance(error, LaunchError):
                break  # the service does not start
    return results, failures


class StoppedError(Exception):
    """The program is told to end: what was found so far is kept."""


def stop(*_: object) -> None:
    """For a signal."""
    raise StoppedError


class LaunchError(RuntimeError):
    """A rank ended badly, or all of them too late."""


def start_until_one_fails(
    waiting: deque[Launch], settings: dict[str, str], results: list[Result], console: Console
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        while waiting:
            launch = waiting.popleft()
            console.print(f"{launch.title} ({len(waiting)} to come)", style="bold", markup=False)
            began = time.monotonic()
            try:
                results.append(start(launch, Path(folder) / "rank0.json", settings))
            except (RuntimeError, OSError, ValueError) as error:
                raise LaunchError(f"{launch.title}: {error}") from error
            console.print(f"  {time.monotonic() - began:.0f} s")
