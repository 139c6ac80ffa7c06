"""What a program wants of its gradients, done on this rank when all ranks have turned to it (`engine.take_turn`)."""

from __future__ import annotations

import torch

from shardstep.engine.planned import ParamGroups, params_of
from shardstep.engine.step import Engine
from shardstep.gradients.clipping import factor_for
from shardstep.gradients.grad_scaler import unscale
from shardstep.gradients.norms import norms_by_parameter, total_norm


def norms(engine: Engine, groups: ParamGroups, norm_type: float) -> dict[str, float]:
    """Of every parameter, by name."""
    found = _by_parameter(engine, groups, _order(norm_type)).tolist()
    return {spec.name: norm for spec, norm in zip(engine.plan.params, found, strict=True) if spec.trainable}


def _by_parameter(engine: Engine, groups: ParamGroups, order: float) -> torch.Tensor:
    pieces = [(piece.param, gradient) for piece, gradient in engine.gradients.present()]
    return norms_by_parameter(engine.transport, pieces, len(engine.plan.params), order, params_of(groups)[0])


def _order(norm_type: float) -> float:
    order = float(norm_type)  # torch takes "inf", too
    if not order >= 0:  # nor nan
        raise ValueError(f"norm_type must be 0, a positive number or inf, and not {norm_type!r}")
    return order


@torch.no_grad()
def clip(
    engine: Engine, groups: ParamGroups, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    params = params_of(groups)
    if engine.keeps_gradients:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    order, shards = _order(norm_type), engine.gradients.shards()
    if order:
        norm = total_norm(engine.transport, shards, order, params[0])
    else:  # which pieces are of one parameter matters in this one only
        norm = _by_parameter(engine, groups, order).count_nonzero().double()
    factor = factor_for(norm, max_norm, order, error_if_nonfinite=error_if_nonfinite)
    engine.gradients.scale(factor, later=engine.share.takes_factor)
    return norm.to((shards or params)[0].dtype.to_real())


def clamp(engine: Engine, groups: ParamGroups, clip_value: float) -> None:
    if engine.keeps_gradients:
        torch.nn.utils.clip_grad_value_(params_of(groups), clip_value)
    else:
        for gradient in engine.gradients.shards():
            gradient.clamp_(-clip_value, clip_value)


def unscale_all(engine: Engine, groups: ParamGroups, inverse: torch.Tensor, allow_fp16: bool) -> torch.Tensor | None:
    """For a GradScaler. What it is to look at, if the gradients lie in shards and there are any."""
    params = params_of(groups)
    kinds = {param.dtype for param, used in zip(params, engine.gradients.used, strict=True) if used}
    if engine.keeps_gradients or not kinds:
        return None
    if torch.float16 in kinds and not allow_fp16 and engine.share.masters is None:  # with them, shards are in fp32
        return params[0].new_zeros(1, dtype=torch.float16)  # the scaler refuses it, on all ranks
    return unscale(engine.transport, engine.gradients.shards(), inverse, params[0])
