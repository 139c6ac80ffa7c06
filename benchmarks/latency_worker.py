"""One rank of `latency.py`: steps of a model of three small layers, by each contender in turn."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import in_turn, say
from rounds import leave
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

import shardstep

LAYERS, WIDTH, BATCH = 3, 64, 8
WARM_UP_STEPS = 3
AdamW = torch.optim.AdamW


class Contender:
    """A model, and the optimizer that `name` says."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(20)
        self.name = name
        self.model: nn.Module = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.optimizer: Any
        if name in ("shard", "shard, clipped"):
            self.optimizer = shardstep.shard(self.model, AdamW)
            return
        self.model = DistributedDataParallel(self.model)
        params = self.model.parameters()
        if name == "DDP":
            self.optimizer = AdamW(params)
        else:
            zero = TorchZero if name == "torch's class" else shardstep.ZeroRedundancyOptimizer
            self.optimizer = zero(params, AdamW)

    def train(self, steps: int) -> None:
        inputs = torch.ones(BATCH, WIDTH)
        for _ in range(steps):
            self.model(inputs).square().mean().backward()
            if self.name == "shard, clipped":
                self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="of one contender in a round")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    contenders = [Contender(name) for name in ("DDP", "torch's class", "drop-in", "shard", "shard, clipped")]
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        contender.train(WARM_UP_STEPS)
    for turn in range(arguments.rounds):
        for contender in in_turn(contenders, turn):
            dist.barrier()
            start = time.perf_counter()
            contender.train(arguments.steps)
            times[contender.name].append(1e3 * (time.perf_counter() - start) / arguments.steps)
        latest = ", ".join(f"{name} {values[-1]:.2f}" for name, values in times.items())
        say(f"round {turn + 1} of {arguments.rounds}: {latest} ms per step")
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps({"milliseconds": times}))
    leave()


if __name__ == "__main__":
    main()
