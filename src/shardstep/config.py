"""How the fast lane works: one value, given once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from shardstep.planning import Layout

GRADIENTS = ("shard", "keep")
GATHER = ("wait", "overlap")
MASTER = ("fp32", "none", "stochastic")
KERNEL = ("auto", "torch")
STEP = ("after", "backward")
WIRE = (None, "bf16")


@dataclass(frozen=True, slots=True)
class ShardConfig:
    """The defaults are right for most; each option is here because a measurement or a program needs the other choice.

    Args:
        layout: how finely parameters are cut. AUTO tries the optimizer on tiny tensors, and takes the finest that is
            exact for torch's own and for known ones; WHOLE for others, whose later steps it does not see. FLAT cuts
            those, too.
        bucket_mb: what travels together. Smaller overlaps better with backward, larger has fewer messages. None: with
            Gloo 25, and 8 between hosts, where links are slow and the first bytes should go early; with NCCL 64, of a
            small model a third of it (with gather="overlap" a seventh), of a large one a forty-eighth, up to 128
            (comm/nccl.py says why).
        gradients: "shard" leaves each rank its part, and `param.grad` raises. "keep" leaves the whole mean in
            `param.grad`, as DDP does, for programs that read it; that is half as many bytes again on the wire.
        gather: "wait" returns from `step` with finished weights; "overlap" lets them arrive during the next forward,
            and whatever touches one waits for it.
        reduce_dtype: of gradients on the wire. None: their own, or that of `wire`.
        wire: "bf16" sends float32 matrices and their gradients in half the bytes (with reduce_dtype=torch.float32 only
            the matrices). Each rank keeps its pieces in float32 and steps, averages and saves those; between steps all
            ranks compute with the same rounded values. Norms and biases travel as they are. None: all of it does.
        ordered_sums: with Gloo gradients are summed in the order of the ranks, in float32 at least, in any case. With
            NCCL the sum is taken in the network, in the dtype of the wire and an order of NCCL's own, which is the same
            from run to run on the same machines. True: as with Gloo, by an all-to-all, at a price (docs/concepts.md).
        master: of bf16 and fp16 parameters. "fp32": each rank keeps its pieces in float32 and steps those; parameters
            and gradients travel in 16 bits. "none": they are stepped as they are, and small steps are lost to rounding.
            "stochastic" (bf16 alone): stepped in float32 and rounded up or down by chance, so that small steps count on
            average; the noise depends on the element and the step, and not on the number of ranks.
        kernel: "auto" steps cut parameters on a GPU by one pass over memory, where Triton is there and the optimizer is
            one that it reproduces (Adam, AdamW, SGD, Lion), and torch's Muon by batches of matrices that have the same
            shape (docs/muon.md). "torch" leaves it to the optimizer's class.
        step: "after" backward, in `step()`; or inside "backward", each bucket as soon as it is reduced, so that
            gradients are never all alive (torch's optimizers only). Then nothing that needs all gradients at once works
            (clipping by norm, a GradScaler), and a pass outside no_sync() is a step: `step()` must follow it.
        ema: keep an exponential moving average of the weights with this decay, 1/N of it on each of N ranks; `with
            opt.ema():` the model has it.
        sync_buffers: whether module buffers (running means) follow rank 0 in every step.
        audit: every so many steps all ranks compare what they hold (parameters, buffers, options), and raise if one
            holds something else. The host waits for the device then. None: never.
    """

    layout: Layout = Layout.AUTO
    bucket_mb: float | None = None
    gradients: Literal["shard", "keep"] = "shard"
    gather: Literal["wait", "overlap"] = "wait"
    reduce_dtype: torch.dtype | None = None
    wire: Literal["bf16"] | None = None
    ordered_sums: bool = False
    master: Literal["fp32", "none", "stochastic"] = "fp32"
    kernel: Literal["auto", "torch"] = "auto"
    step: Literal["after", "backward"] = "after"
    ema: float | None = None
    sync_buffers: bool = True
    audit: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, Layout):
            raise TypeError(f"layout must be a shardstep.Layout, got {self.layout!r}")
        if self.bucket_mb is not None and not self.bucket_mb > 0:
            raise ValueError(f"bucket_mb must be above 0, got {self.bucket_mb}")
        for name, value, choices in (
            ("gradients", self.gradients, GRADIENTS),
            ("gather", self.gather, GATHER),
            ("master", self.master, MASTER),
            ("kernel", self.kernel, KERNEL),
            ("step", self.step, STEP),
            ("wire", self.wire, WIRE),
        ):
            if value not in choices:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
        if self.step == "backward" and self.gradients == "keep":
            raise ValueError('step="backward" gives gradients away as they come, and gradients="keep" keeps them')
        if self.wire is not None and self.master != "fp32":
            raise ValueError(f'wire="{self.wire}" keeps what it rounds in float32: use master="fp32"')
        if self.ema is not None and not 0 <= self.ema < 1:
            raise ValueError(f"ema is a decay of at least 0 and below 1, got {self.ema}")
        if self.audit is not None and not (isinstance(self.audit, int) and self.audit >= 1):
            raise ValueError(f"audit must be a number of steps, at least 1, got {self.audit!r}")
        if self.reduce_dtype is not None and not self.reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype must be a floating dtype, got {self.reduce_dtype}")
