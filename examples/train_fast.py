"""Train with shardstep.shard: no DistributedDataParallel, one copy of the optimizer's state.

torchrun --standalone --nproc-per-node 2 examples/train_fast.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import shardstep

STEPS = 20


def main() -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 1)).to(device)

    # Weight decay for matrices only; every other parameter is in the second group.
    groups = [{"params": "*.weight", "weight_decay": 0.1}, {"params": "*", "weight_decay": 0.0}]
    opt = shardstep.shard(model, torch.optim.AdamW, groups=groups, lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)

    generator = torch.Generator().manual_seed(dist.get_rank())  # every rank its own batches
    for step in range(STEPS):
        for micro in range(2):
            x = torch.randn(64, 32, generator=generator).to(device)
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean() / 2
            if micro == 0:
                with opt.no_sync():  # adds up locally; the second backward sends the sum
                    loss.backward()
            else:
                loss.backward()
        norm = opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
        schedule.step()
        if dist.get_rank() == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {loss.item():.3f}, gradient norm {norm:.3f}")

    held = sum(value.nbytes for entry in opt.state.values() for value in entry.values())
    total = 2 * sum(param.nbytes for param in model.parameters())
    print(f"rank {dist.get_rank()} holds {held:,} bytes of optimizer state; the whole is {total:,}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
