"""ShardConfig(wire="bf16"): float32 matrices travel in half the bytes, and are stepped exact."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meters import observe
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import Net, batch, loss_of
from new_memory import NewMemory
from shardstep import Layout, ShardConfig
from shardstep.comm import nccl as by_all
from shardstep.comm import nccl_gathers
from shardstep.comm.encoding import SCRATCH_NUMEL, Encoding
from training import assert_ranks_equal, raised
from wire_by_hand import ADAMW, SMALL, ByHand, assert_like

BOTH_WAYS = pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])


def trains_like_by_hand(optimizer_class: Any, options: dict[str, Any], config: ShardConfig, collectives: bool) -> None:
    model = Net()
    twin = copy.deepcopy(model)
    by_hand = ByHand(twin, optimizer_class, config, **options)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optimizer_class, config=config, **options)
    assert_like(model, by_hand, "before the first step")
    for step in range(5):
        for net in (model, twin):
            if config.step == "after":
                net.second.requires_grad_(step != 2)  # a new plan, and back
            with opt.no_sync() if net is model else nullcontext():
                loss_of(net, batch(10 * step)).backward()
            loss_of(net, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        by_hand.step()
        opt.synchronize()
        assert_like(model, by_hand, f"step {step}, {config}")


CONFIGS = {
    "default": SMALL,
    "whole": replace(SMALL, layout=Layout.WHOLE),
    "overlap": replace(SMALL, gather="overlap"),
    "keep": replace(SMALL, gradients="keep"),
    "backward": replace(SMALL, step="backward"),
    "exact gradients": replace(SMALL, reduce_dtype=torch.float32),
    "keep exact": replace(SMALL, gradients="keep", reduce_dtype=torch.float32),
    "audited": replace(SMALL, audit=1),
}


@BOTH_WAYS
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_step_exact_values_and_compute_with_rounded_ones(workers, ranks, config, collectives):
    workers(ranks).run(trains_like_by_hand, optim.AdamW, ADAMW, config, collectives)


@pytest.mark.parametrize(("optimizer_class", "options"), [
    (optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    (optim.AdamW, {"lr": 1e-3, "fused": True}),
    (optim.Adagrad, {"lr": 0.01}),
])  # fmt: skip
def test_other_optimizers(workers, optimizer_class, options):
    workers(2).run(trains_like_by_hand, optimizer_class, options, SMALL, False)


class Mixed(nn.Module):
    """bf16 matrices, which travel as they are, beside matrices and norms in fp32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(7, 9).bfloat16()
        self.norm = nn.LayerNorm(9)
        self.last = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x.bfloat16()).float()))


def trains_mixed() -> None:
    model = Mixed()
    twin = copy.deepcopy(model)
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL)
    other = shardstep.shard(twin, optim.AdamW, **ADAMW, config=replace(SMALL, wire=None))
    for step in range(4):
        for net, its in ((model, opt), (twin, other)):
            loss_of(net, batch(step)).backward()
            its.step()
            its.zero_grad()
    assert torch.equal(model.last.weight, model.last.weight.bfloat16().float())
    assert not torch.equal(model.norm.weight, model.norm.weight.bfloat16().float())
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_matrices_of_sixteen_bits_beside_them_travel_as_they_are(workers, ranks):
    workers(ranks).run(trains_mixed)


# -- what travels ------------------------------------------------------------------------------------------------------


def sends(config: ShardConfig, collectives: bool) -> tuple[float, float]:
    """Bytes that this rank sends in a step, counted and reported, over those of DDP's all-reduce."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(301, 700), nn.Tanh(), nn.LayerNorm(700), nn.Linear(700, 300))
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=config)
    ranks, sent = dist.get_world_size(), 0.0
    isend, gather, scatter = dist.isend, nccl_gathers._all_gather, by_all._reduce_scatter

    def count(call: Any, of: Any) -> Any:
        def counted(*args: Any, **options: Any) -> Any:
            nonlocal sent
            sent += of(args)
            return call(*args, **options)

        return counted

    for step in range(2):
        sent = 0.0
        with (
            mock.patch.object(dist, "isend", count(isend, lambda args: args[0].nbytes)),
            mock.patch.object(nccl_gathers, "_all_gather", count(gather, lambda args: args[1].nbytes * (ranks - 1))),
            mock.patch.object(by_all, "_reduce_scatter", count(scatter, lambda args: args[0].nbytes * (ranks - 1))),
        ):
            model(torch.full((2, 301), 0.1 * step)).square().mean().backward()
            opt.step()
            opt.synchronize()
        opt.zero_grad()
    report = opt.report()
    return sent / report.sent_by_ddp, report.ranks[dist.get_rank()].sent / report.sent_by_ddp


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize(("config", "share"), [
    (ShardConfig(bucket_mb=0.2, wire="bf16", gather="overlap"), 0.50),
    (ShardConfig(bucket_mb=0.2, wire="bf16", gather="overlap", reduce_dtype=torch.float32), 0.75),
    (ShardConfig(bucket_mb=0.2, wire="bf16", gather="overlap", gradients="keep"), 0.75),
], ids=["half", "exact gradients", "kept gradients"])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3])
def test_half_of_the_bytes_of_ddp_are_sent(workers, ranks, config, share, collectives):
    for sent, reported in workers(ranks).run(sends, config, collectives):
        assert abs(sent - share) <= 0.02
        assert abs(reported - share) <= 0.02


def sends_by_the_kernel(config: ShardConfig) -> float:
    """Bytes of a step that the kernel has counted on this rank's connections, over those of DDP's all-reduce."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(301, 700), nn.Tanh(), nn.LayerNorm(700), nn.Linear(700, 300))
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=config)

    def step() -> None:
        model(torch.full((2, 301), 0.1)).square().mean().backward()
        opt.step()
        opt.zero_grad()

    step()
    return observe(step).sent / opt.report().sent_by_ddp


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_kernel_counts_half_of_the_bytes_of_ddp(workers, ranks):
    for options, share in (({}, 0.50), ({"reduce_dtype": torch.float32}, 0.75)):
        found = workers(ranks).run(sends_by_the_kernel, ShardConfig(wire="bf16", **options))
        assert sum(found) / ranks == pytest.approx(share, abs=0.02)


