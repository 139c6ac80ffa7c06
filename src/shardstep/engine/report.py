"""What `opt.report()` returns: what every rank holds and sends, and how much of the sending is hidden."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, fields
from statistics import fmean
from typing import Any

import torch

from shardstep.comm.call_order import Call
from shardstep.comm.channel import Channel
from shardstep.comm.comm_timing import CommTiming, Covered
from shardstep.comm.control import open_poll
from shardstep.comm.encoding import gradient_dtype, sent_nbytes
from shardstep.engine.context import ParamGroups, params_of
from shardstep.engine.runtime import Runtime
from shardstep.engine.step import Engine
from shardstep.format import format_nbytes
from shardstep.optimizers.local_optimizer import class_of, qualified_name
from shardstep.planning import Layout

MOST_RANKS = 8  # with a line of their own


@dataclass(frozen=True, slots=True)
class Holding:
    """Bytes of one rank. What it holds, padding included; and what it sends in a step, by the plan."""

    parameters: int
    gradients: int  # between backward and step
    masters: int
    state: int  # none before the first step
    average: int
    sent_reducing: int
    sent_gathering: int

    @property
    def held(self) -> int:
        return self.parameters + self.gradients + self.masters + self.state + self.average

    @property
    def sent(self) -> int:
        return self.sent_reducing + self.sent_gathering


@dataclass(frozen=True, slots=True)
class Group:
    """A param group."""

    optimizer: str  # its class
    layout: Layout
    params: int
    numel: int


def describe_groups(
    optimizer_class: Any, groups: Sequence[Mapping[str, Any]], layouts: Sequence[Layout]
) -> list[Group]:
    return [
        Group(
            qualified_name(class_of(optimizer_class, group)),
            layout,
            len(group["params"]),
            sum(param.numel() for param in group["params"]),
        )
        for group, layout in zip(groups, layouts, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Times:
    """Of one rank, inside `opt.measured()`: seconds for a step, with the passes and whatever else belongs to it.

    Communication is under way from when it is launched until it has been waited for. `waited` is the part of it in
    which this rank did nothing else: it launched, waited, or summed up what came. The rest is hidden under computation.
    """

    seconds: float
    reducing: Covered
    gathering: Covered


@dataclass(frozen=True, slots=True)
class Report:
    """The same on every rank. `print` it, or take its numbers."""

    ranks: tuple[Holding, ...]
    buckets: tuple[int, ...]  # bytes of each
    groups: tuple[Group, ...]
    sent_by_ddp: int  # by a rank in a step, for the same parameters
    steps: int  # that were measured
    times: tuple[Times, ...]  # of each rank; none if no step was measured

    def __str__(self) -> str:
        count = len(self.ranks)
        lines = [f"{count_of(count, 'rank')}, {count_of(len(self.buckets), 'bucket')}{_range_of(self.buckets)}"]
        lines += [
            f"group {number}: {group.optimizer}, {group.layout.name}, {count_of(group.params, 'parameter')} of "
            f"{count_of(group.numel, 'element')}"
            for number, group in enumerate(self.groups)
        ]
        titles = ["held by", "parameters", "gradients", "masters", "state", "average", "all"]
        held = [[r.parameters, r.gradients, r.masters, r.state, r.average, r.held] for r in self.ranks]
        lines += ["", *_table(titles, _rows(held))]
        titles = ["sent in a step by", "reducing", "gathering", "all"]
        rows = _rows([[rank.sent_reducing, rank.sent_gathering, rank.sent] for rank in self.ranks])
        lines += ["", *_table(titles, [*rows, ["each under DDP", "", "", format_nbytes(self.sent_by_ddp)]])]
        return "\n".join([*lines, "", *self._measured()])

    def _measured(self) -> list[str]:
        if not self.times:
            return ["nothing was measured: put a few steps into `with opt.measured():`"]
        seconds = fmean(one.seconds for one in self.times)
        title = f"mean of {count_of(len(self.times), 'rank')} and {count_of(self.steps, 'step')}"
        kinds = {"reducing": [t.reducing for t in self.times], "gathering": [t.gathering for t in self.times]}
        rows = [["a step", _format_seconds(seconds), "", ""]]
        for name, covered in kinds.items():
            mean = Covered(fmean(one.under_way for one in covered), fmean(one.waited for one in covered))
            share = "n/a" if mean.hidden is None else f"{mean.hidden:.0%}"
            rows.append([name, _format_seconds(mean.under_way), _format_seconds(mean.waited), share])
        return _table([title, "under way", "waited for", "hidden"], rows)


# -- numbers ----------------------------------------------------------------------------------------------------------


def holding_of(runtime: Runtime, wire: torch.dtype | None, rank: int) -> Holding:
    """Return what this rank holds and sends; gradients travel in `wire`, or in their own dtype."""
    memory, local_step, gradients = runtime.memory, runtime.local_step, runtime.gradients
    reducing = gathering = spreading = 0
    for bucket in memory.buckets:
        away, spread = bucket.bucket.sent(rank)
        reducing += away * gradient_dtype(bucket, wire).itemsize
        gathering += sent_nbytes(bucket, spread)
        spreading += sent_nbytes(bucket, spread) if wire is None else spread * bucket.values.element_size()
    frozen = [param.nbytes for place, param in enumerate(runtime.params) if place not in memory.homes]
    return Holding(
        parameters=sum(bucket.values.nbytes for bucket in memory.buckets) + sum(frozen),
        gradients=gradients.nbytes,
        masters=0 if local_step.masters is None else local_step.masters.nbytes,
        state=local_step.state_nbytes,
        average=0 if local_step.average is None else local_step.average.nbytes,
        # Replicated gradients are gathered as the parameters are, or as `wire` says (gradients/replicated.py).
        sent_reducing=reducing + (spreading if gradients.are_whole else 0),
        sent_gathering=gathering,
    )


def sent_by_ddp(params: Sequence[torch.Tensor], trainable: Sequence[bool], world_size: int) -> int:
    """By a rank in a step: an all-reduce of all gradients sends each twice, but for a rank's own part."""
    moving = sum(param.nbytes for param, moves in zip(params, trainable, strict=True) if moves)
    return 2 * (world_size - 1) * moving // world_size


