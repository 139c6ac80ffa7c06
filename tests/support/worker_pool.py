"""Processes that run the body of a test as the ranks of a process group.

`WorkerPool(4).run(body, x)` calls `body(x)` on four ranks and returns their results in rank order. `body` is a function
at the top level of a module, and learns its rank from `dist.get_rank()`. Importing torch takes seconds, so a pool
starts its processes at the first run and keeps them; tests get theirs from the fixture `workers` in conftest.py.

[Note: any failure ends the processes] After a job that raised, died or ran out of time, nobody knows which collectives
each rank has issued: one still in flight would pair with a collective of the next job, and an innocent test would hang
or compare wrong numbers. That holds even if every rank raised, for they need not have raised at the same place. So the
pool ends its processes after any failure, and the next run starts new ones. A body that expects an error catches it.

[Note: torch.save, not Connection.send] torch teaches multiprocessing's pickler to send a tensor as a file descriptor of
shared memory, which stays open as long as the tensor lives; a few thousand of them use up the process's limit.
`torch.save` into bytes sends plain data, and keeps tensors that share a storage together.

[Note: ranks are forked from a warm server] Importing torch, the front end of its compiler (which the first step of an
optimizer imports) and shardstep takes seconds of a core. multiprocessing's fork server does so once per pytest process;
every rank is a fork of it and starts in a few hundredths of a second. The server has imported modules and done nothing
else: it has one thread, no process group and no CUDA context, so a rank finds what it would have imported itself. Ranks
that use NCCL are spawned, each as a new interpreter.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import re
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

LOCALHOST = "127.0.0.1"
GROUP_TIMEOUT = timedelta(seconds=60)
START_SECONDS = 90.0  # to import torch on every rank, on two busy cores
GRACE_SECONDS = 3.0  # for the other ranks to fail as well, once one has
LOG_LINES = 30
WARM_MODULES = [  # see [Note: ranks are forked from a warm server]
    "torch", "torch._dynamo", "torch.distributed.algorithms.ddp_comm_hooks.ddp_zero_hook",
    "torch.distributed.checkpoint", "torch.profiler", "hypothesis", "pytest", "_pytest.config", "shardstep",
    "shardstep.ddp_zero_hook",
]  # fmt: skip


class WorkerFailure(RuntimeError):  # noqa: N818 - the error is elsewhere, this is the report
    """A rank raised or died; the text holds the traceback of the rank that failed first."""


class WorkerTimeout(RuntimeError):  # noqa: N818
    """Some ranks did not finish in time; the text says which, and where each of them is."""


@dataclass(frozen=True, slots=True)
class _Returned:
    value: Any


@dataclass(frozen=True, slots=True)
class _Failed:
    at: float  # time.monotonic(), which the processes of a machine share
    summary: str
    text: str
    died: bool = False


@dataclass(frozen=True, slots=True)
class _Seat:
    """Which worker a process is to be."""

    rank: int
    world_size: int
    backend: str
    store_port: int
    log: Path
    stacks: Path


@dataclass(frozen=True, slots=True)
class _Worker:
    seat: _Seat
    process: BaseProcess
    pipe: connection.Connection


def _pack(value: object) -> bytes:
    """See [Note: torch.save, not Connection.send]."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack(data: bytes) -> Any:
    # Not weights_only: these bytes come from a process of our own, and hold functions.
    return torch.load(io.BytesIO(data), weights_only=False)


class WorkerPool:
    """`world_size` processes in one group: started at the first run, reused until a run fails or `close`."""

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self.backend = backend
        self._crew: _Crew | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 60, **kwargs: Any) -> list[Any]:
        """What `function(*args, **kwargs)` returned on each rank, or WorkerFailure, or WorkerTimeout.

        Every rank starts from `torch.manual_seed(0)` and under the caller's warning filters. `pytest.skip` in
        `function` counts as a failure: the test decides that before it calls `run`.
        """
        __tracebackhide__ = True  # pytest then shows the test's line and our report, not this file
        job = _pack((_warning_filters(), function, args, kwargs))
        try:
            if self._crew is None:
                self._crew = _Crew(self.world_size, self.backend)
                self._crew.collect(START_SECONDS)
            self._crew.send(job)
            return self._crew.collect(timeout)
        except BaseException:  # pytest-timeout and Ctrl-C too: the workers are busy with a job nobody waits for
            self.close()  # [Note: any failure ends the processes]
            raise

    def close(self) -> None:
        """End the processes. A later run starts new ones."""
        if self._crew is not None:
            self._crew.kill()
            self._crew = None


