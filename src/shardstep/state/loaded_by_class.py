"""Let the optimizer's class process loaded state and options by its own `__setstate__` and `load_state_dict`.

These convert old formats: step counters that were numbers, options that did not exist yet, AdamW's weight decay where
Adam's was saved. shardstep steps pieces of parameters, joined in runs, which the class cannot load. So it loads into an
optimizer of one tensor for each piece of this rank, frozen ones included, and the result is taken from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.optimizers.local_optimizer import build, class_of, is_of_torch
from shardstep.optimizers.optimizer_copy import Counters, load_again, resume
from shardstep.optimizers.param_groups import copy_options, without_params
from shardstep.params.views import dense_view, flat_gradient
from shardstep.planning import Layout, Piece, Plan
from shardstep.stepping.element_state import Entry
from shardstep.stepping.masters import MASTER, NARROW
from shardstep.stepping.parted_optimizer import placeholder

_OURS = "shardstep."  # prefix of masters, averages and rounding counters, which no optimizer class knows
_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # torch's classes keep these in fp32 for any parameter dtype


class LoadedByClass:
    """Processes loaded state for one plan. `groups` have the parameters whose state is loaded."""

    def __init__(
        self,
        optimizer_class: type[Optimizer],
        defaults: Mapping[str, Any],
        groups: Sequence[dict[str, Any]],
        layouts: Sequence[Layout],
        plan: Plan,
        master: str,
    ) -> None:
        self._class, self._groups, self._layouts, self._master = optimizer_class, groups, layouts, master
        self._params = [param for group in groups for param in group["params"]]
        self._group_of = [spec.group for spec in plan.params]
        self._tensors: dict[Piece, torch.Tensor] = {}
        # Built without parameters: some classes make state in their constructor, which would take memory.
        self._optimizer = build(optimizer_class, without_params(groups), defaults, {})

    def run(
        self,
        pieces: Iterable[Piece],
        entries: dict[Piece, Entry],
        weights: Mapping[Piece, torch.Tensor],
        counted: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Replace the state in `entries` and the options of the groups by what the class makes of them.

        `pieces` are all pieces of this rank, and `weights` the weights that are loaded for them, if any. `counted` are
        numeric attributes of the optimizer instance (step counters), and `others` the entries of the state_dict beside
        "state" and "param_groups". Returns the numeric attributes after loading.
        """
        optimizer = self._optimizer
        self._tensors = {piece: self._tensor(piece, entries.get(piece, {}), weights.get(piece)) for piece in pieces}
        for number, (group, ours) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            mine = [tensor for piece, tensor in self._tensors.items() if self._group_of[piece.param] == number]
            group["params"] = mine or [placeholder(param) for param in ours["params"][:1]]
        of_shardstep = {piece: {key: entry[key] for key in entry if _is_ours(key)} for piece, entry in entries.items()}
        for piece, entry in entries.items():
            own = {key: self._fitted(key, value, piece) for key, value in entry.items() if not _is_ours(key)}
            if own:
                optimizer.state[self._tensors[piece]] = own
        entries.clear()
        resume(optimizer, counted)
        counters = Counters(optimizer)
        load_again(optimizer, others)
        for piece, tensor in self._tensors.items():
            # Removed from the optimizer: state that is later joined in runs would otherwise be in memory twice.
            entry = {**optimizer.state.pop(tensor, {}), **of_shardstep.pop(piece, {})}
            if entry:
                entries[piece] = entry
        copy_options(optimizer.param_groups, self._groups)
        return {**counted, **counters.advanced()}

    def _tensor(self, piece: Piece, entry: Entry, weight: torch.Tensor | None) -> torch.Tensor:
        """Return a tensor like the one that is stepped for a piece. torch's classes do not read its values when they
        load, so theirs takes no memory."""
        param, number = self._params[piece.param], self._group_of[piece.param]
        is_whole = self._layouts[number] is Layout.WHOLE or param.dim() == 0
        narrow = (torch.bfloat16,) if self._master == "stochastic" else NARROW if self._master == "fp32" else ()
        dtype = torch.float32 if param.dtype in narrow else param.dtype
        if is_of_torch(class_of(self._class, self._groups[number])):
            shape = param.shape if is_whole else torch.Size([piece.numel])
            return torch.zeros((), dtype=dtype, device=param.device).expand(shape).requires_grad_()
        if dtype is torch.float32 and MASTER in entry:
            weight = entry[MASTER].to(param.device)
        if weight is None:
            weight = flat_gradient(param, param.detach())[piece.start : piece.stop]
        weight = weight.detach().to(dtype, copy=True)  # a class may write to it
        return (dense_view(weight, 0, param) if is_whole else weight).requires_grad_()

    def _fitted(self, key: str, value: Any, piece: Piece) -> Any:
        """Return a value in the dtype of the stepped tensor, as torch loads it; unchanged for classes of others."""
        tensor, kind = self._tensors[piece], class_of(self._class, self._groups[self._group_of[piece.param]])
        if not isinstance(value, torch.Tensor) or key in _COUNTERS or not is_of_torch(kind):
            return value
        return value.to(tensor.dtype) if value.is_floating_point() and tensor.is_floating_point() else value


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(_OURS)
