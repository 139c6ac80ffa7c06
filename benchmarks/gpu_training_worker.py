"""One rank of `gpu_training.py`: trains all contenders in turn and lets rank 0 write what all ranks found."""

from __future__ import annotations

import argparse
import gc
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import in_turn
from gpu_contenders import DEVICES, Contender, Peers, Rank
from gpu_training_contenders import (
    LARGE,
    ONE_RANK,
    SEVERAL_RANKS,
    SMALL,
    TOO_SMALL,
    TOY_LARGE,
    TOY_SMALL,
    Make,
    Reading,
)
from gpu_worker import WARM_UP_STEPS, Times, leave, slowest, time_block, train
from torch import nn


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def tasks_of(rank: Rank) -> tuple[Reading, ...]:
    """Several ranks train the small one only: every step of theirs crosses loopback."""
    if rank.toy:
        return TOY_SMALL, TOY_LARGE
    return (SMALL, LARGE, TOO_SMALL) if rank.peers.count == 1 else (SMALL, TOO_SMALL)


def prepare(rank: Rank) -> None:
    """What the first to use the device pays for all: workspaces of libraries, for forward's thread and backward's."""
    place = rank.device.place
    layer = nn.Linear(64, 64, bias=False, device=place)
    for dtype in (torch.float32, torch.bfloat16):
        layer.to(dtype)(torch.ones(64, 64, device=place, dtype=dtype)).sum().backward()
    rank.device.synchronize()


@torch.no_grad()
def look(contender: Contender) -> float:
    return contender.loss().item()


def build(rank: Rank, task: Reading, name: str, make: Make) -> tuple[Contender, int, float]:
    """A contender that has trained a few steps; the bytes it needs for them, its parameters among them; its loss.

    The others are at rest meanwhile, and hold what they held before.
    """
    gc.collect()
    rank.device.reset_peak()
    before = rank.device.peak()
    contender = make(name, task, rank.device)
    rank.device.reset_peak()  # it may have been made in fp32
    loss = look(contender)
    train(rank, contender, WARM_UP_STEPS)
    return contender, rank.device.peak() - before, loss


def build_all(
    rank: Rank, task: Reading, makes: Mapping[str, Make]
) -> tuple[list[Contender], dict[str, Any], list[str]]:
    """All that can be built, what is known of each, and those that failed on a rank, with the reason."""
    contenders: list[Contender] = []
    known: dict[str, Any] = {}
    left_out: list[str] = []
    for name, make in makes.items():
        built, failure = None, None
        try:
            built = build(rank, task, name, make)
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        found = rank.peers.from_all((failure, None if built is None else built[1]))
        failures = [text for text, _ in found if text]
        if built is None or failures:
            left_out.append(f"{task.name}, {name}: {failures[0]}")
            rank.peers.say(f"LEFT OUT: {left_out[-1]}")
            continue
        contender, _, loss = built
        contenders.append(contender)
        known[name] = {"peak": max(nbytes for _, nbytes in found), "first_loss": loss}
        rank.peers.say(f"{task.name}, {name}: built, {known[name]['peak'] / 1e6:,.0f} MB at most")
    return contenders, known, left_out


def measure_task(rank: Rank, task: Reading, rounds: int) -> dict[str, Any]:
    """As gpu_worker.py measures its own."""
    contenders, known, left_out = build_all(rank, task, ONE_RANK if rank.peers.count == 1 else SEVERAL_RANKS)
    steps: Times = {contender.name: [] for contender in contenders}
    hosts: Times = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in in_turn(contenders, turn):
            step, host = time_block(rank, contender)
            steps[contender.name].append(step)
            hosts[contender.name].append(host)
        latest = ", ".join(f"{name} {1e3 * values[-1]:.1f}" for name, values in steps.items())
        rank.peers.say(f"{task.name}, round {turn + 1} of {rounds}: {latest} ms")
    for contender in contenders:
        known[contender.name]["last_loss"] = look(contender)
        contender.finish()
    return {
        "task": task.name,
        "sequences": task.shape[0],
        "length": task.shape[1],
        "parameters": sum(param.numel() for param in contenders[0].params()) if contenders else 0,
        "step_seconds": slowest(rank, steps),
        "host_seconds": slowest(rank, hosts),
        "contenders": known,
        "left_out": left_out,
    }


def main() -> None:
    arguments = parse_arguments()
    device = DEVICES[arguments.device]()
    torch.set_float32_matmul_precision("high")  # TF32: models in fp32 are slower without it, by far
    dist.init_process_group(device.backend)
    rank = Rank(device, Peers(), arguments.toy)
    prepare(rank)
    found = []
    for task in tasks_of(rank):
        found.append(measure_task(rank, task, arguments.rounds))
        gc.collect()  # one task's contenders leave before those of the next come
    rank.save({"tasks": found}, arguments.out)
    leave(rank)


if __name__ == "__main__":
    main()
