"""Gradients on their way to the wire: nothing is lost, nothing copied in vain, everything finds its place."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import shardstep
from fast_lane_training import SMALL_BUCKETS, Net, assert_trains_like_ddp, batch, loss_of
from shardstep import Layout, ShardConfig
from shardstep.planning import make_plan, read_specs
from shardstep.runtime import reducer
from shardstep.runtime.flat_memory import FlatMemory, flat_gradient
from shardstep.runtime.packing import GradientPacking

shapes = st.lists(st.lists(st.integers(1, 6), max_size=4).map(tuple), min_size=1, max_size=8)


def make_params(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Every other one with four dimensions lies with its channels last."""
    params = []
    for place, shape in enumerate(shapes):
        values = torch.randn(shape)
        if len(shape) == 4 and place % 2:
            values = values.to(memory_format=torch.channels_last)
        params.append(nn.Parameter(values))
    return params


@given(shapes, st.integers(1, 4), st.integers(5, 80), st.sampled_from([1, 16, 100, float("inf")]), st.data())
def test_every_gradient_comes_where_its_parameter_lies(shapes, ranks, bucket_numel, in_place, data):
    params = make_params(shapes)
    specs = read_specs([{"params": params}])
    plan = make_plan(specs, Layout.FLAT, world_size=ranks, bucket_numel=bucket_numel, alignment=4)
    memory = FlatMemory(plan, params)
    packing = GradientPacking(memory, params, [in_place] * len(memory.buckets))
    came = [data.draw(st.booleans()) for _ in params]
    gradients = [torch.randn(param.shape) if flag else None for param, flag in zip(params, came, strict=True)]
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient

    for number, bucket in enumerate(memory.buckets):
        for rank, parts in enumerate(packing.pack(number)):
            packed = torch.zeros_like(bucket.ranges[rank])
            for place, part in zip(packing.places(number, rank), parts, strict=True):
                packed[place] = part
            expected = torch.zeros_like(packed)
            for piece, offset in zip(bucket.pieces[rank], bucket.offsets[rank], strict=True):
                gradient = gradients[piece.param]
                if gradient is not None:
                    flat = flat_gradient(params[piece.param], gradient)
                    expected[offset : offset + piece.numel] = flat[piece.start : piece.stop]
            assert torch.equal(packed, expected)

    assert all(param.grad is None for param in params)
    assert list(packing.used) == came


def test_a_large_gradient_is_not_copied():
    params = [nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))]
    plan = make_plan(read_specs([{"params": params}]), Layout.FLAT, world_size=1, bucket_numel=1000, alignment=4)
    packing = GradientPacking(FlatMemory(plan, params), params, [64 * 4])
    for param in params:
        param.grad = torch.ones_like(param)
    large = params[0].grad

    ((first, rest),) = packing.pack(0)

    assert large is not None
    assert first.data_ptr() == large.data_ptr()
    assert packing.places(0, 0) == [slice(0, 64), slice(64, 64 + 16 + 5)]  # the third begins at a multiple of 64 bytes
    assert rest.tolist() == [1.0] * 3 + [0.0] * 13 + [1.0] * 5


def trains_in_many_messages(layout: Layout, gradients: Any) -> None:
    with mock.patch.object(reducer, "IN_PLACE_NBYTES", 1):
        for accumulate in (1, 3):
            config = ShardConfig(bucket_mb=SMALL_BUCKETS, layout=layout, gradients=gradients)
            assert_trains_like_ddp(Net, config=config, accumulate=accumulate)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE], ids=["flat", "whole"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_that_travel_one_by_one(workers, ranks, layout, gradients):
    workers(ranks).run(trains_in_many_messages, layout, gradients)


class Conv(nn.Module):
    """Large enough to be sent from its own memory, in another order than its elements, and its bias is not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.conv = nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x[:, :4].reshape(1, 4, 2, 2).repeat(1, 16, 2, 2))


def trains_large() -> None:
    assert_trains_like_ddp(Conv, config=ShardConfig())
    assert_trains_like_ddp(Conv, config=ShardConfig(bucket_mb=0.5))


@pytest.mark.parametrize("ranks", [2, 3])
def test_large_gradients_that_lie_otherwise_than_their_elements(workers, ranks):
    workers(ranks).run(trains_large)


def reduces_in_half() -> list[list[float]]:
    """The mean in bfloat16 on the wire, with messages for every piece and without."""
    results = []
    for in_place in (1, float("inf")):
        with mock.patch.object(reducer, "IN_PLACE_NBYTES", in_place):
            model = Net()
            config = ShardConfig(bucket_mb=SMALL_BUCKETS, reduce_dtype=torch.bfloat16)
            opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05)
        for step in range(3):
            for micro in range(2):
                loss_of(model, batch(10 * step + micro)).backward()
            opt.step()
            opt.zero_grad()
        results.append(torch.cat([param.detach().reshape(-1) for param in model.parameters()]).tolist())
    return results


def test_messages_change_nothing_in_another_dtype_on_the_wire(workers):
    for one, other in workers(2).run(reduces_in_half):
        assert one == other


def trains_in_the_same_memory() -> None:
    model = Net()
    opt = shardstep.shard(model, optim.AdamW, config=ShardConfig(bucket_mb=SMALL_BUCKETS), lr=0.05)
    places = []
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.grad_norms()
        shards = opt._gradients.reducer.shards
        places.append([shard.data_ptr() for shard in shards])
        storages = {shard.untyped_storage().data_ptr() for shard in shards}
        assert len(storages) == 1, "one block"
        opt.step()
        opt.zero_grad()
        assert opt._gradients.reducer.shards == [None] * len(shards)
    assert places[0] == places[1] == places[2]


def test_shards_lie_in_one_block_that_is_kept(workers):
    workers(2).run(trains_in_the_same_memory)
