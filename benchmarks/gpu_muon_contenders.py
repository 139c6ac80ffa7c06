"""What `gpu_muon.py` compares: a GPT in fp32 trained by Muon and AdamW, by hand in two ways and by shardstep."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_contenders import Device, Task
from gpu_training_contenders import FP32, TOY_SMALL, Make, Ratio, Reader, gpt
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep.cli.demo.gpt import GPTConfig

TASK = gpt("GPT of 124 M", GPTConfig(vocab=50_304, block=1_024, layers=12, heads=12, width=768), 8)
TOY_TASK = TOY_SMALL
MUON: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.95}
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.01}
COEFFICIENTS, ITERATIONS, LEAST_NORM = (3.4445, -4.7750, 2.0315), 5, 1e-7  # torch.optim.Muon's
FEW = 1_024  # elements: smaller parameters are on all ranks


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices of the blocks, and the rest."""
    named = dict(model.named_parameters())
    matrices = [name for name, param in named.items() if "blocks." in name and param.dim() == 2]
    return [named[name] for name in matrices], [param for name, param in named.items() if name not in matrices]


# -- stacked by hand ---------------------------------------------------------------------------------------------------


def step_stack(
    gradients: Tensor, params: Tensor, momenta: Tensor, momentum: Tensor, keep: Tensor, rate: Tensor
) -> None:
    """Muon for a stack of matrices; numbers are CPU tensors of no dims, which torch.compile does not specialise on."""
    momenta.lerp_(gradients, 1 - momentum)
    x = gradients.lerp(momenta, momentum).bfloat16()
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=LEAST_NORM)
    a, b, c = COEFFICIENTS
    tall = x.size(1) > x.size(2)
    for _ in range(ITERATIONS):
        gram = x.mT @ x if tall else x @ x.mT
        series = b * gram + c * (gram @ gram)
        x = a * x + (x @ series if tall else series @ x)
    params.copy_(params * keep - rate * x.to(params.dtype))


def step_adamw(
    param: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: Tensor, lr: Tensor, beta1: Tensor,
    beta2: Tensor, eps: Tensor, decay: Tensor,
) -> None:  # fmt: skip
    first.lerp_(gradient, 1 - beta1)
    second.lerp_(gradient.square(), 1 - beta2)
    root = (second / (1 - beta2**step)).sqrt() + eps
    param.copy_(param * (1 - lr * decay) - lr / (1 - beta1**step) * (first / root))


@cache
def compiled(function: Callable[..., None], device: str) -> Callable[..., None]:
    return torch.compile(function, fullgraph=True, dynamic=False) if device == "cuda" else function


def number(value: float) -> Tensor:
    return torch.tensor(value, dtype=FP32)


class Stack:
    """Matrices of one shape: their gradients are stacked and reduced as one, and so are they stepped and gathered."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params, (self._ranks, self._rank) = list(params), (dist.get_world_size(), dist.get_rank())
        self._count = -(-len(params) // self._ranks)  # of each rank; the last may hold padding
        self._momenta = torch.zeros(self._count, *params[0].shape, device=params[0].device)
        ratio = math.sqrt(max(1.0, params[0].shape[0] / params[0].shape[1]))
        self._numbers = [number(MUON["momentum"]), number(1 - MUON["lr"] * MUON["weight_decay"])]
        self._numbers.append(number(MUON["lr"] * ratio))

    def reduce(self) -> None:
        own = [param.grad for param in self._params if param.grad is not None]
        self._all = torch.stack(own)
        if self._ranks == 1:
            self._own, self._work = self._all, None
            return
        padding = self._count * self._ranks - len(own)
        if padding:
            self._all = torch.cat([self._all, self._all.new_zeros(padding, *self._all.shape[1:])])
        self._own = torch.empty_like(self._momenta)
        self._work = dist.reduce_scatter_tensor(self._own, self._all, op=dist.ReduceOp.AVG, async_op=True)

    def step(self) -> None:
        if self._work is not None:
            self._work.wait()
        held = self._params[self._rank * self._count : (self._rank + 1) * self._count]
        if held:
            values, n = torch.stack([param.detach() for param in held]), len(held)
            step = compiled(step_stack, values.device.type)
            step(self._own[:n], values, self._momenta[:n], *self._numbers)
            if self._ranks == 1:
                self._all = values
            else:
                self._own[:n].copy_(values)  # the gradients have been used
        if self._ranks > 1:  # into the memory of what was reduced
            self._work = dist.all_gather_into_tensor(self._all, self._own, async_op=True)

    def finish(self) -> None:
        if self._work is not None:
            self._work.wait()
        found = list(self._all[: len(self._params)].unbind())
        torch._foreach_copy_([param.detach() for param in self._params], found)
        self._all = self._own = self._work = None  # type: ignore[assignment]


class AdamWPart:
    """Values that one call of the compiled step goes over."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._moments = values, (torch.zeros_like(values), torch.zeros_like(values))
        self._step, options = number(0.0), (ADAMW["lr"], *ADAMW["betas"], ADAMW["eps"], ADAMW["weight_decay"])
        self._numbers = [number(value) for value in options]
        self._work: Any = None
        self._gradient: Tensor | None = None

    def reduce(self) -> None:
        raise NotImplementedError

    def step(self) -> None:
        self._wait()
        self._step += 1
        step = compiled(step_adamw, self._values.device.type)
        step(self._values, self._gradient, *self._moments, self._step, *self._numbers)

    def finish(self) -> None:
        self._wait()
        self._gradient = None

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None


