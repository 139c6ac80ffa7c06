"""Hosts with slow links, on one machine: network namespaces on one bridge, each link limited in both directions.

Everything is made inside the namespaces: nothing is attached to the machine's own interfaces, and no route leads out.
The addresses are of the range reserved for benchmarks (RFC 2544). All hosts still share the machine's cores.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

SWITCH = "bsw"
INTERFACE = "eth9"
PORT = 29_500
BURST = "256kb"  # what a link may send at once before the limit holds
LATENCY = "50ms"  # the longest that a packet waits in a link's queue before it is dropped
POLL_SECONDS = 0.2


def host(number: int) -> str:
    return f"bh{number}"


def address(number: int) -> str:
    return f"198.18.0.{number + 1}"


def why_impossible() -> str | None:
    """What this machine lacks to have hosts, as a sentence; None if nothing."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"--hosts needs {' and '.join(missing)} to make network namespaces: install iproute2."
    if os.geteuid() != 0:
        return "--hosts needs root to make network namespaces: run it as root, for instance in a container of your own."
    return None


def _do(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr.strip()}")


def _make_namespace(name: str, made: ExitStack) -> None:
    """Only what was made here is deleted: a namespace of that name may belong to another run."""
    try:
        _do(f"ip netns add {name}")
    except RuntimeError as error:
        raise RuntimeError(f"{error}; is another run using it? If not, `ip netns del {name}`") from None
    made.callback(_do, f"ip netns del {name}")
    _do(f"ip -n {name} link set lo up")


@contextmanager
def linked_hosts(count: int, rate: str) -> Iterator[None]:
    """`count` hosts on one switch, every link limited to `rate` (as tc writes it: 1gbit); gone afterwards."""
    with ExitStack() as made:
        _make_namespace(SWITCH, made)
        _do(f"ip -n {SWITCH} link add br0 type bridge")
        _do(f"ip -n {SWITCH} link set br0 up")
        limit = f"root tbf rate {rate} burst {BURST} latency {LATENCY}"
        for number in range(count):
            name, port = host(number), f"p{number}"
            _make_namespace(name, made)
            _do(f"ip -n {SWITCH} link add {port} type veth peer name {INTERFACE} netns {name}")
            _do(f"ip -n {SWITCH} link set {port} master br0 up")
            _do(f"ip -n {name} addr add {address(number)}/24 dev {INTERFACE}")
            _do(f"ip -n {name} link set {INTERFACE} up")
            _do(f"tc -n {name} qdisc add dev {INTERFACE} {limit}")  # host to switch
            _do(f"tc -n {SWITCH} qdisc add dev {port} {limit}")  # switch to host
        yield


def run_on_hosts(command: Sequence[str], count: int) -> None:
    """Run `command` once per host, as one rank each; when one fails the others, which would wait for it, are ended."""
    together = {
        "WORLD_SIZE": str(count),
        "MASTER_ADDR": address(0),
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # it warns that addresses have no names
    }
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            env = os.environ | together | {"RANK": str(number)}
            ranks.append(subprocess.Popen(["ip", "netns", "exec", host(number), *command], env=env))
        while any(rank.poll() is None for rank in ranks):
            _refuse_failure(ranks)
            time.sleep(POLL_SECONDS)
        _refuse_failure(ranks)
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
            rank.wait()


def _refuse_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    for number, rank in enumerate(ranks):
        if rank.poll():
            raise RuntimeError(f"rank {number} ended with status {rank.returncode}; see above")
