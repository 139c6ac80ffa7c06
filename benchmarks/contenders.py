"""What is compared: a model under DDP, with torch's ZeroRedundancyOptimizer, shardstep's, or another optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer as ShardstepZero
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss

ZeroClass = type[TorchZero] | type[ShardstepZero]
# The first is the base of every ratio.
COMPARED: dict[str, ZeroClass] = {"torch": TorchZero, "shardstep": ShardstepZero}
CONTROL: dict[str, ZeroClass] = {"torch": TorchZero, "torch again": TorchZero}
SEED = 20
BATCH = 2
LEARNING_RATE = 3e-4
TARGET_RANK = 0  # of the consolidation

# About 30 M parameters, 64 % of them in one tied embedding: the hard case for whole-parameter sharding.
FULL = GPTConfig(vocab=50_257, block=64, layers=6, heads=6, width=384)
TOY = GPTConfig(vocab=1_000, block=16, layers=6, heads=2, width=64)


@dataclass(frozen=True, slots=True)
class Setting:
    """How both contenders are run."""

    bucket_view: bool
    frozen: bool  # a sixth of the elements does not train

    @property
    def name(self) -> str:
        base = "bucket view" if self.bucket_view else "default"
        return f"{base}, 1/6 frozen" if self.frozen else base


class Trainee:
    """A model under DDP and an endless, reproducible stream of batches: the same for everything that is compared."""

    optimizer: torch.optim.Optimizer  # made by a subclass, which knows what it compares

    def __init__(self, name: str, config: GPTConfig, *, frozen: bool = False) -> None:
        torch.manual_seed(SEED)
        model = GPT(config)
        self.name = name
        self.frozen_share = freeze_a_sixth(model) if frozen else 0.0
        self.model = DistributedDataParallel(model)
        self._batches = batches(config)
        self._next = next(self._batches)

    def forward_backward(self) -> None:
        tokens, targets = self._next
        self.optimizer.zero_grad()
        next_token_loss(self.model(tokens), targets).backward()

    def step(self) -> None:
        self.optimizer.step()

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.forward_backward()
            self.step()
            self._next = next(self._batches)

    def params(self) -> list[Tensor]:
        return [param.detach() for param in self.model.parameters()]


class Contender(Trainee):
    """DDP with one of the two ZeroRedundancyOptimizers."""

    optimizer: TorchZero | ShardstepZero

    def __init__(self, name: str, zero_class: ZeroClass, config: GPTConfig, setting: Setting) -> None:
        super().__init__(name, config, frozen=setting.frozen)
        self.optimizer = zero_class(
            self.model.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=setting.bucket_view,
            lr=LEARNING_RATE,
        )

    def consolidate(self) -> None:
        self.optimizer.consolidate_state_dict(to=TARGET_RANK)


def batches(config: GPTConfig) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(SEED + 1 + dist.get_rank())
    while True:
        tokens = torch.randint(config.vocab, (BATCH, config.block + 1), generator=generator)
        yield tokens[:, :-1], tokens[:, 1:]


def freeze_a_sixth(model: nn.Module) -> float:
    """Freeze the first blocks, as many as come closest to a sixth of all elements; returns the share that is frozen."""
    blocks = next(module for module in model.modules() if isinstance(module, nn.ModuleList))
    total = sum(param.numel() for param in model.parameters())
    frozen = 0
    for block in blocks:
        numel = sum(param.numel() for param in block.parameters())
        if abs(frozen + numel - total / 6) > abs(frozen - total / 6):
            break
        block.requires_grad_(False)
        frozen += numel
    return frozen / total


def first_different_param(one: Trainee, other: Trainee) -> str | None:
    """The first parameter that is not bitwise equal; None if all are."""
    names = [name for name, _ in one.model.named_parameters()]
    for name, mine, theirs in zip(names, one.params(), other.params(), strict=True):
        if not torch.equal(mine.view(torch.int32), theirs.view(torch.int32)):
            return name
    return None


def first_different_entry(one: object, other: object, path: str = "state_dict") -> str | None:
    """Where two state_dicts differ, in keys, types or bits; None if they do not."""
    if type(one) is not type(other):
        return f"{path}: {type(one).__name__} and {type(other).__name__}"
    if isinstance(one, dict) and isinstance(other, dict):
        if list(one) != list(other):
            return f"{path}: keys {list(one)} and {list(other)}"
        pairs = [(f"{path}[{key!r}]", one[key], other[key]) for key in one]
    elif isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        if len(one) != len(other):
            return f"{path}: {len(one)} and {len(other)} entries"
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    elif isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)
        return None if same else f"{path}: tensors differ"
    else:
        return None if one == other else f"{path}: {one!r} and {other!r}"
    return next((found for where, a, b in pairs if (found := first_different_entry(a, b, where))), None)
