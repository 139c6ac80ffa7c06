"""What a class does with state and options that are loaded, done by its own `__setstate__` and `load_state_dict`.

There old formats are brought up to date: counters that were numbers, options that were not known yet, AdamW's own
weight decay where Adam's was saved. Parameters are cut into pieces and joined in runs here, so the class is given its
state before that, by tensors which stand for the pieces: of this rank's parameters, frozen ones too.
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

_OURS = "shardstep."  # masters, averages and counts of roundings: no class knows of them
_COUNTERS = frozenset({"step", "mu_product", "eta", "mu"})  # of torch's classes: in fp32, whatever they step


class LoadedByClass:
    """Loads into the optimizers of this rank, by one plan. `groups` have the parameters that are loaded for."""

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
        # Built without them: some make state in their constructor, which would take memory.
        self._optimizer = build(optimizer_class, without_params(groups), defaults, {})

    def run(
        self,
        pieces: Iterable[Piece],
        entries: dict[Piece, Entry],
        weights: Mapping[Piece, torch.Tensor],
        counted: Mapping[str, Any],
        others: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Let the class have its way with the state in `entries` and with the options of the groups: both change.

        `pieces` are all of this rank, and `weights` what they will be, where that is loaded as well; `counted` is what
        the class has counted on itself, and `others` what a state_dict has beside state and groups: some save more.
        Returns what the class has counted then.
        """
        optimizer = self._optimizer
        self._tensors = {piece: self._tensor(piece, entries.get(piece, {}), weights.get(piece)) for piece in pieces}
        for number, (group, ours) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            mine = [tensor for piece, tensor in self._tensors.items() if self._group_of[piece.param] == number]
            group["params"] = mine or [placeholder(param) for param in ours["params"][:1]]
        aside = {piece: {key: entry[key] for key in entry if _is_ours(key)} for piece, entry in entries.items()}
        for piece, entry in entries.items():
            own = {key: self._fitted(key, value, piece) for key, value in entry.items() if not _is_ours(key)}
            if own:
                optimizer.state[self._tensors[piece]] = own
        entries.clear()
        resume(optimizer, counted)
        counters = Counters(optimizer)
        load_again(optimizer, others)
        for piece, tensor in self._tensors.items():
            # Popped: what a later step joins in runs would otherwise be in memory twice.
            entry = {**optimizer.state.pop(tensor, {}), **aside.pop(piece, {})}
            if entry:
                entries[piece] = entry
        copy_options(optimizer.param_groups, self._groups)
        return {**counted, **counters.advanced()}

    def _tensor(self, piece: Piece, entry: Entry, weight: torch.Tensor | None) -> torch.Tensor:
        """Like what the share steps for a piece. Of torch's classes none looks at values: those take no memory."""
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
        """In the precision of what is stepped, as torch loads it. What other classes keep has one of its own."""
        tensor, kind = self._tensors[piece], class_of(self._class, self._groups[self._group_of[piece.param]])
        if not isinstance(value, torch.Tensor) or key in _COUNTERS or not is_of_torch(kind):
            return value
        return value.to(tensor.dtype) if value.is_floating_point() and tensor.is_floating_point() else value


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(_OURS)
