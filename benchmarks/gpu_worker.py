"""One rank of `gpu.py`: measures one part of it and lets rank 0 write what all ranks found."""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import in_turn
from gpu_contenders import (
    AGREEING,
    CONTENDERS,
    DDP,
    DEVICES,
    ENCODER,
    LINEARS,
    TOY_ENCODER,
    TOY_LINEARS,
    WEIGHED,
    Contender,
    Peers,
    Rank,
    Task,
)
from gpu_one_rank import measure_given_gradients
from gpu_trace import measure_trace
from torch import Tensor

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step; AdamW allocates its state in it
BLOCK_STEPS = 5
FEW_STEPS = 20  # after which memory is looked at first
MOST_APART = 0.03  # of the way; attention's key biases, whose gradients are rounding, may make half of that
LEAST_MOVE = 1e-3  # parameters that hardly moved agree without proving anything
Times = dict[str, list[float]]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rounds", type=int, default=0, help="of speed and one-rank")
    parser.add_argument("--contender", choices=WEIGHED, help="of memory")
    parser.add_argument("--steps", type=int, default=0, help="of memory")
    parser.add_argument("--trace", type=Path, help="where rank 0 writes the trace")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


# -- speed -------------------------------------------------------------------------------------------------------------


def time_block(rank: Rank, contender: Contender) -> tuple[float, float]:
    """Seconds of a step, and seconds in which the host of this rank was busy with one.

    One step goes before, as in training, where a step follows one of its own kind. The host's time is that of the
    second: it finds the device at work, so that a host that waits for the device is seen to.
    """
    contender.iterate()
    contender.finish()
    rank.device.synchronize()
    rank.peers.barrier()
    start = time.perf_counter()
    contender.iterate()
    before = time.perf_counter()
    contender.iterate()
    host = time.perf_counter() - before
    for _ in range(BLOCK_STEPS - 2):
        contender.iterate()
    contender.finish()
    rank.device.synchronize()
    return (time.perf_counter() - start) / BLOCK_STEPS, host


def slowest(rank: Rank, seconds: Times) -> Times:
    """Of every round the rank that took longest."""
    found: list[Times] = rank.peers.from_all(seconds)
    return {name: [max(row) for row in zip(*(one[name] for one in found), strict=True)] for name in seconds}


def measure_task(rank: Rank, task: Task, rounds: int) -> dict[str, Any]:
    """Contenders in turn; ranks tell each other their times only when all rounds are over."""
    contenders = [make(name, task, rank.device) for name, make in CONTENDERS.items()]
    for contender in contenders:
        for _ in range(WARM_UP_STEPS):
            contender.iterate()
        contender.finish()
    steps: Times = {contender.name: [] for contender in contenders}
    hosts: Times = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in in_turn(contenders, turn):
            step, host = time_block(rank, contender)
            steps[contender.name].append(step)
            hosts[contender.name].append(host)
        latest = ", ".join(f"{name} {1e3 * values[-1]:.1f}" for name, values in steps.items())
        rank.peers.say(f"{task.name}, round {turn + 1} of {rounds}: {latest} ms")
    apart = compare(rank, task, [contender for contender in contenders if contender.name in AGREEING])
    numel = sum(param.numel() for param in contenders[0].params())
    return {
        "task": task.name,
        "parameters": numel,
        "apart": apart,
        "step_seconds": slowest(rank, steps),
        "host_seconds": slowest(rank, hosts),
    }


def compare(rank: Rank, task: Task, contenders: list[Contender]) -> dict[str, float]:
    """How far each is from the first, over how far that has moved. Stop if one is further than chance takes it.

    By all elements together: single ones may be far apart. Attention's backward adds in an order of its own, a
    sum of four ranks depends on its order, and AdamW makes full steps of a gradient that is only rounding.
    """
    base, *others = contenders
    start = [param.detach() for param in task.model(rank.device.place).parameters()]
    moved = distance(base.params(), start)
    rank.peers.refuse(None if moved >= LEAST_MOVE else f"by {moved:.2g}", f"{base.name}: parameters hardly moved")
    found = {}
    for other in others:
        apart = found[other.name] = max(rank.peers.from_all(distance(base.params(), other.params()) / moved))
        text = None if apart <= MOST_APART else f"by {apart:.2g} of the way they went"
        rank.peers.refuse(text, f"{task.name}, {other.name}: parameters differ from {base.name}'s")
    return found


def distance(ones: list[Tensor], others: list[Tensor]) -> float:
    squares = [(one - other).double().square().sum().item() for one, other in zip(ones, others, strict=True)]
    return sum(squares) ** 0.5


def measure_speed(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    results = []
    for task in (TOY_LINEARS, TOY_ENCODER) if rank.toy else (LINEARS, ENCODER):
        results.append(measure_task(rank, task, arguments.rounds))
        gc.collect()  # one task's contenders leave before those of the next come
    return {"tasks": results}


# -- memory ------------------------------------------------------------------------------------------------------------


def measure_memory(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    """Of one contender, alone in its processes; the rank with most."""
    task, name = TOY_LINEARS if rank.toy else LINEARS, arguments.contender
    contender = WEIGHED[name](name, task, rank.device)
    nbytes = sum(param.numel() * param.element_size() for param in task.model(torch.device("cpu")).parameters())
    train(rank, contender, WARM_UP_STEPS)
    rank.device.reset_peak()
    few = min(FEW_STEPS, arguments.steps)
    train(rank, contender, few)
    reserved_early = rank.device.reserved()
    train(rank, contender, arguments.steps - few)
    mine = {
        "beyond": rank.device.peak() - nbytes,
        "reserved_early": reserved_early,
        "reserved_late": rank.device.reserved(),
        "bucket": largest_bucket(contender),
        "predicted": ask(contender, "predicted_nbytes"),
    }
    state = contender.state_nbytes() if name == DDP else None
    return {"contender": name, "parameters": nbytes, "state": state, "memory": rank.peers.from_all(mine)}


def train(rank: Rank, contender: Contender, steps: int) -> None:
    for _ in range(steps):
        contender.iterate()
    contender.finish()
    rank.device.synchronize()


def ask(contender: Contender, method: str) -> Any:
    """What the optimizer says of itself; None if it does not say."""
    answer = getattr(contender.optimizer, method, None)
    return None if answer is None else answer()


def largest_bucket(contender: Contender) -> int | None:
    sizes = ask(contender, "bucket_nbytes")
    return max(sizes) if sizes else None


# -- one launch --------------------------------------------------------------------------------------------------------


def measure_one_rank(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    return measure_given_gradients(rank, arguments.rounds)


def measure_the_trace(rank: Rank, arguments: argparse.Namespace) -> dict[str, Any]:
    return measure_trace(rank, TOY_ENCODER if rank.toy else ENCODER, arguments.trace)


PARTS: dict[str, Callable[[Rank, argparse.Namespace], dict[str, Any]]] = {
    "speed": measure_speed,
    "memory": measure_memory,
    "one-rank": measure_one_rank,
    "trace": measure_the_trace,
}


def main() -> None:
    arguments = parse_arguments()
    device = DEVICES[arguments.device]()
    dist.init_process_group(device.backend)
    rank = Rank(device, Peers(), arguments.toy)
    result = PARTS[arguments.part](rank, arguments)
    rank.save(result | {"part": arguments.part}, arguments.out)
    leave(rank)


def leave(rank: Rank) -> None:
    """All ranks together and with nothing under way: one that is torn away can leave the device busy for the next."""
    rank.device.synchronize()
    rank.peers.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo's threads sometimes crash a process that used DDP when the interpreter ends


if __name__ == "__main__":
    main()
