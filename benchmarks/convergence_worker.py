"""One rank of `convergence.py`, started by torch.distributed.run: trains the demo's GPT in several ways, one by one."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from drop_in_worker import from_all_ranks, say
from rounds import leave
from torch.optim.lr_scheduler import LambdaLR

import shardstep
from shardstep.cli.demo.corpus import Corpus, draw_batches, load_corpus
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss
from shardstep.cli.demo.settings import SIZES, Size

FLOAT32, MASTERS, BY_CHANCE, NO_MASTERS = "fp32", "bf16, fp32 masters", "bf16, stochastic", "bf16, no masters"
MUON = "fp32, Muon + AdamW"
CONTROL = "fp32, rounded start"
# [Note: a rate at which runs can be compared] With the demo's small model, its rate of 2e-3, 40 steps of warm-up and no
# clipping, rounding decides whether Adam's first steps throw the model onto a plateau: after 450 steps fp32 was at
# 1.50, bf16 with masters at 1.09 and without at 1.05. That says nothing of any of them. With half the rate, a longer
# warm-up and clipping, the same training from weights that were rounded goes the same way (CONTROL).
LEARNING_RATE, MUON_RATE = 1e-3, 0.02
# AdamW alone, as contenders of Muon: the rate at which precisions are compared is not its best.
OTHER_RATES = {f"fp32, lr {rate:g}": rate for rate in (2e-3, 4e-3, 8e-3)}
WARM_UP_STEPS = 100
MOST_NORM = 1.0  # of the gradient; more is clipped
LAST_RATE = 0.1  # of the learning rate, at the last step
# The demo's small one has twice the layers and half as much width again: four times the work.
MODELS = {"convergence": Size(layers=2, heads=4, width=128, block=64, batch=8), "tiny": SIZES["tiny"]}
MATRICES = ["blocks.*.attention.*", "blocks.*.feed_forward.*"]  # not the blocks' norms, which are vectors
SEED = 7
SPOKEN_EVERY = 50  # steps


@dataclass(frozen=True, slots=True)
class Way:
    """How a contender trains."""

    dtype: torch.dtype = torch.float32
    master: str = "fp32"
    muon: bool = False
    rate: float = LEARNING_RATE  # AdamW's
    rounded: bool = False  # begin with weights that were rounded to bf16
    wire: str | None = None
    reduce_dtype: torch.dtype | None = None

    def optimizer(self, model: GPT) -> shardstep.ShardedOptimizer:
        """ValueError if this shardstep has no such `master`."""
        wire: Any = self.wire
        config = shardstep.ShardConfig(master=self.master, wire=wire, reduce_dtype=self.reduce_dtype)  # type: ignore[arg-type]
        if not self.muon:
            return shardstep.shard(model, torch.optim.AdamW, config=config, lr=self.rate)
        groups = [
            {"params": MATRICES, "optimizer": torch.optim.Muon, "lr": MUON_RATE},
            {"params": "rest", "optimizer": torch.optim.AdamW, "lr": self.rate},
        ]
        return shardstep.shard(model, groups=groups, config=config)


BF16 = torch.bfloat16
WAYS: Mapping[str, Way] = {
    FLOAT32: Way(),
    MASTERS: Way(BF16),
    BY_CHANCE: Way(BF16, "stochastic"),
    NO_MASTERS: Way(BF16, "none"),
    MUON: Way(muon=True),
    **{name: Way(rate=rate) for name, rate in OTHER_RATES.items()},
    CONTROL: Way(rounded=True),
}


def rate_at(step: int, steps: int) -> float:
    """A straight way up, then a cosine down, as a part of the learning rate."""
    if step < WARM_UP_STEPS:
        return (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def make_model(corpus: Corpus, size: Size, seed: int = SEED) -> GPT:
    torch.manual_seed(seed)
    vocab = len(corpus.characters)
    return GPT(GPTConfig(vocab=vocab, block=size.block, layers=size.layers, heads=size.heads, width=size.width))


def train(name: str, way: Way, corpus: Corpus, size: Size, steps: int, seed: int = SEED) -> list[float]:
    """Of every step: the training loss, mean over the ranks. The same weights and batches for every contender."""
    model = make_model(corpus, size, seed)
    if way.rounded:
        model.to(BF16)
    model.to(way.dtype)
    optimizer = way.optimizer(model)
    schedule = LambdaLR(optimizer, lambda step: rate_at(step, steps))
    batches = draw_batches(corpus, batch=size.batch, block=size.block, seed=seed + 1 + dist.get_rank())
    losses: list[float] = []
    for step in range(1, steps + 1):
        tokens, targets = next(batches)
        # In float32 whatever the model is in: a loss in bf16 has steps of half a percent.
        loss = next_token_loss(model(tokens).float(), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.clip_grad_norm_(MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
        if step % SPOKEN_EVERY == 0 or step == steps:
            say(f"{name}, step {step} of {steps}: loss {statistics.fmean(losses[-SPOKEN_EVERY:]):.3f}")
    optimizer.close()
    return [statistics.fmean(of_step) for of_step in zip(*from_all_ranks(losses), strict=True)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    warnings.filterwarnings("ignore", message=".*bf16.*|.*bfloat16.*")  # that steps are lost is what is to be shown
    dist.init_process_group("gloo")
    corpus, size = load_corpus(), MODELS[arguments.model]
    runs: dict[str, list[float]] = {}
    left_out: list[str] = []
    for name, way in WAYS.items():
        try:
            shardstep.ShardConfig(master=way.master)  # type: ignore[arg-type]
        except ValueError as error:
            left_out.append(name)
            say(f"{name}: left out; {error}")
            continue
        runs[name] = train(name, way, corpus, size, arguments.steps)
    numel = sum(parameter.numel() for parameter in make_model(corpus, size).parameters())
    result: dict[str, Any] = {"ranks": dist.get_world_size(), "size": asdict(size), "parameters": numel}
    if dist.get_rank() == 0:
        kept = {name: [round(loss, 5) for loss in losses] for name, losses in runs.items()}
        arguments.out.write_text(json.dumps(result | {"losses": kept, "left_out": left_out}))
    leave()


if __name__ == "__main__":
    main()
