"""ShardConfig(wire="bf16") once more, on a GPU with NCCL."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
import test_wire
import test_wire_modes
import test_wire_state
from shardstep import Layout, ShardConfig
from test_nothing_silent_gpu import on_the_gpu
from training import assert_ranks_equal
from wire_by_hand import ADAMW, SMALL

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]

# By the class, because the kernel rounds a few bits otherwise than the oracle.
BY_CLASS = replace(SMALL, kernel="torch")
SGD = {"lr": 0.01, "momentum": 0.9}
BY_HAND = test_wire.trains_like_by_hand

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        name: (BY_HAND, (optim.AdamW, ADAMW, replace(config, kernel="torch"), False))
        for name, config in test_wire.CONFIGS.items()
    },
    "fused": (BY_HAND, (optim.AdamW, {**ADAMW, "fused": True}, BY_CLASS, False)),
    "momentum, overlap": (BY_HAND, (optim.SGD, SGD, replace(BY_CLASS, gather="overlap"), False)),
    "bf16 beside": (test_wire.trains_mixed, ()),
    "one launch": (test_wire.gathers_in_one_launch, (False,)),
    "overlap and wait": (test_wire_modes.trains_alike, (SMALL, replace(SMALL, gather="overlap"), False)),
    "overlap and wait, exact gradients": (
        test_wire_modes.trains_alike,
        (
            replace(SMALL, reduce_dtype=torch.float32),
            replace(SMALL, reduce_dtype=torch.float32, gather="overlap"),
            False,
        ),
    ),
    "average": (test_wire_modes.averages_exact_values, ()),
    "writes": (test_wire_modes.follows_what_the_program_writes, ()),
    "tied, frozen, tiny": (test_wire_modes.trains_other_models, (False,)),
    "state dicts": (test_wire_state.resumes_from_state_dicts, (True,)),
    "nothing left over": (test_wire_state.leaves_nothing_over, (False,)),
    "consolidated": (test_wire_state.shows_exact_values_to_other_programs, ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_two_ranks(workers, name):
    body, args = PROGRAMS[name]
    workers(2, backend="nccl").run(on_the_gpu, body, *args, timeout=60)


def test_saved_at_three_ranks_with_it_loaded_at_two_without(workers, tmp_path):
    save, load = test_wire_state.saves_exact_values, test_wire_state.loads_exact_values
    workers(3, backend="nccl").run(on_the_gpu, save, tmp_path, SMALL, timeout=60)
    workers(2, backend="nccl").run(on_the_gpu, load, tmp_path, 3, replace(SMALL, wire=None), timeout=60)
    workers(2, backend="nccl").run(on_the_gpu, load, tmp_path, 3, SMALL, timeout=60)


def trains_large(config: ShardConfig) -> None:
    """Buckets of many millions, with NCCL's own sums and the kernel."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(3000, 3000) for _ in range(6)))
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    for step in range(4):
        x = torch.randn(64, 3000, generator=torch.Generator("cuda").manual_seed(step))
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
        if step % 2:
            for layer in model:
                assert torch.equal(layer.weight, layer.weight.bfloat16().float())
            assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE], ids=["flat", "whole"])
@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_large_buckets(workers, gather, layout):
    config = ShardConfig(wire="bf16", gather=gather, layout=layout)
    workers(2, backend="nccl").run(on_the_gpu, trains_large, config, timeout=60)
