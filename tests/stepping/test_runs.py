"""Small parameters that lie side by side are stepped as one tensor, as long as they are stepped together."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

import shardstep
from shardstep import ShardConfig
from shardstep.planning import Piece
from shardstep.planning.runs import find_runs
from training import assert_ranks_equal


class Many(nn.Module):
    """A hundred small vectors and matrices, each of which can be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        shapes = [(3 + i % 5,) if i % 2 else (2, 1 + i % 7) for i in range(100)]
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: torch.Tensor, without: int = 0) -> torch.Tensor:
        return torch.stack([(part * x).square().mean() for part in list(self.parts)[without:]]).sum()


class OptimizerCopy:
    """The same model twice: under DDP with the plain optimizer, and sharded."""

    def __init__(self, optimizer_class: type[optim.Optimizer] = optim.AdamW, groups: int = 1, **options: Any) -> None:
        self.model = Many()
        self.ddp = DistributedDataParallel(copy.deepcopy(self.model), find_unused_parameters=True)
        names = [name for name, _ in self.model.named_parameters()]
        halves = [names[::groups], names[1::groups]] if groups == 2 else [names]
        rates = [{"lr": 0.05}, {"lr": 0.01}]
        table = dict(self.ddp.module.named_parameters())
        plain_groups = [{"params": [table[n] for n in half], **rate} for half, rate in zip(halves, rates, strict=False)]
        ours = [{"params": half, **rate} for half, rate in zip(halves, rates, strict=False)]
        self.plain = optimizer_class(plain_groups, **options)
        self.opt = shardstep.shard(self.model, optimizer_class, groups=ours, **options)

    def train(self, steps: int, without: int = 0) -> None:
        for step in range(steps):
            x = torch.tensor(1.0 + step + dist.get_rank())
            for model, optimizer in ((self.ddp, self.plain), (self.model, self.opt)):
                model(x, without).backward()
                optimizer.step()
                optimizer.zero_grad()

    def assert_equal(self) -> None:
        for ours, theirs in zip(self.model.parameters(), self.ddp.parameters(), strict=True):
            assert torch.equal(ours, theirs)
        assert_ranks_equal(list(self.model.parameters()))

    @property
    def tensors(self) -> int:
        """That the local optimizer steps."""
        groups = self.opt._engine.runtime.local_step.local.param_groups
        return sum(param.numel() > 0 for group in groups for param in group["params"])


def joined(optimizer_class: type[optim.Optimizer], groups: int, options: dict[str, Any]) -> int:
    twin = OptimizerCopy(optimizer_class, groups, **options)
    twin.train(4)
    twin.assert_equal()
    return twin.tensors


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(optim.AdamW, {}), (optim.AdamW, {"foreach": True}), (optim.SGD, {"momentum": 0.9}), (optim.Adagrad, {})],
    ids=str,
)
def test_a_hundred_parameters_are_one_tensor_for_each_group(workers, optimizer_class, options, groups):
    counts = workers(2).run(joined, optimizer_class, groups, options)
    assert counts == [1, 1], "both groups are as large as each other, and each is the half of one rank"


def test_fused_kernels_round_by_position_and_keep_every_parameter(workers):
    assert sum(workers(2).run(joined, optim.AdamW, 1, {"fused": True})) >= 100


def left_out() -> tuple[int, int, int]:
    """Parameters without a gradient: nothing moves them, and their counters stand still."""
    twin = OptimizerCopy()
    twin.train(2)
    before = twin.tensors
    twin.train(1, without=70)
    apart = twin.tensors
    twin.train(2)
    twin.assert_equal()
    own = twin.opt.state
    plain = twin.plain.state
    for param, theirs in zip(twin.model.parameters(), twin.ddp.parameters(), strict=True):
        if param in own:
            assert own[param]["step"] == plain[theirs]["step"]
    return before, apart, twin.tensors


def test_parameters_left_out_of_a_step_count_for_themselves(workers):
    ranks = workers(2).run(left_out)
    assert [before for before, _, _ in ranks] == [1, 1]
    # On one rank all that it holds was left out together; only the other has something to take apart.
    assert sorted(apart for _, apart, _ in ranks)[0] == 1
    assert max(apart for _, apart, _ in ranks) > 40
    assert all(apart == after for _, apart, after in ranks)