class _Crew:
    """The processes behind a pool, from their start to their end; they are never repaired, only replaced."""

    def __init__(self, world_size: int, backend: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="worker_pool_")
        # The store lives here, on a port that the kernel picks as it binds: no other process can take it in between.
        self._store = dist.TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self._workers: list[_Worker] = []
        context = _context_for(backend)
        with mock.patch.dict(os.environ, _worker_environment()):
            for rank in range(world_size):
                base = Path(self._directory.name, f"rank{rank}")
                files = base.with_suffix(".log"), base.with_suffix(".stacks")
                seat = _Seat(rank, world_size, backend, self._store.port, *files)
                pipe, worker_pipe = context.Pipe()
                # Daemons: multiprocessing ends them when this process exits, after an interrupt as well.
                process = context.Process(target=_serve, args=(seat, worker_pipe), daemon=True)
                process.start()
                worker_pipe.close()  # or the death of the worker would not be the end of the pipe
                self._workers.append(_Worker(seat, process, pipe))

    def send(self, job: bytes) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # a dead worker: collect() says so
                worker.pipe.send_bytes(job)

    def collect(self, timeout: float) -> list[Any]:
        """The value of each rank's answer; raises unless all of them returned one."""
        __tracebackhide__ = True
        returned: dict[int, Any] = {}
        failed: dict[int, _Failed] = {}
        waiting = list(self._workers)
        deadline = time.monotonic() + timeout
        while waiting and (seconds_left := deadline - time.monotonic()) > 0:
            connection.wait([handle for w in waiting for handle in (w.pipe, w.process.sentinel)], seconds_left)
            for worker in waiting:
                match _poll(worker):
                    case _Returned(value):
                        returned[worker.seat.rank] = value
                    case _Failed() as failure:
                        failed[worker.seat.rank] = failure
            waiting = [w for w in waiting if w.seat.rank not in returned.keys() | failed.keys()]
            if any(failure.died for failure in failed.values()):
                break
            if failed:
                deadline = min(deadline, min(failure.at for failure in failed.values()) + GRACE_SECONDS)
        if failed:
            raise WorkerFailure(self._failure_report(failed, returned))
        if waiting:
            raise WorkerTimeout(_timeout_report(waiting, sorted(returned), timeout))
        return [returned[worker.seat.rank] for worker in self._workers]

    def _failure_report(self, failed: dict[int, _Failed], returned: dict[int, Any]) -> str:
        first = min(failed, key=lambda rank: failed[rank].at)
        lines = [f"rank {first} of {len(self._workers)} failed first:", failed[first].text.rstrip()]
        for rank in range(len(self._workers)):
            if rank not in failed:
                lines.append(f"rank {rank} {'had finished' if rank in returned else 'was still running'}")
            elif rank != first:
                lines.append(f"rank {rank} also failed: {failed[rank].summary}")
        return "\n".join([*lines, *_output_tail(self._workers[first])])

    def kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._directory.cleanup()


def _poll(worker: _Worker) -> _Returned | _Failed | None:
    try:
        if worker.pipe.poll():
            answer: _Returned | _Failed = _unpack(worker.pipe.recv_bytes())
            return answer
    except (EOFError, OSError):  # the pipe ends a moment before the process does
        worker.process.join(1)
    code = worker.process.exitcode
    if code is None:
        return None
    text = f"died with exit code {code}" + (f" ({signal.Signals(-code).name})" if code < 0 else "")
    # A head start: the peers' "connection closed" can get here before the death that caused it.
    return _Failed(time.monotonic() - 0.5, text, text, died=True)


def _timeout_report(stuck: list[_Worker], finished: list[int], timeout: float) -> str:
    ranks = [worker.seat.rank for worker in stuck]
    lines = [f"not finished after {timeout:g} s: ranks {ranks}; finished: ranks {finished}"]
    for worker in stuck:
        assert worker.process.pid is not None
        os.kill(worker.process.pid, signal.SIGUSR1)  # _serve has registered a dump of the stacks
    time.sleep(1)
    for worker in stuck:
        threads = worker.seat.stacks.read_text().strip().split("\n\n") if worker.seat.stacks.exists() else []
        shown = [thread for thread in threads if _exit_with_parent.__name__ not in thread] or ["(no stack)"]
        lines += [f"rank {worker.seat.rank} is here, innermost call first:", "\n\n".join(shown), *_output_tail(worker)]
    return "\n".join(lines)


