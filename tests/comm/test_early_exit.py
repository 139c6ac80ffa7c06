"""A rank may leave as soon as its own last step is over: nobody is left waiting for what it had to send."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch import nn
import shardstep

dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(600, 600) for _ in range(6)])  # more than a socket takes at once
config = shardstep.ShardConfig(gather="overlap", bucket_mb=1.5)
opt = shardstep.shard(model, torch.optim.SGD, lr=0.01, config=config)
for step in range(3):
    model(torch.ones(2, 600) + rank).square().mean().backward()
    opt.step()
    opt.zero_grad()
leaves_first = int(sys.argv[1])
if rank != leaves_first:
    time.sleep(1.0)
    total = sum(param.double().sum().item() for param in model.parameters())
    print("reads", total == total, flush=True)
dist.destroy_process_group()
print("leaves", flush=True)
"""


@pytest.mark.parametrize("first", [0, 1])
def test_a_rank_that_leaves_under_overlap_leaves_nobody_waiting(tmp_path: Path, first: int) -> None:
    script = tmp_path / "leaves.py"
    script.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    done = subprocess.run([*command, str(first)], timeout=60, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("leaves") == 2
    assert "reads True" in done.stdout
