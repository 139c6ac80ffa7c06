"""ShardConfig(wire="bf16") with everything else that a program may ask for."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join

import shardstep
from as_collectives import by_collectives
from fast_lane_training import Net, batch, loss_of
from shardstep import ShardConfig
from training import assert_ranks_equal
from wire_by_hand import ADAMW, SMALL, ByHand, exact_of

BOTH_WAYS = pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])


def trains_whole_matrices(gather: Any, collectives: bool) -> None:
    model = nn.Sequential(nn.Linear(7, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 5))
    twin = copy.deepcopy(model)
    groups = [
        {"params": "[024].weight", "optimizer": optim.Muon, "lr": 0.02},
        {"params": "rest", "optimizer": optim.AdamW, "lr": 1e-3},
    ]
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, groups=groups, config=replace(SMALL, gather=gather))
    matrices, vectors = ([p for p in twin.parameters() if (p.dim() == 2) is wants] for wants in (True, False))
    muon = ByHand(nn.ParameterList(matrices), optim.Muon, SMALL, lr=0.02)
    adamw = ByHand(nn.ParameterList(vectors), optim.AdamW, SMALL, lr=1e-3)
    for step in range(4):
        for net in (model, twin):
            loss_of(net, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        muon.step()
        adamw.step()
    opt.synchronize()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@BOTH_WAYS
@pytest.mark.parametrize("gather", ["wait", "overlap"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_muon_steps_whole_matrices(workers, ranks, gather, collectives):
    workers(ranks).run(trains_whole_matrices, gather, collectives)


def averages_exact_values() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=replace(SMALL, ema=0.9))
    by_hand = ByHand(copy.deepcopy(model), optim.AdamW, SMALL, **ADAMW)
    exact_before = exact_of(opt)
    average = None
    for step in range(4):
        if average is None:
            average = {piece: values.clone() for piece, values in exact_before.items()}
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        for piece, values in exact_of(opt).items():
            average[piece].lerp_(values, 1 - 0.9)
    assert average is not None
    weights = [param.detach().clone() for param in model.parameters()]
    exact = {piece: values.clone() for piece, values in exact_of(opt).items()}
    params = list(model.parameters())
    with opt.ema():
        assert_ranks_equal(params)
        for piece, values in average.items():
            shown = params[piece.param].detach().reshape(-1)[piece.start : piece.stop]
            assert torch.equal(shown, values.bfloat16().float())
    for before, param in zip(weights, params, strict=True):
        assert torch.equal(before, param)
    for piece, values in exact_of(opt).items():
        assert torch.equal(values, exact[piece])
    del by_hand


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_average_is_of_exact_values_and_is_shown_rounded(workers, ranks):
    workers(ranks).run(averages_exact_values)


def joins_and_scales() -> None:
    """Rank 0 has a batch more than the others; a GradScaler before that."""
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for param, own in zip(twin.parameters(), model.parameters(), strict=True):
            param.copy_(own)
    scaler.scale(loss_of(model, batch(0))).backward()
    scaler.unscale_(opt)
    opt.clip_grad_norm_(1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert any(not torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    with Join([opt]):
        for step in range(1, 3 if dist.get_rank() else 4):
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
    assert_ranks_equal(list(model.parameters()))
    assert torch.equal(model.first.weight, model.first.weight.bfloat16().float())


def test_join_and_a_grad_scaler(workers):
    workers(2).run(joins_and_scales)


def follows_what_the_program_writes() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.0, config=SMALL)
    with torch.no_grad():
        model.first.weight.mul_(1.001)
    written = model.first.weight.detach().clone()
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    assert torch.equal(model.first.weight, written.bfloat16().float())
    for piece, values in exact_of(opt).items():
        if piece.param == 0:
            assert torch.equal(values, written.reshape(-1)[piece.start : piece.stop]), "what was written, all of it"
    late = nn.Linear(5, 3)
    model.late = late
    opt.add_param_group({"params": list(late.parameters())})
    assert torch.equal(late.weight, late.weight.bfloat16().float())
    assert_ranks_equal(list(model.parameters()))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_program_writes_and_adds_is_kept_exact(workers, ranks):
    workers(ranks).run(follows_what_the_program_writes)


# -- other models and groups -------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One matrix in two places, a frozen one, a matrix of few elements, and one that is a vector but for its shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.embed = nn.Embedding(11, 6)
        self.frozen = nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.small = nn.Parameter(torch.randn(2, 2))
        self.column = nn.Parameter(torch.randn(6, 1))
        self.last = nn.Linear(6, 11, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.frozen(self.embed(x.abs().mul(3).long() % 11)) * self.column[:, 0]
        return self.last(inner) * self.small.sum()


def trains_other_models(collectives: bool) -> None:
    for make in (Tied, lambda: nn.Linear(2, 2)):
        torch.manual_seed(8)
        model = make()
        twin = copy.deepcopy(model)
        frozen = [param.detach().clone() for param in model.parameters() if not param.requires_grad]
        by_hand = ByHand(twin, optim.AdamW, SMALL, **ADAMW)
        with by_collectives() if collectives else nullcontext():
            opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL)
        for step in range(3):
            x = batch(step, 2)
            for net in (model, twin):
                loss_of(net, x).backward()
            opt.step()
            opt.zero_grad()
            by_hand.step()
            trained = [pair for pair in zip(model.parameters(), by_hand.params, strict=True) if pair[0].requires_grad]
            for ours, theirs in trained:
                assert torch.equal(ours, theirs), f"{type(model).__name__}, step {step}"
        assert_ranks_equal(list(model.parameters()))
        after = [param for param in model.parameters() if not param.requires_grad]
        assert all(torch.equal(old, new) for old, new in zip(frozen, after, strict=True)), "frozen ones stay exact"


@BOTH_WAYS
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_tied_frozen_and_tiny_matrices(workers, ranks, collectives):
    """Five ranks share four elements."""
    workers(ranks).run(trains_other_models, collectives)


def trains_in_halves() -> None:
    """Ranks 0 and 1 train one model, ranks 2 and 3 another."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    own = groups[dist.get_rank() // 2]
    torch.manual_seed(dist.get_rank() // 2)
    model = nn.Linear(7, 9)
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=SMALL, process_group=own)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    assert_ranks_equal(list(model.parameters()), own)
    assert torch.equal(model.weight, model.weight.bfloat16().float())