# -- between the ranks ------------------------------------------------------------------------------------------------

_HOLDING = struct.Struct(f">{len(fields(Holding))}q")
_TIMES = struct.Struct(">5d")
_STEPS = struct.Struct(">q")


def make_report(engine: Engine, groups: ParamGroups) -> Report:
    """Return what all ranks hold and send. On all ranks, which wait for each other."""
    engine.check_not_joined("report()")
    engine.check_not_accumulating("report()")
    engine.synchronize()
    had_no_pass = engine.runtime.gradients.rest
    engine.announce_call(Call.REPORT, groups)  # others may be in a backward pass, and wait for this rank's part
    engine.call_order.check()
    context, runtime = engine.context, engine.runtime
    if had_no_pass and not any(runtime.gradients.used):
        runtime.gradients.rest_again()
    own = holding_of(runtime, context.config.reduce_dtype, context.channel.rank)
    holdings, steps, times = _exchange(context.channel, own, engine.timing)
    kinds = describe_groups(runtime.recipe.optimizer_class, groups, runtime.recipe.layouts)
    ddp = sent_by_ddp(params_of(groups), runtime.trainable, context.channel.world_size)
    return Report(holdings, tuple(runtime.bucket_nbytes()), tuple(kinds), ddp, steps, times)


@contextmanager
def measured(engine: Engine) -> Iterator[None]:
    """Inside, it is measured how long communication is in flight; not if a new plan is made there."""
    weights, gradients, steps = engine.runtime.weights, engine.runtime.gradients, engine.steps
    timing, sender = CommTiming(engine.runtime.params[0].device), weights.sender
    weights.sender = timing.sender(sender)
    try:
        with gradients.watched(timing):
            yield
    finally:
        weights.sender = sender
        timing.end(engine.steps - steps)
        engine.timing = timing if not engine.lost and engine.runtime.gradients is gradients else None


def _exchange(
    channel: Channel, own: Holding, watch: CommTiming | None
) -> tuple[tuple[Holding, ...], int, tuple[Times, ...]]:
    """Of all ranks: what they hold, the steps that all have measured, and their times. Called on all ranks."""
    steps = 0 if watch is None else watch.steps
    record = _HOLDING.pack(*astuple(own)) + _STEPS.pack(steps) + _pack_times(watch)
    poll = open_poll(channel, lambda record: "exchange a report")
    poll.ask(record)
    rows = poll.answer().rows()
    measured = min(_STEPS.unpack_from(row, _HOLDING.size)[0] for row in rows)
    holdings = tuple(Holding(*_HOLDING.unpack_from(row)) for row in rows)
    return holdings, measured, tuple(map(_unpack_times, rows)) if measured else ()


def _pack_times(watch: CommTiming | None) -> bytes:
    if watch is None or not watch.steps:
        return bytes(_TIMES.size)
    seconds, reducing, gathering = watch.read()
    numbers = [seconds, reducing.under_way, reducing.waited, gathering.under_way, gathering.waited]
    return _TIMES.pack(*(number / watch.steps for number in numbers))


def _unpack_times(row: bytes) -> Times:
    seconds, reducing, not_hidden, gathering, waited = _TIMES.unpack_from(row, _HOLDING.size + _STEPS.size)
    return Times(seconds, Covered(reducing, not_hidden), Covered(gathering, waited))


# -- as text ----------------------------------------------------------------------------------------------------------


def _rows(numbers: Sequence[Sequence[int]]) -> list[list[str]]:
    """A line for each rank; of many ranks the least and the most of every column."""
    if len(numbers) <= MOST_RANKS:
        named = [(f"rank {rank}", row) for rank, row in enumerate(numbers)]
    else:
        columns = list(zip(*numbers, strict=True))
        named = [("a rank at least", list(map(min, columns))), ("a rank at most", list(map(max, columns)))]
    return [[name, *map(format_nbytes, row)] for name, row in named]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """In columns: names to the left, numbers to the right."""
    cells = [titles, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in cells
    ]
    return [line.rstrip() for line in lines]


def _range_of(buckets: Sequence[int]) -> str:
    if not buckets:
        return ""
    least, most = format_nbytes(min(buckets)), format_nbytes(max(buckets))
    return f" of {least}" if least == most else f" of {least} to {most}"


def _format_seconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def count_of(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
