"""Train, be killed, and go on bit for bit: torchrun starts the job again, and it resumes from the newest checkpoint.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/elastic.py --folder run

A rank that dies takes the others with it (they raise, for their connection to it is gone), and torchrun starts all of
them anew: there is nothing to repair in a process, and everything is in the checkpoint. To go on with another number of
ranks, start it again with another --nproc-per-node; on several machines, `--nnodes=1:4 --rdzv-backend c10d
--rdzv-endpoint host:29400` lets torchrun go on with those that are left. The global batch stays the same as long as the
number of ranks divides it, and so does the order of the samples; sums of gradients are taken in another order.

The variable: by default torchrun keeps one store for all starts, in which the ranks of the second find the addresses of
the first and are refused (github.com/pytorch/pytorch/issues/135712 and 167288; seen with torch 2.13).
"""

from __future__ import annotations

import argparse
import os
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardstep

SAMPLES, GLOBAL_BATCH = 4096, 24


def random_state() -> dict[str, Any]:
    """Of this rank: numbers, lists and tensors, which is all that `extra_of_rank` takes."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    try:
        import numpy as np
    except ImportError:
        return state
    name, words, *rest = np.random.get_state()
    return state | {"numpy": (name, words.tolist(), *rest)}


def set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if "numpy" in state:
        import numpy as np

        np.random.set_state(state["numpy"])


class Data:
    """An endless order of samples that is known from its seed; `position` is how many were taken, by all ranks."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(SAMPLES, 16, generator=generator)
        self._seed, self.position = seed, 0
        self._order: tuple[int, torch.Tensor] = (-1, torch.empty(0))  # of an epoch

    def next_batch(self) -> torch.Tensor:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        taken = [self._sample(self.position + number) for number in range(rank, GLOBAL_BATCH, ranks)]
        self.position += GLOBAL_BATCH
        return self.x[taken]

    def _sample(self, number: int) -> int:
        epoch, place = divmod(number, SAMPLES)
        if self._order[0] != epoch:
            self._order = (epoch, torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self._seed + epoch)))
        return int(self._order[1][place])


class Training:
    def __init__(self, folder: Path, steps: int) -> None:
        self.folder, self.steps, self.step = folder, steps, 0
        self.saving: Any = None
        random.seed(dist.get_rank())
        torch.manual_seed(dist.get_rank())  # dropout: every rank its own
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else "cpu"
        self.model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1)).to(device)
        self.opt = shardstep.shard(self.model, torch.optim.AdamW, lr=3e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, steps)
        self.data = Data(seed=7)

    def resume(self) -> None:
        try:
            extra = shardstep.load(self.folder, self.model, self.opt)
        except FileNotFoundError:
            return  # the first start
        self.step, self.data.position = extra["step"], extra["position"]
        self.schedule.load_state_dict(extra["schedule"])
        if extra.own is not None:  # the same number of ranks: bit for bit
            set_random_state(extra.own)
        else:  # another: random numbers that no rank has had yet
            torch.manual_seed(1_000_000 * self.step + dist.get_rank())
        print(f"rank {dist.get_rank()} of {dist.get_world_size()} goes on after step {self.step}", flush=True)

    def save(self) -> None:
        """What differs between ranks goes into `extra_of_rank`; the rest is the same on all of them."""
        self.saving = shardstep.save(
            self.folder / f"step-{self.step}",
            self.model,
            self.opt,
            extra={"step": self.step, "position": self.data.position, "schedule": self.schedule.state_dict()},
            extra_of_rank=random_state(),
            keep=3,
            asynchronous=True,  # written while the next steps are taken; the next save waits for it
        )

    def train_step(self) -> float:
        x = self.data.next_batch().to(next(self.model.parameters()).device)
        x = x + 0.1 * random.random()  # noise of this rank's
        loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        self.opt.step()
        self.opt.zero_grad()
        self.schedule.step()
        self.step += 1
        return loss.item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="of checkpoints; all ranks reach it")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps from one checkpoint to the next")
    parser.add_argument("--smoke", action="store_true", help="12 steps, a checkpoint after every third")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.every = 12, 3
    return arguments


def main() -> None:
    arguments = parse_arguments()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ["TORCHELASTIC_RESTART_COUNT"] != "0":
        raise RuntimeError(
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: restarted ranks do not find each other"
        )
    # Short enough that ranks which wait for a dead one on another machine give up before the night is over.
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", timeout=timedelta(minutes=2))
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    training = Training(arguments.folder, arguments.steps)
    training.resume()
    while training.step < training.steps:
        loss = training.train_step()
        print(f"rank {dist.get_rank()}: step {training.step}, loss {loss!r}", flush=True)
        if training.step % arguments.every == 0 or training.step == training.steps:
            training.save()
    if training.saving is not None:
        training.saving.wait()  # raises, on all ranks, if the last one could not be written
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
