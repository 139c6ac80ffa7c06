"""What `gpu_training.py` compares: two sizes of GPT on random tokens, and ways to train them in bf16."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from gpu_contenders import BATCHES, OPTIONS, SEED, AdamW, Contender, Device, Task
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss

BF16, FP32 = torch.bfloat16, torch.float32


# -- the models --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reading(Task):
    """A GPT and a rank's batches; `shape` is that of the tokens, sequences first."""

    vocab: int

    def model(self, device: torch.device) -> nn.Module:
        """Made where it trains: on the host, with one thread, the larger one takes a quarter of a minute."""
        torch.manual_seed(SEED)
        with device:
            return self.build()

    def batches(self, device: torch.device) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(SEED + 1 + dist.get_rank())
        both = torch.randint(self.vocab, (BATCHES, 2, *self.shape), generator=generator).to(device)
        return [(tokens, targets) for tokens, targets in both]


def gpt(name: str, config: GPTConfig, sequences: int) -> Reading:
    return Reading(name, partial(GPT, config), (sequences, config.block), config.vocab)


SMALL = gpt("GPT of 124 M", GPTConfig(vocab=50_304, block=1_024, layers=12, heads=12, width=768), 16)
LARGE = gpt("GPT of 774 M", GPTConfig(vocab=50_304, block=1_024, layers=36, heads=20, width=1_280), 8)
# A quarter of it: the device is done before the host has launched all, so that the host's time is what is measured.
TOO_SMALL = gpt("GPT of 124 M, small batch", GPTConfig(vocab=50_304, block=512, layers=12, heads=12, width=768), 8)
TOY_SMALL = gpt("GPT, 2 layers", GPTConfig(vocab=64, block=16, layers=2, heads=2, width=32), 2)
TOY_LARGE = gpt("GPT, 3 layers", GPTConfig(vocab=64, block=16, layers=3, heads=2, width=48), 2)


# -- the contenders ----------------------------------------------------------------------------------------------------


class MastersByHand:
    """What one writes around torch's fused AdamW so that a model in bf16 learns as one in fp32 does."""

    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        self._params = list(params)
        self._values: list[Tensor] = [param.detach() for param in self._params]
        self._masters = [value.to(FP32, copy=True).requires_grad_() for value in self._values]
        self._gradients = [torch.empty_like(master) for master in self._masters]
        for master, gradient in zip(self._masters, self._gradients, strict=True):
            master.grad = gradient
        self._optimizer = AdamW(self._masters, **OPTIONS)

    @torch.no_grad()
    def step(self) -> None:
        given = [param.grad for param in self._params if param.grad is not None]
        torch._foreach_copy_(self._gradients, given)
        self._optimizer.step()
        torch._foreach_copy_(self._values, self._masters)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


class Reader(Contender):
    """A GPT whose parameters are of `dtype`."""

    def __init__(self, name: str, task: Task, device: Device, *, dtype: torch.dtype = BF16) -> None:
        super().__init__(name, task, device)
        self.whole = self.whole.to(dtype)

    def loss(self) -> Tensor:
        tokens, targets = next(self._batches)
        return next_token_loss(self.whole(tokens), targets)


class Plain(Reader):
    """torch's fused AdamW, without or with masters by hand; `ddp` with gradients that are views of its buckets."""

    def __init__(
        self, name: str, task: Task, device: Device, *, dtype: torch.dtype = BF16, masters: bool = False,
        ddp: bool = False, autocast: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(name, task, device, dtype=dtype)
        if ddp:
            self.whole = DistributedDataParallel(self.whole, gradient_as_bucket_view=True)
        params = self.whole.parameters()
        self.optimizer: Any = MastersByHand(params) if masters else AdamW(params, **OPTIONS)
        self._cast: Callable[[], AbstractContextManager[Any]] = (
            partial(torch.autocast, device.place.type, BF16) if autocast else nullcontext
        )

    def loss(self) -> Tensor:
        with self._cast():
            return super().loss()


class Sharded(Reader):
    """shardstep.shard on a model in bf16, in a process group of its own (as in gpu_contenders.py)."""

    def __init__(self, name: str, task: Task, device: Device, *, gather: Any = "wait", master: Any = "fp32") -> None:
        super().__init__(name, task, device)
        config = shardstep.ShardConfig(gather=gather, master=master)
        self.optimizer = shardstep.shard(self.whole, AdamW, process_group=dist.new_group(), config=config, **OPTIONS)

    def finish(self) -> None:
        self.optimizer.synchronize()


SHARD, SHARD_OVERLAP, SHARD_BY_CHANCE = "shard", "shard, overlap", "shard, stochastic"
BY_HAND, NO_MASTERS = "torch, masters by hand", "torch, no masters"
DDP_BY_HAND, DDP_FP32, DDP_AUTOCAST = "DDP, masters by hand", "DDP, fp32", "DDP, fp32, autocast"

Make = Callable[[str, Task, Device], Contender]
ONE_RANK: dict[str, Make] = {
    SHARD: Sharded,
    SHARD_BY_CHANCE: partial(Sharded, master="stochastic"),
    BY_HAND: partial(Plain, masters=True),
    NO_MASTERS: Plain,
}
SEVERAL_RANKS: dict[str, Make] = {
    SHARD: Sharded,
    SHARD_OVERLAP: partial(Sharded, gather="overlap"),
    DDP_BY_HAND: partial(Plain, masters=True, ddp=True),
    DDP_FP32: partial(Plain, dtype=FP32, ddp=True),
    DDP_AUTOCAST: partial(Plain, dtype=FP32, ddp=True, autocast=True),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """Whose time is divided by whose; without a limit it is for information."""

    ours: str
    base: str
    limit: float | None = None


RATIOS: Sequence[Ratio] = (
    Ratio(SHARD, BY_HAND, 1.00),
    Ratio(SHARD, NO_MASTERS),
    Ratio(SHARD_BY_CHANCE, NO_MASTERS),
    Ratio(SHARD, DDP_FP32, 0.60),
    Ratio(SHARD_OVERLAP, DDP_FP32, 0.60),
    Ratio(SHARD, DDP_BY_HAND, 1.00),
    Ratio(SHARD_OVERLAP, DDP_BY_HAND, 1.00),
    Ratio(SHARD, DDP_AUTOCAST),
    Ratio(SHARD_OVERLAP, DDP_AUTOCAST),
)
