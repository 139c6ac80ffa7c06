"""What planning knows of a parameter: everything that must be the same on every rank, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """One parameter, as every rank must see it."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as torch prints it, without "torch."
    # The kind of device and which of the rank's devices of that kind it is, in order of first appearance. Not the
    # machine's own number: rank 0 on cuda:0 and rank 3 on cuda:3 must make equal plans.
    device: str
    group: int
    trainable: bool = True  # a frozen parameter has a holder too, but does not travel
    wire: str = ""  # the encoding in which it travels when it is trained (comm/encoding.py); empty: as it is

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def encoded(self, wire: str) -> ParamSpec:
        """As it travels if matrices of float32 are encoded. Norms and biases are few bytes, and stay exact."""
        is_matrix = sum(size > 1 for size in self.shape) >= 2
        return replace(self, wire=wire if is_matrix and self.dtype == "float32" else "")

    def __str__(self) -> str:
        trainable = "trainable" if self.trainable else "frozen"
        return f"{self.name}: shape {self.shape}, {self.dtype}, {self.device}, group {self.group}, {trainable}"


def read_specs(param_groups: Iterable[Mapping[str, Any]], travels: Sequence[bool] | None = None) -> list[ParamSpec]:
    """Describe the parameters of an optimizer's `param_groups`, in index order.

    `travels[i]` says whether parameter i is sent; by default those that require a gradient are.
    Parameters that were given without names are named after their place.
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
