"""What a step costs each parameter: known of torch's classes, tried for a moment of others'.

It decides who holds which whole parameter, so it must be the same on all ranks, and clocks are not: rank 0 tries, and
tells the others. A trial that comes out wrong makes ranks wait for each other, and changes no number.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple
from itertools import combinations
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.comm.channel import Channel
from shardstep.comm.tensors import broadcast_bytes
from shardstep.optimizers.layout_trial import same_options, without_rate
from shardstep.optimizers.local_optimizer import class_of, is_muon, is_of_torch
from shardstep.optimizers.trial import Trial, no_trace
from shardstep.planning import ParamSpec
from shardstep.planning.cost import Cost, elementwise_cost, matrix_dims, muon_cost

BUDGET = 0.2  # seconds of trying, for one set of options
_SIDES = (32, 64, 128, 256, 512, 1024, 2048)
_ASPECTS = (1, 4)  # a square and a wide matrix of each side
_STEPS = 3  # the first of them too: some classes do their costly work every few steps, and begin with it
_GROWTH = 8  # of the time when sides double, at most
_LEAST_TIMINGS = 4  # fewer say nothing of how it grows

_Timing = tuple[tuple[int, int], float]  # a shape, and the seconds of one step
_WIRE = struct.Struct("<?5d")


class StepCosts:
    """Of one optimizer. A group's are found when it is first seen, and stay: its learning rate is nothing to them."""

    def __init__(
        self,
        channel: Channel,
        optimizer_class: Callable[..., Optimizer],
        defaults: Mapping[str, Any],
        is_batched: Callable[[Mapping[str, Any]], bool] = lambda group: False,
    ) -> None:
        """`is_batched` of a group: whether Muon's matrices are stepped by batches."""
        self._channel, self._class, self._defaults = channel, optimizer_class, defaults
        self._is_batched = is_batched
        self._found: list[tuple[dict[str, Any], torch.device, Cost]] = []  # of each group

    def of(
        self, specs: Sequence[ParamSpec], groups: Sequence[Mapping[str, Any]], elementwise: Sequence[bool]
    ) -> list[int]:
        """Of each parameter, in picoseconds. Called on all ranks, which hold the same groups.

        `elementwise` of each group: whether it is known to be.
        """
        self.find(groups, elementwise)
        return [self._found[spec.group][-1].of(spec) for spec in specs]

    def forget_after(self, groups: int) -> None:
        """Keep what was found of so many groups: those that came later were refused."""
        del self._found[groups:]

    def find(self, groups: Sequence[Mapping[str, Any]], elementwise: Sequence[bool]) -> None:
        """Of groups that were added. Called on all ranks; when it returns, `of` asks nobody about these."""
        for number, group in enumerate(groups[len(self._found) :], start=len(self._found)):
            device = group["params"][0].device if group["params"] else torch.device("cpu")
            options = without_rate(group)
            self._found.append((options, device, self._cost_of(group, options, device, elementwise[number])))

    def _cost_of(
        self, group: Mapping[str, Any], options: dict[str, Any], device: torch.device, elementwise: bool
    ) -> Cost:
        kind = class_of(self._class, group)
        if is_muon(kind):
            return muon_cost(device.type, int(group["ns_steps"]), batched=self._is_batched(group))
        if elementwise or is_of_torch(kind) or not group["params"]:
            return elementwise_cost(device.type)
        for others, where, cost in self._found:
            if where == device and same_options(others, options):
                return cost
        tried, found = None, None
        try:
            if self._channel.rank == 0:
                tried = try_cost(Trial(self._class, self._defaults, group), device, group["params"][0].dtype)
        finally:  # the others wait for it, whatever has ended the trial
            found = self._told(tried)
        return found or elementwise_cost(device.type)

    def _told(self, cost: Cost | None) -> Cost | None:
        """That of rank 0, on all ranks."""
        packed = _WIRE.pack(cost is not None, *astuple(cost or Cost(0.0)))
        found, *figures = _WIRE.unpack(broadcast_bytes(self._channel, packed, _WIRE.size, 0))
        return Cost(*figures) if found else None


def try_cost(trial: Trial, device: torch.device, dtype: torch.dtype, budget: float = BUDGET) -> Cost | None:
    """By a few steps on small matrices; None if it takes none of them, or its time says nothing."""
    try:
        with no_trace(device), torch.enable_grad():
            timings = list(_time_steps(trial, device, dtype, budget))
    except Exception:  # whatever a class of somebody else's raises: it is dealt by elements then
        return None
    return fit_cost(timings, dtype.itemsize)


def _time_steps(trial: Trial, device: torch.device, dtype: torch.dtype, budget: float) -> Iterator[_Timing]:
    """From small to large, while the next would still be within the budget."""
    deadline = time.perf_counter() + budget
    last = dict.fromkeys(_ASPECTS, 0.0)
    for side in _SIDES:
        for aspect in _ASPECTS:
            if time.perf_counter() + _STEPS * _GROWTH * last[aspect] > deadline:
                return
            shape = (side, side * aspect)
            last[aspect] = _seconds_of_a_step(trial, shape, device, dtype)
            yield shape, last[aspect]


def _seconds_of_a_step(trial: Trial, shape: tuple[int, int], device: torch.device, dtype: torch.dtype) -> float:
    generator = torch.Generator("cpu").manual_seed(1)

    def draw() -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32).to(device, dtype)

    param = draw().requires_grad_()
    gradients = [draw() for _ in range(_STEPS)]
    optimizer = trial.make([param])
    _wait_for(device)
    begin = time.perf_counter()
    for gradient in gradients:
        param.grad = gradient
        optimizer.step()
    _wait_for(device)
    return (time.perf_counter() - begin) / _STEPS


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def fit_cost(timings: Sequence[_Timing], itemsize: int) -> Cost | None:
    """The cost that comes nearest to these, in proportion to each; None if nothing can be said.

    No term is below zero: noise in small matrices would make large ones cost nothing. There are four terms, so the best
    of all choices of them is found by trying each.
    """
    if len(timings) < _LEAST_TIMINGS:
        return None
    rows = []
    for shape, seconds in timings:
        m, n = matrix_dims(shape)
        rows.append([term / seconds for term in (1, m * n * itemsize, m * m * n, n**3)])
    terms = torch.tensor(rows, dtype=torch.float64, device="cpu")
    scale = terms.amax(0)
    terms /= scale
    ones = torch.ones(len(rows), 1, dtype=torch.float64, device="cpu")
    best, least_error = None, float("inf")
    for chosen in (chosen for count in range(1, 5) for chosen in combinations(range(4), count)):
        found = torch.linalg.lstsq(terms[:, chosen], ones).solution
        error = float((terms[:, chosen] @ found - ones).square().sum())
        if bool((found >= 0).all()) and error < least_error:
            best, least_error = dict(zip(chosen, (found[:, 0] / scale[list(chosen)]).tolist(), strict=True)), error
    if best is None:
        return None
    least, per_byte, per_mmn, per_nnn = (best.get(term, 0.0) for term in range(4))
    return Cost(per_byte, per_mmn=per_mmn, per_nnn=per_nnn, least=least)
