"""One rank of `overlap.py`: measures plain AdamW, the sharded step, and the step inside the backward pass, in turn."""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import FULL, LEARNING_RATE, TOY, Trainee, first_different_param
from drop_in_worker import from_all_ranks, refuse, say
from rounds import leave, measure_steps, measure_traffic
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shardstep import ZeroRedundancyOptimizer
from shardstep.cli.demo.gpt import GPTConfig
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved, reduce_to_holders

WARM_UP_STEPS = 4  # DDP's buckets are final, and the overlapping optimizer knows them, in the fourth
MOST_DIFFERENCE = 1e-4  # with more than two ranks: a sum of three or more depends on its order


class SteppedAfter(Trainee):
    """The optimizer steps after the backward pass. DDP reduces with a hook here too, as in those that overlap."""

    def __init__(self, name: str, config: GPTConfig, *, sharded: bool) -> None:
        super().__init__(name, config)
        self.model.register_comm_hook(None, allreduce_hook)
        params = self.model.parameters()
        self.optimizer = (
            ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=LEARNING_RATE)
            if sharded
            else torch.optim.AdamW(params, lr=LEARNING_RATE)
        )


class SteppedInBackward(Trainee):
    """The backward pass steps; `wrap` is one of the hooks of shardstep.ddp_zero_hook, round `reduce`."""

    def __init__(
        self, name: str, config: GPTConfig, *, wrap: Callable[..., Any], reduce: Callable[..., Any] = allreduce_hook
    ) -> None:
        super().__init__(name, config)
        zero = ZeroRedundancyOptimizer(
            self.model.parameters(),
            torch.optim.AdamW,
            overlap_with_ddp=True,
            train_from_first_step=True,
            lr=LEARNING_RATE,
        )
        self.model.register_comm_hook(None, wrap(reduce, self.model, zero, shard_buckets=True))
        self.optimizer = zero

    def step(self) -> None:
        """Nothing is left to do."""


def make_contenders(config: GPTConfig) -> list[Trainee]:
    """The first two are the bases of the ratios."""
    return [
        SteppedAfter("AdamW", config, sharded=False),
        SteppedAfter("sharded", config, sharded=True),
        SteppedInBackward("overlap", config, wrap=hook_with_zero_step),
        SteppedInBackward("interleaved", config, wrap=hook_with_zero_step_interleaved),
        SteppedInBackward("to holders", config, wrap=hook_with_zero_step_interleaved, reduce=reduce_to_holders),
    ]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--toy", action="store_true", help="a model of 0.4 M parameters, to see that everything runs")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of one contender in a round")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def digest(contender: Trainee) -> str:
    """Of all bits of all parameters."""
    total = hashlib.sha256()
    for param in contender.params():
        total.update(param.contiguous().numpy().data)
    return total.hexdigest()


def largest_difference(one: Trainee, other: Trainee) -> float:
    return (
        torch.stack([(mine - theirs).abs().max() for mine, theirs in zip(one.params(), other.params(), strict=True)])
        .max()
        .item()
    )


def compare(contenders: list[Trainee]) -> dict[str, float]:
    """Largest differences from the first contender; stops on every rank if one is too large, or if ranks differ."""
    base, *others = contenders
    for contender in contenders:
        digests = from_all_ranks(digest(contender))
        odd = [str(rank) for rank, text in enumerate(digests) if text != digests[0]]
        refuse(f"not those of rank 0 on {', '.join(odd)}" if odd else None, f"{contender.name}: parameters differ")
    differences = {}
    for other in others:
        largest = differences[other.name] = largest_difference(base, other)
        if dist.get_world_size() <= 2:
            found = first_different_param(base, other)
        else:
            found = None if largest <= MOST_DIFFERENCE else f"by {largest:.2g}"  # NaN is not at most anything
        refuse(found, f"{base.name} and {other.name}: parameters differ after the same steps")
    return differences


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    contenders = make_contenders(TOY if arguments.toy else FULL)
    for contender in contenders:
        contender.train(WARM_UP_STEPS)
    result: dict[str, Any] = {
        "ranks": dist.get_world_size(),
        "elements": sum(param.numel() for param in contenders[0].params()),
        "traffic": measure_traffic(contenders),
    }
    say("bytes and calls counted")
    result["step_seconds"] = measure_steps(contenders, arguments.rounds, arguments.steps)
    result["differences"] = compare(contenders)
    largest = max(result["differences"].values())
    say(f"all ranks hold the same parameters; contenders differ by at most {largest:g}")
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