def none_at_all() -> int:
    twin = OptimizerCopy()
    twin.train(1)
    twin.opt.step()  # no gradient anywhere: nothing to do, and no reason to take anything apart
    twin.train(1)
    twin.assert_equal()
    return twin.tensors


def test_a_step_without_gradients_changes_nothing(workers):
    assert workers(2).run(none_at_all) == [1, 1]


def saved_and_loaded(without: int) -> tuple[int, int]:
    first = OptimizerCopy()
    first.train(2)
    first.train(1, without)
    saved = copy.deepcopy(first.opt.state_dict())
    second = OptimizerCopy()
    second.model.load_state_dict(first.model.state_dict())
    second.ddp.load_state_dict(first.ddp.state_dict())
    second.plain.load_state_dict(copy.deepcopy(first.plain.state_dict()))
    second.opt.load_state_dict(saved)
    for ours, theirs in zip(first.opt.state.values(), second.opt.state.values(), strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    loaded = second.tensors
    second.train(2)
    second.assert_equal()
    return loaded, second.tensors


def test_a_state_that_counts_alike_is_joined_again_when_it_is_loaded(workers):
    assert workers(2).run(saved_and_loaded, 0) == [(1, 1), (1, 1)]


def test_a_state_that_does_not_is_joined_where_it_does(workers):
    for loaded, later in workers(2).run(saved_and_loaded, 70):
        assert loaded <= 3, "those that were left out, and the rest"
        assert later == loaded


def frozen_and_back() -> None:
    twin = OptimizerCopy()
    twin.train(2)
    for place in (10, 11, 50):
        for model in (twin.model, twin.ddp.module):
            model.parts[place].requires_grad_(False)
    twin.opt.step()  # takes notice
    state = twin.opt.state
    assert all(value["step"] == 2 for value in state.values())
    for model in (twin.model, twin.ddp.module):
        for part in model.parts:
            part.requires_grad_(True)
    twin.ddp = DistributedDataParallel(twin.ddp.module, find_unused_parameters=True)
    twin.opt.step()
    twin.train(3)
    twin.assert_equal()


def test_freezing_and_unfreezing_keeps_the_state_of_every_parameter(workers):
    workers(2).run(frozen_and_back)


@given(st.lists(st.integers(0, 9), max_size=20), st.data())
def test_runs_hold_every_piece_once_and_only_what_belongs_together(sizes, data):
    pieces = [Piece(place, 0, size, 0) for place, size in enumerate(sizes)]
    offsets, end = [], 0
    for size in sizes:
        end += data.draw(st.integers(0, 3))
        offsets.append(end)
        end += size
    colours = [data.draw(st.integers(0, 1)) for _ in sizes]
    runs = find_runs(
        list(zip(pieces, offsets, strict=True)), lambda one, other: colours[one.param] == colours[other.param]
    )
    assert [piece for run in runs for piece in run.pieces] == pieces
    for run in runs:
        assert len({colours[piece.param] for piece in run.pieces}) == 1
        for piece, offset in zip(run.pieces, run.offsets, strict=True):
            assert run.start + offset == offsets[piece.param]
        assert run.stop == offsets[run.pieces[-1].param] + run.pieces[-1].numel
    for one, other in itertools.pairwise(runs):
        assert colours[one.pieces[-1].param] != colours[other.pieces[0].param], "as few as can be"


def overlap_equals_wait() -> None:
    models = [Many(), Many()]
    opts = [
        shardstep.shard(model, optim.AdamW, lr=0.05, config=ShardConfig(gather=gather))
        for model, gather in zip(models, ("wait", "overlap"), strict=True)
    ]
    for step in range(4):
        for model, opt in zip(models, opts, strict=True):
            model(torch.tensor(1.0 + step + dist.get_rank()), 30 if step == 2 else 0).backward()
            opt.step()
            opt.zero_grad()
    opts[1].synchronize()
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_overlapping_gathers_give_the_same_bits(workers):
    workers(2).run(overlap_equals_wait)
