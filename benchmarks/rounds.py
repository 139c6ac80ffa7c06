"""What the ranks of benchmarks share: contenders in turn, bytes and calls of a step, and the way out."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from functools import partial
from typing import Any

import torch.distributed as dist
from contenders import Trainee
from drop_in_worker import from_all_ranks, in_turn, say
from meters import count_calls, observe, slowest_rank_seconds

from shardstep import ShardedOptimizer


def measure_traffic(contenders: list[Trainee]) -> dict[str, Any]:
    """Bytes and calls of one full step, per rank."""
    results: dict[str, Any] = {}
    for contender in contenders:
        one_step = partial(train_and_wait, contender)
        results[contender.name] = {
            "step": from_all_ranks(asdict(observe(one_step))),
            "calls": from_all_ranks(asdict(count_calls(one_step))),
        }
    return results


def train_and_wait(contender: Trainee) -> None:
    """One step, with nothing left on its way: torch crashes when a message that outlives the profiler is waited for."""
    contender.train(1)
    if isinstance(contender.optimizer, ShardedOptimizer):
        contender.optimizer.synchronize()


def measure_steps(contenders: list[Trainee], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per full step, one number per round, contenders in turn.

    Timed from the second step of a turn on, as in training, where a step follows one of its own kind. In the first, one
    that gives its gradients' memory back has the kernel clear pages for which others had their turn since; one that
    keeps its gradients until the next step, as DDP does, has not: 0.1 s of 2.4 s in four ranks on two cores.
    """
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in in_turn(contenders, turn):
            contender.train(1)
            seconds[contender.name].append(slowest_rank_seconds(partial(contender.train, steps)) / steps)
        latest = ", ".join(f"{name} {values[-1]:.3f} s" for name, values in seconds.items())
        say(f"round {turn + 1} of {rounds}: {latest} per step")
    return seconds


def leave() -> None:
    """When all ranks have come here."""
    dist.barrier()
    sys.stderr.flush()
    os._exit(0)  # Gloo's threads sometimes crash a process that used DDP when the interpreter ends
