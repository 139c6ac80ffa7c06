"""One rank of `drop_in.py`, started by torch.distributed.run: measures both contenders in turn in one process group."""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from contenders import (
    COMPARED,
    CONTROL,
    FULL,
    TARGET_RANK,
    TOY,
    Contender,
    Setting,
    first_different_entry,
    first_different_param,
)
from meters import count_calls, observe, slowest_rank_seconds

WARM_UP_STEPS = 3  # DDP rebuilds its buckets after the first step; AdamW allocates its state in it

AnyContender = TypeVar("AnyContender")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--frozen", action="store_true")
    parser.add_argument("--control", action="store_true", help="torch's class on both sides")
    parser.add_argument("--toy", action="store_true", help="a model of 0.4 M parameters, to see that everything runs")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True, help="steps of one contender in a round")
    parser.add_argument("--consolidations", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"  {text}", file=sys.stderr, flush=True)


def from_all_ranks(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def in_turn(contenders: list[AnyContender], turn: int) -> list[AnyContender]:
    """The order of this round: whoever was first last time is last now, so that none always runs on a warm cache."""
    shift = turn % len(contenders)
    return contenders[shift:] + contenders[:shift]


def measure_traffic(contenders: list[Contender]) -> dict[str, Any]:
    """Bytes of the gradients' part and of the optimizer's part of one step, and the optimizer's calls; per rank."""
    results: dict[str, Any] = {}
    for contender in contenders:
        gradients = observe(contender.forward_backward)
        parameters = observe(contender.step)
        contender.forward_backward()
        calls = count_calls(contender.step)
        results[contender.name] = {
            "forward_backward": from_all_ranks(asdict(gradients)),
            "optimizer_step": from_all_ranks(asdict(parameters)),
            "calls": from_all_ranks(asdict(calls)),
        }
    return results


def measure_steps(contenders: list[Contender], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds per full step and per optimizer.step(), one number per round, contenders alternating."""
    full: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    alone: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(rounds):
        for contender in in_turn(contenders, turn):
            full[contender.name].append(slowest_rank_seconds(partial(contender.train, steps)) / steps)
            contender.forward_backward()
            alone[contender.name].append(slowest_rank_seconds(contender.step))
        latest = ", ".join(f"{name} {values[-1]:.3f} s" for name, values in full.items())
        say(f"round {turn + 1} of {rounds}: {latest} per step")
    return {"step_seconds": full, "optimizer_seconds": alone}


def measure_consolidation(contenders: list[Contender], repetitions: int) -> dict[str, Any]:
    """consolidate_state_dict(to=0): what it costs every rank, and what state_dict() then costs the target."""
    results: dict[str, list[Any]] = {contender.name: [] for contender in contenders}
    for turn in range(repetitions):
        states: dict[str, Any] = {}
        for contender in in_turn(contenders, turn):
            cost = observe(contender.consolidate)
            start = time.perf_counter()
            if dist.get_rank() == TARGET_RANK:
                states[contender.name] = contender.optimizer.state_dict()
            reading = from_all_ranks(time.perf_counter() - start)[TARGET_RANK]
            results[contender.name].append({"ranks": from_all_ranks(asdict(cost)), "state_dict_seconds": reading})
        refuse(first_different_entry(*states.values()) if states else None, "the consolidated states differ")
        latest = ", ".join(f"{name} {slowest(values[-1]):.3f} s" for name, values in results.items())
        say(f"consolidation {turn + 1} of {repetitions}: {latest}")
    return results


def slowest(consolidation: dict[str, Any]) -> float:
    return max(float(rank["seconds"]) for rank in consolidation["ranks"])


def refuse(difference: str | None, meaning: str) -> None:
    """Stop on every rank if any found a difference: a faster wrong answer is no result."""
    found = [f"rank {rank}: {text}" for rank, text in enumerate(from_all_ranks(difference)) if text]
    if found:
        raise RuntimeError(f"{meaning}: {'; '.join(found)}")


def main() -> None:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    setting = Setting(arguments.bucket_view, arguments.frozen)
    config = TOY if arguments.toy else FULL
    classes = CONTROL if arguments.control else COMPARED
    contenders = [Contender(name, zero_class, config, setting) for name, zero_class in classes.items()]
    for contender in contenders:
        contender.train(WARM_UP_STEPS)
    result: dict[str, Any] = {
        "setting": setting.name,
        "ranks": dist.get_world_size(),
        "elements": sum(param.numel() for param in contenders[0].params()),
        "frozen_share": contenders[0].frozen_share,
        "traffic": measure_traffic(contenders),
    }
    say("bytes and calls counted")
    result |= measure_steps(contenders, arguments.rounds, arguments.steps)
    result["consolidation"] = measure_consolidation(contenders, arguments.consolidations)
    refuse(first_different_param(*contenders), "the contenders' parameters differ after the same steps")
    say("both contenders hold bitwise equal parameters")
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
