"""Instruments: what one rank sent and received, how much memory it took, which collectives it called.

[Note: bytes per rank] All ranks of a run share the loopback interface, and so does everything else on the machine, so
its counter can neither tell ranks apart nor be trusted on a busy machine. The kernel also counts per connection
(TCP_INFO: tcpi_bytes_sent less tcpi_bytes_retrans, tcpi_bytes_received): summed over this process's own sockets that is
exactly what this rank sent and received, Gloo's message headers included, TCP/IP headers and repeats not. Barriers
round a reading leave a hundred bytes or two of uncertainty.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

_TCP_INFO_BYTES = 256
_BYTES_RECEIVED_AT = 128  # offsets in struct tcp_info of linux/tcp.h, fixed since Linux 4.19
_BYTES_SENT_AT = 200  # followed by the bytes among them that were sent again


def _socket_totals() -> dict[str, tuple[int, int]]:
    """(bytes sent, bytes received) of every TCP connection of this process, by the kernel's name of the socket."""
    totals: dict[str, tuple[int, int]] = {}
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since it was listed
            name = os.readlink(f"/proc/self/fd/{entry}")
            if not name.startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry))) as peer:
                if peer.family not in (socket.AF_INET, socket.AF_INET6) or peer.type != socket.SOCK_STREAM:
                    continue
                info = peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            sent, repeated = struct.unpack_from("QQ", info, _BYTES_SENT_AT)
            (received,) = struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)
            totals[name] = (sent - repeated, received)
    return totals


def _loopback_bytes() -> int:
    for line in Path("/proc/net/dev").read_text().splitlines():
        interface, _, counters = line.partition(":")
        if interface.strip() == "lo":
            return int(counters.split()[8])  # the ninth counter is bytes transmitted
    raise RuntimeError("/proc/net/dev has no interface lo; these benchmarks run all ranks on one Linux machine")


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; these benchmarks need Linux's /proc")


def resident_bytes(*, peak: bool = False) -> int:
    """Of this process: now, or the most since `start_of_peak`."""
    return _status_bytes("VmHWM" if peak else "VmRSS")


def start_of_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to what is resident now


@dataclass(frozen=True, slots=True)
class Observation:
    """What one action cost this rank; `loopback` is the machine's."""

    seconds: float
    sent: int
    received: int
    loopback: int
    extra_memory: int  # highest resident memory during the action, over the resident memory before it


def _observe_once(action: Callable[[], object]) -> Observation:
    # Freed but still resident memory would hide what the action allocates: give it back first.
    ctypes.CDLL(None).malloc_trim(0)
    # The outer barriers keep a fast rank's next action out of a slow rank's readings.
    dist.barrier()
    start_of_peak()
    resident, loopback, before = _status_bytes("VmRSS"), _loopback_bytes(), _socket_totals()
    dist.barrier()
    start = time.perf_counter()
    action()
    seconds = time.perf_counter() - start
    dist.barrier()
    after, loopback = _socket_totals(), _loopback_bytes() - loopback
    extra = max(_status_bytes("VmHWM") - resident, 0)
    dist.barrier()
    sent = sum(total[0] - before.get(name, (0, 0))[0] for name, total in after.items())
    received = sum(total[1] - before.get(name, (0, 0))[1] for name, total in after.items())
    return Observation(seconds, sent, received, loopback, extra)


def observe(action: Callable[[], object]) -> Observation:
    """Run `action` on all ranks at once and observe it; the barriers' own bytes are taken off."""
    idle = _observe_once(lambda: None)
    seen = _observe_once(action)
    return Observation(
        seconds=seen.seconds,
        sent=max(seen.sent - idle.sent, 0),
        received=max(seen.received - idle.received, 0),
        loopback=seen.loopback,  # others' traffic in the idle reading would be taken off ours
        extra_memory=seen.extra_memory,
    )


def slowest_rank_seconds(action: Callable[[], object]) -> float:
    """Wall time of `action`, started together, on the rank that took longest."""
    dist.barrier()
    start = time.perf_counter()
    action()
    elapsed = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return elapsed.item()


_POINT_TO_POINT = frozenset({"send", "recv_", "recv_any_source_"})


@dataclass(frozen=True, slots=True)
class Calls:
    """How often an action called the process group."""

    collectives: int
    messages: int  # point to point: sends and receives
    by_name: dict[str, int]


@contextmanager
def _silent_stderr() -> Iterator[None]:
    """The profiler announces its start and end from C++, past sys.stderr and every log level."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def count_calls(action: Callable[[], object]) -> Calls:
    """Count by the profiler's c10d operators: also what bypasses the functions of torch.distributed is seen."""
    with _silent_stderr(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        action()
    names = Counter(
        event.name.partition("::")[2]
        for event in profiler.events()
        if event.name.startswith(("c10d::", "_c10d_functional::")) and not event.name.endswith("wait_tensor")
    )
    messages = sum(count for name, count in names.items() if name in _POINT_TO_POINT)
    return Calls(names.total() - messages, messages, dict(sorted(names.items())))
