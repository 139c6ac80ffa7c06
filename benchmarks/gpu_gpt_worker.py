"""One rank of `gpu_gpt.py`: trains all contenders of one mode in turn and lets rank 0 write what all ranks found."""

from __future__ import annotations

import argparse
import gc
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import in_turn
from gpu_contenders import DEVICES, Contender, Peers, Rank, Task
from gpu_gpt_contenders import ALONE, CONTENDERS, MODES, SMALL, TOY, WIRE_BF16, WIRE_FP32, WIRE_OVERLAP, chosen
from gpu_trace import profile, read_trace
from gpu_training_worker import prepare
from gpu_worker import Times, leave, slowest, time_block, train

COMPILED_STEPS = 3  # in which everything is compiled, and every state allocated


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=DEVICES, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--fewer", action="store_true")
    parser.add_argument("--trace", type=Path, help="where rank 0 keeps a trace of one contender")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def build(rank: Rank, task: Task, name: str, mode: str) -> tuple[Contender, int]:
    """A contender that has trained a few steps, and the bytes it needs for one when all is compiled."""
    gc.collect()
    rank.device.reset_peak()
    before = rank.device.peak()
    contender = CONTENDERS[name](name, task, rank.device, mode)
    train(rank, contender, COMPILED_STEPS)
    rank.device.reset_peak()
    train(rank, contender, 1)
    return contender, rank.device.peak() - before


def build_all(
    rank: Rank, task: Task, mode: str, names: Sequence[str]
) -> tuple[list[Contender], dict[str, Any], list[str]]:
    """All that can be built, what is known of each, and those that failed on a rank, with the reason."""
    contenders: list[Contender] = []
    known: dict[str, Any] = {}
    left_out: list[str] = []
    for name in names:
        built, failure = None, None
        try:
            built = build(rank, task, name, mode)
        except Exception as error:
            traceback.print_exc()
            failure = f"{type(error).__name__}: {error}"
        found = rank.peers.from_all((failure, None if built is None else built[1]))
        failures = [text for text, _ in found if text]
        if built is None or failures:
            left_out.append(f"{mode}, {name}: {failures[0]}")
            rank.peers.say(f"LEFT OUT: {left_out[-1]}")
            continue
        contenders.append(built[0])
        known[name] = {"peak": max(nbytes for _, nbytes in found)}
        rank.peers.say(f"{mode}, {name}: built, {known[name]['peak'] / 1e6:,.0f} MB")
    return contenders, known, left_out


def measure(rank: Rank, task: Task, arguments: argparse.Namespace) -> dict[str, Any]:
    mode, rounds = arguments.mode, arguments.rounds
    names = chosen(mode, rank.peers.count, fewer=arguments.fewer)
    contenders, known, left_out = build_all(rank, task, mode, names)
    steps: Times = {contender.name: [] for contender in contenders}
    hosts: Times = {contender.name: [] for contender in contenders}
    compiled_before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for turn in range(rounds):
        for contender in in_turn(contenders, turn):
            step, host = time_block(rank, contender)
            steps[contender.name].append(step)
            hosts[contender.name].append(host)
        latest = ", ".join(f"{name} {1e3 * values[-1]:.0f}" for name, values in steps.items())
        rank.peers.say(f"{mode}, round {turn + 1} of {rounds}: {latest} ms")
    late = torch._dynamo.utils.counters["stats"]["unique_graphs"] - compiled_before
    traced = [contender for contender in contenders if arguments.trace and contender.name == WIRE_OVERLAP]
    hidden = {contender.name: look_at(rank, contender, arguments.trace) for contender in traced}
    for contender in contenders:
        contender.finish()
        loss = contender.loss().detach()
        contender.finish()
        if contender.name not in (ALONE, WIRE_FP32, WIRE_BF16):
            known[contender.name]["loss"] = sum(rank.peers.from_all(loss.item())) / rank.peers.count
    return {
        "mode": mode,
        "task": task.name,
        "sequences": task.shape[0],
        "length": task.shape[1],
        "step_seconds": slowest(rank, steps),
        "host_seconds": slowest(rank, hosts),
        "contenders": known,
        "compiled_late": late,
        "hidden": hidden,
        "left_out": left_out,
    }


def look_at(rank: Rank, contender: Contender, kept: Path) -> dict[str, Any]:
    """How much of each kind of NCCL kernel ran under computation; the trace is kept. Without clipping."""
    profiled = rank.peers.rank == 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        for _ in range(2):  # the profiler's first use is slow
            profile(rank, contender, file if profiled else None)
        return dict(read_trace(file, kept)["kernels"]) if profiled else {}


def main() -> None:
    arguments = parse_arguments()
    device = DEVICES[arguments.device]()
    torch.set_float32_matmul_precision("high")
    # All contenders share the code of nn.Module.__call__, of which the compiler keeps so many versions.
    torch._dynamo.config.recompile_limit = 256
    dist.init_process_group(device.backend)
    rank = Rank(device, Peers(), arguments.toy)
    prepare(rank)
    found = measure(rank, TOY if arguments.toy else SMALL, arguments)
    rank.save(found, arguments.out)
    leave(rank)


if __name__ == "__main__":
    main()
