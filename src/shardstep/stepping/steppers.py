"""What may step parameters in the place of the optimizer's class: a protocol, and what it is given of a parameter."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shardstep.planning import Piece
from shardstep.stepping.scaling import Scaling

Groups = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One tensor of the local optimizer, and the memory that it stands for."""

    tensor: torch.Tensor  # the key of its state
    values: torch.Tensor  # flat: the parameters' own memory, or float32 values that are encoded when they are sent
    master: torch.Tensor | None  # flat, of 16-bit values
    gradient_dtype: torch.dtype
    group: int
    piece: Piece  # the first: for noise, and to count steps
    stride: tuple[int, ...]  # of the parameter: how a whole one lies in that memory


class Stepper(Protocol):
    """Steps the parameters of some groups like their class does. The class still refuses options, and holds the state.

    The share calls `build` once for a plan, and then `begin` and `step` in every step.
    """

    @property
    def groups(self) -> Collection[int]:
        """Whose parameters it steps."""

    @property
    def writes_values(self) -> bool:
        """Whether it rounds masters into 16-bit values itself, and by chance where there are none."""

    @property
    def temporary_nbytes(self) -> int:
        """Memory that a step takes and gives back, at most."""

    def build(
        self, rows: Sequence[Sequence[Row]], state: dict[Any, Any], groups: Groups, counts: dict[Piece, torch.Tensor]
    ) -> None:
        """Take `rows[k]`, which are stepped together, and the optimizer's `state` by tensor.

        `groups` are all of the optimizer's; `counts` are of steps, for classes that keep none in their state.
        """

    def begin(self, groups: Groups) -> None:
        """Take over the options as they are now."""

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
