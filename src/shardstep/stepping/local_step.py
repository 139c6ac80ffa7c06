"""The step of this rank's pieces: the tensors that the optimizer steps, its state, and what is kept beside it.

[Note: runs] An optimizer that treats every element alone does not care where one parameter ends and the next begins. So
pieces that lie side by side in a bucket are one tensor for it: a bucket of a thousand small parameters is stepped in
one call. Their state is joined as well, and is cut by parameter only when somebody asks for it. Runs need all of their
pieces to be stepped together. When a step finds a piece without a gradient, all runs are split into single pieces and
stay split, because from then on each parameter counts its own steps. Only classes of torch.optim get runs: what other
classes keep, and where, is unknown. And kernels must not round differently at the end of a tensor, as fused kernels on
the CPU and kernels for 16 bits do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.optimizers.local_optimizer import build, is_of_torch
from shardstep.optimizers.sliced_step import CUT_ANYWHERE, MakeOptimizer
from shardstep.params.flat import FlatMemory
from shardstep.params.views import dense_view
from shardstep.planning import Layout, Piece, Plan
from shardstep.planning.runs import Run, find_runs
from shardstep.stepping.element_state import (
    Entry,
    Slot,
    StochasticRounding,
    counts_alike,
    cut_from_run,
    join_in_run,
    on_device_of,
    without_counts,
)
from shardstep.stepping.masters import NARROW, Average, Masters, drop_unused
from shardstep.stepping.parted_optimizer import PartedOptimizer, placeholder, takes_scaling
from shardstep.stepping.steppers import Row, Scaling, Stepper

ParamGroups = Sequence[dict[str, Any]]
Members = list[list[tuple[Run, torch.Tensor]]]  # by bucket: pieces, and the tensor that the optimizer steps for them


@dataclass(frozen=True, slots=True)
class Prepared:
    """Everything that `LocalStep.take` installs, built beforehand because the optimizer's class may refuse it."""

    members: Members
    local: Optimizer
    parted: PartedOptimizer
    parked: dict[Piece, Entry]
    slot_values: list[dict[Piece, torch.Tensor]]  # of each slot


