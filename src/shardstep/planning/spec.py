"""What a plan is made from: the layout, and for each parameter what must be the same on every rank."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any


class Layout(Enum):
    """How finely a parameter may be cut.

    `WHOLE`: never, for optimizers that look at a whole matrix (Muon, Adafactor), and for the drop-in.
    `FLAT`: anywhere, into equal ranges, for optimizers that treat every element alone (AdamW, SGD).
    `AUTO`: the finest of these that is known to be exact for the class (optimizers/layout_policy.py chooses).
    """

    WHOLE = "whole"
    FLAT = "flat"
    AUTO = "auto"


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """Description of one parameter; it must be equal on all ranks."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch prints it, without "torch."
    # The kind of device, and which of the rank's devices of that kind it is in order of first appearance. This is not
    # the device's index on the machine: rank 0 on cuda:0 and rank 3 on cuda:3 must make equal plans.
    device: str
    group: int
    trainable: bool = True  # a frozen parameter has a holder too, but is not sent
    wire: str = ""  # the encoding in which it is sent (comm/encoding.py); empty: unchanged

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def encoded(self, wire: str) -> ParamSpec:
        """Return the spec with encoding `wire` if it is a float32 matrix: norms and biases are few bytes."""
        is_matrix = sum(size > 1 for size in self.shape) >= 2
        return replace(self, wire=wire if is_matrix and self.dtype == "float32" else "")

    def __str__(self) -> str:
        trainable = "trainable" if self.trainable else "frozen"
        return f"{self.name}: shape {self.shape}, {self.dtype}, {self.device}, group {self.group}, {trainable}"


def read_specs(param_groups: Iterable[Mapping[str, Any]], travels: Sequence[bool] | None = None) -> list[ParamSpec]:
    """Return the specs of the parameters of an optimizer's `param_groups`, in index order.

    `travels[i]` says whether parameter i is sent; by default a parameter is sent if it requires a gradient.
    A parameter without a name is named after its position in `param_groups`.
    """
    ordinals: dict[str, dict[object, int]] = {}
    specs: list[ParamSpec] = []
    for group_index, group in enumerate(param_groups):
        names = group.get("param_names") or [
            f"param_groups[{group_index}]['params'][{i}]" for i in range(len(group["params"]))
        ]
        for name, param in zip(names, group["params"], strict=True):
            seen = ordinals.setdefault(param.device.type, {})
            ordinal = seen.setdefault(param.device, len(seen))
            specs.append(
                ParamSpec(
                    name=name,
                    shape=tuple(param.shape),
                    dtype=str(param.dtype).removeprefix("torch."),
                    device=f"{param.device.type}:{ordinal}",
                    group=group_index,
                    trainable=bool(param.requires_grad) if travels is None else travels[len(specs)],
                )
            )
    return specs