class Cut(AdamWPart):
    """A large parameter: each rank steps a part of its rows."""

    def __init__(self, param: nn.Parameter) -> None:
        rows, rank = len(param) // dist.get_world_size(), dist.get_rank()
        super().__init__(param.detach()[rank * rows : (rank + 1) * rows])
        self._param = param

    def reduce(self) -> None:
        gradient = self._gradient = self._param.grad
        if dist.get_world_size() > 1:
            self._gradient = torch.empty_like(self._values)
            self._work = dist.reduce_scatter_tensor(self._gradient, gradient, op=dist.ReduceOp.AVG, async_op=True)

    def step(self) -> None:
        super().step()
        if dist.get_world_size() > 1:
            self._work = dist.all_gather_into_tensor(self._param.detach(), self._values, async_op=True)


class Joined(AdamWPart):
    """All small parameters, which every rank steps: one message, and one step. (nanochat has one of each for each.)"""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__(torch.cat([param.detach().flatten() for param in params]))
        self._params = list(params)

    def reduce(self) -> None:
        own = [param.grad.flatten() for param in self._params if param.grad is not None]
        self._gradient = torch.cat(own)
        if dist.get_world_size() > 1:
            self._work = dist.all_reduce(self._gradient, op=dist.ReduceOp.AVG, async_op=True)

    def finish(self) -> None:
        super().finish()
        found = self._values.split([param.numel() for param in self._params])
        targets = [param.detach() for param in self._params]
        torch._foreach_copy_(targets, [one.view_as(target) for one, target in zip(found, targets, strict=True)])


class StackedByHand:
    """ZeRO-2 as nanochat's optimizer has it: all is reduced in step(), and gathered part by part as it is stepped."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = split(model)
        self._params = list(model.parameters())
        shapes = sorted({param.shape for param in matrices})
        stacks = [Stack([param for param in matrices if param.shape == shape]) for shape in shapes]
        small = [param for param in others if param.numel() < FEW]
        large = [param for param in others if param.numel() >= FEW]
        self._parts: list[Stack | AdamWPart] = [*map(Cut, large), *([Joined(small)] if small else []), *stacks]

    @torch.no_grad()
    def step(self) -> None:
        for part in self._parts:
            part.reduce()
        for part in self._parts:
            part.step()
        for part in self._parts:
            part.finish()

    def zero_grad(self) -> None:
        clear(self._params)


def clear(params: Iterable[nn.Parameter]) -> None:
    for param in params:
        param.grad = None


# -- the contenders ----------------------------------------------------------------------------------------------------


class Stacked(Reader):
    def __init__(self, name: str, task: Task, device: Device) -> None:
        super().__init__(name, task, device, dtype=FP32)
        self.optimizer = StackedByHand(self.whole)


class Two:
    """torch's Muon and fused AdamW, one after the other."""

    def __init__(self, model: nn.Module) -> None:
        matrices, others = split(model)
        self._both = torch.optim.Muon(matrices, **MUON), torch.optim.AdamW(others, fused=True, **ADAMW)

    def step(self) -> None:
        for optimizer in self._both:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self._both:
            optimizer.zero_grad()


class ByClasses(Reader):
    def __init__(self, name: str, task: Task, device: Device, *, ddp: bool = False) -> None:
        super().__init__(name, task, device, dtype=FP32)
        if ddp:
            self.whole = DistributedDataParallel(self.whole, gradient_as_bucket_view=True)
        self.optimizer = Two(self.whole)


class Sharded(Reader):
    """shardstep.shard with both classes, in a process group of its own (as in gpu_contenders.py)."""

    def __init__(self, name: str, task: Task, device: Device, **config: Any) -> None:
        super().__init__(name, task, device, dtype=FP32)
        groups: list[dict[str, Any]] = [
            {"params": ["blocks.*.attention.*", "blocks.*.feed_forward.*"], "optimizer": torch.optim.Muon, **MUON},
            {"params": "rest", "optimizer": torch.optim.AdamW, "fused": True, **ADAMW},
        ]
        self.optimizer = shardstep.shard(
            self.whole, groups=groups, process_group=dist.new_group(), config=shardstep.ShardConfig(**config)
        )

    def finish(self) -> None:
        self.optimizer.synchronize()


SHARD, SHARD_OVERLAP, SHARD_CLASS = "shard", "shard, overlap", 'shard, kernel="torch"'
STACKED, PLAIN, DDP = "stacked by hand", "torch's classes", "DDP, torch's classes"
ONE_RANK: dict[str, Make] = {
    SHARD: Sharded,
    SHARD_CLASS: partial(Sharded, kernel="torch"),
    STACKED: Stacked,
    PLAIN: ByClasses,
}
SEVERAL_RANKS: dict[str, Make] = {
    SHARD: Sharded,
    SHARD_OVERLAP: partial(Sharded, gather="overlap"),
    SHARD_CLASS: partial(Sharded, kernel="torch"),
    STACKED: Stacked,
    DDP: partial(ByClasses, ddp=True),
}
BY_HAND = (STACKED, PLAIN, DDP)
MOST_OF_A_STEP, MOST_ON_TWO_RANKS = 1.00, 0.95
STEP_RATIOS = (Ratio(SHARD, STACKED, MOST_OF_A_STEP), Ratio(SHARD, PLAIN), Ratio(SHARD_CLASS, STACKED))
RATIOS = (
    Ratio(SHARD, STACKED, MOST_ON_TWO_RANKS),
    Ratio(SHARD_OVERLAP, STACKED, MOST_ON_TWO_RANKS),
    Ratio(SHARD, DDP, MOST_ON_TWO_RANKS),
    Ratio(SHARD_OVERLAP, DDP, MOST_ON_TWO_RANKS),
    Ratio(SHARD, SHARD_CLASS),
)
