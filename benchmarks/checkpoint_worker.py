"""One rank of `checkpoint.py`: saves one model in three ways, in turn, and lets rank 0 write what all ranks found."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meters import Observation, observe
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import shardstep

WIDTH = 1024
OPTIONS: dict[str, Any] = {"lr": 1e-3}


def make_model(millions: int) -> nn.Module:
    torch.manual_seed(1)
    layers = max(1, millions * 1_000_000 // (WIDTH * WIDTH))
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def sharded(millions: int) -> tuple[nn.Module, shardstep.ShardedOptimizer]:
    model = make_model(millions)
    opt = shardstep.shard(model, torch.optim.AdamW, **OPTIONS)
    model(torch.randn(2, WIDTH)).square().mean().backward()
    opt.step()
    return model, opt


def by_torch(millions: int) -> tuple[nn.Module, TorchZero]:
    """Gradients that take no memory: its state is there after one step, whatever they are."""
    model = make_model(millions)
    zero = TorchZero(model.parameters(), torch.optim.AdamW, foreach=False, **OPTIONS)
    for param in model.parameters():
        param.grad = torch.full((), 1e-3).expand_as(param)
    zero.step()
    zero.zero_grad()
    return model, zero


class Saves:
    """The ways to save; each returns when the loop may go on."""

    def __init__(self, millions: int, folder: Path) -> None:
        self._folder = folder
        self._ours, self._theirs = sharded(millions), by_torch(millions)
        self._saving: Any = None
        self.bytes_of_ranks: list[int] = []

    def consolidate(self) -> None:
        model, zero = self._theirs
        zero.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            torch.save({"model": model.state_dict(), "optimizer": zero.state_dict()}, self._folder / "whole.pt")
        dist.barrier()
        zero._all_state_dicts = []  # what it keeps of the last time would be part of the next one's memory

    def synchronous(self) -> None:
        shardstep.save(self._folder / "sync", *self._ours)

    def asynchronous(self) -> None:
        self._saving = shardstep.save(self._folder / "async", *self._ours, asynchronous=True)

    def wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()

    def load(self) -> None:
        shardstep.load(self._folder / "sync", *self._ours)

    def look(self) -> None:
        files = sorted((self._folder / "sync").glob("*.distcp"))
        self.bytes_of_ranks = [path.stat().st_size for path in files]


def slowest(seen: Observation) -> dict[str, float]:
    values = torch.tensor([seen.seconds, float(seen.extra_memory)], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {"seconds": values[0].item(), "extra_memory": values[1].item()}


def measure(saves: Saves, rounds: int) -> dict[str, list[dict[str, float]]]:
    ways: dict[str, Callable[[], None]] = {
        "consolidate": saves.consolidate,
        "sync": saves.synchronous,
        "async": saves.asynchronous,
        "wait": saves.wait,
        "load": saves.load,
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for turn in range(rounds + 1):
        for name, way in ways.items():
            seen = slowest(observe(way))
            if turn or name == "consolidate":  # the first asynchronous one also finds the memory that others take again
                found[name].append(seen)
            else:
                found.setdefault(f"first {name}", []).append(seen)
            if dist.get_rank() == 0:
                print(
                    f"  round {turn}, {name}: {seen['seconds']:.2f} s, {seen['extra_memory'] / 1e6:,.0f} MB", flush=True
                )
    saves.look()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    saves = Saves(arguments.millions, arguments.folder)
    found = measure(saves, arguments.rounds)
    if dist.get_rank() == 0:
        model = saves._ours[0]
        total = 3 * sum(param.nbytes for param in model.parameters())
        result = {"times": found, "bytes_of_ranks": saves.bytes_of_ranks, "total": total}
        arguments.out.write_text(json.dumps(result))
        for name in ("sync", "async"):
            shutil.rmtree(arguments.folder / name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
