"""DDP with shardstep, start to finish: train, save, load, go on.

torchrun --standalone --nproc-per-node 2 examples/train_ddp.py
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardstep import ZeroRedundancyOptimizer


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    ddp = DistributedDataParallel(model)
    opt = ZeroRedundancyOptimizer(ddp.named_parameters(), torch.optim.AdamW, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)

    def train(steps: int) -> float:
        loss = torch.zeros(())
        for _ in range(steps):
            batch = torch.randn(64, 32)
            loss = (ddp(batch).squeeze(1) - batch.sum(1)).square().mean()
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            opt.step()
            scheduler.step()
        return loss.item()

    torch.manual_seed(rank)  # each rank draws batches of its own
    first = train(20)
    held = sum(value.nbytes for entry in opt.state.values() for value in entry.values())
    print(f"rank {rank}: loss {first:.3f}, holds {held:,} bytes of optimizer state")

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    checkpoint = Path(str(folder[0])) / "checkpoint.pt"
    opt.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, checkpoint)
    dist.barrier()

    saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["optimizer"])
    print(f"rank {rank}: loss {train(20):.3f} after loading the checkpoint and going on")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
