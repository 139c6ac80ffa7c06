"""What a program wants of its gradients, done on this rank when all ranks have turned to it (`engine.take_turn`)."""

from __future__ import annotations

import torch

from shardstep.engine import Engine
from shardstep.gradients.clipping import norm_and_factor
from shardstep.gradients.norms import norms_by_parameter
from shardstep.gradients.scaling import unscale
from shardstep.planned import ParamGroups, params_of


def norms(engine: Engine, groups: ParamGroups, norm_type: float) -> dict[str, float]:
    """Of every parameter, by name."""
    pieces = [(piece.param, gradient) for piece, gradient in engine.gradients.present()]
    specs, first = engine.plan.params, params_of(groups)[0]
    found = norms_by_parameter(engine.transport, pieces, len(specs), norm_type, first)
    return {spec.name: norm for spec, norm in zip(specs, found, strict=True) if spec.trainable}


@torch.no_grad()
def clip(
    engine: Engine, groups: ParamGroups, max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> torch.Tensor:
    params = params_of(groups)
    if engine.keeps_gradients:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)
    shards = engine.gradients.shards()
    norm, factor = norm_and_factor(
        engine.transport, shards, max_norm, norm_type, params[0], error_if_nonfinite=error_if_nonfinite
    )
    engine.gradients.scale(factor, later=engine.share.takes_factor)
    return norm


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
