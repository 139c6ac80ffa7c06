"""Starts the ranks under torchrun, follows them, and leaves none behind.

[Note: which rank failed] When one rank fails, the others fail after it with a broken connection, so the first failure
is the one to show. A rank that ended with an exception left an error file, and the oldest of them is the first; one
that was killed (memory, a signal) left none, and torchrun's summary has its negative exit status. torchrun itself
names a first rank too, but by whole seconds, in which several ranks fail.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

from shardstep.cli.demo.exchange import Exchange, Result, Tick
from shardstep.cli.demo.settings import Settings

WORKER = "shardstep.cli.demo.worker"
POLL_SECONDS = 0.1
# torchrun gives its ranks 30 seconds to end, then kills them; it gets a little longer itself.
STOP_SECONDS = 35
TAIL_LINES = 15


class WorkerError(RuntimeError):
    """A rank failed; the message says which one, and how."""


def run_workers(
    settings: Settings, exchange: Exchange, on_tick: Callable[[Tick], None], worker: str = WORKER
) -> Result:
    """Train on `settings.ranks` processes; returns when the last of them has ended."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
    command += ["--redirects", "3", "--log-dir", str(exchange.logs), "-m", worker, "--exchange", str(exchange.folder)]
    command += ["--model", settings.model, "--optimizer", settings.optimizer, "--steps", str(settings.steps)]
    # The cores this process may use, which in a container are often fewer than the machine has.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with exchange.launcher_log.open("wb") as log, ExitStack() as handlers:
        for number in (signal.SIGTERM, signal.SIGHUP):  # a killed command must not leave its workers behind
            handlers.callback(signal.signal, number, signal.signal(number, _exit))
        process = subprocess.Popen(
            command,
            env={**os.environ, "OMP_NUM_THREADS": str(max(1, cores // settings.ranks))},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # Out of reach of the terminal's Ctrl-C, which comes to us; torchrun hears of it once, from `_stop`.
            start_new_session=True,
        )
        try:
            _follow(process, exchange, on_tick)
        finally:
            _stop(process)
    if process.returncode < 0:
        raise WorkerError(f"torchrun was killed by {_name_signal(-process.returncode)}.")
    if process.returncode > 0:
        raise WorkerError(describe_failure(exchange))
    return Result.from_json(exchange.result.read_text(encoding="utf-8"))


def _exit(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # an exception, so that `finally` runs


def _follow(process: subprocess.Popen[bytes], exchange: Exchange, on_tick: Callable[[Tick], None]) -> None:
    position, running = 0, True
    while running:
        # Asked before reading: what is written up to the end is then read in the last round.
        running = process.poll() is None
        ticks, position = exchange.read_ticks(position)
        for tick in ticks:
            on_tick(tick)
        time.sleep(POLL_SECONDS if running else 0)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End torchrun, which ends its ranks; nothing to do if it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()  # the ranks notice that their parent is gone (worker.py) and end too
            process.wait()


def describe_failure(exchange: Exchange) -> str:
    """Which rank failed first, and the last lines it wrote. See [Note: which rank failed]."""
    summary = exchange.launcher_log.read_text(encoding="utf-8", errors="replace")
    logs = {log.parent.name: log for log in sorted(exchange.logs.glob("*/attempt_*/*/stderr.log"))}
    errors = sorted(exchange.logs.glob("*/attempt_*/*/error.json"), key=lambda path: path.stat().st_mtime_ns)
    raised = [error.parent.name for error in errors]
    for rank, status in re.findall(r"rank +: (\d+) .*\n +exitcode +: -(\d+) ", summary):
        # SIGTERM is how torchrun ends the ranks that are left; one that raised may still abort on its way out.
        if int(status) != signal.SIGTERM and rank not in raised:
            return f"rank {rank} was killed by {_name_signal(int(status))}.\n{_tail(logs[rank])}".rstrip()
    # Without an error file no rank came as far as its own code: its imports failed.
    candidates = raised + [rank for rank, log in logs.items() if log.stat().st_size]
    if candidates:
        return f"rank {candidates[0]} failed:\n{_tail(logs[candidates[0]])}"
    return f"torchrun could not start the ranks:\n{_tail(exchange.launcher_log)}"


def _name_signal(number: int) -> str:
    return f"signal {number} ({signal.Signals(number).name})"


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:])
