"""What the tests of checkpoints share: models, ways to train them, and what a rank holds, read without checkpoint/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from fast_lane_training import SMALL_BUCKETS, batch, loss_of
from shardstep import Layout, ShardConfig


class Odd(nn.Module):
    """Matrices, vectors, a scalar, nothing, a frozen one, an unused one, a tied one, channels_last, a buffer."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(7, 13)
        self.second = nn.Linear(13, 5)
        self.again = nn.Linear(7, 13, bias=False)
        self.again.weight = self.first.weight
        self.image = nn.Conv2d(3, 4, 3)
        self.image.weight.data = self.image.weight.data.contiguous(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))
        self.register_buffer("count", torch.zeros(3, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.first.weight.dtype)
        seen = self.image(x.reshape(-1)[:27].reshape(1, 3, 3, 3)).sum()
        self.count += 1
        both = torch.tanh(self.first(x)) + self.again(x)
        return self.second(both) * self.scale + self.nothing.sum() + seen + self.frozen.sum()


class Blocks(nn.Module):
    def __init__(self, seed: int = 6) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(7, 12)
        self.blocks = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


MUON = {"lr": 0.02, "weight_decay": 0.1}
ADAMW = {"lr": 3e-3, "weight_decay": 0.01}
FLAT = ShardConfig(bucket_mb=SMALL_BUCKETS)
WHOLE = ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE)
OVERLAP = ShardConfig(bucket_mb=2 * SMALL_BUCKETS, gather="overlap")


@dataclass(frozen=True)
class Kind:
    """A way to train; `loads_as` are configurations in which its checkpoints are loaded."""

    model: Callable[..., nn.Module] = Odd
    optimizer: type[optim.Optimizer] | None = optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: dict(ADAMW))
    config: ShardConfig = FLAT
    dtype: torch.dtype = torch.float32
    loads_as: tuple[ShardConfig, ...] = (FLAT, WHOLE, OVERLAP)

    def build(self, config: ShardConfig | None = None, seed: int = 3) -> tuple[nn.Module, Any]:
        model = self.model(seed).to(self.dtype)
        config = config or self.config
        if self.optimizer is None:
            return model, shardstep.shard(model, groups=muon_groups(), config=config)
        return model, shardstep.shard(model, self.optimizer, config=config, **self.options)


def muon_groups() -> list[dict[str, Any]]:
    return [
        {"params": "blocks.*.weight", "optimizer": optim.Muon, **MUON},
        {"params": "rest", "optimizer": optim.AdamW, **ADAMW},
    ]


AVERAGED = ShardConfig(bucket_mb=SMALL_BUCKETS, ema=0.9)
KINDS: dict[str, Kind] = {
    "flat": Kind(),
    "whole": Kind(config=WHOLE),
    "momentum": Kind(optimizer=optim.SGD, options={"lr": 0.05, "momentum": 0.9}),
    "bf16": Kind(dtype=torch.bfloat16),
    "averaged": Kind(config=AVERAGED, dtype=torch.bfloat16, loads_as=(AVERAGED,)),
    "muon and adamw": Kind(Blocks, None, {}, loads_as=(FLAT, OVERLAP)),
    "adafactor": Kind(Blocks, optim.Adafactor, {"lr": 0.01}, loads_as=(FLAT,)),
}


def train(model: nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    if isinstance(opt, shardstep.ShardedOptimizer):
        opt.synchronize()


def held(opt: shardstep.ShardedOptimizer) -> list[tuple[str, int, int, dict[str, Any]]]:
    """What this rank holds: of each piece its parameter's name, its range, and its state on the CPU."""
    specs = opt._engine.runtime.plan.params
    return [
        (specs[piece.param].name, piece.start, piece.stop, {key: on_host(value) for key, value in entry.items()})
        for piece, entry in opt._engine.runtime.local_step.entries().items()
    ]


def on_host(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


def leave_reference(opt: shardstep.ShardedOptimizer, model: nn.Module, folder: Path) -> None:
    """By torch.save, and not by anything that is tested."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = {key: value.cpu().clone() for key, value in model.state_dict().items()} if rank == 0 else {}
    torch.save({"held": held(opt), "weights": weights, "ranks": world_size}, folder / f"reference-{rank}.pt")


Reference = tuple[dict[str, dict[str, Any]], dict[str, torch.Tensor]]


def read_reference(folder: Path, shapes: dict[str, torch.Size]) -> Reference:
    """Whole state by name, flat where it is kept by element; and the weights."""
    first = torch.load(folder / "reference-0.pt")
    files = [first, *(torch.load(folder / f"reference-{rank}.pt") for rank in range(1, first["ranks"]))]
    state: dict[str, dict[str, Any]] = {}
    for name, start, stop, entry in (row for file in files for row in file["held"]):
        whole = state.setdefault(name, {})
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == stop - start:
                flat = whole.setdefault(
                    key, torch.full([shapes[name].numel()], torch.nan, dtype=value.dtype, device="cpu")
                )
                flat[start:stop] = in_memory_order(value)
            else:
                whole[key] = value
    return state, first["weights"]


def in_memory_order(value: torch.Tensor) -> torch.Tensor:
    """State of a whole parameter that lies channels_last is in its shape, and that of a piece in its order."""
    if value.dim() == 4:
        return value.permute(0, 2, 3, 1).reshape(-1)
    return value.reshape(-1)


def assert_holds(opt: shardstep.ShardedOptimizer, model: nn.Module, reference: Reference) -> None:
    """Bitwise: what this rank holds, and all weights."""
    state, weights = reference
    for name, start, stop, entry in held(opt):
        expected = state.get(name, {})
        assert entry.keys() == expected.keys(), f"{name}: {sorted(entry)} instead of {sorted(expected)}"
        for key, value in entry.items():
            want = expected[key]
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == stop - start:
                want, value = want.reshape(-1)[start:stop], in_memory_order(value)
            assert type(value) is type(want), f"{name}.{key}"
            if isinstance(value, torch.Tensor):
                assert value.dtype is want.dtype, f"{name}.{key}: {value.dtype} instead of {want.dtype}"
                assert torch.equal(value, want), f"{name}.{key} [{start}, {stop}) differs"
            else:
                assert value == want, f"{name}.{key}"
    for key, value in model.state_dict().items():
        assert torch.equal(value.cpu(), weights[key]), f"{key} differs"