@pytest.mark.parametrize("numel", [0, 1, 7, 1000, 1001, 9_999_999, 33_554_432])
def test_values_are_encoded_and_decoded_where_they_lie(numel):
    """In few launches, and in no memory but the scratch."""
    values = torch.randn(numel)
    expected = values.bfloat16()
    encoding = Encoding(torch.bfloat16)
    scratch = torch.empty(min(max(numel // 7, 1), SCRATCH_NUMEL), dtype=torch.bfloat16)
    with NewMemory() as memory:
        encoded = encoding.encode_front(values, scratch)
        assert torch.equal(encoded, expected)
        encoding.decode_front(values, scratch)
    assert memory.made == {}
    assert memory.calls["copy_"] <= 2 * 5
    assert torch.equal(values, expected.float())
    assert SCRATCH_NUMEL * 2 <= 8 * 1024**2


def takes_no_memory_to_send(config: ShardConfig, collectives: bool) -> int:
    """What would run out on one rank when the others wait for what it sends."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(90, 700), nn.Tanh(), nn.Linear(700, 300))
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=config)
    send, memory = opt._engine.runtime.weights.send, NewMemory()

    def watched(buckets: Any) -> None:
        with memory:
            send(buckets)

    with mock.patch.object(opt._engine.runtime.weights, "send", watched):
        for step in range(2):
            model(torch.full((2, 90), 0.1 * step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            with memory:
                opt.synchronize()
    assert not memory.made, memory.made
    return memory.calls["copy_"]


@BOTH_WAYS
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE], ids=["flat", "whole"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_sending_takes_no_memory_that_could_run_out(workers, ranks, layout, collectives):
    config = ShardConfig(bucket_mb=0.1, wire="bf16", layout=layout)
    assert sum(workers(ranks).run(takes_no_memory_to_send, config, collectives)) > 0


def gathers_in_one_launch(collectives: bool = True) -> list[int]:
    """Whole matrices of one size, as many on every rank: buckets that are gathered together."""
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(12, 12, bias=False) for _ in range(48)))
    config = ShardConfig(bucket_mb=0.0018, wire="bf16", layout=Layout.WHOLE, ordered_sums=True)
    twin = copy.deepcopy(model)
    by_hand = ByHand(twin, optim.AdamW, config, **ADAMW)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    transport, together = opt._engine.context.transport, []
    gather = transport._gather_together

    def counted(outputs: Any, inputs: Any) -> None:
        together.append(len(outputs))
        gather(outputs, inputs)

    with mock.patch.object(transport, "_gather_together", counted):
        for step in range(3):
            for net in (model, twin):
                loss_of(net, batch(step, 12)).backward()
            opt.step()
            opt.zero_grad()
            by_hand.step()
            assert_like(model, by_hand, f"step {step}")
    return together


@pytest.mark.parametrize("ranks", [2, 3])
def test_buckets_of_whole_matrices_are_gathered_in_one_launch(workers, ranks):
    for together in workers(ranks).run(gathers_in_one_launch):
        assert together
        assert min(together) > 1


# -- refusals ----------------------------------------------------------------------------------------------------------


def refuses() -> list[str]:
    vectors = nn.LayerNorm(8)
    before = vectors.weight.detach().clone()
    exact = nn.Linear(3, 3)
    texts = [
        raised(lambda: shardstep.shard(exact, optim.SGD, lr=0.1, config=SMALL, masters_from=exact.state_dict()))[1],
        raised(lambda: shardstep.shard(nn.Linear(3, 3).bfloat16(), optim.SGD, lr=0.1, config=SMALL))[1],
        raised(lambda: shardstep.shard(vectors, optim.SGD, lr=0.1, config=SMALL))[1],
    ]
    assert torch.equal(vectors.weight, before)
    return texts


def test_what_has_nothing_to_encode_is_refused(workers):
    for masters, halves, vectors in workers(2).run(refuses):
        assert "masters_from is for parameters of bfloat16 and float16, and there is none" in masters
        assert (
            'wire="bf16" is for float32 matrices, and there is none: the first parameter, weight, has bfloat16'
            in halves
        )
        assert "Leave `wire` out" in vectors
    with pytest.raises(ValueError, match="wire must be one of None, 'bf16', got 'int3'"):
        ShardConfig(wire="int3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='use master="fp32"'):
        ShardConfig(wire="bf16", master="none")
