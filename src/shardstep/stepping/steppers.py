"""What may step parameters in the place of the optimizer's class: the protocol, and the stepper by the kernel."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardstep.optimizers.param_groups import copy_options
from shardstep.planning import Layout, Piece
from shardstep.stepping.kernel import KernelPiece, KernelStep, Rule, is_available, rule_of, supports
from shardstep.stepping.kernel.table import FLOATS


@dataclass(frozen=True, slots=True)
class Scaling:
    """A GradScaler's tensors on the device, named like the attributes that torch's classes read.

    Where `found_inf` is 1 nothing is stepped, and no step is counted. Gradients are divided by `grad_scale`.
    """

    found_inf: torch.Tensor
    grad_scale: torch.Tensor | None


Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One tensor of the local optimizer, and the parameters' memory that belongs to it."""

    tensor: torch.Tensor  # the key of its state
    values: torch.Tensor  # flat: the parameters' own memory, or float32 values that are encoded when they are sent
    master: torch.Tensor | None  # flat, of 16-bit values
    gradient_dtype: torch.dtype
    group: int
    piece: Piece  # the first: for noise, and to count steps
    stride: tuple[int, ...]  # of the parameter: how a whole one lies in that memory


class Stepper(Protocol):
    """Steps the parameters of some groups as their class does. The class still checks options, and holds the state.

    LocalStep calls `build` once for a plan, and then `begin` and `step` in every step.
    """

    @property
    def groups(self) -> Collection[int]:
        """The param groups whose parameters it steps."""

    @property
    def writes_values(self) -> bool:
        """Whether it writes 16-bit values itself: rounded from masters, or stochastically where there are none."""

    @property
    def temporary_nbytes(self) -> int:
        """Bytes of temporary memory that a step takes, at most."""

    def build(
        self, rows: Sequence[Sequence[Row]], state: dict[Any, Any], groups: Groups, counts: dict[Piece, torch.Tensor]
    ) -> None:
        """Take `rows[k]`, which are stepped together, and the optimizer's `state` by tensor.

        `groups` are all of the optimizer's; `counts` are of steps, for classes that keep none in their state.
        """

    def begin(self, groups: Groups) -> None:
        """Begin a step: copy the options as they are now."""

    def step(
        self,
        number: int,
        gradients: Sequence[torch.Tensor | None],
        scaling: Scaling | None,
        factor: torch.Tensor | None = None,
    ) -> None:
        """Step `rows[number]` with these flat gradients, which stay as they are, multiplied by `factor`.

        A row without a gradient is not stepped, and has no state before its first one.
        """


