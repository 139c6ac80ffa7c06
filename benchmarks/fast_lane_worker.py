"""One rank of `fast_lane.py`: measures step times, bytes and memory of the contenders it is given, in turn."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import FULL, LEARNING_RATE, TOY, TorchZero, Trainee, batches
from drop_in_worker import from_all_ranks, refuse, say
from meters import resident_bytes, slowest_rank_seconds, start_of_peak
from rounds import leave, measure_steps, measure_traffic
from torch import nn
from torch.distributed.fsdp import fully_shard

import shardstep
from shardstep import ShardConfig
from shardstep.cli.demo.gpt import GPT, GPTConfig

WARM_UP_STEPS = 3
COMPUTE_ROUNDS = 7
MOST_DIFFERENCE = 1e-4  # with more than two ranks: a sum of three or more depends on its order
M_MMAP_THRESHOLD = -3  # of malloc.h: from this size on, a block is mapped alone, and unmapped when it is freed
RETURNED_NBYTES = 1024 * 1024
AdamW = torch.optim.AdamW


class Ddp(Trainee):
    """DistributedDataParallel with the plain optimizer, or with torch's ZeroRedundancyOptimizer in its best setting."""

    def __init__(self, name: str, config: GPTConfig, *, fused: bool | None, sharded: bool = False) -> None:
        super().__init__(name, config)
        params, options = self.model.parameters(), {"lr": LEARNING_RATE, "fused": fused}
        self.optimizer = (
            TorchZero(params, AdamW, parameters_as_bucket_view=True, **options) if sharded else AdamW(params, **options)
        )


class Unwrapped(Trainee):
    """A plain module; the subclass does what DDP would."""

    def __init__(self, name: str, config: GPTConfig) -> None:
        self.name = name
        self.model = self.make_model(config)
        self._batches = batches(config)
        self._next = next(self._batches)

    def make_model(self, config: GPTConfig) -> Any:
        torch.manual_seed(20)
        return GPT(config)


class Fast(Unwrapped):
    def __init__(self, name: str, config: GPTConfig, *, fused: bool | None, gather: Any = "wait") -> None:
        super().__init__(name, config)
        self.optimizer = shardstep.shard(
            self.model, AdamW, config=ShardConfig(gather=gather), lr=LEARNING_RATE, fused=fused
        )

    def params(self) -> list[torch.Tensor]:
        self.optimizer.synchronize()
        return super().params()


class Fsdp2(Unwrapped):
    def __init__(self, name: str, config: GPTConfig) -> None:
        super().__init__(name, config)
        blocks = next(module for module in self.model.modules() if isinstance(module, nn.ModuleList))
        for block in blocks:
            fully_shard(block, reshard_after_forward=False)
        fully_shard(self.model, reshard_after_forward=False)
        self.optimizer = AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def params(self) -> list[torch.Tensor]:
        return [param.full_tensor().detach() for param in self.model.parameters()]


CONTENDERS: dict[str, Callable[[str, GPTConfig], Trainee]] = {
    "DDP": partial(Ddp, fused=None),
    "DDP fused": partial(Ddp, fused=True),
    "torch ZeRO": partial(Ddp, fused=None, sharded=True),
    "torch ZeRO fused": partial(Ddp, fused=True, sharded=True),
    "FSDP2": Fsdp2,
    "shardstep": partial(Fast, fused=None),
    "shardstep fused": partial(Fast, fused=True),
    "shardstep fused, overlap": partial(Fast, fused=True, gather="overlap"),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--returned", action="store_true", help="with --rounds 0: freed memory goes back at once")
    parser.add_argument("--steps", type=int, required=True, help="steps of one contender in a round")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def measure_memory(name: str, config: GPTConfig, *, returned: bool) -> dict[str, Any]:
    """Peak of resident memory while one contender trains, over what the process had before the contender was built."""
    gc.collect()
    libc = ctypes.CDLL(None)
    if returned:
        accepted = libc.mallopt(M_MMAP_THRESHOLD, RETURNED_NBYTES)
        refuse(None if accepted == 1 else "mallopt", "another allocator than that of glibc")
    libc.malloc_trim(0)
    before = resident_bytes()
    contender = CONTENDERS[name](name, config)
    contender.train(WARM_UP_STEPS)
    start_of_peak()
    contender.train(WARM_UP_STEPS)
    return {"returned": returned, "peak": from_all_ranks(resident_bytes(peak=True) - before)}


def measure_compute(ddp: Trainee) -> list[float]:
    """Forward and backward on all ranks at once, with nothing sent."""

    def compute() -> None:
        with ddp.model.no_sync():
            ddp.forward_backward()

    return [slowest_rank_seconds(compute) for _ in range(COMPUTE_ROUNDS)]


def compare(contenders: list[Trainee]) -> float:
    """The largest difference of any parameter from that of the first contender; stops on all ranks if it is large."""
    base, *others = contenders
    largest = 0.0
    for other in others:
        pairs = zip(base.params(), other.params(), strict=True)
        found = max((one - two).abs().max().item() for one, two in pairs if one.numel())
        # A fused kernel rounds unlike the ops that it replaces: bits are not expected here, the tests have them.
        refuse(None if found <= MOST_DIFFERENCE else f"by {found:.2g}", f"{other.name}: parameters differ")
        largest = max(largest, found)
    return largest


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    config = TOY if arguments.toy else FULL
    result: dict[str, Any] = {"ranks": dist.get_world_size(), "contenders": arguments.contenders}
    if arguments.rounds == 0:
        (name,) = arguments.contenders
        result["memory"] = measure_memory(name, config, returned=arguments.returned)
    else:
        contenders = [CONTENDERS[name](name, config) for name in arguments.contenders]
        for contender in contenders:
            contender.train(WARM_UP_STEPS)
        result["parameter_bytes"] = sum(param.nbytes for param in contenders[0].params())
        result["largest_bytes"] = max(param.nbytes for param in contenders[0].params())
        result["step_seconds"] = measure_steps(contenders, arguments.rounds, arguments.steps)
        result["traffic"] = measure_traffic(contenders)
        result["largest_difference"] = compare(contenders)
        result["compute_seconds"] = measure_compute(contenders[0])
        say(f"all hold the same parameters, to {result['largest_difference']:g}")
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))
    leave()


if __name__ == "__main__":
    main()
