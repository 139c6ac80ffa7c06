"""One rank of the demo; torchrun starts one process of this module per rank.

It trains the model twice from the same weights on the same batches, with DDP + AdamW and with DDP + shardstep, and
compares what came out.

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
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LinearLR

from shardstep import ZeroRedundancyOptimizer
from shardstep.cli.demo.corpus import Corpus, draw_batches, load_corpus
from shardstep.cli.demo.exchange import Exchange, Tick
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss
from shardstep.cli.demo.result import PLAIN, SHARDED, RankMemory, Result, Run
from shardstep.cli.demo.settings import SIZES, Size

LEARNING_RATE = 2e-3
WARMUP_STEPS = 40  # at the full rate from the start, Adam's first steps throw this model onto a plateau
SEED = 7
# A rank that lost its peer fails after this long instead of waiting for ever.
PEER_TIMEOUT = timedelta(seconds=60)
NETWORK_COUNTERS = Path("/proc/net/dev")


@dataclass(frozen=True, slots=True)
class Stepper:
    optimizer: Optimizer
    local: Optimizer  # the one that holds this rank's state


def step_plainly(parameters: Iterable[Tensor]) -> Stepper:
    optimizer = AdamW(parameters, lr=LEARNING_RATE)
    return Stepper(optimizer, local=optimizer)


def step_shard(parameters: Iterable[Tensor]) -> Stepper:
    zero = ZeroRedundancyOptimizer(parameters, AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE)
    return Stepper(zero, local=zero.optim)


@dataclass(frozen=True, slots=True)
class Job:
    corpus: Corpus
    size: Size
    steps: int
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class Trained:
    """What one training leaves on this rank."""

    losses: list[float]
    parameters: list[Tensor]
    memory: RankMemory
    seconds_per_step: float
    looped_back: int | None  # bytes that all ranks together sent over this machine's loopback


def train(name: str, make_stepper: Callable[[Iterable[Tensor]], Stepper], job: Job) -> Trained:
    # Gradients as views of DDP's buckets: otherwise DDP holds them twice, and the picture would show one of the two.
    ddp = DistributedDataParallel(make_model(job), gradient_as_bucket_view=True)
    stepper = make_stepper(ddp.parameters())
    batches = draw_batches(job.corpus, batch=job.size.batch, block=job.size.block, seed=SEED + 1 + dist.get_rank())
    warmup = LinearLR(stepper.optimizer, start_factor=0.05, total_iters=WARMUP_STEPS)
    launcher = os.getppid()
    losses, seconds = [], []

    dist.barrier()
    before = read_loopback_counter()
    for step in range(1, job.steps + 1):
        start = time.perf_counter()
        tokens, targets = next(batches)
        stepper.optimizer.zero_grad()
        loss = next_token_loss(ddp(tokens), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        stepper.optimizer.step()
        warmup.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        if dist.get_rank() == 0:
            job.exchange.write_tick(Tick(name, step, losses[-1]))
        if os.getppid() != launcher:
            sys.exit("torchrun is gone, so nobody waits for this rank.")
    dist.barrier()
    after = read_loopback_counter()

    parameters = list(ddp.parameters())
    return Trained(
        losses=losses,
        parameters=[parameter.detach() for parameter in parameters],
        memory=RankMemory(
            parameters=sum(parameter.nbytes for parameter in parameters),
            gradients=sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None),
            optimizer_state=count_state_bytes(stepper.local),
        ),
        seconds_per_step=statistics.median(seconds),
        looped_back=None if before is None or after is None else after - before,
    )


def make_model(job: Job) -> GPT:
    torch.manual_seed(SEED)
    size, vocab = job.size, len(job.corpus.characters)
    return GPT(GPTConfig(vocab=vocab, block=size.block, layers=size.layers, heads=size.heads, width=size.width))


def count_state_bytes(optimizer: Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(tensor.nbytes for tensor in tensors)


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


def same_bits(left: list[Tensor], right: list[Tensor]) -> bool:
    # As integers: compared as floats, 0.0 would equal -0.0.
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(left, right, strict=True))


def gather_run(name: str, trained: Trained) -> Run | None:
    """What all ranks measured, on rank 0; None elsewhere."""
    mine = (trained.losses, trained.memory)
    ranks: list[tuple[list[float], RankMemory]] | None = (
        [mine] * dist.get_world_size() if dist.get_rank() == 0 else None
    )
    dist.gather_object(mine, ranks)
    if ranks is None:
        return None
    steps = len(trained.losses)
    looped_back = trained.looped_back
    return Run(
        name=name,
        losses=tuple(statistics.fmean(of_step) for of_step in zip(*(losses for losses, _ in ranks), strict=True)),
        memory=tuple(memory for _, memory in ranks),
        sent_per_rank_and_step=None if looped_back is None else looped_back / len(ranks) / steps,
        seconds_per_step=trained.seconds_per_step,
    )


def compare(job: Job) -> Result | None:
    """Both trainings, on rank 0 as a result; None elsewhere."""
    plain = train(PLAIN, step_plainly, job)
    sharded = train(SHARDED, step_shard, job)
    plain_run, sharded_run = gather_run(PLAIN, plain), gather_run(SHARDED, sharded)
    equal = torch.zeros(dist.get_world_size(), dtype=torch.int32)
    equal[dist.get_rank()] = same_bits(plain.parameters, sharded.parameters)
    dist.all_reduce(equal)
    if plain_run is None or sharded_run is None:
        return None
    return Result(
        numel=sum(parameter.numel() for parameter in plain.parameters),
        plain=plain_run,
        sharded=sharded_run,
        equal_on_rank=tuple(bool(flag) for flag in equal.tolist()),
    )


@record  # an exception leaves an error file, from which launch.py finds the rank that failed first
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exchange", type=Path, required=True)
    parser.add_argument("--model", choices=SIZES, required=True)
    parser.add_argument("--steps", type=int, required=True)
    arguments = parser.parse_args()

    dist.init_process_group("gloo", timeout=PEER_TIMEOUT)
    exchange = Exchange(arguments.exchange)
    result = compare(Job(load_corpus(), SIZES[arguments.model], arguments.steps, exchange))
    if result is not None:
        exchange.write_result(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    os._exit(0)  # [Note: leaving without finalization]
