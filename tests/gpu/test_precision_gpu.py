"""The programs of test_masters, test_several_classes and test_ema once more, on a GPU with NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim

import test_ema
import test_masters
import test_several_classes
from fast_lane_training import SMALL_BUCKETS
from shardstep import Layout, ShardConfig
from test_nothing_silent_gpu import on_the_gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]

# Summed by rank in fp32, as the oracle does: with NCCL's own sum the bits depend on its order.
ORDERED = ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True, kernel="torch")
BY_KERNEL = ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True)
WHOLE = ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True, layout=Layout.WHOLE)
OVERLAP = ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True, gather="overlap")
BY_HAND = test_masters.trains_like_masters_by_hand
ADAMW = {"lr": 1e-3}

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "masters": (BY_HAND, (torch.bfloat16, optim.AdamW, ADAMW, ORDERED, False)),
    "masters, fused": (BY_HAND, (torch.bfloat16, optim.AdamW, {**ADAMW, "fused": True}, ORDERED, False)),
    "masters, by the kernel": (BY_HAND, (torch.bfloat16, optim.AdamW, ADAMW, BY_KERNEL, False)),
    "masters, fp16, by the kernel": (
        BY_HAND,
        (torch.float16, optim.SGD, {"lr": 0.01, "momentum": 0.9}, BY_KERNEL, False),
    ),
    "halves and a scaler": (test_masters.scales_halves, ()),
    "masters, fp16": (BY_HAND, (torch.float16, optim.AdamW, ADAMW, ORDERED, False)),
    "masters, whole": (BY_HAND, (torch.bfloat16, optim.AdamW, ADAMW, WHOLE, False)),
    "masters, overlap": (BY_HAND, (torch.bfloat16, optim.SGD, {"lr": 0.01, "momentum": 0.9}, OVERLAP, False)),
    **{f"writes: {name}": (test_masters.writes_between_steps, (name, "overlap", True)) for name in test_masters.WRITES},
    "resumes": (test_masters.resumes, (False,)),
    "several": (test_several_classes.trains_both, (test_several_classes.CONFIGS["default"], False)),
    "several, overlap": (test_several_classes.trains_both, (test_several_classes.CONFIGS["overlap"], False)),
    "two optimizers": (test_several_classes.trains_two_optimizers, (False,)),
    "several, saved": (test_several_classes.is_saved_and_loaded, ()),
    "average": (test_ema.is_the_average, (torch.float32, test_ema.CONFIGS["default"], False)),
    "average, bf16": (test_ema.is_the_average, (torch.bfloat16, test_ema.CONFIGS["overlap"], False)),
    "average, saved": (test_ema.is_saved, ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_two_ranks(workers, name):
    body, args = PROGRAMS[name]
    workers(2, backend="nccl").run(on_the_gpu, body, *args, timeout=60)


def test_masters_on_three_ranks(workers):
    body, args = PROGRAMS["masters"]
    workers(3, backend="nccl").run(on_the_gpu, body, *args, timeout=60)
