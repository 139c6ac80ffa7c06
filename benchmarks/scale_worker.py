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
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from statistics import median
from typing import Any
from unittest import mock

import torch
from given_gradients import Listed
from meters import resident_bytes, start_of_peak
from nobody import join_nobody, sent
from torch import Tensor

import shardstep
from shardstep.comm.host_groups import HostGroups
from shardstep.planning import Layout, ParamSpec, make_plan

sgd_module = import_module("torch.optim.sgd")  # torch.optim hides it
PARAMS_PER_BUCKET = 4
# Elements of a parameter: enough that 16,384 ranks get some of every bucket, and few, so that the step's own
# arithmetic is small.
NUMEL = 65_536
BUCKETS = (7, 250)
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 3
STEPS = 40
STEPPING_SECONDS = 8.0  # after which it is enough of steps that are slow
LEAST_STEPS = 3
ITEMSIZE = 4
MOST_ADDRESS_BYTES = 12 * 2**30  # a plan that grows with the ranks must not take the machine down
PLAN_BUCKET_NUMEL, PLAN_ALIGNMENT = 25_000_000, 16


def make_model(buckets: int) -> Listed:
    return Listed([(NUMEL,)] * PARAMS_PER_BUCKET * buckets, torch.device("cpu"))


def shard(model: Listed, buckets: int) -> Any:
    """With as many buckets; half an element more than they need, against rounding."""
    bucket_mb = (PARAMS_PER_BUCKET * NUMEL + 0.5) * ITEMSIZE / 1e6
    config = shardstep.ShardConfig(bucket_mb=bucket_mb)
    return shardstep.shard(model, torch.optim.SGD, lr=LEARNING_RATE, config=config)


def join(ranks: int) -> None:
    """Imports and the search for the finest layout are paid once in a process, whatever is built in it."""
    join_nobody(ranks)
    toy = shardstep.shard(Listed([(64,)] * 2, torch.device("cpu")), torch.optim.SGD, lr=LEARNING_RATE)
    toy.close()


def trim() -> None:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# -- building ----------------------------------------------------------------------------------------------------------


def measure_build(arguments: argparse.Namespace) -> dict[str, Any]:
    """Resident memory before has the model in it, so what is over that is beyond the model's own bytes."""
    join(arguments.ranks)
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
    join(arguments.ranks)
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
    join(arguments.ranks)
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
    """Hooks are what backward takes beyond that of an equal model without an optimizer."""
    start = time.thread_time()
    plain(gradients).backward()
    bare = time.thread_time() - start
    plain.zero_grad()
    arithmetic = Clock()
    with mock.patch.object(sgd_module, "sgd", arithmetic.timed(sgd_module.sgd)):
        start = time.thread_time()
        model(gradients).backward()
        backward = time.thread_time() - start
        start = time.thread_time()
        optimizer.step()
        step = time.thread_time() - start
    optimizer.zero_grad()
    return {"hooks": backward - bare, "step": step, "host": step - arithmetic.seconds}


# -- counting ----------------------------------------------------------------------------------------------------------


def measure_counts(arguments: argparse.Namespace) -> dict[str, Any]:
    join(arguments.ranks)
    model = make_model(arguments.buckets)
    gradients = make_gradients(model)
    optimizer = shard(model, arguments.buckets)
    for _ in range(WARM_UP_STEPS):
        iterate(model, optimizer, gradients)
    return {
        "buckets_made": count_buckets(optimizer),
        "calls": count_python(model, optimizer, gradients),
        **count_sent(model, optimizer, gradients),
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


def count_sent(model: Listed, optimizer: Any, gradients: list[Tensor]) -> dict[str, Any]:
    """Collectives of one iteration, and the bytes of records: the highest and the lowest of each, so twice as long."""
    nbytes = 0
    send = HostGroups.send

    def counting(hosts: HostGroups, record: bytes) -> Any:
        nonlocal nbytes
        nbytes += 2 * len(record)
        return send(hosts, record)

    sent.clear()
    with mock.patch.object(HostGroups, "send", counting):
        iterate(model, optimizer, gradients)
    return {"sent": dict(sorted(sent.items())), "record_nbytes": nbytes}


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
    parser.add_argument("--buckets", type=int, choices=BUCKETS, default=min(BUCKETS), help="of all but plan")
    arguments = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MOST_ADDRESS_BYTES, MOST_ADDRESS_BYTES))
    try:
        result = MEASURES[arguments.measure](arguments)
    except MemoryError:
        result = {"failed": "too much memory"}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
