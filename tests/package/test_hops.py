"""The way through the code is short: how often one iteration goes from one file of ours to another."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn, optim

import shardstep

SOURCE = str(Path(shardstep.__file__).parent)
MOST = 50


def caller_of_ours(frame: FrameType | None) -> str | None:
    """The nearest file of ours that this was called from, directly or through torch."""
    while frame is not None and not frame.f_code.co_filename.startswith(SOURCE):
        frame = frame.f_back
    return None if frame is None else frame.f_code.co_filename


def hops_of_an_iteration() -> dict[str, int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = shardstep.shard(model, optim.AdamW, lr=0.1)
    hops: Counter[str] = Counter()

    def watch(frame: FrameType, event: str, argument: Any) -> None:
        del argument
        own = frame.f_code.co_filename
        if event == "call" and own.startswith(SOURCE):
            caller = caller_of_ours(frame.f_back)
            if caller is not None and caller != own:
                hops[f"{Path(caller).name} -> {Path(own).name}: {frame.f_code.co_name}"] += 1

    def iterate() -> None:
        model(torch.ones(2, 8)).sum().backward()
        opt.step()
        opt.zero_grad()

    for _ in range(2):
        iterate()
    sys.setprofile(watch)
    try:
        iterate()
    finally:
        sys.setprofile(None)
    return dict(hops)


def test_one_iteration_of_two_layers_makes_few_hops_between_files(workers):
    (hops,) = workers(1).run(hops_of_an_iteration)
    assert 0 < sum(hops.values()) <= MOST, hops
