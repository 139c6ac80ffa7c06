"""One rank of `host_work.py`: the host's time for backward and for the optimizer, of each contender in turn."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
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
ALONE = "no data parallelism, foreach"  # every rank for itself: what autograd and the optimizer cost anyway
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

    def count_calls(self) -> dict[str, int]:
        """Of functions written in Python, in one step."""
        loss = self.model(torch.tensor(1.0 + dist.get_rank()))
        backward = python_calls(loss.backward)
        return {
            "backward": backward,
            "step": python_calls(self.optimizer.step) + python_calls(self.optimizer.zero_grad),
        }

    def tensors(self) -> int:
        """That the optimizer of this rank steps."""
        local = getattr(self.optimizer, "optim", self.optimizer)
        local = (
            self.optimizer._engine.runtime.local_step.local if isinstance(local, shardstep.ShardedOptimizer) else local
        )
        return sum(param.numel() > 0 for group in local.param_groups for param in group["params"])


def python_calls(action: Callable[[], object]) -> int:
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def make_contenders(count: int) -> list[Contender]:
    under_ddp = [DistributedDataParallel(Many(count)) for _ in range(2)]
    plain = AdamW(under_ddp[0].parameters(), foreach=True)
    zero = TorchZero(under_ddp[1].parameters(), AdamW, parameters_as_bucket_view=True, foreach=True)
    model, alone = Many(count), Many(count)
    return [
        Contender("DDP, foreach", under_ddp[0], plain),
        Contender("torch ZeRO, foreach", under_ddp[1], zero),
        Contender("shardstep", model, shardstep.shard(model, AdamW)),
        Contender(ALONE, alone, AdamW(alone.parameters(), foreach=True)),
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
        if other.name == ALONE:
            continue
        refuse(difference(contenders[0], other), f"{other.name}: parameters differ")
    calls = {contender.name: contender.count_calls() for contender in contenders}
    say(f"{arguments.rounds} rounds; all hold the same parameters, to {MOST_DIFFERENCE:g}")
    if dist.get_rank() == 0:
        tensors = {contender.name: contender.tensors() for contender in contenders}
        result = {"parameters": arguments.parameters, "seconds": seconds, "tensors": tensors, "calls": calls}
        arguments.out.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
