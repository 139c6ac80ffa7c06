"""One rank of `gpu_muon.py`: trains all contenders in turn and lets rank 0 write what all ranks found."""

from __future__ import annotations

import gc
import time
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import in_turn
from gpu_contenders import DEVICES, Contender, Peers, Rank
from gpu_muon_contenders import ONE_RANK, SEVERAL_RANKS, TASK, TOY_TASK
from gpu_training_worker import build_all, look, parse_arguments, prepare
from gpu_worker import Times, leave, slowest, time_block

MOST_APART = 0.01  # of the loss after the first steps: products in bfloat16 may be summed in another order


def time_step(rank: Rank, contender: Contender) -> float:
    """Seconds of one step() that finds the device idle, until the device has done it."""
    contender.loss().backward()
    rank.device.synchronize()
    start = time.perf_counter()
    contender.optimizer.step()
    contender.finish()
    rank.device.synchronize()
    seconds = time.perf_counter() - start
    contender.optimizer.zero_grad()
    return seconds


def check_losses(rank: Rank, contenders: list[Contender]) -> None:
    """Stop where one has learned something else in its first steps: a faster wrong answer is no result."""
    losses = {contender.name: look(contender) for contender in contenders}
    first = next(iter(losses.values()), 0.0)
    apart = {name: loss for name, loss in losses.items() if not abs(loss - first) <= MOST_APART * first}
    rank.peers.refuse(f"{apart}, and the first has {first:.4f}" if apart else None, "losses differ")


def measure(rank: Rank, rounds: int) -> dict[str, Any]:
    task, alone = TOY_TASK if rank.toy else TASK, rank.peers.count == 1
    contenders, known, left_out = build_all(rank, task, ONE_RANK if alone else SEVERAL_RANKS)
    check_losses(rank, contenders)
    steps, hosts, only_steps = ({contender.name: [] for contender in contenders} for _ in range(3))
    times: tuple[Times, Times, Times] = (steps, hosts, only_steps)
    for turn in range(rounds):
        for contender in in_turn(contenders, turn):
            step, host = time_block(rank, contender)
            steps[contender.name].append(step)
            hosts[contender.name].append(host)
            only_steps[contender.name].append(min(time_step(rank, contender) for _ in range(3)) if alone else 0.0)
        latest = ", ".join(f"{name} {1e3 * values[-1]:.1f}" for name, values in steps.items())
        rank.peers.say(f"round {turn + 1} of {rounds}: {latest} ms")
    for contender in contenders:
        known[contender.name]["last_loss"] = look(contender)
        contender.finish()
    found = [slowest(rank, one) for one in times]
    return {
        "task": task.name,
        "sequences": task.shape[0],
        "length": task.shape[1],
        "parameters": sum(param.numel() for param in contenders[0].params()) if contenders else 0,
        "step_seconds": found[0],
        "host_seconds": found[1],
        "only_step_seconds": found[2],
        "contenders": known,
        "left_out": left_out,
    }


def main() -> None:
    arguments = parse_arguments()
    device = DEVICES[arguments.device]()
    torch.set_float32_matmul_precision("high")
    dist.init_process_group(device.backend)
    rank = Rank(device, Peers(), arguments.toy)
    prepare(rank)
    result = measure(rank, arguments.rounds)
    gc.collect()
    rank.save({"tasks": [result]}, arguments.out)
    leave(rank)


if __name__ == "__main__":
    main()