def _output_tail(worker: _Worker) -> list[str]:
    output = worker.seat.log.read_text(errors="replace").splitlines() if worker.seat.log.exists() else []
    lines = [line for line in output if not line.startswith("[Gloo] Rank")]  # Gloo greets every new group
    return [f"--- output of rank {worker.seat.rank}:", *lines[-LOG_LINES:]] if lines else []


def _context_for(backend: str) -> Any:
    """Return how processes start: see [Note: ranks are forked from a warm server]."""
    if "nccl" in backend:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(WARM_MODULES)
    return context


def _worker_environment() -> dict[str, str]:
    """Variables that must be set before a worker imports torch."""
    # Without an interface Gloo looks up the host's name, which on some machines is the address of another host.
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}


def _warning_filters() -> list[tuple[Any, ...]]:
    """The filters in force here, each as arguments of `warnings.filterwarnings`.

    Under pytest they are those of pyproject.toml and of the test's marks, so that the ranks follow the same rules.
    """

    def text(pattern: re.Pattern[str] | str | None) -> str:
        return pattern.pattern if isinstance(pattern, re.Pattern) else pattern or ""

    return [(action, text(m), category, text(module), line) for action, m, category, module, line in warnings.filters]


# From here on: what runs in a worker.


def _serve(seat: _Seat, pipe: connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole foreground group; the parent ends us
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    _write_output_to(seat.log)
    stacks = seat.stacks.open("w")
    faulthandler.register(signal.SIGUSR1, file=stacks)
    pipe.send_bytes(_answer(partial(_join_group, seat)))
    with contextlib.suppress(EOFError):
        while True:
            job = pipe.recv_bytes()
            os.ftruncate(sys.stdout.fileno(), 0)  # a report shows the output of its own job
            pipe.send_bytes(_answer(partial(_do, job)))
            # What this job leaves in cycles (as DDP does) must not be torn down in the middle of the next one.
            gc.collect()


def _answer(action: Callable[[], Any]) -> bytes:
    try:
        return _pack(_Returned(action()))
    except BaseException as error:  # SystemExit and pytest's outcomes as well: the parent waits for an answer
        summary = traceback.format_exception_only(error)[-1].partition("\n")[0]
        return _pack(_Failed(time.monotonic(), summary, traceback.format_exc()))


def _do(job: bytes) -> Any:
    filters, function, args, kwargs = _unpack(job)
    with warnings.catch_warnings():
        warnings.resetwarnings()
        for one in reversed(filters):  # each goes in front of those before it
            warnings.filterwarnings(*one)
        torch.manual_seed(0)
        return function(*args, **kwargs)


def _join_group(seat: _Seat) -> None:
    torch.set_num_threads(1)
    torch.set_warn_always(True)  # what torch says once per process would fail only the test that happens to come first
    _rewrite_asserts()
    store = dist.TCPStore(LOCALHOST, seat.store_port, is_master=False, timeout=GROUP_TIMEOUT)
    if "nccl" in seat.backend:
        # NCCL refuses two ranks on one device of one host, so each rank of a test is a host of its own.
        os.environ.update(NCCL_HOSTID=f"host{seat.rank}", NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(0)
    dist.init_process_group(
        seat.backend, store=store, rank=seat.rank, world_size=seat.world_size, timeout=GROUP_TIMEOUT
    )
    gc.freeze()  # all that torch made at import stays: the gc.collect() after each job need not visit it


def _rewrite_asserts() -> None:
    """Let a failing `assert` in a test module show its values, as it does in pytest's own process."""
    with contextlib.suppress(ImportError):  # this is not public; without it a traceback has to do
        from _pytest.config import _prepareconfig

        # No plugins, no capturing, no conftest: all we want is the import hook that reading the configuration installs.
        with mock.patch.dict(os.environ, PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTEST_ADDOPTS=""):
            _prepareconfig(["--noconftest", "--capture=no", "--override-ini=addopts="])


def _write_output_to(path: Path) -> None:
    sys.stdout = sys.stderr = path.open("a", buffering=1)  # by lines: the last words of a killed worker count
    for descriptor in (1, 2):  # and what C++ prints
        os.dup2(sys.stdout.fileno(), descriptor)


def _exit_with_parent() -> None:
    """The parent may be killed, or leave by os._exit as pytest-timeout can; then nobody else ends this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)
