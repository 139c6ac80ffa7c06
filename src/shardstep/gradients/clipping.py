"""By how much to scale gradients so that their norm over all ranks is small enough; and to scale this rank's part."""

from __future__ import annotations

from collections.abc import Sequence

import torch


@torch.no_grad()
def factor_for(norm: torch.Tensor, max_norm: float, norm_type: float, *, error_if_nonfinite: bool) -> torch.Tensor:
    """Return the factor that clips gradients of this norm; it lies on the device of `norm`."""
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped; "
            "pass error_if_nonfinite=False to scale by it anyway"
        )
    return (max_norm / (norm + 1e-6)).clamp(max=1.0)  # nan stays nan, as torch's


@torch.no_grad()
def multiply(shards: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    if factor.device.type == "cpu" and factor == 1.0:  # there a look costs nothing, and a product does
        return
    for members in of_one_kind(shards):
        torch._foreach_mul_(members, factor.to(device=members[0].device, dtype=members[0].dtype.to_real()))


def of_one_kind(shards: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Those of a dtype and device, which one call can take."""
    kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for values in shards:
        kinds.setdefault((values.dtype, values.device), []).append(values)
    return list(kinds.values())
