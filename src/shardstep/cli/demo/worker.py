"""One rank of the demo; torchrun starts one process of this module per rank.

It trains the same model in three ways, from the same weights and on the same batches, in turn, and compares what came
out.

[Note: leaving without finalization] Gloo's threads drop the tensors of a finished collective a moment after it, and
need Python's lock for that. DDP keeps the process group, and so these threads, alive after destroy_process_group. A
thread that asks for the lock while the interpreter goes down is ended inside a C++ destructor, and the process aborts:
"terminate called without an active exception" (as in pytorch/pytorch#190489), seen in 5 of some 120 exits on a busy
machine, with plain AdamW too. So a rank that has done its work leaves by os._exit.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer
from torch.optim.lr_scheduler import LinearLR

import shardstep
from shardstep.cli.demo.corpus import draw_batches, load_corpus
from shardstep.cli.demo.exchange import Exchange, RankMemory, Result, Run, Tick
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss
from shardstep.cli.demo.settings import OPTIMIZERS, SIZES, Size

LEARNING_RATE, MUON_RATE = 2e-3, 0.02
WARMUP_STEPS = 40  # at the full rate from the start, Adam's first steps throw this model onto a plateau
AT_A_TIME = 10  # steps of one, before the next has its turn: what else the machine does then slows down all alike
SEED = 7
# A rank that lost its peer fails after this long instead of waiting for ever.
PEER_TIMEOUT = timedelta(seconds=60)
NETWORK_COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    model: nn.Module  # what is called: `bare` itself, or DDP round it
    bare: nn.Module
    optimizers: Sequence[Optimizer]  # to step, one after the other

    def measure(self) -> RankMemory:
        """Count the bytes that this rank holds; called on all ranks, after a step."""
        if isinstance(self.optimizers[0], shardstep.ShardedOptimizer):
            held = self.optimizers[0].report().ranks[dist.get_rank()]
            return RankMemory(held.parameters, held.gradients, held.state)
        params = list(self.bare.parameters())
        states = [value for one in self.optimizers for entry in one.state.values() for value in entry.values()]
        return RankMemory(
            parameters=sum(param.nbytes for param in params),
            gradients=sum(param.grad.nbytes for param in params if param.grad is not None),
            optimizer_state=sum(value.nbytes for value in states if isinstance(value, Tensor)),
        )


def make_contenders(make_model: Callable[[], nn.Module], optimizer: str) -> list[Contender]:
    zero = partial(shardstep.ZeroRedundancyOptimizer, parameters_as_bucket_view=True)
    without, with_drop_in, with_shard = OPTIMIZERS[optimizer]
    fast = make_model()
    return [
        _with_ddp(without, make_model(), optimizer, lambda optimizer_class, **group: optimizer_class(**group)),
        _with_ddp(with_drop_in, make_model(), optimizer, zero),
        Contender(with_shard, fast, fast, [shardstep.shard(fast, AdamW, groups=_groups(fast, optimizer))]),
    ]


def _with_ddp(name: str, model: nn.Module, optimizer: str, make: Callable[..., Optimizer]) -> Contender:
    """Each class has an optimizer of its own; `shard` takes several classes at once."""
    groups = _groups(model, optimizer)
    optimizers = [make(optimizer_class=group.pop("optimizer", AdamW), **group) for group in groups]
    # Gradients as views of DDP's buckets: otherwise DDP holds them twice, and the picture would show one of the two.
    return Contender(name, DistributedDataParallel(model, gradient_as_bucket_view=True), model, optimizers)


def _groups(model: nn.Module, optimizer: str) -> list[dict[str, Any]]:
    """Param groups: everything for AdamW; or the matrices of the blocks for Muon, and the rest for AdamW."""
    if optimizer == "adamw":
        return [{"params": list(model.parameters()), "lr": LEARNING_RATE}]
    matrices: list[Tensor] = []
    rest: list[Tensor] = []
    for name, param in model.named_parameters():
        (matrices if ".attention." in name or ".feed_forward." in name else rest).append(param)
    return [{"params": matrices, "optimizer": Muon, "lr": MUON_RATE}, {"params": rest, "lr": LEARNING_RATE}]


class Training:
    """One contender on this rank, and what was measured of it."""

    def __init__(self, contender: Contender, batches: Iterator[tuple[Tensor, Tensor]], exchange: Exchange) -> None:
        self.contender, self._batches, self._exchange = contender, batches, exchange
        self._warmups = [LinearLR(one, start_factor=0.05, total_iters=WARMUP_STEPS) for one in contender.optimizers]
        self._losses: list[float] = []
        self._seconds: list[float] = []
        self._looped_back: list[int] = []  # bytes that all ranks together sent over this machine's loopback

    def train(self, steps: int) -> None:
        launcher = os.getppid()
        dist.barrier()
        before = read_loopback_counter()
        for _ in range(steps):
            start = time.perf_counter()
            self._losses.append(self._step())
            self._seconds.append(time.perf_counter() - start)
            if dist.get_rank() == 0:
                self._exchange.write_tick(Tick(self.contender.name, len(self._losses), self._losses[-1]))
            if os.getppid() != launcher:
                sys.exit("torchrun is gone, so nobody waits for this rank.")
        dist.barrier()
        after = read_loopback_counter()
        if before is not None and after is not None:
            self._looped_back.append(after - before)

    def _step(self) -> float:
        tokens, targets = next(self._batches)
        for optimizer in self.contender.optimizers:
            optimizer.zero_grad()
        loss = next_token_loss(self.contender.model(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, warmup in zip(self.contender.optimizers, self._warmups, strict=True):
            optimizer.step()
            warmup.step()
        return loss.item()

    def gather(self, expected: list[Tensor]) -> Run:
        """Gather what all ranks measured, and how far their parameters are from the `expected` ones."""
        params = [param.detach() for param in self.contender.bare.parameters()]
        mine = (self._losses, self.contender.measure(), difference(expected, params))
        ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, mine)
        losses, memory, differs_by = zip(*ranks, strict=True)
        sent = sum(self._looped_back) / len(ranks) / len(self._losses) if self._looped_back else None
        return Run(
            name=self.contender.name,
            losses=tuple(statistics.fmean(of_step) for of_step in zip(*losses, strict=True)),
            memory=memory,
            sent_per_rank_and_step=sent,
            seconds_per_step=statistics.median(self._seconds),
            differs_by=differs_by,
        )


def read_loopback_counter(counters: Path = NETWORK_COUNTERS) -> int | None:
    """Bytes this machine has sent to itself so far; None where the system has no such counter.

    Ranks on one machine reach each other over the loopback interface whichever address they use.
    """
    if not counters.exists():
        return None
    for line in counters.read_text().splitlines():
        interface, _, fields = line.partition(":")
        if interface.strip() == "lo":
            return int(fields.split()[8])  # eight receive counters, then bytes sent
    return None


def difference(left: list[Tensor], right: list[Tensor]) -> float:
    """Of the one from the other, in units of the largest number; 0 if no bit differs."""
    # As integers: compared as floats, 0.0 would equal -0.0.
    if all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True)):
        return 0.0
    furthest = max((a - b).abs().max().item() for a, b in zip(left, right, strict=True) if a.numel())
    return furthest / max(a.abs().max().item() for a in left if a.numel())


def start() -> torch.device:
    """Join the other ranks; on GPUs, if this machine has some."""
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        dist.init_process_group("gloo", timeout=PEER_TIMEOUT)
        return torch.device("cpu")
    rank, count = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if int(os.environ["LOCAL_WORLD_SIZE"]) > count:
        # Ranks share a GPU, which NCCL takes for a mistake if they are on one host: so each is a host of its own.
        os.environ.update(NCCL_HOSTID=f"rank{rank}", NCCL_SOCKET_IFNAME="lo")
    torch.cuda.set_device(rank % count)
    dist.init_process_group("nccl", timeout=PEER_TIMEOUT)
    return torch.device("cuda", rank % count)


def make_model(vocab: int, size: Size, device: torch.device) -> GPT:
    torch.manual_seed(SEED)
    config = GPTConfig(vocab=vocab, block=size.block, layers=size.layers, heads=size.heads, width=size.width)
    return GPT(config).to(device)


@record  # an exception leaves an error file, from which launch.py finds the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    arguments = parser.parse_args()

    device, exchange = start(), Exchange(arguments.exchange)
    corpus, size = load_corpus(), SIZES[arguments.model]
    contenders = make_contenders(partial(make_model, len(corpus.characters), size, device), arguments.optimizer)
    draw = partial(draw_batches, corpus, batch=size.batch, block=size.block, seed=SEED + 1 + dist.get_rank())
    trainings = [Training(one, ((x.to(device), y.to(device)) for x, y in draw()), exchange) for one in contenders]
    for begin in range(0, arguments.steps, AT_A_TIME):
        for training in trainings:
            training.train(min(AT_A_TIME, arguments.steps - begin))
    expected = [param.detach() for param in contenders[0].bare.parameters()]
    runs = tuple(training.gather(expected) for training in trainings)
    if dist.get_rank() == 0:
        numel = sum(param.numel() for param in expected)
        exchange.result.write_text(Result(numel, device.type, runs).to_json(), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # [Note: leaving without finalization]
