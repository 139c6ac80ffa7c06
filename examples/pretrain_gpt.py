"""Pretrain a small GPT on a text, and go on where it stopped: accumulation, warm-up and cosine, clipping, bf16.

    torchrun --standalone --nproc-per-node 2 examples/pretrain_gpt.py --folder run            trains, saves, resumes
    torchrun --standalone --nproc-per-node 3 examples/pretrain_gpt.py --folder run            goes on with three ranks
    torchrun --standalone --nproc-per-node 2 examples/pretrain_gpt.py --folder m --muon       Muon for the matrices
    torchrun --standalone --nproc-per-node 2 examples/pretrain_gpt.py --folder r --text my.txt --bf16

`--smoke` is a few steps of a tiny model. The model and the text are those of `shardstep demo`.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import shardstep
from shardstep.cli.demo.corpus import Corpus, load_corpus
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss

MATRICES = ["blocks.*.attention.*", "blocks.*.feed_forward.*"]  # what Muon is for; embeddings and norms are AdamW's


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", type=Path, default=Path("run"), help="of checkpoints; training goes on from the newest (run)"
    )
    parser.add_argument("--text", type=Path, help="to learn, in UTF-8 (default: the demo's)")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=2, help="passes to a step")
    parser.add_argument("--muon", action="store_true", help="Muon for the matrices, AdamW for the rest")
    parser.add_argument("--bf16", action="store_true", help="parameters in bf16, with fp32 masters in shares")
    parser.add_argument("--smoke", action="store_true", help="a few steps of a tiny model")
    return parser.parse_args()


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def read_text(path: Path | None) -> Corpus:
    if path is None:
        return load_corpus()
    text = path.read_text(encoding="utf-8")
    characters = "".join(sorted(set(text)))
    return Corpus(characters, torch.tensor([characters.index(character) for character in text]))


def make_optimizer(model: GPT, *, muon: bool) -> shardstep.ShardedOptimizer:
    if muon:
        matrices = {"params": MATRICES, "optimizer": torch.optim.Muon, "lr": 0.02}
        rest = {"params": "rest", "optimizer": torch.optim.AdamW, "lr": 1e-3}
        return shardstep.shard(model, groups=[matrices, rest])
    decayed = {"params": ["*.weight"], "weight_decay": 0.1}
    return shardstep.shard(model, torch.optim.AdamW, groups=[decayed, {"params": "rest", "weight_decay": 0.0}], lr=1e-3)


def rate(step: int, steps: int) -> float:
    """Of the full one: up over a tenth of the steps, then down along a cosine to a tenth of it."""
    warm = max(1, steps // 10)
    return (step + 1) / warm if step < warm else 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(1, steps - warm))


def batch_of(text: Corpus, number: int, size: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch with this number, whoever asks: a job that goes on, on any number of ranks, sees what is new to it."""
    generator = torch.Generator().manual_seed(number)
    starts = torch.randint(len(text.tokens) - block - 1, (size, 1), generator=generator)
    windows = text.tokens[starts + torch.arange(block + 1)]
    return windows[:, :-1], windows[:, 1:]


def train(arguments: argparse.Namespace, device: torch.device) -> None:
    text = read_text(arguments.text)
    small = arguments.smoke
    block, size = (32, 2) if small else (64, 8)
    config = GPTConfig(len(text.characters), block, 2 if small else 4, 2 if small else 6, 32 if small else 192)
    model = GPT(config).to(device, torch.bfloat16 if arguments.bf16 else torch.float32)
    opt = make_optimizer(model, muon=arguments.muon)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: rate(step, arguments.steps))
    step = position = 0
    try:
        extra = shardstep.load(arguments.folder, model, opt)  # the newest complete one
        step, position = extra["step"], extra["position"]
        schedule.load_state_dict(extra["schedule"])
    except FileNotFoundError:
        pass  # the first start
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print(f"{ranks} ranks, from step {step} to {arguments.steps}", flush=True)
    while step < arguments.steps:
        for micro in range(arguments.accumulate):
            tokens, targets = (one.to(device) for one in batch_of(text, position + rank, size, block))
            position += ranks
            last = micro + 1 == arguments.accumulate
            with contextlib.nullcontext() if last else opt.no_sync():
                loss = next_token_loss(model(tokens).float(), targets)
                (loss / arguments.accumulate).backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        step += 1
        if rank == 0 and (step % 20 == 0 or step == arguments.steps):
            print(f"step {step}: loss {loss.item():.3f}, rate {schedule.get_last_lr()[0]:.2e}", flush=True)
        if step % arguments.save_every == 0 or step == arguments.steps:
            save(arguments.folder, model, opt, {"step": step, "position": position, "schedule": schedule.state_dict()})


def save(folder: Path, model: GPT, opt: shardstep.ShardedOptimizer, extra: dict[str, Any]) -> None:
    # A schedule's function is the program's own, and cannot be in a file; torch leaves None for it.
    shardstep.save(folder / f"step-{extra['step']}", model, opt, extra=extra, keep=3, asynchronous=True)


def main() -> None:
    arguments = parse_arguments()
    if arguments.smoke:
        arguments.steps, arguments.save_every = min(arguments.steps, 12), 4
    train(arguments, start())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
