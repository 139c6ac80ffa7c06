"""What `gpu_gpt.py` compares: ways to train one GPT as people train it, with autocast, clipping and torch.compile."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from gpu_contenders import AdamW, Contender, Device, Task
from gpu_training_contenders import gpt
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep.cli.demo import gpt as source
from shardstep.cli.demo.gpt import GPTConfig, next_token_loss

BF16, FP32 = torch.bfloat16, torch.float32
CLIP = 1.0
DECAY = 0.1
OPTIONS: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-6, "fused": True}

SMALL = gpt("GPT of 124 M", GPTConfig(vocab=50_304, block=1_024, layers=12, heads=12, width=768), 8)
TOY = gpt("GPT, 2 layers", GPTConfig(vocab=64, block=16, layers=2, heads=2, width=32), 2)

EAGER, WHOLE, BLOCKS = "eager", "whole", "blocks"
MODES = {WHOLE: "the whole model compiled", BLOCKS: "compiled block by block", EAGER: "eager"}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not: as most programs that train a GPT have it."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2], "weight_decay": DECAY},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


_copies = count()


def with_code_of_its_own(model: nn.Module) -> nn.Module:
    """Make the classes of `model` ones that no other contender has.

    The compiler keeps what it knows by code: a graph break that it met in one contender would be one in all of them.
    """
    spec = importlib.util.spec_from_file_location(f"gpt_{next(_copies)}", source.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for part in model.modules():
        part.__class__ = getattr(module, type(part).__name__, type(part))
    return model


class Trainee(Contender):
    """A GPT in `dtype`, forward under autocast to bf16, gradients clipped by their norm.

    `call` is what is trained: the model, its wrapper, or what torch.compile has made of either.
    """

    def __init__(self, name: str, task: Task, device: Device, mode: str, *, dtype: torch.dtype = FP32) -> None:
        super().__init__(name, task, device)
        self._place, self._mode = device.place.type, mode
        self.whole = with_code_of_its_own(self.whole.to(dtype))
        if mode == BLOCKS:
            for block in self.whole.blocks:
                block.compile()
        self.prepare()

    def prepare(self) -> None:
        """Wrap the model, make the optimizer, and set `call`."""
        raise NotImplementedError

    def compiled(self, model: Any) -> Any:
        return torch.compile(model) if self._mode == WHOLE else model

    def loss(self) -> Tensor:
        tokens, targets = next(self._batches)
        with torch.autocast(self._place, BF16):
            return next_token_loss(self.call(tokens), targets)

    def iterate(self) -> None:
        self.iterate_with_clipping()

    def clip(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.whole.parameters(), CLIP)


class UnderDdp(Trainee):
    """DDP with fused AdamW; with torch's hook that sends gradients in bf16; or with a ZeroRedundancyOptimizer."""

    def __init__(self, *args: Any, bf16: bool = False, zero: Any = None) -> None:
        self._bf16, self._zero = bf16, zero
        super().__init__(*args)

    def prepare(self) -> None:
        groups = groups_of(self.whole)
        self.whole = DistributedDataParallel(self.whole, gradient_as_bucket_view=True)
        if self._bf16:
            self.whole.register_comm_hook(None, bf16_compress_hook)
        self.call = self.compiled(self.whole)
        if self._zero is None:
            self.optimizer = AdamW(groups, **OPTIONS)
        else:
            # torch's class takes one group.
            self.optimizer = self._zero(
                self.whole.parameters(), AdamW, parameters_as_bucket_view=True, weight_decay=DECAY, **OPTIONS
            )


class Fsdp2(Trainee):
    """torch's fully_shard, block by block; weights stay whole between forward and backward."""

    def __init__(self, *args: Any, reduce_dtype: torch.dtype) -> None:
        self._reduce_dtype = reduce_dtype
        super().__init__(*args)

    def prepare(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=self._reduce_dtype)
        for block in self.whole.blocks:
            fully_shard(block, reshard_after_forward=False, mp_policy=policy)
        fully_shard(self.whole, reshard_after_forward=False, mp_policy=policy)
        self.call = self.compiled(self.whole)
        self.optimizer = AdamW(groups_of(self.whole), **OPTIONS)


class Sharded(Trainee):
    """shardstep.shard, in a process group of its own (as in gpu_contenders.py)."""

    def __init__(self, *args: Any, dtype: torch.dtype = FP32, **config: Any) -> None:
        self._config = config
        super().__init__(*args, dtype=dtype)

    def prepare(self) -> None:
        self.optimizer = shardstep.shard(
            self.whole,
            AdamW,
            groups=groups_of(self.whole),
            process_group=dist.new_group(),
            config=shardstep.ShardConfig(**self._config),
            **OPTIONS,
        )
        if self._mode == WHOLE:
            self.optimizer.compile()
        self.call = self.whole

    def clip(self) -> None:
        self.optimizer.clip_grad_norm_(CLIP)

    def finish(self) -> None:
        self.optimizer.synchronize()


class SingleRank(Trainee):
    """No exchange at all: what all ranks compute, side by side on one GPU."""

    def prepare(self) -> None:
        self.call = self.compiled(self.whole)
        self.optimizer = AdamW(groups_of(self.whole), **OPTIONS)


