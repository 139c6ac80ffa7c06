"""Programs for tests of Lightning: modules, trainers as under torchrun, and what is left of a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import shardstep
from shardstep.integrations.lightning import ShardStepStrategy

ADAMW = {"lr": 3e-3, "weight_decay": 0.1}
BATCH, STEPS_IN_EPOCH = 4, 10
FAST, DROP_IN, PLAIN = "fast lane", "drop-in", "plain"


@contextmanager
def under_torchrun() -> Iterator[None]:
    """What torchrun tells a process; the group is there already, and Lightning takes it."""
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    told = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world_size}
    told |= {"LOCAL_WORLD_SIZE": world_size, "TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "127.0.0.1"}
    with mock.patch.dict(os.environ, told | {"MASTER_PORT": "29500"}):
        yield


class Regression(pl.LightningModule):
    """Two groups and a schedule by the step; layers are called in the step, and not by the module's forward."""

    def __init__(self, kind: str, config: shardstep.ShardConfig | None = None, *, recomputes: bool = False) -> None:
        super().__init__()
        self.kind, self.config, self.recomputes = kind, config, recomputes
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        if self.recomputes:  # a backward pass inside the backward pass
            x = self.net[1](self.net[0](x))
            return (checkpoint(self.net[2:], x, use_reentrant=True) - y).square().mean()
        return (self.net(x) - y).square().mean()

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("loss", self.training_step(batch, 0), sync_dist=True)

    def configure_optimizers(self) -> Any:
        weights = [param for name, param in self.named_parameters() if name.endswith("weight")]
        biases = [param for name, param in self.named_parameters() if name.endswith("bias")]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        opt: Any
        if self.kind == FAST:
            opt = shardstep.shard(self, optim.AdamW, groups=groups, config=self.config, **ADAMW)
        elif self.kind == DROP_IN:
            opt = shardstep.ZeroRedundancyOptimizer(groups, optim.AdamW, **ADAMW)
        else:
            opt = optim.AdamW(groups, **ADAMW)
        schedule = optim.lr_scheduler.StepLR(opt, 6, gamma=0.5)
        return {"optimizer": opt, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Gan(pl.LightningModule):
    """By hand, as Lightning wants it where there are two optimizers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.automatic_optimization = False
        torch.manual_seed(5)
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, number: int) -> None:
        real, noise = batch
        of_generator, of_discriminator = self.optimizers()
        score = nn.functional.binary_cross_entropy_with_logits
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.toggle_optimizer(of_generator)
        loss = score(self.discriminator(self.generator(noise)), ones)
        of_generator.zero_grad()
        self.manual_backward(loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_discriminator)
        loss = score(self.discriminator(real), ones) + score(self.discriminator(self.generator(noise).detach()), zeros)
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.untoggle_optimizer(of_discriminator)

    def configure_optimizers(self) -> Any:
        if self.kind == FAST:
            halves = [[{"params": "generator.*"}], [{"params": "discriminator.*"}]]
            return [shardstep.shard(self, optim.Adam, groups=half, lr=1e-3, betas=(0.5, 0.9)) for half in halves]
        parts = self.generator, self.discriminator
        return [optim.Adam(part.parameters(), lr=1e-3, betas=(0.5, 0.9)) for part in parts]


def loader() -> DataLoader[Any]:
    """Ten batches for each of two ranks; Lightning deals them."""
    generator = torch.Generator().manual_seed(7)
    shape = 2 * BATCH * STEPS_IN_EPOCH
    data = torch.randn(shape, 6, generator=generator), torch.randn(shape, 3, generator=generator)
    return DataLoader(TensorDataset(*data), batch_size=BATCH)


def trainer_of(kind: str, folder: Path, **options: Any) -> pl.Trainer:
    ddp = options.pop("ddp", "ddp")
    strategy: Any = ShardStepStrategy() if kind == FAST else ddp
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "max_epochs": -1, "max_steps": 20, "num_sanity_val_steps": 0}
    return pl.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, default_root_dir=folder, **quiet | options
    )


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def snapshot(trainer: pl.Trainer, module: pl.LightningModule) -> dict[str, Any] | None:
    """All that a run goes on from, whole, on rank 0."""
    states = []
    for opt in trainer.optimizers:
        if hasattr(opt, "consolidate_state_dict"):
            opt.consolidate_state_dict(0)
        states.append(opt.state_dict() if dist.get_rank() == 0 else None)
    if dist.get_rank() != 0:
        return None
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    return {
        "weights": weights_of(module),
        "state": [{place: dict(entry) for place, entry in state["state"].items()} for state in states],
        "groups": [[{**group} for group in state["param_groups"]] for state in states],
        "schedules": schedules,
        "step": trainer.global_step,
    }


class Snapshots(pl.Callback):
    """At the end of every epoch, in a file; and of what was restored, when training begins."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.restored = folder, None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.restored = snapshot(trainer, pl_module)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = snapshot(trainer, pl_module)
        if found is not None:
            torch.save(found, self.folder / f"snapshot-{trainer.current_epoch}.pt")


def assert_same(one: Any, other: Any, where: str = "") -> None:
    assert type(one) is type(other), where
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, where
        assert torch.equal(one, other), where
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for number, (mine, yours) in enumerate(zip(one, other, strict=True)):
            assert_same(mine, yours, f"{where}[{number}]")
    else:
        assert one == other, where
