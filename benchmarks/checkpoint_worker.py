"""One rank of `checkpoint.py`: saves one model in three ways, in turn, and lets rank 0 write what all ranks found."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meters import Observation, observe
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero

import shardstep
from shardstep.checkpoint import background

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


class Ours:
    """A sharded model and the ways to save it; each returns when the loop may go on."""

    def __init__(self, millions: int, folder: Path) -> None:
        self._folder, self._saving = folder, None
        self._trained = sharded(millions)

    def ways(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "sync", lambda: shardstep.save(self._folder / "sync", *self._trained)
        yield "first async", self._asynchronous  # this one also finds the memory that later ones take again
        yield "first wait", self._wait
        yield "async", self._asynchronous
        yield "wait", self._wait
        yield "load", lambda: shardstep.load(self._folder / "sync", *self._trained)

    def _asynchronous(self) -> None:
        self._saving = shardstep.save(self._folder / "async", *self._trained, asynchronous=True)

    def _wait(self) -> None:
        if self._saving is not None:
            self._saving.wait()


class Theirs:
    """What a program does with torch's class."""

    def __init__(self, millions: int, folder: Path) -> None:
        self._folder = folder
        self._model, self._zero = by_torch(millions)

    def ways(self) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "consolidate", self._consolidate

    def _consolidate(self) -> None:
        self._zero.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            whole = {"model": self._model.state_dict(), "optimizer": self._zero.state_dict()}
            torch.save(whole, self._folder / "whole.pt")
        dist.barrier()


def slowest(seen: Observation) -> dict[str, float]:
    values = torch.tensor([seen.seconds, float(seen.extra_memory)], dtype=torch.float64)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return {"seconds": values[0].item(), "extra_memory": values[1].item()}


def measure(millions: int, rounds: int, folder: Path) -> dict[str, list[dict[str, float]]]:
    """In turn; each is made anew and dropped, because both beside each other do not fit into one machine's memory."""
    found: dict[str, list[dict[str, float]]] = {}
    for turn in range(rounds):
        for kind in (Ours, Theirs):
            contender = kind(millions, folder)
            for name, way in contender.ways():
                seen = slowest(observe(way))
                found.setdefault(name, []).append(seen)
                if dist.get_rank() == 0:
                    text = f"{seen['seconds']:.2f} s, {seen['extra_memory'] / 1e6:,.0f} MB"
                    print(f"  round {turn}, {name}: {text}", flush=True)
            del contender
            forget()
    return found


def forget() -> None:
    """Nothing of the one is left when the other is measured."""
    background.forget_memory()  # that the next asynchronous save would take again
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--millions", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    found = measure(arguments.millions, arguments.rounds, arguments.folder)
    if dist.get_rank() == 0:
        files = sorted((arguments.folder / "sync").glob("*.distcp"))
        numel = sum(param.numel() for param in make_model(arguments.millions).parameters())
        sizes = [path.stat().st_size for path in files]
        arguments.out.write_text(json.dumps({"times": found, "bytes_of_ranks": sizes, "total": 3 * 4 * numel}))
        for name in ("sync", "async"):
            shutil.rmtree(arguments.folder / name)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
