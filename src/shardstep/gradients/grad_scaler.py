"""torch.amp.GradScaler, where gradients lie in shards.

The scaler goes over an optimizer's parameters, multiplies what is in `param.grad` by 1 / scale, and notes whether all
of it was finite; if not, nothing is stepped. It asks for `param.grad`, and the guard sees who asks. At the first
question everything is done: this rank's shards are multiplied, and the ranks combine whether anything was not finite on
any of them. The scaler itself gets one number to look at, the same on every rank: zero, or inf.

One number, whatever the rank holds: with several on several devices the scaler would count 2, and torch's fused kernels
skip a step where it counted 1, and only there. Nothing here asks a device for a number.
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
    """The answers to one `call` of the scaler, which is known by a tensor that it has made for it."""

    def __init__(self, call: torch.Tensor | None = None, verdict: torch.Tensor | None = None) -> None:
        """`verdict` is found once, in place of the first gradient that is asked for; without it, what is there is."""
        self.call, self._verdict = call, verdict
        self._first: torch.Tensor | None = None

    def of(self, param: torch.Tensor) -> torch.Tensor | None:
        if self._verdict is None:
            found: torch.Tensor | None = gradient_of(param)
            return found
        if self._first is None:
            self._first = param
        return self._verdict if param is self._first else None  # it asks several times for each


@torch.no_grad()
def unscale(
    transport: Transport, shards: Sequence[torch.Tensor], inverse: torch.Tensor, like: torch.Tensor
) -> torch.Tensor:
    """Multiply this rank's shards by `inverse`. Returns inf if anything was not finite on any rank, or else zero."""
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
    """What is in `param.grad`, on every rank all of it: a kernel that is given `scale` divides what it steps."""
    gradients = [gradient for param in params if (gradient := gradient_of(param)) is not None]
    for members in of_one_kind(gradients):
        torch._foreach_div_(members, scale.to(members[0].device, non_blocking=True))