class LocalStep:
    """Steps this rank's pieces under one plan; a new plan gets a new one.

    `optimizer_class` is built with `defaults`. `layouts` has one layout for each param group, `bucket_groups` the
    buckets that are stepped together. Param groups that none of `steppers` handles are stepped by the class itself.
    """

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        defaults: Mapping[str, Any],
        plan: Plan,
        memory: FlatMemory,
        layouts: Sequence[Layout],
        bucket_groups: Sequence[Sequence[int]],
        *,
        join: bool,
        masters: Masters | None = None,
        average: Average | None = None,
        rounding: StochasticRounding | None = None,
        steppers: Sequence[Stepper] = (),
    ) -> None:
        self._class, self._defaults = optimizer_class, defaults
        self._plan, self._memory, self._layouts, self._bucket_groups = plan, memory, layouts, bucket_groups
        self.masters, self.average = masters, average
        self._rounding, self.steppers = rounding, steppers
        self._groups_of_steppers = {group for stepper in steppers for group in stepper.groups}
        self._groups_written = {group for stepper in steppers if stepper.writes_values for group in stepper.groups}
        self._class_steps = len(self._groups_of_steppers) < len(layouts)
        self.slots: list[Slot] = [slot for slot in (masters, average, rounding) if slot is not None]
        self._join = join and is_of_torch(optimizer_class)
        self._members: Members = []
        self.parked: dict[Piece, Entry] = {}  # state of frozen parameters
        self._parted: PartedOptimizer | None = None

    def build(
        self, param_groups: ParamGroups, entries: dict[Piece, Entry], counted: Mapping[str, Any] | None = None
    ) -> None:
        """Build tensors and optimizers with the state in `entries`; the state of frozen parameters is kept in `parked`.

        `entries` is emptied, because state that is joined into runs would otherwise be in memory twice. `counted` has
        the values of the class's counters (numeric attributes of the instance); by default those of this object.
        """
        self.take(self.prepare(param_groups, entries, counted), param_groups)

    def prepare(
        self, param_groups: ParamGroups, entries: dict[Piece, Entry], counted: Mapping[str, Any] | None = None
    ) -> Prepared:
        """Build everything without installing it: if the class refuses options or parameters, nothing is changed."""
        rest = dict(entries) if self._rounding is not None else without_counts(entries)
        entries.clear()
        slot_values: list[dict[Piece, torch.Tensor]] = []
        for slot in self.slots:
            found, rest = slot.split(rest)
            slot_values.append(found)
        rest = drop_unused(rest, self._memory, {slot.key for slot in self.slots})
        members = self._make_members(param_groups, rest)
        local, parted = self._make_optimizers(param_groups, members)
        for run, tensor in chain.from_iterable(members):
            of_run = {piece: rest.pop(piece) for piece in run.pieces if piece in rest}
            if of_run:
                entry = join_in_run(run, of_run, tensor)
                local.state[tensor] = on_device_of(tensor, entry, param_groups[self._group_of(run.pieces[0])])
        parked = {piece: _copy_tensors(entry) for piece, entry in rest.items()}
        parted.reload()
        parted.resume(self.counted() if counted is None else counted)
        return Prepared(members, local, parted, parked, slot_values)

    def try_class(self, param_groups: ParamGroups) -> None:
        """Raise what the class raises when it is given its parameters. The plan's memory need not have storage."""
        members = self._make_members(param_groups, {})
        try:
            self._make_optimizers(param_groups, members)
        except Exception:
            # It may have asked for a device, or for values: try tensors that have both, in one element of memory.
            homes = [self._memory.params[memory.bucket.segments[0].param] for memory in self._memory.buckets]
            small = [
                [(run, _in_one_element(tensor, home.device)) for run, tensor in row]
                for home, row in zip(homes, members, strict=True)
            ]
            self._make_optimizers(param_groups, small)

    def _make_optimizers(self, param_groups: ParamGroups, members: Members) -> tuple[Optimizer, PartedOptimizer]:
        local = self._make_local(param_groups, list(chain.from_iterable(members)))
        parts = [[tensor for bucket in group for _, tensor in members[bucket]] for group in self._bucket_groups]
        return local, PartedOptimizer(local, parts, _maker(self._class, self._defaults))

    def take(self, prepared: Prepared, param_groups: ParamGroups) -> None:
        """Install what `prepare` has built. No code of the class runs here."""
        self._members = prepared.members
        self.local, self._parted, self.parked = prepared.local, prepared.parted, prepared.parked
        for slot, values in zip(self.slots, prepared.slot_values, strict=True):
            slot.fill(values)
        self._rows = self._make_rows()
        counts = {} if self._rounding is None else self._rounding.counts
        for stepper in self.steppers:
            rows = [[row for row in all_rows if row.group in stepper.groups] for all_rows in self._rows]
            stepper.build(rows, self.local.state, param_groups, counts)

    def _make_members(self, param_groups: ParamGroups, rest: Mapping[Piece, Entry]) -> Members:
        """Return the runs of each bucket with their tensors; pieces whose counters in `rest` differ are not joined."""

        def may_be_one(one: Piece, other: Piece) -> bool:
            joinable = self._may_join(one, param_groups) and self._may_join(other, param_groups)
            same_group = self._group_of(one) == self._group_of(other)
            return joinable and same_group and counts_alike(rest.get(one), one, rest.get(other), other)

        return [
            [(run, self._tensor_of(run, number)) for run in find_runs(memory.placed, may_be_one)]
            for number, memory in enumerate(self._memory.buckets)
        ]

    def _make_rows(self) -> list[list[Row]]:
        """Return what steppers are given of each run, for each group of buckets."""
        return [
            [self._make_row(run, tensor, bucket) for bucket in group for run, tensor in self._members[bucket]]
            for group in self._bucket_groups
        ]

    def _make_row(self, run: Run, tensor: torch.Tensor, bucket: int) -> Row:
        first, values = run.pieces[0], self._values_of(run, bucket)
        masters = None if self.masters is None else self.masters.values.get(bucket)
        master = None if masters is None else masters[run.start : run.stop]
        if master is not None and values.dtype is torch.float32:  # rounded when it is sent, so it is stepped as fp32
            values, master = master, None
        # Gradients of fp16 parameters with masters are kept in fp32 (gradients/shard_memory.py).
        wide = master is not None and values.dtype is torch.float16
        dtype = torch.float32 if wide else values.dtype
        stride = self._memory.homes[first.param].stride()
        return Row(tensor, values, master, dtype, self._group_of(first), first, stride)

    def _values_of(self, run: Run, bucket: int) -> torch.Tensor:
        """Return the parameters' own memory, flat."""
        return self._memory.buckets[bucket].own[run.start : run.stop]

    @property
    def takes_scaling(self) -> bool:
        """Whether a step takes a GradScaler's tensors, so that the host need not wait for `found_inf`."""
        return not self._class_steps or takes_scaling(self.local)

    @property
    def takes_factor(self) -> bool:
        """Whether a step multiplies gradients by a factor that is on the device."""
        return not self._class_steps

    def counted(self) -> dict[str, Any]:
        """Return the class's counters: numeric attributes of the instance that steps have changed."""
        return {} if self._parted is None else self._parted.counted()

    def check_may_move(self) -> None:
        """Raise if the class keeps something in attributes that cannot be carried over to new instances."""
        lost = [] if self._parted is None or is_of_torch(self._class) else self._parted.left_behind()
        if lost:
            raise RuntimeError(
                f"{getattr(self._class, '__name__', self._class)} keeps {', '.join(map(repr, lost))} on itself, which "
                "cannot be distributed anew: freeze no parameter and add no group after the first step, or keep it in "
                "the optimizer's state"
            )

    def _group_of(self, piece: Piece) -> int:
        return self._plan.params[piece.param].group

    def _may_join(self, piece: Piece, param_groups: ParamGroups) -> bool:
        home = self._memory.homes[piece.param]
        fused = param_groups[self._group_of(piece)].get("fused")
        cut_anywhere = home.dtype in CUT_ANYWHERE or (self.masters is not None and home.dtype in NARROW)
        rounds_alike = home.is_cuda or (cut_anywhere and not fused)
        is_cut = self._layouts[self._group_of(piece)] is Layout.FLAT
        has_noise = self._rounding is not None and home.dtype is torch.bfloat16  # which depends on the parameter
        return self._join and is_cut and home.dim() > 0 and rounds_alike and not has_noise

    def _tensor_of(self, run: Run, bucket: int) -> torch.Tensor:
        """Return what the optimizer steps: a flat range, or a parameter in its own shape.

        A scalar keeps its shape in any layout, so that its state looks like that of the plain optimizer.
        """
        home = self._memory.homes[run.pieces[0].param]
        whole = self._layouts[self._group_of(run.pieces[0])] is Layout.WHOLE or home.dim() == 0
        if self._rounding is not None and home.dtype is torch.bfloat16:
            shape = home.shape if whole else torch.Size([run.numel])
            return self._rounding.placeholder(shape, home.device).requires_grad_()
        if self.masters is None or bucket not in self.masters.values:
            return (home if whole else self._memory.buckets[bucket].own[run.start : run.stop]).detach().requires_grad_()
        master = self.masters.values[bucket]
        shaped = dense_view(master, run.start, home) if whole else master[run.start : run.stop]
        return shaped.requires_grad_()

    def _make_local(self, param_groups: ParamGroups, pairs: Sequence[tuple[Run, torch.Tensor]]) -> Optimizer:
        groups = [{key: value for key, value in g.items() if key != "param_names"} for g in param_groups]
        for number, group in enumerate(groups):
            group["params"] = [tensor for run, tensor in pairs if self._group_of(run.pieces[0]) == number]
            like = [home for param, home in self._memory.homes.items() if self._plan.params[param].group == number]
            if like and not group["params"]:
                whole = self._layouts[number] is Layout.WHOLE
                group["params"] = [placeholder(like[0] if whole else like[0].detach().reshape(-1))]
        names = {tensor: self._plan.params[run.pieces[0].param].name for run, tensor in pairs}
        names |= {
            group["params"][0]: "nothing" for group in groups if group["params"] and group["params"][0] not in names
        }
        return build(self._class, groups, self._defaults, names)

    # -- stepping -----------------------------------------------------------------------------------------------------

    def begin(self, param_groups: ParamGroups, used: Sequence[int]) -> None:
        """Begin a step with the options as they are now; `used` says of each parameter whether it has a gradient."""
        if not all(used) and any(
            len({used[piece.param] for piece in run.pieces}) > 1 for run, _ in chain.from_iterable(self._members)
        ):
            self._join = False
            self.build(param_groups, self.entries())
        if self.masters is not None:
            self.masters.follow()
        if self.average is not None:
            self.average.begin()
        for stepper in self.steppers:
            stepper.begin(param_groups)
        assert self._parted is not None, "built"
        self._parted.begin(param_groups)

    def step(
        self,
        group: int,
        gradients_of: Callable[[int, Run], torch.Tensor | None],
        scaling: Scaling | None = None,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Step the buckets of a group.

        `gradients_of` returns the flat gradient of a run, or None; gradients are multiplied by `factor`.
        """
        buckets = self._bucket_groups[group]
        gradients = [gradients_of(bucket, run) for bucket in buckets for run, _ in self._members[bucket]]
        pairs = list(zip(self._rows[group], gradients, strict=True))
        stepped = {
            row.tensor for row, gradient in pairs if gradient is not None and row.group not in self._groups_written
        }
        with nullcontext() if self._rounding is None else self._float32_values(self._rounding, buckets, stepped):
            for stepper in self.steppers:
                given = [gradient for row, gradient in pairs if row.group in stepper.groups]
                stepper.step(group, given, scaling, factor)
            if self._class_steps:
                assert factor is None, "optimizer classes take no factor"
                self._step_by_class(group, pairs, scaling)
        if self.masters is not None:
            self.masters.write(b for b in buckets if not self._is_written(b))
        if self.average is not None:
            self.average.follow(buckets, scaling)

    def _step_by_class(
        self, group: int, pairs: Sequence[tuple[Row, torch.Tensor | None]], scaling: Scaling | None
    ) -> None:
        """Step with the optimizer's class what no stepper has stepped: everything else gets no gradient."""
        assert self._parted is not None, "built"
        given = [
            None if row.group in self._groups_of_steppers else _shaped_like(gradient, row.tensor)
            for row, gradient in pairs
        ]
        self._parted.step(group, given, scaling)

    def _is_written(self, bucket: int) -> bool:
        """Whether a stepper has rounded the masters of a bucket into its values; never if it is encoded when sent."""
        groups = {self._group_of(run.pieces[0]) for run, _ in self._members[bucket]}
        return groups <= self._groups_written and self._memory.buckets[bucket].values.dtype is not torch.float32

    @contextmanager
    def _float32_values(
        self, rounding: StochasticRounding, buckets: Iterable[int], chosen: Collection[torch.Tensor]
    ) -> Iterator[None]:
        """Inside, the `chosen` tensors of bfloat16 parameters have their values in float32; then these are rounded."""
        rows = [
            (run, tensor, self._values_of(run, bucket))
            for bucket in buckets
            for run, tensor in self._members[bucket]
            if self._memory.buckets[bucket].values.dtype is torch.bfloat16 and tensor in chosen
        ]
        for run, tensor, values in rows:
            rounding.load(tensor, values, self._memory.homes[run.pieces[0].param])
        yield
        for run, tensor, values in rows:
            rounding.store(tensor, values, run, self.local.state.get(tensor, {}))

    def end(self, param_groups: ParamGroups) -> None:
        """End a step: options that the class has changed become visible in `param_groups`."""
        assert self._parted is not None, "built"
        self._parted.end(param_groups)

    def switch(self, param_groups: ParamGroups, mode: str) -> None:
        """Call `train()` or `eval()` of the class, which may change weights."""
        if self.masters is not None:
            self.masters.follow()
        assert self._parted is not None, "built"
        self._parted.begin(param_groups)
        everything = {tensor for _, tensor in chain.from_iterable(self._members)}
        buckets = range(len(self._members))
        with nullcontext() if self._rounding is None else self._float32_values(self._rounding, buckets, everything):
            self._parted.switch(mode)
        self._parted.end(param_groups)
        if self.masters is not None:
            self.masters.write(self.masters.values)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state_nbytes(self) -> int:
        """Bytes of the optimizer's own state, frozen parameters included; without masters and averages."""
        entries = [*self.local.state.values(), *self.parked.values()]
        tensors = [value for entry in entries for value in entry.values() if isinstance(value, torch.Tensor)]
        return sum(value.nbytes for value in tensors)

    def entries(self) -> dict[Piece, Entry]:
        """Return the state of every piece that was stepped, frozen ones included: views where pieces share a tensor.

        Masters follow the weights as they are now, which a program may have written to since the last step.
        """
        if self.masters is not None and not (self.average is not None and self.average.is_shown):
            self.masters.follow_writes()
            self.masters.follow_frozen(self.parked)
        live = {
            piece: cut_from_run(entry, run, offset, piece.numel)
            for run, tensor in chain.from_iterable(self._members)
            if (entry := self.local.state.get(tensor))
            for piece, offset in zip(run.pieces, run.offsets, strict=True)
        }
        for slot in self.slots:
            slot.put_into(live)
        return {**self.parked, **live}


def _in_one_element(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a parameter of the same shape, all of whose elements are one element of memory."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape).requires_grad_()


def _maker(optimizer_class: Callable[..., Optimizer], defaults: Mapping[str, Any]) -> MakeOptimizer:
    """Return a function that builds an optimizer. Not a method: a reference to it would keep an old plan's memory."""
    return lambda groups: optimizer_class(groups, **defaults)


def _shaped_like(gradient: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the flat gradient in the shape and the dtype of what is stepped."""
    if gradient is None:
        return None
    wide = gradient if gradient.dtype is tensor.dtype else gradient.to(tensor.dtype)
    return wide if tensor.dim() == 1 else dense_view(wide, 0, tensor)


def _copy_tensors(entry: Mapping[str, Any]) -> Entry:
    """Copy tensors: a view would keep the state of other pieces alive."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in entry.items()}
