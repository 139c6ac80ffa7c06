"""The parity matrix of test_overlap_with_ddp.py with NCCL: several ranks share one GPU, each as a host of its own.

pytest -v tests/gpu/test_overlap_with_ddp_gpu.py        one line per case
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook as torch_hooks
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from shardstep.ddp_zero_hook import reduce_to_holders
from test_overlap_with_ddp import HOOKS, OPTIMIZERS, parity

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]

FLAGS = list(itertools.product([False, True], repeat=3))
TORCHS = [torch_hooks.hook_with_zero_step, torch_hooks.hook_with_zero_step_interleaved]


def named(flags: tuple[bool, bool, bool]) -> str:
    words = ("shard_buckets", "static_graph", "gradient_as_bucket_view")
    return "+".join(word for word, flag in zip(words, flags, strict=True) if flag) or "plain"


@pytest.mark.parametrize("flags", FLAGS, ids=named)
@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize(("optimizer_class", "options"), OPTIMIZERS, ids=[cls.__name__ for cls, _ in OPTIMIZERS])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ten_updates_equal_ddp_with_the_plain_optimizer(
    workers, world_size, optimizer_class, options, make_hook, flags
):
    workers(world_size, "nccl").run(on_gpu, optimizer_class, options, make_hook, flags, False)


@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
def test_training_from_the_first_pass(workers, world_size, make_hook):
    for optimizer_class, options in OPTIMIZERS:
        workers(world_size, "nccl").run(on_gpu, optimizer_class, options, make_hook, (True, False, False), True)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("make_hook", TORCHS, ids=lambda hook: f"torchs_{hook.__name__}")
@pytest.mark.parametrize("world_size", [2, 4])
def test_torchs_own_hooks_drive_our_class(workers, world_size, make_hook, shard_buckets):
    for optimizer_class, options in OPTIMIZERS:
        flags = (shard_buckets, False, False)
        workers(world_size, "nccl").run(on_gpu, optimizer_class, options, make_hook, flags, False)


@pytest.mark.parametrize("shard_buckets", [False, True])
@pytest.mark.parametrize("make_hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_that_go_to_their_holders_only(workers, world_size, make_hook, shard_buckets):
    for optimizer_class, options in OPTIMIZERS:
        flags = (shard_buckets, False, True)
        workers(world_size, "nccl").run(on_gpu, optimizer_class, options, make_hook, flags, False, reduce_to_holders)


def on_gpu(
    optimizer_class: Any,
    options: dict[str, Any],
    make_hook: Any,
    flags: tuple[bool, bool, bool],
    from_first: bool,
    reduce: Any = allreduce_hook,
) -> None:
    shard_buckets, static_graph, view = flags
    parity(
        optimizer_class,
        options,
        make_hook,
        shard_buckets=shard_buckets,
        static_graph=static_graph,
        gradient_as_bucket_view=view,
        train_from_first_step=from_first,
        device="cuda",
        reduce=reduce,
    )
