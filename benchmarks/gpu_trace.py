"""The part of `gpu.py` that asks the profiler: does communication run under computation, and does the host wait?"""

from __future__ import annotations

import gzip
import json
import re
import tempfile
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_contenders import CONTENDERS, DROP_IN, OVERLAP, WAIT, Contender, Rank, Task
from torch.profiler import ProfilerActivity, record_function

STEPS = 3
CHECKED_STEPS = 5
WARM_UP_STEPS = 5
MOST_NBYTES = 3_000_000  # of the trace that is kept
PHASES = ("forward", "backward", "step")
KERNEL = re.compile(r"nccl.*?_(AllGather|ReduceScatter|AllReduce|Broadcast|SendRecv|Reduce)", re.IGNORECASE)
C10D = ("c10d::", "_c10d_functional::")

Event = dict[str, Any]
Interval = tuple[float, float]


# -- the trace ---------------------------------------------------------------------------------------------------------


def measure_trace(rank: Rank, task: Task, kept: Path) -> dict[str, Any]:
    contender = CONTENDERS[OVERLAP](OVERLAP, task, rank.device)
    for _ in range(WARM_UP_STEPS):
        contender.iterate()
    profiled = rank.peers.rank == 0
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("first.json", "second.json")]
        for file in files:  # the profiler's first use is slow: only the second is looked at
            profile(rank, contender, file if profiled else None)
        found = read_trace(files[-1], kept) if profiled else {}
    sizes = getattr(contender.optimizer, "bucket_nbytes", None)
    result = found | {"task": task.name, "buckets": None if sizes is None else len(sizes())}
    return result | {"waits": measure_waits(rank, task)}


def profile(rank: Rank, contender: Contender, file: Path | None) -> None:
    """Three times from step to backward, so that every gathering is followed by the forward that it should run under.

    Only the rank that is given a file is profiled; the others train with it.
    """
    contender.loss().backward()
    # On the host all messages end inside: torch crashes when one of Gloo that outlives the profiler is waited for.
    on_host = rank.device.place.type == "cpu"
    if file is None:
        train_in_phases(rank, contender, complete=on_host)
    else:
        activities = [ProfilerActivity.CPU] if on_host else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            train_in_phases(rank, contender, complete=on_host)
        profiler.export_chrome_trace(str(file))
    if not on_host:
        end_of_step(contender)


def train_in_phases(rank: Rank, contender: Contender, *, complete: bool) -> None:
    for _ in range(STEPS):
        with record_function("bench::step"):
            contender.optimizer.step()
            contender.optimizer.zero_grad()
        with record_function("bench::forward"):
            loss = contender.loss()
        with record_function("bench::backward"):
            loss.backward()
    if complete:
        end_of_step(contender)
    rank.device.synchronize()  # or the profiler would miss what still runs


def end_of_step(contender: Contender) -> None:
    contender.optimizer.step()
    contender.optimizer.zero_grad()
    contender.finish()


def read_trace(file: Path, kept: Path) -> dict[str, Any]:
    trace = json.loads(file.read_text())
    events: list[Event] = trace["traceEvents"]
    calls = Counter(
        event["name"].partition("::")[2]
        for event in events
        if event.get("cat") == "cpu_op" and event["name"].startswith(C10D) and "wait_tensor" not in event["name"]
    )
    size = keep(trace, kept)
    return {"calls": dict(calls), "kernels": overlaps(events), "steps": STEPS, "trace_nbytes": size}


def keep(trace: dict[str, Any], kept: Path) -> int:
    """Write the trace, or its first step if all of it is large; without the fields that name a machine."""
    events: list[Event] = trace["traceEvents"]
    size = write(trace, events, kept)
    if size > MOST_NBYTES:
        starts = sorted(event["ts"] for event in events if is_phase(event, "step"))
        size = write(trace, [e for e in events if e["ph"] == "M" or starts[0] <= e["ts"] < starts[1]], kept)
    return size


def write(trace: dict[str, Any], events: Sequence[Event], kept: Path) -> int:
    fields = {key: trace[key] for key in ("schemaVersion", "deviceProperties", "displayTimeUnit") if key in trace}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(gzip.compress(json.dumps(fields | {"traceEvents": list(events)}).encode(), mtime=0))
    return kept.stat().st_size


