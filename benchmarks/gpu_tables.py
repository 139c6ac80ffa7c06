"""Turns what the ranks of `gpu.py` found into tables and targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from gpu_contenders import DDP, DROP_IN, FSDP2, IN_BACKWARD, OVERLAP, TORCH, WAIT
from gpu_one_rank import PLAIN, SHARDED
from gpu_ranks import Result
from report import SPREAD_COLUMNS, Grid, Spread, Target

MOST_OF_FASTER, MOST_OF_TORCH, MOST_OF_TORCH_DROP_IN = 1.05, 0.70, 1.01
MOST_OF_BOUND, MOST_OFF_PREDICTION = 1.05, 0.03
BUCKETS_IN_FLIGHT = 3
HOST_MS = {1: 3.0, 2: 6.0}  # of step(), by ranks
NOTHING = "-"


def of_part(results: Sequence[Result], part: str) -> list[Result]:
    return [result for result in results if result["part"] == part]


def megabytes(nbytes: float | None) -> str:
    return NOTHING if nbytes is None else f"{nbytes / 1e6:,.1f}"


# -- speed -------------------------------------------------------------------------------------------------------------


def speeds(results: Sequence[Result]) -> Iterator[tuple[str, dict[str, Any]]]:
    for result in of_part(results, "speed"):
        for task in result["tasks"]:
            yield f"{result['ranks']} ranks, {task['task']}", task


def ratio(task: dict[str, Any], ours: str, base: str) -> Spread:
    seconds = task["step_seconds"]
    return Spread.of([mine / theirs for mine, theirs in zip(seconds[ours], seconds[base], strict=True)])


def speed_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (
            title,
            name,
            f"{1e3 * median(seconds):.2f}",
            *ratio(task, name, DDP).cells(),
            f"{1e3 * median(task['host_seconds'][name]):.1f}",
        )
        for title, task in speeds(results)
        for name, seconds in task["step_seconds"].items()
    ]
    note = (
        "Forward, backward, step and zero_grad; the slowest rank. Median, quartiles and extremes are of the ratio to "
        "DDP within a round. Host ms: how long the host of the slowest rank is busy with one iteration."
    )
    columns = ("", "contender", "ms", *SPREAD_COLUMNS, "host ms")
    return Grid("Speed", note, columns, tuple(rows), labels=2)


def speed_targets(results: Sequence[Result]) -> Iterator[Target]:
    for title, task in speeds(results):
        faster = min((DDP, FSDP2), key=lambda name: median(task["step_seconds"][name]))
        for ours in (WAIT, OVERLAP):
            yield Target(f"{ours} / {faster}, the faster of DDP and FSDP2, {title}", MOST_OF_FASTER, ratio(task, ours, faster).median)  # fmt: skip # noqa: E501
            yield Target(f"{ours} / {TORCH}, {title}", MOST_OF_TORCH, ratio(task, ours, TORCH).median)
        yield Target(f"{DROP_IN} / {TORCH}, {title}", MOST_OF_TORCH_DROP_IN, ratio(task, DROP_IN, TORCH).median)


# -- memory ------------------------------------------------------------------------------------------------------------


def most(result: Result, key: str) -> int:
    """Of the rank with most."""
    return max(int(rank[key]) for rank in result["memory"])


def told(result: Result, key: str) -> int | None:
    """The same of what the optimizer says of itself; None if it does not."""
    return None if any(rank[key] is None for rank in result["memory"]) else most(result, key)


def activations(ddp: Result) -> float:
    """What DDP needs beside parameters, gradients (their only copy is its buckets) and state."""
    return float(most(ddp, "beyond") - ddp["parameters"] - ddp["state"])


def bound(ours: Result, ddp: Result) -> float | None:
    bucket = told(ours, "bucket")
    if bucket is None:
        return None
    shared = (ddp["state"] + ddp["parameters"]) / ours["ranks"]
    return float(MOST_OF_BOUND * (shared + BUCKETS_IN_FLIGHT * bucket + activations(ddp)))


def predicted(ours: Result, ddp: Result) -> float | None:
    """Beyond the parameters, activations included."""
    plan = told(ours, "predicted")
    return None if plan is None else float(plan + activations(ddp) - ours["parameters"])


def ddp_beside(results: Sequence[Result], ranks: int) -> Result | None:
    alike = (result for result in results if result["ranks"] == ranks and result["contender"] == DDP)
    return next(alike, None)


def memory_grid(results: Sequence[Result]) -> Grid:
    weighed = of_part(results, "memory")
    rows = []
    for result in weighed:
        ddp = ddp_beside(weighed, result["ranks"]) if result["contender"] in (WAIT, IN_BACKWARD) else None
        limits = (None, None) if ddp is None else (bound(result, ddp), predicted(result, ddp))
        keys = ("beyond", "reserved_early", "reserved_late")
        cells = [megabytes(most(result, key)) for key in keys]
        cells += [megabytes(limit) for limit in (told(result, "bucket"), *limits)]
        rows.append((f"{result['ranks']} ranks", result["contender"], *cells))
    shown = [result for result in weighed if result["contender"] == DDP]
    words = "; ".join(f"{megabytes(activations(one))} MB with {one['ranks']} ranks" for one in shown)
    note = (
        "MB, of the rank with most. 'Peak' is allocated memory beyond the parameters' bytes; 'reserved' what the "
        "allocator has from the driver after 20 steps and at the end, after 200 of shard and 20 of the others. The "
        f"bound is {MOST_OF_BOUND} ((state + gradients) / ranks + {BUCKETS_IN_FLIGHT} buckets + activations); "
        "'predicted' is what the optimizer says it needs, and activations. Activations are what DDP needs beside "
        f"parameters, gradients and state: {words or NOTHING}."
    )
    columns = ("", "contender", "peak", "reserved, 20", "reserved, end", "bucket", "bound", "predicted")
    return Grid("Memory", note, columns, tuple(rows), labels=2)


def memory_targets(results: Sequence[Result]) -> Iterator[Target]:
    weighed = of_part(results, "memory")
    for ours in (result for result in weighed if result["contender"] == WAIT):
        title = f"{ours['ranks']} ranks"
        early, late, peak = (most(ours, key) for key in ("reserved_early", "reserved_late", "beyond"))
        yield Target(f"{WAIT}: reserved memory grows from step 20 to 200, {title}", 0.0, (late - early) / 1e6, " MB")
        for torchs in weighed:
            if (torchs["ranks"], torchs["contender"]) == (ours["ranks"], TORCH):
                yield Target(f"{WAIT} / {TORCH}: peak, {title}", 1.0, peak / most(torchs, "beyond"))
        ddp = ddp_beside(weighed, ours["ranks"])
        if ddp is None:
            continue
        limit, foreseen = bound(ours, ddp), predicted(ours, ddp)
        if limit is not None:
            yield Target(f"{WAIT}: peak over its bound, {title}", 1.0, peak / limit)
        if foreseen is not None:
            yield Target(f"{WAIT}: peak off its prediction, {title}", MOST_OFF_PREDICTION, abs(peak / foreseen - 1))


# -- one rank ----------------------------------------------------------------------------------------------------------


def milliseconds(result: Result, name: str, what: str) -> Spread | None:
    """Of the slowest rank in each round."""
    rows = zip(*(rank[name][what] for rank in result["seconds"]), strict=True)
    slowest = [1e3 * max(row) for row in rows]
    return Spread.of(slowest) if slowest else None


def one_rank_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in of_part(results, "one-rank"):
        for name in result["seconds"][0]:
            spreads = [milliseconds(result, name, what) for what in ("device", "idle", "busy")]
            cells = [NOTHING if spread is None else " / ".join(spread.cells(2)[::2]) for spread in spreads]
            size = f"{result['tensors']} tensors, {result['parameters']:,} elements"
            rows.append((f"{result['ranks']} ranks", name, size, *cells))
    note = (
        "step() alone, milliseconds: median / extremes. 'Device' is between two events round step(), in iterations "
        "that follow each other without a pause; 'host, idle' when the device has finished backward, 'host, busy' when "
        "it has not."
    )
    columns = ("", "contender", "", "device", "host, idle", "host, busy")
    return Grid("step() on the shapes of GPT-2 XL", note, columns, tuple(rows), labels=3)


def one_rank_targets(results: Sequence[Result]) -> Iterator[Target]:
    for result in of_part(results, "one-rank"):
        title = f"{result['ranks']} rank{'s' if result['ranks'] > 1 else ''}"
        if result["ranks"] == 1:
            device = [result["seconds"][0][name]["device"] for name in (SHARDED, PLAIN)]
            ratios = [mine / plain for mine, plain in zip(*device, strict=True)]
            yield Target(f"{SHARDED} / {PLAIN}, device time of step(), {title}", 1.0, median(ratios))
        host = milliseconds(result, SHARDED, "idle")
        if host is not None and result["ranks"] in HOST_MS:
            yield Target(f"{SHARDED}: host time of step(), {title}", HOST_MS[result["ranks"]], host.median, " ms")


# -- trace -------------------------------------------------------------------------------------------------------------


def overlap_grid(results: Sequence[Result]) -> Grid:
    shares = ("any", "forward", "backward", "step")
    rows = []
    for result in of_part(results, "trace"):
        for kind, found in result["kernels"].items():
            per_step = (f"{found['count'] / result['steps']:.1f}", f"{1e3 * found['seconds'] / result['steps']:.2f}")
            rows.append((result["title"], kind, *per_step, *(f"{found[share]:.0%}" for share in shares)))
        if not result["kernels"]:
            rows.append((result["title"], "none in the trace", *[NOTHING] * (2 + len(shares))))
    note = (
        "NCCL's kernels of rank 0 in the profiler's trace of three steps, and the share of their time in which another "
        "kernel of this process ran: any, or one launched in forward, backward or step()."
    )
    columns = ("", "kernel", "per step", "ms per step", *(f"under {share}" for share in shares))
    return Grid('Overlap, gather="overlap"', note, columns, tuple(rows), labels=2)


def calls_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in of_part(results, "trace"):
        buckets = NOTHING if result["buckets"] is None else str(result["buckets"])
        counts = sorted(result["calls"].items())
        rows += [(result["title"], name, f"{count / result['steps']:.1f}", buckets) for name, count in counts]
    note = "c10d operators of rank 0 in the same trace, beside the number of buckets."
    return Grid("Collectives", note, ("", "operator", "per step", "buckets"), tuple(rows), labels=2)


def waits_grid(results: Sequence[Result]) -> Grid:
    rows = [(name, verdict(places)) for result in of_part(results, "trace") for name, places in result["waits"].items()]
    note = (
        "Whole iterations with clipping after a warm-up, under torch.cuda.set_sync_debug_mode: 'error' passes, or the "
        "places that 'warn' names on any rank."
    )
    return Grid("Does the host wait for the device", note, ("contender", ""), tuple(rows), labels=2)


def verdict(places: list[str] | None) -> str:
    if places is None:
        return NOTHING
    return f"fail: {', '.join(places)}" if places else "pass"


def trace_targets(results: Sequence[Result]) -> Iterator[Target]:
    for result in of_part(results, "trace"):
        for name, places in result["waits"].items():
            if places is not None:
                yield Target(f"{name}: places in which the host waits for the device", 0, len(places))


# -- all of it ---------------------------------------------------------------------------------------------------------


def all_grids(results: Sequence[Result]) -> list[Grid]:
    made = (speed_grid, memory_grid, one_rank_grid, overlap_grid, calls_grid, waits_grid)
    return [grid for grid in (make(results) for make in made) if grid.rows]


def all_targets(results: Sequence[Result]) -> list[Target]:
    made = (speed_targets, memory_targets, one_rank_targets, trace_targets)
    return [target for make in made for target in make(results)]
