"""Hosts between which a packet takes milliseconds, on one machine: network namespaces, each with one TUN device.

For times that are made of waiting and not of bytes (`hosts.py` is for those). This process reads every packet that a
host sends, and writes it to the host that it is for when it is due. Nothing is attached to the machine's own
interfaces, and no route leads out of the namespaces. The addresses are of the range reserved for benchmarks (RFC 2544).
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import select
import shutil
import struct
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from hosts import _do, _make_namespace

INTERFACE = "eth9"
PORT = 29_501
_NETWORK = bytes([198, 19])
_TUNSETIFF = 0x400454CA
_IS_TUN, _WITHOUT_HEADER = 0x0001, 0x1000
_LONGEST_WAIT = 0.2  # seconds between two looks at the ranks


def why_impossible() -> str | None:
    """Return what this machine lacks to have such hosts, as a sentence; None if nothing."""
    if shutil.which("ip") is None:
        return "Hosts far apart need ip to make network namespaces: install iproute2."
    if os.geteuid() != 0 or not os.access("/dev/net/tun", os.W_OK):
        return "Hosts far apart need root and /dev/net/tun: run it as root, for instance in a container of your own."
    return None


def run_far_apart(command: Sequence[str], count: int, seconds: float) -> None:
    """Run `command` on `count` hosts, one rank each, that are `seconds` apart; raise if one fails, and end all."""
    with ExitStack() as made:
        devices = [_make_host(number, made) for number in range(count)]
        ranks = []
        for number in range(count):
            own = {
                "RANK": str(number),
                "WORLD_SIZE": str(count),
                "OMP_NUM_THREADS": "1",
                "TORCH_CPP_LOG_LEVEL": "ERROR",
            }
            meeting = {"MASTER_ADDR": _address(0), "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": INTERFACE}
            started = subprocess.Popen(["ip", "netns", "exec", _name(number), *command], env=os.environ | own | meeting)
            made.callback(_end, started)
            ranks.append(started)
        _carry_packets(devices, ranks, seconds)
        for number, rank in enumerate(ranks):
            if rank.poll():
                raise RuntimeError(f"rank {number} ended with status {rank.returncode}; see above")


def _name(number: int) -> str:
    return f"far{os.getpid()}n{number}"


def _address(number: int) -> str:
    return f"198.19.0.{number + 1}"


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _make_host(number: int, made: ExitStack) -> int:
    """Make one host; return the device by which its packets come and go."""
    name = _name(number)
    _make_namespace(name, made)
    own = os.open("/proc/self/ns/net", os.O_RDONLY)
    its = os.open(f"/var/run/netns/{name}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        if libc.setns(its, 0):
            raise OSError(ctypes.get_errno(), "setns")
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        made.callback(os.close, device)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH", INTERFACE.encode(), _IS_TUN | _WITHOUT_HEADER))
    finally:
        libc.setns(own, 0)
        os.close(own)
        os.close(its)
    _do(f"ip -n {name} addr add {_address(number)}/24 dev {INTERFACE}")
    _do(f"ip -n {name} link set {INTERFACE} mtu 60000 txqueuelen 5000 up")
    return device


def _carry_packets(devices: Sequence[int], ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Hand every packet on when it is due, until all ranks have ended or one has failed."""
    due: list[tuple[float, int, int, bytes]] = []  # when, in which order, to which host, what
    order = 0
    while any(rank.poll() is None for rank in ranks) and not any(rank.poll() for rank in ranks):
        wait = min(_LONGEST_WAIT, max(0.0, due[0][0] - time.perf_counter())) if due else _LONGEST_WAIT
        for device in select.select(devices, [], [], wait)[0]:
            for packet in _packets_of(device):
                if packet[0] >> 4 == 4 and packet[16:18] == _NETWORK and packet[19] - 1 < len(devices):
                    order += 1
                    heapq.heappush(due, (time.perf_counter() + seconds, order, packet[19] - 1, packet))
        while due and due[0][0] <= time.perf_counter():
            _, _, to, packet = heapq.heappop(due)
            with suppress(OSError):  # the host's queue is full, or the host is gone: TCP sends it again
                os.write(devices[to], packet)


def _packets_of(device: int) -> list[bytes]:
    packets = []
    while True:
        try:
            packet = os.read(device, 65536)
        except BlockingIOError:
            return packets
        if len(packet) >= 20:
            packets.append(packet)
