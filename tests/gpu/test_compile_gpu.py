"""torch.compile with NCCL on a GPU: the same bits with overlap as without, by inductor, also in CUDA graphs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import optim

import shardstep
from shardstep import ShardConfig
from test_compile import Stack, groups_of
from training import assert_ranks_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:TensorFloat32 tensor cores"),
]

STEPS = 6


def train(how: str, gather: str, options: dict[str, Any], **config: Any) -> list[torch.Tensor]:
    """The parameters after training under autocast with clipping; raises if the compiler runs late."""
    torch._dynamo.reset()
    model = Stack(4, 64).cuda()
    chosen = ShardConfig(bucket_mb=0.06, gather=gather, **config)  # type: ignore[arg-type]
    opt = shardstep.shard(model, optim.AdamW, groups=groups_of(model), config=chosen, lr=1e-2, fused=True)
    if how == "whole":
        opt.compile(**options)
    elif how == "blocks":
        for block in model.blocks:
            block.compile(**options)
    generator = torch.Generator().manual_seed(dist.get_rank())
    data = [torch.randn(32, 7, generator=generator).cuda() for _ in range(STEPS)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step, x in enumerate(data):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).square().mean()
            loss.backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
            late = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
            assert step < 2 or late == 0, f"{late} graphs compiled in step {step}"
    assert not [str(warning.message) for warning in caught if "hides nothing" in str(warning.message)]
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))
    values = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return values


def overlaps_in_the_same_bits(how: str, options: dict[str, Any], config: dict[str, Any]) -> None:
    if options.get("backend", "inductor") == "inductor":
        # Ranks choose among kernels by the clock, each for itself, and the files in which they keep what they chose are
        # the same: only from the second compilation on it is the same kernels.
        train(how, "wait", options, **config)
        dist.barrier()
    waited, overlapped = (train(how, gather, options, **config) for gather in ("wait", "overlap"))
    plain = train("eager", "wait", {}, **config)
    for one, other, third in zip(waited, overlapped, plain, strict=True):
        assert torch.equal(one, other)
        # Compiled products and sums are rounded in another order, and bf16 has 8 bits.
        torch.testing.assert_close(one, third, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("config", [{}, {"wire": "bf16"}], ids=["fp32", "wire"])
@pytest.mark.parametrize("how", ["whole", "blocks"])
@pytest.mark.parametrize("options", [
    {"backend": "eager"}, {"backend": "aot_eager"}, {}, {"mode": "reduce-overhead"},
], ids=["eager", "aot_eager", "inductor", "reduce-overhead"])  # fmt: skip
def test_compiled_models_have_the_same_bits_with_overlap(workers, options, how, config):
    workers(2, "nccl").run(overlaps_in_the_same_bits, how, options, config, timeout=110)


def waits_for_no_device(how: str) -> None:
    """Whole compiled iterations, after those in which everything is compiled."""
    model = Stack(4, 64).cuda()
    config = ShardConfig(bucket_mb=0.06, gather="overlap")
    opt = shardstep.shard(model, optim.AdamW, groups=groups_of(model), config=config, lr=1e-2, fused=True)
    if how == "whole":
        opt.compile()
    else:
        for block in model.blocks:
            block.compile()
    x = torch.randn(32, 7, device="cuda")
    for step in range(6):
        if step == 3:
            torch.cuda.set_sync_debug_mode("error")
        model(x).square().mean().backward()
        opt.clip_grad_norm_(1.0)
        opt.step()
        opt.zero_grad()
    torch.cuda.set_sync_debug_mode("default")
    opt.synchronize()
    opt.close()


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_no_host_waits_in_a_compiled_iteration(workers, how):
    workers(2, "nccl").run(waits_for_no_device, how, timeout=110)


def one_rank() -> None:
    """One region, as there is nobody to exchange with."""
    model = Stack(4, 64).cuda()
    opt = shardstep.shard(model, optim.AdamW, groups=groups_of(model), lr=1e-2, fused=True)
    opt.compile()
    for _ in range(3):
        model(torch.randn(32, 7, device="cuda")).square().mean().backward()
        opt.step()
        opt.zero_grad()
    assert all(torch.isfinite(param).all() for param in model.parameters())
    opt.close()


def test_one_rank_is_compiled_whole(workers):
    workers(1, "nccl").run(one_rank, timeout=110)
