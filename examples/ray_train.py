"""Ray Train with the fast lane: save, then go on with another number of workers.

python examples/ray_train.py [--smoke] [--storage FOLDER]

It wants `pip install "shardstep[ray]"`. On more than one machine, FOLDER is on a file system that all of them share. On
one machine it starts Ray there, with two workers and then with three; to join a cluster that runs, set RAY_ADDRESS.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, get_device
from torch import nn

import shardstep
from shardstep.integrations.ray import report, restore


def train_loop(config: dict[str, Any]) -> None:
    """Runs in every worker; Ray has made the process group."""
    device = get_device()
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)).to(device)
    opt = shardstep.shard(model, torch.optim.AdamW, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, config["steps"])
    extra = restore(model, opt)
    if extra is not None:
        schedule.load_state_dict(extra["schedule"])
    first = 0 if extra is None else extra["step"]
    last = min(first + config["steps_in_a_run"], config["steps"])

    random = torch.Generator().manual_seed(1000 * first + dist.get_rank())  # every rank its own batches
    for step in range(first + 1, last + 1):
        x = torch.randn(64, 32, generator=random).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        if step == last:
            metrics = {"step": step, "loss": loss.item(), "workers": dist.get_world_size(), "began_at": first}
            report(metrics, model, opt, extra={"step": step, "schedule": schedule.state_dict()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a few steps with two workers, to see that it runs")
    parser.add_argument("--storage", help="a folder that all machines share")
    asked = parser.parse_args()
    steps = 10 if asked.smoke else 400
    storage = asked.storage or tempfile.mkdtemp()

    if "RAY_ADDRESS" not in os.environ:
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    for workers in (2,) if asked.smoke else (2, 3):
        trainer = TorchTrainer(
            train_loop,
            train_loop_config={"steps": steps, "steps_in_a_run": steps // 2},
            scaling_config=ScalingConfig(num_workers=workers, use_gpu=torch.cuda.is_available()),
            # The same name: the second goes on where the first has stopped.
            run_config=RunConfig(storage_path=storage, name="example"),
        )
        print(trainer.fit().metrics)
    ray.shutdown()


if __name__ == "__main__":
    main()