def is_phase(event: Event, phase: str) -> bool:
    return event.get("cat") == "user_annotation" and event["name"] == f"bench::{phase}"


def overlaps(events: Sequence[Event]) -> dict[str, dict[str, float]]:
    """For every kind of NCCL kernel: how many, their seconds, and the share of these under other kernels.

    "forward", "backward" and "step" are the shares under kernels that were launched in that phase, whichever phase the
    host is in when they run; "any" is that under all of them.
    """
    kernels = [event for event in events if event.get("cat") == "kernel"]
    launched = launch_times(events)
    phases = {phase: [interval(event) for event in events if is_phase(event, phase)] for phase in PHASES}
    computing: dict[str, list[Interval]] = {"any": [], **{phase: [] for phase in PHASES}}
    sending: dict[str, list[Interval]] = {}
    for kernel in kernels:
        if "nccl" in kernel["name"].lower():
            named = KERNEL.search(kernel["name"])
            sending.setdefault(named.group(1) if named else "other", []).append(interval(kernel))
            continue
        computing["any"].append(interval(kernel))
        at = launched.get(kernel["args"].get("correlation"))
        for phase, spans in phases.items():
            if at is not None and any(start <= at < stop for start, stop in spans):
                computing[phase].append(interval(kernel))
    merged = {name: merge(intervals) for name, intervals in computing.items()}
    return {kind: describe(intervals, merged) for kind, intervals in sorted(sending.items())}


def launch_times(events: Iterable[Event]) -> dict[Any, float]:
    """When the host launched what has this correlation number."""
    calls = (event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))
    return {event["args"]["correlation"]: event["ts"] for event in calls if "correlation" in event.get("args", {})}


def describe(sending: Sequence[Interval], computing: dict[str, list[Interval]]) -> dict[str, float]:
    total = sum(stop - start for start, stop in sending)
    shares = {
        name: sum(covered(one, merged) for one in sending) / total if total else 0.0
        for name, merged in computing.items()
    }
    return {"count": len(sending), "seconds": total / 1e6, **shares}


def interval(event: Event) -> Interval:
    """In microseconds."""
    return event["ts"], event["ts"] + event["dur"]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Their union, as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged


def covered(one: Interval, merged: Sequence[Interval]) -> float:
    """How much of an interval lies in a union."""
    start, stop = one
    first = bisect_left(merged, start, key=lambda other: other[1])
    total = 0.0
    for low, high in merged[first:]:
        if low >= stop:
            break
        total += min(stop, high) - max(start, low)
    return total


# -- waiting -----------------------------------------------------------------------------------------------------------


def measure_waits(rank: Rank, task: Task) -> dict[str, list[str] | None]:
    """Where whole iterations, clipping included, make a host wait for its device; None if that cannot be seen."""
    found: dict[str, list[str] | None] = {}
    for name in (WAIT, OVERLAP, DROP_IN):
        contender = CONTENDERS[name](name, task, rank.device)
        for _ in range(WARM_UP_STEPS):
            contender.iterate_with_clipping()
        contender.finish()
        found[name] = find_waits(rank, contender)
        rank.peers.say(f"{name}: waits for the device {found[name]}")
    return found


def find_waits(rank: Rank, contender: Contender) -> list[str] | None:
    """First as warnings, and as errors only where no rank had one: a rank that raises leaves the others waiting."""
    with warnings.catch_warnings(record=True) as caught, rank.device.waits_are("warn"):
        warnings.simplefilter("always")
        train_with_clipping(contender)
    contender.finish()
    places = {f"{Path(w.filename).name}:{w.lineno}" for w in caught if "called a synchronizing" in str(w.message)}
    everywhere = sorted(set().union(*rank.peers.from_all(places)))
    if not everywhere:
        with rank.device.waits_are("error"):
            train_with_clipping(contender)
        contender.finish()
    return everywhere if rank.device.tells_waits else None


def train_with_clipping(contender: Contender) -> None:
    for _ in range(CHECKED_STEPS):
        contender.iterate_with_clipping()
