"""One rank of `wire.py`: step times and bytes of DDP and of `shard` with and without `wire`, in turn."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import FULL, LEARNING_RATE, TOY, Trainee
from drop_in_worker import refuse, say
from fast_lane_worker import WARM_UP_STEPS, Ddp, Unwrapped
from rounds import leave, measure_steps, measure_traffic

import shardstep
from shardstep import ShardConfig
from shardstep.cli.demo.gpt import GPTConfig

DDP, EXACT, WIRE, OVERLAP = "DDP", "shard", 'wire="bf16"', 'wire="bf16", overlap'
EXACT_GRADIENTS = 'wire="bf16", reduce_dtype=torch.float32'


class Sharded(Unwrapped):
    def __init__(self, name: str, config: GPTConfig, *, options: ShardConfig) -> None:
        super().__init__(name, config)
        self.optimizer = shardstep.shard(self.model, torch.optim.AdamW, config=options, lr=LEARNING_RATE, fused=True)

    def params(self) -> list[torch.Tensor]:
        self.optimizer.synchronize()
        return super().params()


CONTENDERS: dict[str, Callable[[str, GPTConfig], Trainee]] = {
    DDP: partial(Ddp, fused=True),
    EXACT: partial(Sharded, options=ShardConfig()),
    WIRE: partial(Sharded, options=ShardConfig(wire="bf16")),
    OVERLAP: partial(Sharded, options=ShardConfig(wire="bf16", gather="overlap")),
    EXACT_GRADIENTS: partial(Sharded, options=ShardConfig(wire="bf16", reduce_dtype=torch.float32)),
}


def check_ranks_equal(contenders: list[Trainee]) -> None:
    """Stop on all ranks if one holds other bits than the first."""
    for contender in contenders:
        differ = 0
        for param in contender.params():
            first = param.clone()
            dist.broadcast(first, 0)
            differ += int((first != param).sum())
        refuse(f"{differ} elements" if differ else None, f"{contender.name}: ranks hold different parameters")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of one contender in a round")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    config = TOY if arguments.toy else FULL
    contenders = [make(name, config) for name, make in CONTENDERS.items()]
    for contender in contenders:
        contender.train(WARM_UP_STEPS)
    result: dict[str, Any] = {"ranks": dist.get_world_size(), "contenders": list(CONTENDERS)}
    result["parameter_bytes"] = sum(param.nbytes for param in contenders[0].params())
    result["step_seconds"] = measure_steps(contenders, arguments.rounds, arguments.steps)
    result["traffic"] = measure_traffic(contenders)
    check_ranks_equal(contenders)
    say("all ranks of each hold the same bits")
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