# The names of 2.13, which warns about those that 2.11 has.
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Wire(Contender):
    """The exchange alone: a reduce-scatter and an all-gather of all parameters, in few calls."""

    BUCKETS = 6

    def __init__(self, name: str, task: Task, device: Device, mode: str, *, dtype: torch.dtype) -> None:
        del mode
        self.name = name
        with torch.device("meta"):
            numel = sum(param.numel() for param in task.build().parameters())
        self._width = numel // self.BUCKETS // dist.get_world_size()
        self._own = torch.zeros(self.BUCKETS, self._width, dtype=dtype, device=device.place)
        self._all = torch.zeros(self.BUCKETS, self._width * dist.get_world_size(), dtype=dtype, device=device.place)
        self._group = dist.new_group()
        self.optimizer = None

    def iterate(self) -> None:
        for own, everything in zip(self._own, self._all, strict=True):
            _reduce_scatter(own, everything, group=self._group)
        for own, everything in zip(self._own, self._all, strict=True):
            _all_gather(everything, own, group=self._group)

    def loss(self) -> Tensor:
        return torch.zeros(())


DDP, DDP_BF16, TORCH, DROP_IN = "DDP", "DDP, bf16_compress_hook", "torch ZeRO", "drop-in"
FSDP2, FSDP2_BF16 = "FSDP2, bf16, sums in fp32", "FSDP2, bf16"
WAIT, OVERLAP = "shard", "shard, overlap"
WIRE, WIRE_OVERLAP = 'shard, wire="bf16"', 'shard, wire="bf16", overlap'
WIRE_SUMS_OVERLAP = 'shard, wire="bf16", sums in fp32, overlap'
BF16_WAIT, BF16_OVERLAP = "shard, model in bf16", "shard, model in bf16, overlap"
ALONE, WIRE_FP32, WIRE_BF16 = "no exchange", "the wire alone, fp32", "the wire alone, bf16"

Make = Callable[[str, Task, Device, str], Contender]
CONTENDERS: dict[str, Make] = {
    DDP: UnderDdp,
    DDP_BF16: partial(UnderDdp, bf16=True),
    TORCH: partial(UnderDdp, zero=TorchZero),
    DROP_IN: partial(UnderDdp, zero=shardstep.ZeroRedundancyOptimizer),
    FSDP2: partial(Fsdp2, reduce_dtype=FP32),
    FSDP2_BF16: partial(Fsdp2, reduce_dtype=BF16),
    WAIT: Sharded,
    OVERLAP: partial(Sharded, gather="overlap"),
    WIRE: partial(Sharded, wire="bf16"),
    WIRE_OVERLAP: partial(Sharded, wire="bf16", gather="overlap"),
    WIRE_SUMS_OVERLAP: partial(Sharded, wire="bf16", reduce_dtype=FP32, gather="overlap"),
    BF16_WAIT: partial(Sharded, dtype=BF16),
    BF16_OVERLAP: partial(Sharded, dtype=BF16, gather="overlap"),
    ALONE: SingleRank,
    WIRE_FP32: partial(Wire, dtype=FP32),
    WIRE_BF16: partial(Wire, dtype=BF16),
}
# Compiling one takes a quarter of a minute, and a step at four ranks two to three times as long: only those that the
# limits are about.
CHOSEN = (DDP, DDP_BF16, FSDP2_BF16, WAIT, OVERLAP, WIRE, WIRE_OVERLAP, BF16_WAIT, BF16_OVERLAP, WIRE_FP32, WIRE_BF16)

FEWER = (DDP, FSDP2_BF16, WIRE_OVERLAP, BF16_OVERLAP, WIRE_FP32, WIRE_BF16)  # the first limits; a third of the time


def chosen(mode: str, ranks: int, *, fewer: bool) -> tuple[str, ...]:
    """The contenders of one launch."""
    few = CHOSEN if mode == EAGER else FEWER
    usual = tuple(CONTENDERS) if mode == EAGER and ranks == 2 else CHOSEN
    return few if fewer else usual


@dataclass(frozen=True, slots=True)
class Ratio:
    """Whose time is divided by whose; without a limit it is for information."""

    ours: str
    base: str
    limit: float | None = None


RATIOS: Sequence[Ratio] = (
    Ratio(BF16_OVERLAP, FSDP2_BF16, 0.95),
    Ratio(WIRE_OVERLAP, FSDP2_BF16, 0.95),
    Ratio(WIRE_SUMS_OVERLAP, FSDP2, 0.95),
    Ratio(BF16_OVERLAP, WIRE_BF16, 1.15),
    Ratio(WIRE_OVERLAP, WIRE_BF16, 1.15),
    Ratio(OVERLAP, WIRE_FP32, 1.15),
    Ratio(OVERLAP, DDP, 1.00),
    Ratio(WAIT, DDP),
    Ratio(OVERLAP, WAIT, 1.00),
    Ratio(WIRE_OVERLAP, WIRE, 1.00),
    Ratio(BF16_OVERLAP, BF16_WAIT, 1.00),
    Ratio(WIRE_OVERLAP, DDP),
    Ratio(BF16_OVERLAP, DDP),
    Ratio(FSDP2_BF16, DDP),
    Ratio(DDP_BF16, DDP),
    Ratio(TORCH, DDP),
    Ratio(DROP_IN, DDP),
)
# At the same bytes: ours, and those whose peak memory it must not pass.
PEAKS = ((OVERLAP, (DDP, FSDP2)), (WIRE_OVERLAP, (DDP_BF16, FSDP2_BF16)), (BF16_OVERLAP, (DDP_BF16, FSDP2_BF16)))
