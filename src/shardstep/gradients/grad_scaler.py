"""torch.amp.GradScaler, where gradients lie in shards.

The scaler reads `param.grad` of every parameter of an optimizer, multiplies it by 1 / scale, and notes whether all of
it was finite; if not, nothing is stepped. A parameter's proxy sees that the scaler reads it (params/proxy.py). At the
first read everything is done: this rank's shards are multiplied, and the ranks combine whether anything was not finite
on any of them. The scaler itself finds one gradient of one element, the same on every rank: zero or inf.

It is one tensor, whatever this rank holds: with several on several devices the scaler would count 2, and torch's fused
kernels skip a step only where it counted 1. The host does not wait for a device here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from shardstep.comm.transport import Transport
from shardstep.gradients.clipping import of_one_kind
from shardstep.params.proxy import gradient_of

_OF_THE_SCALER = (torch.float32, torch.float64, torch.float16)  # what its kernel takes on every device


class Unscaled:
    """What the scaler finds in `param.grad` during one call. `call` is the tensor that it has made for that call."""

    def __init__(self, call: torch.Tensor | None = None, verdict: torch.Tensor | None = None) -> None:
        """The first parameter that is read shows `verdict`, the others none; without it, all show what they have."""
        self.call, self._verdict = call, verdict
        self._first: torch.Tensor | None = None

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        """Return what the scaler is to find in `param.grad`."""
        if self._verdict is None:
            found: torch.Tensor | None = gradient_of(param)
            return found
        if self._first is None:
            self._first = param
        return self._verdict if param is self._first else None  # the scaler reads each of them several times


@torch.no_grad()
def unscale(
    transport: Transport, shards: Sequence[torch.Tensor], inverse: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Multiply this rank's shards by `inverse`. Return inf if anything was not finite on any rank, or else zero."""
    flags = [torch.zeros(1, dtype=torch.float32, device=like.device)]
    for members in of_one_kind([torch.view_as_real(one) if one.is_complex() else one for one in shards]):
        factor = inverse.to(members[0].device, non_blocking=True)
        if members[0].dtype in _OF_THE_SCALER:
            flag = torch.zeros(1, dtype=torch.float32, device=factor.device)
            torch._amp_foreach_non_finite_check_and_unscale_(members, flag, factor)
        else:  # a kernel that refuses them would raise on the ranks that hold some, and on no other
            highest = torch.stack(torch._foreach_norm(members, math.inf))
            flag = highest.isfinite().logical_not_().any().float().view(1)
            torch._foreach_mul_(members, factor)
        flags.append(flag.to(like.device, non_blocking=True))
    anywhere = transport.add_up(torch.stack(flags).amax(0), highest=True)
    return torch.zeros_like(anywhere).masked_fill_(anywhere > 0, math.inf)


def unscale_kept(params: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Divide `param.grad` by `scale`: all of it on every rank, where a kernel would divide what that rank steps."""
    gradients = [gradient for param in params if (gradient := gradient_of(param)) is not None]
    for members in of_one_kind(gradients):
        torch._foreach_div_(members, scale.to(members[0].device, non_blocking=True))
