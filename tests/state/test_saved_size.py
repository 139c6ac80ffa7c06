"""What is saved of a sharded model has the size that it has without."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn, optim

import shardstep
from fast_lane_training import batch, loss_of
from shardstep import Layout, ShardConfig


def saved_nbytes(what: Any) -> int:
    file = io.BytesIO()
    torch.save(what, file)
    return len(file.getvalue())


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 1))


def saves_what_it_has(layout: Layout) -> None:
    plain, model = net(), net()
    opt = shardstep.shard(model, optim.AdamW, lr=0.01, config=ShardConfig(layout=layout, bucket_mb=0.1))
    loss_of(model, batch(0)).backward()
    opt.step()
    for one, other in zip(plain.modules(), model.modules(), strict=True):
        assert saved_nbytes(other.state_dict()) == saved_nbytes(one.state_dict())
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert other.untyped_storage().nbytes() == one.nbytes
    assert saved_nbytes(model) < saved_nbytes(plain) + 5_000  # hooks that do nothing
    # It is no copy: what is written to it reaches the model, and the other way round.
    state = model.state_dict()
    state["0.bias"].fill_(3.0)
    assert torch.equal(model[0].bias, torch.full((300,), 3.0))
    before = copy.deepcopy(state)
    opt.zero_grad()
    loss_of(model, batch(1)).backward()
    opt.step()
    assert not torch.equal(state["2.weight"], before["2.weight"])
    assert torch.equal(state["2.weight"], model[2].weight)


def test_a_submodules_state_dict_is_not_saved_with_the_whole_buffer(workers):
    for layout in (Layout.FLAT, Layout.WHOLE):
        workers(2).run(saves_what_it_has, layout)


def outlives_its_optimizer() -> None:
    """A parameter is part of a buffer that nobody else holds any more."""
    model = net()
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    weight = model[4].bias
    expected = weight.detach().clone()
    opt.close()
    del opt, model
    torch.empty(3_000_000).fill_(7.0)
    assert torch.equal(weight, expected)


def test_a_parameter_keeps_its_buffer_alive(workers):
    workers(1).run(outlives_its_optimizer)
