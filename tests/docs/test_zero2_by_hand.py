"""examples/zero2_by_hand.py trains with the bits of DDP and of shard(), and is short enough to be read."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardstep
from fast_lane_training import SMALL_BUCKETS, Net, batch, loss_of
from repository import ROOT
from training import all_same, assert_ranks_equal, assert_same

EXAMPLE = ROOT / "examples" / "zero2_by_hand.py"
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def load_example(bucket_numel: int = 50) -> ModuleType:
    """Import the example, with buckets so small that the tests' model has several."""
    spec = importlib.util.spec_from_file_location("zero2_by_hand", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.BUCKET_NUMEL = bucket_numel
    return module


def train_in_three_ways(steps: int) -> list[list[torch.Tensor]]:
    """Train one model by hand, with DDP, and with shard(); return the weights of each."""
    by_hand, plain, sharded = Net(), Net(), Net()
    ddp = DistributedDataParallel(plain)
    adamw = torch.optim.AdamW(ddp.parameters(), **OPTIONS)
    zero = load_example().Zero2(by_hand, torch.optim.AdamW, **OPTIONS)
    assert len(zero.buckets) > 1
    config = shardstep.ShardConfig(bucket_mb=SMALL_BUCKETS)
    opt = shardstep.shard(sharded, torch.optim.AdamW, config=config, **OPTIONS)
    for step in range(steps):
        x = batch(step)
        for model in (by_hand, ddp, sharded):
            loss_of(model, x).backward()
        zero.step()
        adamw.step()
        adamw.zero_grad()
        opt.step()
        opt.zero_grad()
    return [[param.detach() for param in model.parameters()] for model in (by_hand, plain, sharded)]


def compare_bits() -> None:
    by_hand, plain, sharded = train_in_three_ways(steps=6)
    assert_same(by_hand, plain, "from DDP's")
    assert_same(by_hand, sharded, "from shard()'s")
    assert_ranks_equal(by_hand)


def compare_closely() -> None:
    by_hand, plain, sharded = train_in_three_ways(steps=6)
    for other in (plain, sharded):
        for own, expected in zip(by_hand, other, strict=True):
            # Three addends: the sum depends on their order, and AdamW amplifies a last bit of a small gradient.
            torch.testing.assert_close(own, expected, rtol=0, atol=1e-6)
    assert_ranks_equal(by_hand)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_equal_those_of_ddp_and_of_shard_bit_for_bit(workers, ranks):
    workers(ranks).run(compare_bits)


def test_three_ranks_differ_only_in_the_order_of_sums(workers):
    workers(3).run(compare_closely)


def count_state() -> tuple[int, int]:
    zero = load_example().Zero2(nn.Linear(32, 32, bias=False), torch.optim.AdamW)
    for bucket in zero.buckets:
        bucket.shard.grad = torch.zeros_like(bucket.shard)
    zero.optimizer.step()
    moments = [state["exp_avg"].numel() for state in zero.optimizer.state.values()]
    return len(zero.buckets), sum(moments)


def test_each_rank_keeps_half_of_the_state(workers):
    assert all_same(workers(2).run(count_state)) == (1, 32 * 32 // 2)


def use_layers_unevenly() -> None:
    """A layer that one rank uses gets half of its gradient; one that no rank uses gets zeros."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))
    before = [layer.weight.detach().clone() for layer in layers]
    zero = load_example(bucket_numel=16).Zero2(layers, torch.optim.SGD, lr=1.0)
    layers[0].weight.sum().backward()
    if dist.get_rank() == 1:
        layers[1].weight.sum().backward()
    zero.step()
    for layer, start, gradient in zip(layers, before, (1.0, 0.5, 0.0), strict=True):
        assert torch.equal(layer.weight.detach(), start - gradient)


def test_ranks_that_use_different_layers_do_not_hang(workers):
    workers(2).run(use_layers_unevenly)


def go_backward_twice() -> None:
    model = Net()
    load_example().Zero2(model, torch.optim.AdamW)
    loss_of(model, batch(0)).backward()
    with pytest.raises(RuntimeError, match="second backward pass before step"):
        loss_of(model, batch(1)).backward()


def test_a_second_backward_pass_is_refused(workers):
    workers(1).run(go_backward_twice)


def test_the_example_has_at_most_150_lines():
    assert len(EXAMPLE.read_text().splitlines()) <= 150
