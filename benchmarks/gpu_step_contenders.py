"""What `gpu_step.py` compares: a share's tensors, and the ways to step them with AdamW."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardstep.stepping.kernel import BlockShape, KernelPiece, KernelStep, Rule

LR, BETAS, EPS, WEIGHT_DECAY = 1e-4, (0.9, 0.999), 1e-8, 0.01
FLOAT32, MASTERS, BY_CHANCE = "fp32", "bf16 + fp32 masters", "bf16 by chance"
# Read and written for an element: gradient, values or master, both moments; then values, master, both moments.
NBYTES = {FLOAT32: 4 * 4 + 3 * 4, MASTERS: 2 + 3 * 4 + 2 + 3 * 4, BY_CHANCE: 2 + 2 + 8 + 2 + 8}
SEED = 20

Step = Callable[[], None]


@dataclass(frozen=True)
class Case:
    kind: str
    share: int  # a rank holds one of so many parts
    numel: int  # of a range
    ranges: int
    steps: int  # in a row

    @property
    def name(self) -> str:
        return f"{self.kind}, all of it" if self.share == 1 else f"{self.kind}, a {self.share}th"

    @property
    def nbytes(self) -> int:
        return self.numel * self.ranges * NBYTES[self.kind]


class Share:
    """Flat ranges, as many as a rank has buckets, and all that belongs to them."""

    def __init__(self, case: Case, device: torch.device) -> None:
        low = torch.float32 if case.kind == FLOAT32 else torch.bfloat16

        def ranges(dtype: torch.dtype, scale: float) -> list[Tensor]:
            made = [torch.zeros(case.numel, dtype=dtype, device=device) for _ in range(case.ranges)]
            return [tensor.normal_(0, scale) for tensor in made] if scale else made

        self.values, self.gradients = ranges(low, 0.02), ranges(low, 1e-3)
        self.masters = [values.float() for values in self.values] if case.kind == MASTERS else None
        self.first, self.second = ranges(torch.float32, 0.0), ranges(torch.float32, 0.0)
        self.counts = torch.zeros(case.ranges, device=device)

    def pieces(self) -> list[KernelPiece]:
        masters = self.masters or [None] * len(self.values)
        rows = zip(self.values, masters, self.first, self.second, self.counts.unbind(), strict=True)
        return [
            KernelPiece(values=values, master=master, first=first, second=second, step=count, param=index)
            for index, (values, master, first, second, count) in enumerate(rows)
        ]


def options() -> dict[str, Any]:
    return {"lr": LR, "betas": BETAS, "eps": EPS, "weight_decay": WEIGHT_DECAY, "decoupled_weight_decay": True}


def by_kernel(share: Share, kind: str, shape: BlockShape | None = None) -> Step:
    seed = SEED if kind == BY_CHANCE else None
    kernel = KernelStep(Rule.ADAM, share.pieces(), [options()], seed=seed, shape=shape or BlockShape())
    return lambda: kernel.step(share.gradients)


def by_torch_fused(share: Share) -> Step:
    """It has moments of its own."""
    params = [values.detach().requires_grad_() for values in share.values]
    for param, gradient in zip(params, share.gradients, strict=True):
        param.grad = gradient
    optimizer = torch.optim.AdamW(params, lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True)
    return lambda: optimizer.step() and None


def _advance(count: Tensor, rate: Tensor, root: Tensor) -> None:
    """What the elements have in common, on the device."""
    count.add_(1)
    rate.copy_(-LR / (1 - BETAS[0] ** count.double()))
    root.copy_((1 - BETAS[1] ** count.double()).rsqrt())


def _plain(
    values: Tensor, master: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rate: Tensor, root: Tensor
) -> None:
    """AdamW as one would write it down; `master` is `values` where there is none."""
    given = gradient.float()
    mean = torch.lerp(first, given, 1 - BETAS[0])
    square = BETAS[1] * second + (1 - BETAS[1]) * given * given
    stepped = (1 - LR * WEIGHT_DECAY) * master + rate * mean / (square.sqrt() * root + EPS)
    first.copy_(mean)
    second.copy_(square)
    master.copy_(stepped)
    if values is not master:
        values.copy_(stepped)


def _plain_in_place(
    values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, rate: Tensor, root: Tensor
) -> None:
    _plain(values, values, gradient, first, second, rate, root)


def by_compiler(share: Share) -> Step:
    """A call for each range. All are of one size, for which the compiler may choose: its best case."""
    torch._dynamo.reset()
    count, rate, root = (torch.zeros((), device=share.counts.device) for _ in range(3))
    advance = torch.compile(_advance, dynamic=False)
    moments = (share.gradients, share.first, share.second)
    if share.masters is None:
        step = torch.compile(_plain_in_place, dynamic=False)
        rows: list[tuple[Tensor, ...]] = list(zip(share.values, *moments, strict=True))
    else:
        step = torch.compile(_plain, dynamic=False)
        rows = list(zip(share.values, share.masters, *moments, strict=True))

    def run() -> None:
        advance(count, rate, root)
        for row in rows:
            step(*row, rate, root)

    return run


def in_a_graph(step: Step) -> Step:
    """Launched as one. It must have been run before."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def largest_difference(device: torch.device, *, fused: bool) -> float:
    """Between the kernel and torch.optim.AdamW after five steps from the same numbers, relative to the largest."""
    generator = torch.Generator().manual_seed(SEED)

    def normal(numel: int) -> Tensor:
        return torch.randn(numel, generator=generator).to(device)

    sizes = (1, 1_000, 5_000)
    theirs = [normal(size).requires_grad_() for size in sizes]
    plain = torch.optim.AdamW(theirs, lr=1e-2, fused=fused)
    pieces = [
        KernelPiece(
            values=param.detach().clone(),
            step=torch.zeros((), device=device),
            first=torch.zeros(param.numel(), device=device),
            second=torch.zeros(param.numel(), device=device),
        )
        for param in theirs
    ]
    kernel = KernelStep(Rule.ADAM, pieces, plain.param_groups)
    for _ in range(5):
        for param in theirs:
            param.grad = normal(param.numel())
        kernel.step([param.grad for param in theirs])
        plain.step()
    rows = [(piece.values, param.detach()) for piece, param in zip(pieces, theirs, strict=True)]
    return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in rows)
