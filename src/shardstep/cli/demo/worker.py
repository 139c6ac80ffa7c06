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
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.optim.lr_scheduler import LinearLR

from shardstep.cli.demo.contenders import Contender, make_contenders
from shardstep.cli.demo.corpus import Corpus, draw_batches, load_corpus
from shardstep.cli.demo.exchange import Exchange, Tick
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss
from shardstep.cli.demo.result import RankMemory, Result, Run
from shardstep.cli.demo.settings import OPTIMIZERS, SIZES, Size

WARMUP_STEPS = 40  # at the full rate from the start, Adam's first steps throw this model onto a plateau
AT_A_TIME = 10  # steps of one, before the next has its turn: what else the machine does then slows down all alike
SEED = 7
# A rank that lost its peer fails after this long instead of waiting for ever.
PEER_TIMEOUT = timedelta(seconds=60)
NETWORK_COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True, slots=True)
class Job:
    corpus: Corpus
    size: Size
    steps: int
    optimizer: str
    exchange: Exchange
    device: torch.device


class Training:
    """One contender on this rank."""

    def __init__(self, contender: Contender, job: Job) -> None:
        self.contender, self._job = contender, job
        size, seed = job.size, SEED + 1 + dist.get_rank()
        self._batches = draw_batches(job.corpus, batch=size.batch, block=size.block, seed=seed)
        self._warmups = [LinearLR(one, start_factor=0.05, total_iters=WARMUP_STEPS) for one in contender.optimizers]
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.looped_back: int | None = 0  # bytes that all ranks together sent over this machine's loopback

    def train(self, steps: int) -> None:
        launcher = os.getppid()
        dist.barrier()
        before = read_loopback_counter()
        for _ in range(steps):
            start = time.perf_counter()
            self.losses.append(self._step())
            self.seconds.append(time.perf_counter() - start)
            if dist.get_rank() == 0:
                self._job.exchange.write_tick(Tick(self.contender.name, len(self.losses), self.losses[-1]))
            if os.getppid() != launcher:
                sys.exit("torchrun is gone, so nobody waits for this rank.")
        dist.barrier()
        after = read_loopback_counter()
        known = before is not None and after is not None and self.looped_back is not None
        self.looped_back = self.looped_back + after - before if known else None  # type: ignore[operator]

    def _step(self) -> float:
        tokens, targets = (one.to(self._job.device) for one in next(self._batches))
        for optimizer in self.contender.optimizers:
            optimizer.zero_grad()
        loss = next_token_loss(self.contender.model(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer, warmup in zip(self.contender.optimizers, self._warmups, strict=True):
            optimizer.step()
            warmup.step()
        return loss.item()


def make_model(job: Job) -> GPT:
    torch.manual_seed(SEED)
    size, vocab = job.size, len(job.corpus.characters)
    model = GPT(GPTConfig(vocab=vocab, block=size.block, layers=size.layers, heads=size.heads, width=size.width))
    return model.to(job.device)


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


@dataclass
class OfRank:
    """What one rank found of one training."""

    losses: list[float]
    memory: RankMemory
    differs_by: float


def gather_run(training: Training, memory: RankMemory, differs_by: float) -> Run | None:
    """What all ranks measured, on rank 0; None elsewhere."""
    mine = OfRank(training.losses, memory, differs_by)
    ranks: list[OfRank] | None = [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, ranks)
    if ranks is None:
        return None
    steps, looped_back = len(training.losses), training.looped_back
    return Run(
        name=training.contender.name,
        losses=tuple(statistics.fmean(of_step) for of_step in zip(*(one.losses for one in ranks), strict=True)),
        memory=tuple(one.memory for one in ranks),
        sent_per_rank_and_step=None if looped_back is None else looped_back / len(ranks) / steps,
        seconds_per_step=statistics.median(training.seconds),
        differs_by=tuple(one.differs_by for one in ranks),
    )


def compare(job: Job) -> Result | None:
    """All trainings in turn; on rank 0 as a result, None elsewhere."""
    trainings = [Training(one, job) for one in make_contenders(lambda: make_model(job), job.optimizer)]
    for begin in range(0, job.steps, AT_A_TIME):
        for training in trainings:
            training.train(min(AT_A_TIME, job.steps - begin))
    memory = [training.contender.measure() for training in trainings]
    params = [[param.detach() for param in training.contender.bare.parameters()] for training in trainings]
    rows = zip(trainings, memory, params, strict=True)
    runs = [gather_run(training, held, difference(params[0], own)) for training, held, own in rows]
    numel = sum(param.numel() for param in params[0])
    return Result(numel, job.device.type, tuple(run for run in runs if run)) if dist.get_rank() == 0 else None


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


@record  # an exception leaves an error file, from which launch.py finds the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    arguments = parser.parse_args()

    device, exchange = start(), Exchange(arguments.exchange)
    job = Job(load_corpus(), SIZES[arguments.model], arguments.steps, arguments.optimizer, exchange, device)
    result = compare(job)
    if result is not None:
        exchange.write_result(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # [Note: leaving without finalization]
