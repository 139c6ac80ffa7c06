"""One process of `scale.py`: rank 0 of many that are not there, in a process group whose collectives do nothing."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import sys
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from importlib import import_module
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from given_gradients import Listed
from meters import count_calls, resident_bytes, start_of_peak
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardstep
from shardstep.planning import Layout, ParamSpec, make_plan
from shardstep.wire import collectives
from shardstep.wire.hosts import Hosts

sgd_module = import_module("torch.optim.sgd")  # torch.optim hides it
PARAMS_PER_BUCKET = 4
# Elements of a parameter, by buckets: enough that 16,384 ranks get some of every bucket, and few, so that the step's
# own arithmetic is small.
NUMEL = {7: 65_536, 250: 32_768}
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 3
STEPS = 40
STEPPING_SECONDS = 8.0  # after which it is enough of steps that are slow
LEAST_STEPS = 3
ITEMSIZE = 4
MOST_ADDRESS_BYTES = 12 * 2**30  # a plan that grows with the ranks must not take the machine down
PLAN_BUCKET_NUMEL, PLAN_ALIGNMENT = 25_000_000, 16
SENDING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "batch_isend_irecv",
    "broadcast",
    "gather",
    "irecv",
    "isend",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "send",
)


def make_model(buckets: int) -> Listed:
    return Listed([(NUMEL[buckets],)] * PARAMS_PER_BUCKET * buckets, torch.device("cpu"))


def shard(model: Listed, buckets: int) -> Any:
    """With as many buckets; half an element more than they need, against rounding."""
    bucket_mb = (PARAMS_PER_BUCKET * NUMEL[buckets] + 0.5) * ITEMSIZE / 1e6
    config = shardstep.ShardConfig(bucket_mb=bucket_mb)
    return shardstep.shard(model, torch.optim.SGD, lr=LEARNING_RATE, config=config)


def join_nobody(ranks: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    probe = torch.ones(3)
    dist.all_reduce(probe)
    if not torch.equal(probe, torch.ones(3)):
        raise RuntimeError("the fake process group reduced something: this torch's does more than nothing")
    # Imports and the search for the finest layout are paid once in a process, whatever is built in it.
    toy = shardstep.shard(Listed([(64,)] * 2, torch.device("cpu")), torch.optim.SGD, lr=LEARNING_RATE)
    toy.close()


def trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# -- building ----------------------------------------------------------------------------------------------------------


def measure_build(arguments: argparse.Namespace) -> dict[str, Any]:
    """Resident memory before has the model in it, so what is over that is beyond the model's own bytes."""
    join_nobody(arguments.ranks)
    model = make_model(arguments.buckets)
    trim()
    before = resident_bytes()
    start_of_peak()
    start = time.perf_counter()
    optimizer = shard(model, arguments.buckets)
    seconds = time.perf_counter() - start
    peak = resident_bytes(peak=True)
    trim()
    return {
        "seconds": seconds,
        "peak": peak - before,
        "kept": resident_bytes() - before,
        "buckets_made": count_buckets(optimizer),
        "model": sum(param.nbytes for param in model.parameters()),
    }


def measure_traced(arguments: argparse.Namespace) -> dict[str, Any]:
    """Python's own objects: exact, and several times slower, so in a process of its own."""
    join_nobody(arguments.ranks)
    model = make_model(arguments.buckets)
    tracemalloc.start()
    optimizer = shard(model, arguments.buckets)
    kept, peak = tracemalloc.get_traced_memory()
    return {"kept": kept, "peak": peak, "buckets_made": count_buckets(optimizer)}


def count_buckets(optimizer: Any) -> int:
    return len(optimizer.bucket_nbytes() if hasattr(optimizer, "bucket_nbytes") else optimizer._plan.buckets)


# -- stepping ----------------------------------------------------------------------------------------------------------


class Clock:
    """Processor time of this thread in a function, summed: what another program takes does not count."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.thread_time() - start

        return wrapper


def measure_step(arguments: argparse.Namespace) -> dict[str, Any]:
    join_nobody(arguments.ranks)
    model, plain = make_model(arguments.buckets), make_model(arguments.buckets)
    gradients = make_gradients(model)
    optimizer = shard(model, arguments.buckets)
    for _ in range(WARM_UP_STEPS):
        time_step(model, plain, optimizer, gradients)
    rows: list[dict[str, float]] = []
    end = time.perf_counter() + STEPPING_SECONDS
    while len(rows) < STEPS and (len(rows) < LEAST_STEPS or time.perf_counter() < end):
        rows.append(time_step(model, plain, optimizer, gradients))
    return {
        "seconds": {name: median(row[name] for row in rows) for name in rows[0]},
        "steps": len(rows),
        "buckets_made": count_buckets(optimizer),
    }


def make_gradients(model: Listed) -> list[Tensor]:
    return [1e-3 * torch.randn_like(param) for param in model.parameters()]


def time_step(model: Listed, plain: Listed, optimizer: Any, gradients: list[Tensor]) -> dict[str, float]:
    """Hooks are what backward takes beyond that of an equal model without an optimizer.

    Without the fake group's own work: it copies a bucket rank by rank, which no backend has its host do.
    """
    start = time.thread_time()
    plain(gradients).backward()
    bare = time.thread_time() - start
    plain.zero_grad()
    fake, arithmetic = Clock(), Clock()
    gather, scatter = fake.timed(collectives._all_gather), fake.timed(collectives._reduce_scatter)
    with (
        mock.patch.object(collectives, "_all_gather", gather),
        mock.patch.object(collectives, "_reduce_scatter", scatter),
        mock.patch.object(sgd_module, "sgd", arithmetic.timed(sgd_module.sgd)),
    ):
        start = time.thread_time()
        model(gradients).backward()
        backward = time.thread_time() - start - fake.seconds
        fake.seconds = 0.0
        start = time.thread_time()
        optimizer.step()
        step = time.thread_time() - start - fake.seconds
    optimizer.zero_grad()
    return {"hooks": backward - bare, "step": step, "host": step - arithmetic.seconds}


# -- counting ----------------------------------------------------------------------------------------------------------


def measure_counts(arguments: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own: the profiler takes a minute over ten thousand operators."""
    join_nobody(arguments.ranks)
    model = make_model(arguments.buckets)
    gradients = make_gradients(model)
    optimizer = shard(model, arguments.buckets)
    for _ in range(WARM_UP_STEPS):
        iterate(model, optimizer, gradients)
    return {
        "buckets_made": count_buckets(optimizer),
        "calls": count_python(model, optimizer, gradients),
        "sent": count_sent(model, optimizer, gradients),
        # The profiler takes a minute over the operators of many buckets, and sees the same of few.
        "seen": count_seen(model, optimizer, gradients) if arguments.buckets == min(NUMEL) else {},
    }


