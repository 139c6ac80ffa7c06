"""One rank of `host_work.py`: the host's time for backward and for the optimizer, of each contender in turn."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import in_turn, refuse, say
from rounds import leave
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel

import shardstep

ELEMENTS = 128_000
WARM_UP_STEPS = 3
MOST_DIFFERENCE = 1e-5  # foreach and the plain loop round differently
AdamW = torch.optim.AdamW


class Many(nn.Module):
    """Parameters, and nothing that takes time."""

    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(20)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(ELEMENTS // count)) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([part.sum() for part in self.parts]).sum() * x


class Contender:
    def __init__(self, name: str, model: nn.Module, optimizer: Any) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer

    def train(self) -> dict[str, float]:
        """Seconds of this thread's processor time."""
        loss = self.model(torch.tensor(1.0 + dist.get_rank()))
        start = time.thread_time()
        loss.backward()
        between = time.thread_time()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {"backward": between - start, "step": time.thread_time() - between}

    def tensors(self) -> int:
        """That the optimizer of this rank steps."""
        local = getattr(self.optimizer, "optim", self.optimizer)
        local = self.optimizer._share.local if isinstance(local, shardstep.ShardedOptimizer) else local
        return sum(len(group["params"]) for group in local.param_groups)


def make_contenders(count: int) -> list[Contender]:
    under_ddp = [DistributedDataParallel(Many(count)) for _ in range(2)]
    plain = AdamW(under_ddp[0].parameters(), foreach=True)
    zero = TorchZero(under_ddp[1].parameters(), AdamW, parameters_as_bucket_view=True, foreach=True)
    model = Many(count)
    return [
        Contender("DDP, foreach", under_ddp[0], plain),
        Contender("torch ZeRO, foreach", under_ddp[1], zero),
        Contender("shardstep", model, shardstep.shard(model, AdamW)),
    ]


def difference(one: Contender, other: Contender) -> str | None:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    largest = max((mine - theirs).abs().max().item() for mine, theirs in pairs)
    return None if largest <= MOST_DIFFERENCE else f"by {largest:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    contenders = make_contenders(arguments.parameters)
    for contender in contenders:
        for _ in range(WARM_UP_STEPS):
            contender.train()
    seconds: dict[str, list[dict[str, float]]] = {contender.name: [] for contender in contenders}
    for turn in range(arguments.rounds):
        for contender in in_turn(contenders, turn):
            dist.barrier()
            seconds[contender.name].append(contender.train())
    for other in contenders[1:]:
        refuse(difference(contenders[0], other), f"{other.name}: parameters differ")
    say(f"{arguments.rounds} rounds; all hold the same parameters, to {MOST_DIFFERENCE:g}")
    if dist.get_rank() == 0:
        tensors = {contender.name: contender.tensors() for contender in contenders}
        arguments.out.write_text(
            json.dumps({"parameters": arguments.parameters, "seconds": seconds, "tensors": tensors})
        )
    leave()


if __name__ == "__main__":
    main()
