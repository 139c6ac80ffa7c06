"""Parameters and buffers over the same memory: what is sharded moves elsewhere, and what shared with it would part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import assert_trains_like_ddp, batch, loss_of
from shardstep import ZeroRedundancyOptimizer
from shardstep.params.shared_memory import overlaps_itself, places_of, sharing
from training import assert_ranks_equal, raised


class Scaled(nn.Module):
    """`scale` is one element for every output, or as it is given."""

    def __init__(self, scale: torch.Tensor, **more: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.layer = nn.Linear(7, 4)
        self.scale = nn.Parameter(scale)
        for name, value in more.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale.sum()


def expanded() -> nn.Module:
    return Scaled(torch.ones(1).expand(4))


def windows() -> nn.Module:
    return Scaled(torch.ones(6).unfold(0, 3, 1))


def a_transposed_twin() -> nn.Module:
    model = Scaled(torch.ones(1))
    model.scale = nn.Parameter(model.layer.weight.detach().t())
    return model


def columns_that_overlap() -> nn.Module:
    matrix = torch.ones(3, 5)
    model = Scaled(matrix[:, :3])
    model.other = nn.Parameter(matrix[:, 2:])
    return model


def a_buffer_that_follows() -> nn.Module:
    model = Scaled(torch.ones(4))
    model.register_buffer("seen", model.scale.detach()[1:3])
    return model


REFUSED: dict[Callable[[], nn.Module], str] = {
    expanded: "scale: several elements of a parameter share memory",
    windows: "scale: several elements of a parameter share memory",
    a_transposed_twin: "share memory; a tied weight is one parameter",
    columns_that_overlap: "scale and other share memory",
    a_buffer_that_follows: "seen lies in the memory of scale, which moves to other memory",
}


def refuses(make: Callable[[], nn.Module], only_one: bool) -> str:
    model = make() if not only_one or dist.get_rank() == 1 else Scaled(torch.ones(4))
    return raised(lambda: shardstep.shard(model, optim.AdamW, lr=0.1))[1]


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_weights_over_the_same_memory_parted_without_a_word(workers, make):
    for text in workers(2).run(refuses, make, False, timeout=30):
        assert REFUSED[make] in text
    for text in workers(2).run(refuses, make, True, timeout=30):
        assert REFUSED[make] in text


def refuses_in_the_drop_in() -> str:
    params = [nn.Parameter(torch.ones(1).expand(4))]
    return raised(lambda: ZeroRedundancyOptimizer(params, optim.SGD, lr=0.1))[1]


def test_the_drop_in_says_so_of_an_expanded_parameter_too(workers):
    for text in workers(2).run(refuses_in_the_drop_in, timeout=30):
        assert "several elements of a parameter share memory" in text


def columns() -> nn.Module:
    """Of one matrix, and no element twice; and a buffer that shares with another buffer alone."""
    matrix, row = torch.arange(15.0).view(3, 5) / 15, torch.ones(4)
    model = Scaled(matrix[:, :3], seen=row, also=row[1:])
    model.other = nn.Parameter(matrix[:, 3:], requires_grad=False)
    return model


def trains_columns() -> None:
    assert_trains_like_ddp(columns)


def test_columns_of_one_matrix_are_two_parameters(workers):
    workers(2).run(trains_columns, timeout=30)


def starts_apart_expanded(collectives: bool) -> None:
    own = float(dist.get_rank() + 1)
    many = torch.full((1, 3), own).expand(5, 3)
    model = Scaled(torch.full((1,), own).expand(4), many=many, whole=torch.full((4,), own))
    model.scale.requires_grad_(False)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.SGD, lr=0.1)
        for step in range(2):
            model.many[0].fill_(own + step)
            loss_of(model, batch(step)).backward()
            opt.step()
            assert model.many.eq(1 + step).all()
            opt.zero_grad()
    assert model.scale.eq(1).all()
    assert model.many.stride() == (0, 1)
    assert_ranks_equal([*model.parameters(), *model.buffers()])


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
def test_expanded_buffers_and_frozen_parameters_follow_the_first_rank(workers, collectives):
    workers(3).run(starts_apart_expanded, collectives, timeout=30)


def unfreezes_an_expanded_one() -> str:
    model = expanded()
    model.scale.requires_grad_(False)
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    loss_of(model, batch(0)).backward()
    opt.step()
    opt.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    model.scale.requires_grad_(True)
    loss_of(model, batch(1)).backward()
    text = raised(opt.step)[1]
    assert all(map(torch.equal, before, model.parameters()))
    return text


def test_an_expanded_parameter_that_is_unfrozen_is_refused_before_a_weight_moves(workers):
    for text in workers(2).run(unfreezes_an_expanded_one, timeout=30):
        assert REFUSED[expanded] in text


def test_what_shares_memory():
    row, matrix = torch.zeros(8), torch.zeros(4, 6)
    assert overlaps_itself(row.unfold(0, 3, 1))
    assert overlaps_itself(torch.zeros(4, 1)[::2].expand(2, 3))
    assert not overlaps_itself(torch.zeros(0, 1).expand(0, 3))
    assert not overlaps_itself(torch.zeros(3, 1).as_strided((3, 1), (1, 0)))
    assert not overlaps_itself(matrix.t())
    parts = {
        "low": row[:4],
        "high": row[4:],
        "even": matrix[:, ::2],
        "odd": matrix[:, 1::2],
        "row": matrix[2],
        "no": row[:0],
    }
    pairs = [{one.name, other.name} for one, other in sharing(places_of(parts.items()))]
    assert sorted(map(sorted, pairs)) == [["even", "row"], ["odd", "row"]]
