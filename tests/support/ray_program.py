"""A program of Ray Train: python ray_program.py FOLDER. What its workers found lies in FOLDER afterwards.

Three runs of one name: two workers train with DDP and the plain AdamW and then with the fast lane, and save half-way;
two others go on from there; and so do three, which stop where they have loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer
from torch import nn, optim

import shardstep
from shardstep.integrations.ray import report, restore

STEPS, HALF = 20, 10
ADAMW = {"lr": 3e-3, "weight_decay": 0.1}


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return (model(torch.randn(4, 6, generator=generator)) - torch.randn(4, 3, generator=generator)).square().mean()


def train_with_ddp(folder: Path) -> None:
    model = ray.train.torch.prepare_model(make_model())
    opt = optim.AdamW(model.parameters(), **ADAMW)
    for step in range(STEPS):
        loss_of(model, step).backward()
        opt.step()
        opt.zero_grad()
    if dist.get_rank() == 0:
        torch.save(model.module.state_dict(), folder / "ddp.pt")


def train_loop(config: dict[str, Any]) -> None:
    folder = Path(config["folder"])
    if config["run"] == "first":
        train_with_ddp(folder)
    model = make_model()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW)
    extra = restore(model, opt)
    leave(model, opt, folder / f"{config['run']}-restored.pt")
    start = 0 if extra is None else extra["step"]
    stop = start if config["run"] == "three" else STEPS
    for step in range(start, stop):
        loss = loss_of(model, step)
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step + 1 == HALF:
            leave(model, opt, folder / "saved.pt")
            report({"loss": loss.item()}, model, opt, extra={"step": HALF})
    leave(model, opt, folder / f"{config['run']}.pt")


def leave(model: nn.Module, opt: Any, file: Path) -> None:
    """Weights and the whole state, by torch.save and not by anything that is tested."""
    opt.consolidate_state_dict(0)
    if dist.get_rank() == 0:
        state = {place: dict(entry) for place, entry in opt.state_dict()["state"].items()}
        torch.save({"weights": model.state_dict(), "state": state, "ranks": dist.get_world_size()}, file)


def main(folder: Path) -> None:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    for run, workers in (("first", 2), ("second", 2), ("three", 3)):
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"folder": str(folder), "run": run},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.25}),
            run_config=RunConfig(storage_path=str(folder / "storage"), name="one"),
            torch_config=TorchConfig(backend="gloo"),
        )
        result = trainer.fit()
        print(run, "reported", result.checkpoint, flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
