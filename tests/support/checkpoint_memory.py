"""One rank of a load whose memory is measured: `torchrun ... checkpoint_memory.py shard FOLDER`, or plain.

It leaves in FOLDER how much memory the load took at most beyond what was there before, how large the state is that this
rank holds from then on, and its part of the weights.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep

WIDTH, LAYERS = 2600, 4  # 27 million parameters: one matrix is 27 MB, and the state of all 216 MB


def memory(field: str) -> int:
    """VmRSS or VmHWM, its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def build(kind: str) -> tuple[nn.Module, optim.Optimizer]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    if kind == "shard":
        return model, shardstep.shard(model, optim.AdamW, lr=1e-3)
    return model, optim.AdamW(model.parameters(), lr=1e-3)


def save(kind: str, folder: str) -> None:
    model, opt = build(kind)
    model(torch.randn(1, WIDTH)).sum().backward()
    opt.step()
    opt.zero_grad()
    shardstep.save(f"{folder}/saved", model, opt)


def load(kind: str, folder: str) -> dict[str, int]:
    model, opt = build(kind)
    forget_peak()
    before = memory("VmRSS")
    shardstep.load(f"{folder}/saved", model, opt)
    took = memory("VmHWM") - before
    entries = opt._engine.runtime.local_step.entries().values() if kind == "shard" else opt.state.values()
    state = sum(value.nbytes for entry in entries for value in entry.values() if isinstance(value, torch.Tensor))
    weights = sum(param.nbytes for param in model.parameters()) // dist.get_world_size()
    return {"took": took, "state": state, "weights": weights}


def main() -> None:
    kind, folder = sys.argv[1:3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    save(kind, folder)
    gc.collect()
    Path(folder, f"took-{dist.get_rank()}.json").write_text(json.dumps(load(kind, folder)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