class KernelStepper:
    """A `Stepper` by the kernel of kernel/, in one pass over memory. With a `seed`, bfloat16 values have no master and
    are rounded stochastically."""

    writes_values = True
    temporary_nbytes = 0

    def __init__(self, optimizer_class: Any, groups: Sequence[int], seed: int | None) -> None:
        self._rule, self.groups, self.seed = rule_of(optimizer_class), groups, seed

    def build(
        self,
        rows: Sequence[Sequence[Row]],
        state: dict[Any, Any],
        groups: Groups,
        counts: dict[Piece, torch.Tensor],
    ) -> None:
        self._rows, self._state = rows, state
        self._place = {number: place for place, number in enumerate(self.groups)}
        self._groups: list[dict[str, Any]] = [{} for _ in self.groups]
        self._flags: list[Any] = []
        self._made: list[_Made | None] = [None] * len(rows)
        self._counts = counts
        self.begin(groups)

    def begin(self, groups: Groups) -> None:
        copy_options([groups[number] for number in self.groups], self._groups)
        flags = [[group.get(name) for name in _COMPILED] + [bool(group.get("momentum"))] for group in self._groups]
        if flags != self._flags:
            self._flags, self._made = flags, [None] * len(self._rows)

    def step(
        self,
        number: int,
        gradients: Sequence[torch.Tensor | None],
        scaling: Scaling | None,
        factor: torch.Tensor | None = None,
    ) -> None:
        rows, made = self._rows[number], self._made[number]
        present = {index for index, gradient in enumerate(gradients) if gradient is not None}
        if made is None or not present <= made.places.keys():
            known = {index for index, row in enumerate(rows) if row.tensor in self._state or row.piece in self._counts}
            chosen = sorted(present | known)
            if not chosen:
                return
            pieces = [self._piece(rows[index]) for index in chosen]
            kernel = KernelStep(self._rule, pieces, self._groups, seed=self.seed)
            made = self._made[number] = _Made(kernel, {index: place for place, index in enumerate(chosen)})
        made.kernel.step(
            [gradients[index] for index in made.places],
            grad_scale=None if scaling is None else scaling.grad_scale,
            clip=factor,
            found_inf=None if scaling is None else scaling.found_inf,
        )

    def _piece(self, row: Row) -> KernelPiece:
        first, second, largest = self._moments(row)
        return KernelPiece(
            values=row.values,
            step=self._count(row),
            group=self._place[row.group],
            first=first,
            second=second,
            largest=largest,
            master=row.master,
            gradient_dtype=row.gradient_dtype,
            param=row.piece.param,
            start=row.piece.start,
        )

    def _moments(self, row: Row) -> list[torch.Tensor | None]:
        """Return the class's state per element, first, second and largest moment; what is missing is created."""
        group = self._groups[self._place[row.group]]
        names: list[str | None] = list(_MOMENTS[self._rule])
        if self._rule is Rule.SGD and not group.get("momentum"):
            names[0] = None
        if not group.get("amsgrad"):
            names[2] = None
        stepped = row.values if row.master is None else row.master
        dtype = torch.float32 if self.seed is not None else stepped.dtype
        found: list[torch.Tensor | None] = []
        for name in names:
            if name is None:
                found.append(None)
                continue
            entry = self._state.setdefault(row.tensor, {})
            if entry.get(name) is None:
                if self._rule is Rule.SGD:  # the first gradient is its first momentum
                    self._counts.pop(row.piece, None)
                entry[name] = torch.zeros(row.tensor.shape, dtype=dtype, device=stepped.device)
            elif self._rule is Rule.SGD:
                self._counts.setdefault(row.piece, torch.ones((), dtype=torch.float32, device=stepped.device))
            found.append(entry[name])
        return found

    def _count(self, row: Row) -> torch.Tensor:
        """Return the count of steps as a tensor on the device, from the state if the class has it there."""
        device = row.values.device
        if self._rule is not Rule.ADAM:
            own = self._counts.get(row.piece, 0.0)
            self._counts[row.piece] = torch.as_tensor(own, dtype=torch.float32, device=device)
            return self._counts[row.piece]
        entry = self._state.setdefault(row.tensor, {})
        count = torch.as_tensor(entry.get("step", 0.0), dtype=torch.float32, device=device)
        entry["step"] = count if count is entry.get("step") else count.clone()
        return entry["step"]  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class _Made:
    """A kernel for the rows that have been stepped so far."""

    kernel: KernelStep
    places: Mapping[int, int]  # row: its place among the kernel's pieces


_COMPILED = ("amsgrad", "nesterov", "decoupled_weight_decay")  # options that a kernel is made for
_MOMENTS = {
    Rule.ADAM: ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    Rule.SGD: ("momentum_buffer", None, None),
    Rule.LION: ("exp_avg", None, None),
}


def can_step(kind: Any, groups: Groups, layouts: Sequence[Layout]) -> bool:
    """Whether the kernel can step all of these groups: cut parameters on one GPU, a class and options that it knows."""
    params = [param for group in groups for param in group["params"]]
    return (
        bool(params)
        and len({param.device for param in params}) == 1
        and is_available(params[0].device)
        and all(param.dtype in FLOATS for param in params)
        and all(layout is Layout.FLAT for layout in layouts)
        and all(supports(kind, group) is None for group in groups)
    )