def count_python(model: Listed, optimizer: Any, gradients: list[Tensor]) -> dict[str, dict[str, int]]:
    """Calls of functions written in Python and in C, in backward and in step()."""
    loss = model(gradients)
    found = {"backward": profiled(loss.backward), "step": profiled(optimizer.step)}
    optimizer.zero_grad()
    return found


def profiled(action: Callable[[], object]) -> dict[str, int]:
    calls: Counter[str] = Counter()

    def count(frame: object, event: str, argument: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return {"python": calls["call"], "c": calls["c_call"]}


def count_sent(model: Listed, optimizer: Any, gradients: list[Tensor]) -> dict[str, dict[str, int]]:
    """Calls of torch.distributed's functions in one iteration, and the bytes of what they were given first.

    Records go between hosts past those functions: combined, the highest and the lowest of every byte, so twice as long.
    """
    counts: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    combine = Hosts.combine

    def counting(hosts: Hosts, record: bytes) -> Any:
        counts["records"] += 1
        nbytes["records"] += 2 * len(record)
        return combine(hosts, record)

    with counted(counts, nbytes), mock.patch.object(Hosts, "combine", counting):
        iterate(model, optimizer, gradients)
    return {name: {"calls": counts[name], "nbytes": nbytes[name]} for name in sorted(counts)}


@contextmanager
def counted(counts: Counter[str], nbytes: Counter[str]) -> Iterator[None]:
    def watching(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            nbytes[name] += size_of(next(iter([*args, *kwargs.values()]), None))
            return function(*args, **kwargs)

        return wrapper

    there = {name: watching(name, getattr(dist, name)) for name in SENDING if hasattr(dist, name)}
    with ExitStack() as patches:
        for name, function in there.items():
            patches.enter_context(mock.patch.object(dist, name, function))
        yield


def size_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return sum(map(size_of, value))
    value = getattr(value, "tensor", value)  # of a P2POp
    return value.nbytes if isinstance(value, Tensor) else 0


def count_seen(model: Listed, optimizer: Any, gradients: list[Tensor]) -> dict[str, int]:
    """The same by the profiler, which also sees what goes round torch.distributed's functions."""
    return count_calls(lambda: iterate(model, optimizer, gradients)).by_name


def iterate(model: Listed, optimizer: Any, gradients: list[Tensor]) -> None:
    model(gradients).backward()
    optimizer.step()
    optimizer.synchronize()
    optimizer.zero_grad()


# -- planning ----------------------------------------------------------------------------------------------------------


def llama_specs() -> list[ParamSpec]:
    """7 B parameters: 32 layers of width 4,096, 11,008 in the middle, and 32,000 tokens."""
    width, middle, vocab = 4096, 11_008, 32_000
    layer = [(width, width)] * 4 + [(middle, width)] * 2 + [(width, middle), (width,), (width,)]
    shapes = [(vocab, width), *layer * 32, (width,), (vocab, width)]
    return [ParamSpec(f"parameter {place}", shape, "float32", "cuda:0", 0) for place, shape in enumerate(shapes)]


def measure_plan(arguments: argparse.Namespace) -> dict[str, Any]:
    specs = llama_specs()
    trim()
    before = resident_bytes()
    start_of_peak()
    start = time.perf_counter()
    plan = make_plan(
        specs,
        Layout.FLAT,
        world_size=arguments.ranks,
        bucket_numel=PLAN_BUCKET_NUMEL,
        alignment=PLAN_ALIGNMENT,
    )
    seconds = time.perf_counter() - start
    peak = resident_bytes(peak=True)
    numel = sum(spec.numel for spec in specs)
    return {"seconds": seconds, "peak": peak - before, "buckets_made": len(plan.buckets), "numel": numel}


MEASURES = {
    "build": measure_build,
    "traced": measure_traced,
    "step": measure_step,
    "count": measure_counts,
    "plan": measure_plan,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", choices=MEASURES, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--buckets", type=int, choices=NUMEL, default=min(NUMEL), help="of all but plan")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    try:
        result = MEASURES[arguments.measure](arguments)
    except MemoryError:
        result = {"failed": "too much memory"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
