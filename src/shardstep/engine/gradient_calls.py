"""What a program asks of its gradients, done on this rank once all ranks have announced it (engine/step.py)."""

from __future__ import annotations

from typing import Any

import torch

from shardstep.engine.context import ParamGroups, params_of
from shardstep.engine.step import Engine
from shardstep.gradients.clipping import factor_for
from shardstep.gradients.grad_scaler import unscale, unscale_kept
from shardstep.gradients.norms import norms_by_parameter, total_norm
from shardstep.stepping.steppers import Scaling


def scaling_of(optimizer: Any, engine: Engine) -> Scaling | None:
    """Return what `GradScaler.step` has left on an optimizer, for its `step`."""
    found_inf, scale = vars(optimizer).get("found_inf"), vars(optimizer).get("grad_scale")
    if found_inf is None:
        return None
    if engine.keeps_gradients and scale is not None:
        unscale_kept(params_of(optimizer.param_groups), scale)
        scale = None
    return Scaling(found_inf, scale)


def grad_norms(engine: Engine, groups: ParamGroups, norm_type: float) -> dict[str, float]:
    """Return the norm of every parameter's mean gradient, by name."""
    found = _norms_by_parameter(engine, groups, _order(norm_type)).tolist()
    specs = engine.runtime.plan.params
    return {spec.name: norm for spec, norm in zip(specs, found, strict=True) if spec.trainable}


def _norms_by_parameter(engine: Engine, groups: ParamGroups, order: float) -> torch.Tensor:
    runtime = engine.runtime
    pieces = [(piece.param, gradient) for piece, gradient in runtime.gradients.present()]
    count, like = len(runtime.plan.params), params_of(groups)[0]
    return norms_by_parameter(engine.context.transport, pieces, count, order, like)


def _order(norm_type: float) -> float:
    order = float(norm_type)  # torch takes "inf", too
    if not order >= 0:  # nor nan
        raise ValueError(f"norm_type must be 0, a positive number or inf, and not {norm_type!r}")
    return order


@torch.no_grad()
def clip_grad_norm(
    engine: Engine, groups: ParamGroups, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    """Scale the gradients so that their norm is at most `max_norm`; return what it was."""
    if engine.keeps_gradients:
        return torch.nn.utils.clip_grad_norm_(params_of(groups), max_norm, norm_type, error_if_nonfinite)
    order, runtime = _order(norm_type), engine.runtime
    shards = runtime.gradients.shards()
    if order:
        norm = total_norm(engine.context.transport, shards, order, runtime.params[0])
    else:  # which pieces are of one parameter matters in this one only
        norm = _norms_by_parameter(engine, groups, order).count_nonzero().double()
    factor = factor_for(norm, max_norm, order, error_if_nonfinite=error_if_nonfinite)
    runtime.gradients.scale(factor, later=runtime.local_step.takes_factor)
    return norm.to((shards or runtime.params)[0].dtype.to_real())


def clip_grad_value(engine: Engine, groups: ParamGroups, clip_value: float) -> None:
    """Bring every element of the gradients between -`clip_value` and `clip_value`."""
    if engine.keeps_gradients:
        torch.nn.utils.clip_grad_value_(params_of(groups), clip_value)
    else:
        for gradient in engine.runtime.gradients.shards():
            gradient.clamp_(-clip_value, clip_value)


def unscale_gradients(
    engine: Engine, groups: ParamGroups, inverse: torch.Tensor, allow_fp16: bool
) -> torch.Tensor | None:
    """Divide the gradients by a GradScaler's scale. Returns what it checks for inf, if there are shards."""
    params, runtime = params_of(groups), engine.runtime
    dtypes = {param.dtype for param, used in zip(params, runtime.gradients.used, strict=True) if used}
    if engine.keeps_gradients or not dtypes:
        return None
    # With masters, shards of fp16 parameters are in fp32.
    if torch.float16 in dtypes and not allow_fp16 and runtime.local_step.masters is None:
        return params[0].new_zeros(1, dtype=torch.float16)  # the scaler refuses it, on all ranks
    return unscale(engine.context.transport, runtime.gradients.shards(), inverse, params[0])