def test_two_groups_of_ranks(workers):
    workers(4).run(trains_in_halves)


def trains_alike(one: ShardConfig, other: ShardConfig, collectives: bool) -> None:
    """Bit for bit, with clipping and two passes a step."""
    model = Net()
    twin = copy.deepcopy(model)
    with by_collectives() if collectives else nullcontext():
        opts = [
            shardstep.shard(net, optim.AdamW, **ADAMW, config=config) for net, config in ((model, one), (twin, other))
        ]
    for step in range(4):
        norms = []
        for net, opt in zip((model, twin), opts, strict=True):
            with opt.no_sync():
                loss_of(net, batch(10 * step)).backward()
            loss_of(net, batch(step)).backward()
            norms.append(opt.clip_grad_norm_(0.1))
            opt.step()
            opt.zero_grad()
        assert torch.equal(*norms)
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert_ranks_equal(list(model.parameters()))


@BOTH_WAYS
@pytest.mark.parametrize("reduce_dtype", [None, torch.float32], ids=["half", "exact gradients"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_overlap_has_the_bits_of_wait(workers, ranks, reduce_dtype, collectives):
    wait = replace(SMALL, reduce_dtype=reduce_dtype)
    workers(ranks).run(trains_alike, wait, replace(wait, gather="overlap"), collectives)


def keeps_exact_gradients() -> None:
    """One rank sends nothing, so that nothing is rounded but the weights."""
    model = Net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=replace(SMALL, gradients="keep"))
    twin = copy.deepcopy(model)
    for net in (model, twin):
        loss_of(net, batch(0)).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)
    opt.step()
    assert torch.equal(model.first.weight, model.first.weight.bfloat16().float())


def test_one_rank_keeps_gradients_as_they_are(workers):
    workers(1).run(keeps_exact_gradients)


def reports_what_is_sent(config: ShardConfig) -> tuple[float, float]:
    """Reducing and gathering, of DDP's bytes."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(304, 704, bias=False), nn.Tanh(), nn.Linear(704, 304, bias=False))
    opt = shardstep.shard(model, optim.AdamW, **ADAMW, config=config)
    model(torch.ones(2, 304)).square().mean().backward()
    opt.step()
    report, ranks = opt.report(), dist.get_world_size()
    own = report.ranks[dist.get_rank()]
    nbytes = sum(param.nbytes for param in model.parameters())
    assert own.masters == nbytes // ranks
    assert own.held <= opt.predicted_nbytes() <= own.held + 2 * nbytes
    ddp = max(report.sent_by_ddp, 1)
    return own.sent_reducing / ddp, own.sent_gathering / ddp


@pytest.mark.parametrize(("options", "reducing", "gathering"), [
    ({}, 0.25, 0.25),
    ({"reduce_dtype": torch.float32}, 0.5, 0.25),
    ({"gradients": "keep"}, 0.5, 0.25),
    ({"gradients": "keep", "reduce_dtype": torch.float32}, 1.0, 0.25),
], ids=["half", "exact gradients", "kept", "kept, exact"])  # fmt: skip
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_report_says_what_travels(workers, ranks, options, reducing, gathering):
    config = ShardConfig(wire="bf16", **options)
    for found in workers(ranks).run(reports_what_is_sent, config):
        assert found == pytest.approx((reducing, gathering) if ranks > 1 else (0, 0))
