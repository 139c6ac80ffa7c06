"""What a program may do with gradients that lie in shards; and what torch's functions find that look for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shardstep.comm.call_order import Call
from shardstep.config import ShardConfig
from shardstep.engine.gradient_calls import clamp, clip, norms, unscale_all
from shardstep.engine.planned import params_of
from shardstep.engine.step import Engine
from shardstep.gradients.grad_scaler import Unscaled


class GradientSurface:
    """The part of a ShardedOptimizer that has to do with gradients."""

    param_groups: list[dict[str, Any]]
    _engine: Engine
    _model: nn.Module
    _config: ShardConfig
    _unscaled: Unscaled
    _ready: bool
    _closed: bool
    _why_closed: str

    @property
    def is_closed(self) -> bool:
        """Whether it has let go of its model: by `close`, or because something failed that could not be taken back."""
        return self._closed or bool(self._engine.lost)

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._why_closed)
        if self._engine.lost:
            raise RuntimeError(f"this optimizer was closed: {self._engine.lost}")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: this rank's part of the mean, and whatever `no_sync` has left in `param.grad`."""
        if self._config.step == "backward":
            self._engine.check_not_stepped("zero_grad()")
        self._engine.gradients.clear(to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes send nothing; their gradients add up in `param.grad` until one outside."""
        call_order = self._engine.call_order  # as long as the optimizer lives: a new plan may be made inside
        before, call_order.syncs = call_order.syncs, False
        try:
            yield
        finally:
            call_order.syncs = before

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """The norm of the mean gradient of every parameter, by name; the same on every rank. The host waits for it."""
        self._engine.announce_call(Call.NORMS, self.param_groups, told={"norm_type": norm_type})
        return norms(self._engine, self.param_groups, norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`; returns what it was.

        What is returned lies where the gradients do, and nothing here waits for it; `error_if_nonfinite` does.
        """
        told = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        waits = not self._engine.keeps_gradients
        self._engine.announce_call(Call.CLIP_NORM, self.param_groups, waits=waits, told=told)
        return clip(self._engine, self.param_groups, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Bring every element of the mean gradient between -`clip_value` and `clip_value`. On all ranks."""
        told = {"clip_value": clip_value}
        self._engine.announce_call(Call.CLIP_VALUE, self.param_groups, waits=False, told=told)
        clamp(self._engine, self.param_groups, clip_value)

    def gradient_to_unscale(self, param: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor | None:
        """What torch's `GradScaler` is to find in `param.grad`; `call` are the variables of its function."""
        if self._unscaled.call is not call["found_inf"]:
            self._engine.announce_call(Call.UNSCALE, self.param_groups)
            verdict = unscale_all(self._engine, self.param_groups, call["inv_scale"], call["allow_fp16"])
            self._unscaled = Unscaled(call["found_inf"], verdict)
        return self._unscaled.of(param)

    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that torch's functions do not see."""
        return not self.is_closed and self._engine.gradients.hides(param)

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None:
        """`zero_grad` of a module with these parameters is called: of the model, or of a part of it."""
        if not self._ready or self.is_closed:
            return
        if not set_to_none and self._engine.gradients.are_zero:
            return
        given = set(params)
        if given.issuperset(self._model.parameters()):
            self.zero_grad(set_to_none)
        elif any(param in given and self.holds_gradient_of(param) for param in params_of(self.param_groups)):
            raise RuntimeError(
                "zero_grad() of a part of the model cannot drop its part of gradients that are sharded over the ranks: "
                'call zero_grad() of the model or of the optimizer, or pass config=ShardConfig(gradients="keep")'
            )

    def shows_memory_of(self, param: torch.Tensor) -> None:
        """`param.data` is read, and may be written to."""
        if self._ready and not self.is_closed and self._engine.share.masters is not None:
            self._engine.share.masters.shown(param)
