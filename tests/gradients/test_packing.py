"""Gradients on their way to the wire: nothing is lost, nothing copied in vain, everything finds its place."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn, optim

import shardstep
from fast_lane_training import SMALL_BUCKETS, Net, assert_trains_like_ddp, batch, loss_of
from new_memory import NewMemory
from shardstep import Layout, ShardConfig
from shardstep.comm import gloo
from shardstep.gradients import passes
from shardstep.gradients.packing import GradientPacking
from shardstep.params.flat import FlatMemory
from shardstep.planning import make_plan, read_specs
from training import raised

shapes = st.lists(st.lists(st.integers(0, 6), max_size=4).map(tuple), min_size=1, max_size=8)


def lying(values: torch.Tensor, otherwise: bool) -> torch.Tensor:
    """The same values, in another order in memory."""
    return values.transpose(0, -1).contiguous().transpose(0, -1) if otherwise and values.dim() > 1 else values


@dataclass
class Packs:
    """What packing asks of a transport."""

    by_rank: bool
    part_nbytes: float

    def packs_by_rank(self, bucket: Any) -> bool:
        del bucket
        return self.by_rank


def test_what_is_left_of_a_pass_that_was_given_up_is_not_taken_for_the_next():
    """One parameter in two buckets, of which the second was never packed: memory ran out, and then zero_grad()."""
    param = nn.Parameter(torch.zeros(10))
    plan = make_plan(read_specs([{"params": [param]}]), Layout.FLAT, world_size=1, bucket_numel=6, alignment=1)
    assert len(plan.buckets) == 2
    packing = GradientPacking(FlatMemory(plan, [param], 0), [param], Packs(False, float("inf")), [torch.float32] * 2)
    param.grad = torch.ones(10)
    packing.pack(0)
    packing.forget()
    param.grad = gradient = torch.randn(10)
    packed = torch.cat([part for bucket in range(2) for row in packing.pack(bucket) for part in row])
    assert torch.equal(packed[:10], gradient)


@given(shapes, st.integers(1, 4), st.integers(5, 80), st.sampled_from([1, 16, 100, float("inf")]), st.data())
def test_every_gradient_comes_where_its_parameter_lies(shapes, ranks, bucket_numel, part_nbytes, data):
    draw = data.draw
    params = [nn.Parameter(lying(torch.randn(shape), draw(st.booleans()))) for shape in shapes]
    specs = read_specs([{"params": params}])
    layout = draw(st.sampled_from([Layout.FLAT, Layout.WHOLE]))
    plan = make_plan(specs, layout, world_size=ranks, bucket_numel=bucket_numel, alignment=4)
    own, by_rank = draw(st.integers(0, ranks - 1)), draw(st.booleans())
    memory = FlatMemory(plan, params, own)
    sent = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    packing = GradientPacking(memory, params, Packs(by_rank, part_nbytes), [sent] * len(plan.buckets))
    came = [draw(st.booleans()) for _ in params]
    for param, flag in zip(params, came, strict=True):
        param.grad = lying(torch.randn(param.shape), draw(st.booleans())) if flag else None
    # The parameters are views of the buckets: written to them, gradients lie where they belong.
    with torch.no_grad():
        for param in params:
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)

    for number, bucket in enumerate(memory.buckets):
        packed = packing.pack(number)
        if by_rank:
            assert len(packed) == ranks
            whole = torch.zeros_like(bucket.own, dtype=sent)
            for place, part in zip(packing.places(number), packed[own], strict=True):
                assert part.dtype is sent
                whole[place] = part
            assert torch.equal(whole, bucket.own.to(sent))
            sizes = [sum(map(len, parts)) for parts in packed]
            assert sizes == [covered(bucket.bucket.placed(rank), part_nbytes) for rank in range(ranks)]
        else:
            (parts,) = packed
            assert torch.equal(torch.cat(parts) if parts else bucket.values.to(sent), bucket.values.to(sent))

    travels = [index in memory.homes for index in range(len(params))]
    assert all(param.grad is None for param, moves in zip(params, travels, strict=True) if moves)
    assert list(packing.used) == [flag and moves for flag, moves in zip(came, travels, strict=True)]


def covered(placed: list[Any], part_nbytes: float) -> int:
    """Elements that are sent of one rank's pieces: with what lies between neighbours that travel together."""
    total, end, before_alone = 0, None, False
    for piece, offset in placed:
        alone = 4 * piece.numel >= part_nbytes
        if end is not None and not alone and not before_alone:
            total += offset - end  # a gap, sent with its neighbours
        total += piece.numel
        end, before_alone = offset + piece.numel, alone
    return total


def test_a_large_gradient_is_not_copied():
    params = [nn.Parameter(torch.randn(64)), nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5))]
    plan = make_plan(read_specs([{"params": params}]), Layout.FLAT, world_size=1, bucket_numel=1000, alignment=16)
    packing = GradientPacking(FlatMemory(plan, params, 0), params, Packs(True, 64 * 4), [torch.float32])
    for param in params:
        param.grad = torch.ones_like(param)
    large = params[0].grad

    ((first, rest),) = packing.pack(0)

    assert large is not None
    assert first.data_ptr() == large.data_ptr()
    assert packing.places(0) == [slice(0, 64), slice(64, 64 + 16 + 5)]  # the third begins at a multiple of 64 bytes
    assert rest.tolist() == [1.0] * 3 + [0.0] * 13 + [1.0] * 5


@pytest.mark.parametrize("by_rank", [True, False])
def test_gradients_that_are_sent_in_half_the_bytes_are_never_joined_in_all_of_them(by_rank):
    """A large one, small ones with a gap between them, one that lies in another order, and one that has not come."""
    shapes = [(64, 8), (3, 2), (5, 7), (9, 4), (11,)]
    params = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    plan = make_plan(read_specs([{"params": params}]), Layout.FLAT, world_size=1, bucket_numel=4000, alignment=16)
    packing = GradientPacking(FlatMemory(plan, params, 0), params, Packs(by_rank, 500 * 4), [torch.bfloat16])
    for param in params[:-1]:
        param.grad = torch.randn(param.shape)
    params[2].grad = torch.randn(7, 5).t()
    gradients = [param.grad for param in params[:-1]]
    with NewMemory() as memory:
        (parts,) = packing.pack(0)
    assert {dtype for dtype, _ in memory.made.values()} == {torch.bfloat16}
    joined = torch.cat(parts)
    for index, gradient in enumerate([*gradients, torch.zeros(11)]):
        (offset,) = [segment.offset for segment in plan.buckets[0].segments if segment.param == index]
        assert torch.equal(joined[offset : offset + gradient.numel()], gradient.bfloat16().reshape(-1))


def count_sends(in_place: float, **options: Any) -> int:
    with (
        mock.patch.object(gloo, "PART_NBYTES", in_place),
        mock.patch.object(gloo.dist, "isend", side_effect=dist.isend) as isend,
    ):
        assert_trains_like_ddp(Net, **options)
    return isend.call_count


def trains_in_many_messages(layout: Layout, gradients: Any) -> tuple[int, int]:
    """How many messages this rank has sent when each piece was one, and when those of a rank went together."""
    cut = ShardConfig(bucket_mb=SMALL_BUCKETS, layout=layout, gradients=gradients)
    for accumulate in (1, 3):
        count_sends(1, config=cut, accumulate=accumulate)
    together = ShardConfig(layout=layout, gradients=gradients)
    return count_sends(1, config=together), count_sends(float("inf"), config=together)


@pytest.mark.parametrize("gradients", ["shard", "keep"])
@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE], ids=["flat", "whole"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gradients_that_travel_one_by_one(workers, ranks, layout, gradients):
    sent = workers(ranks).run(trains_in_many_messages, layout, gradients)
    assert sum(many for many, _ in sent) > sum(few for _, few in sent)


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
        with mock.patch.object(gloo, "PART_NBYTES", in_place):
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
    places, others = [], []
    for step in range(3):
        loss_of(model, batch(step)).backward()
        opt.grad_norms()
        shards = opt._engine.runtime.gradients.current.shards
        places.append([shard.data_ptr() for shard in shards])
        storages = {shard.untyped_storage().data_ptr() for shard in shards}
        assert len(storages) == 1, "one block"
        opt.step()
        opt.zero_grad()
        assert opt._engine.runtime.gradients.current.shards == [None] * len(shards)
        others.append(torch.empty(sum(len(shard) for shard in shards)))  # would get memory that was let go
    assert places[0] == places[1] == places[2]


def test_shards_lie_in_one_block_that_is_kept(workers):
    workers(2).run(trains_in_the_same_memory)


class Remembers(optim.Optimizer):
    """Steps by what the gradient has changed since the last step, and keeps the last one as it is."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    before = self.state[param].get("before")
                    param.sub_(param.grad if before is None else param.grad - before, alpha=group["lr"])
                    self.state[param]["before"] = param.grad


def keeps_gradients() -> None:
    assert_trains_like_ddp(Net, Remembers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_optimizer_may_keep_a_gradient(workers, ranks):
    workers(ranks).run(keeps_gradients)


def trains_in_half_alone() -> None:
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, reduce_dtype=torch.bfloat16)
    assert_trains_like_ddp(Net, config=config)


def test_one_rank_sends_nothing_in_any_dtype(workers):
    workers(1).run(trains_in_half_alone)


def trains_on_gradients_with_a_graph() -> None:
    """A penalty on gradients: backward(create_graph=True) leaves gradients that have a graph."""

    def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model, x)
        weights = [param for param in model.parameters() if param.numel()]
        return loss + sum(g.square().sum() for g in torch.autograd.grad(loss, weights, create_graph=True))

    model = Net()
    config = ShardConfig(bucket_mb=1e-6, layout=Layout.WHOLE)  # every gradient is alone, and so not copied
    opt = shardstep.shard(model, optim.AdamW, config=config, lr=0.05)
    for step in range(3):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")  # torch's advice
            penalized(model, batch(2 * step)).backward(create_graph=True)
            penalized(model, batch(2 * step + 1)).backward(create_graph=True)
        opt.clip_grad_norm_(1.0)
        assert not any(shard.requires_grad for shard in opt._engine.runtime.gradients.current.shards)
        opt.step()
        opt.zero_grad(set_to_none=step % 2 == 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_have_a_graph_leave_it_behind(workers, ranks):
    workers(ranks).run(trains_on_gradients_with_a_graph)


def fails_to_pack_once() -> None:
    """Memory runs out in the middle of a parameter that lies in several buckets."""
    torch.manual_seed(1)
    model = nn.Linear(40, 30)
    opt = shardstep.shard(model, optim.SGD, config=ShardConfig(bucket_mb=0.002), lr=1.0)
    before = model.weight.detach().clone()
    pack, calls = opt._engine.runtime.gradients.current._packing.pack, []

    def fails(bucket: int) -> Any:
        calls.append(bucket)
        if len(calls) == 2:
            raise MemoryError
        return pack(bucket)

    opt._engine.runtime.gradients.current._packing.pack = fails
    with pytest.raises(MemoryError):
        (100 * model(torch.ones(1, 40)).sum()).backward()
    opt.zero_grad()
    model(torch.ones(1, 40)).sum().backward()
    opt.step()
    assert torch.allclose(before - model.weight, torch.ones(30, 40)), "a step of the dead pass"


def test_what_a_failed_pass_took_is_not_taken_for_the_next(workers):
    workers(1).run(fails_to_pack_once)


def two_alike() -> tuple[nn.Module, nn.Module, Any, Any]:
    """Two equal models of several buckets, and their optimizers."""
    nets = [nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 2)) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    config = ShardConfig(bucket_mb=0.002)
    opts = [shardstep.shard(net, optim.SGD, config=config, lr=0.1) for net in nets]
    assert len(opts[0].bucket_nbytes()) == 4
    return *nets, *opts


def fails_to_pack_on_one_rank(bucket: int) -> None:
    """Memory runs out on rank 1; the others wait for what it would have sent."""
    model, twin, opt, other = two_alike()
    pack = opt._engine.runtime.gradients.current._packing.pack

    def fails(number: int) -> Any:
        if number == bucket:
            opt._engine.runtime.gradients.current._packing.pack = pack
            raise MemoryError
        return pack(number)

    if dist.get_rank() == 1:
        opt._engine.runtime.gradients.current._packing.pack = fails
        with pytest.raises(MemoryError):
            model(torch.ones(1, 40)).sum().backward()
    else:
        model(torch.ones(1, 40)).sum().backward()
    with pytest.raises(RuntimeError, match=r"the backward pass failed on ranks \[1\]"):
        opt.step()
    opt.zero_grad()
    for net, optimizer in ((model, opt), (twin, other)):
        net(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), "a step of the dead pass"


@pytest.mark.parametrize("bucket", [0, 1, 2])
def test_memory_that_runs_out_on_one_rank_hangs_nobody(workers, bucket):
    workers(2).run(fails_to_pack_on_one_rank, bucket)


def loses_what_arrived(bucket: int) -> None:
    """Memory runs out on rank 1 when a bucket that has arrived is summed: it was sent, and is not sent again."""
    model, twin, opt, other = two_alike()
    reduction = opt._engine.runtime.gradients.current._reductions[bucket]
    land = reduction.land

    def fails() -> None:
        land()
        raise MemoryError

    with mock.patch.object(gloo, "IN_FLIGHT_NBYTES", 100):
        if dist.get_rank() == 1:
            reduction.land = fails
            with pytest.raises(MemoryError):
                model(torch.ones(1, 40)).sum().backward()
        else:
            model(torch.ones(1, 40)).sum().backward()
        reduction.land = land
        with pytest.raises(RuntimeError, match=r"failed on ranks? \[?1\]?"):
            opt.step()
        opt.zero_grad()
        twin.load_state_dict(model.state_dict())  # rank 0 may have stepped its share
        for number in range(3):
            for net, optimizer in ((model, opt), (twin, other)):
                net(torch.full((1, 40), number + 1.0)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), "messages of two passes were mixed up"


@pytest.mark.parametrize("bucket", [0, 1])
def test_memory_that_runs_out_when_gradients_arrive_mixes_up_nothing(workers, bucket):
    workers(2).run(loses_what_arrived, bucket)


class Phases(nn.Module):
    """The gradient of a real part's conjugate partner comes as a view that is conjugated when it is read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.large = nn.Parameter(torch.randn(300, 130, dtype=torch.complex64))
        self.small = nn.Parameter(torch.randn(3, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.large.conj() * x.mean()).real.mean(1) * (self.small.conj() * 2).real.mean()


def trains_complex() -> None:
    assert_trains_like_ddp(Phases, optim.SGD)
    assert_trains_like_ddp(Phases, optim.SGD, config=ShardConfig())


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_that_are_conjugated_when_read(workers, ranks):
    workers(ranks).run(trains_complex)


class WithoutElements(nn.Module):
    """The only parameter of its dtype has no elements."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.linear = nn.Linear(7, 3)
        self.nothing = nn.Parameter(torch.empty(0, 3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.nothing.sum().float()


def trains_without_elements() -> None:
    for layout in (Layout.FLAT, Layout.WHOLE):
        assert_trains_like_ddp(WithoutElements, config=ShardConfig(layout=layout))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_bucket_without_elements(workers, ranks):
    workers(ranks).run(trains_without_elements)


def casts_after_sharding() -> None:
    """Gradients then come in another dtype than the zeros that stand for those that do not come."""
    model = nn.ModuleList([nn.Linear(9, 9), nn.Linear(1000, 400)])
    opt = shardstep.shard(model, optim.AdamW)
    model.bfloat16()
    model[1](torch.ones(2, 1000, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(RuntimeError, match=r"call shard\(\.\.\.\) after model\.to"):
        opt.step()


def test_a_model_that_is_cast_after_sharding_gets_an_error(workers):
    workers(2).run(casts_after_sharding)


def sends_in_order(unused: bool) -> list[str]:
    """What this rank sends in a pass: the part of a bucket, or which gradients came."""
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7), nn.Linear(7, 7))
    with mock.patch.object(passes, "RECORD_FIRST_NBYTES", 1):  # these buckets count as large
        opt = shardstep.shard(model, optim.SGD, config=ShardConfig(bucket_mb=0.0002), lr=0.1)
    current = opt._engine.runtime.gradients.current
    names = {reduction.tag: f"bucket {number}" for number, reduction in enumerate(current._reductions)}
    names[current._poll.tag] = "record"
    sent = []

    def watched(values: torch.Tensor, **options: Any) -> Any:
        sent.append(names[options["tag"]])
        return isend(values, **options)

    isend = dist.isend
    with mock.patch.object(dist, "isend", watched):
        loss_of(model[1:] if unused else model, batch(1)).backward()
    opt.step()
    return list(dict.fromkeys(sent))


@pytest.mark.parametrize("unused", [False, True])
def test_ranks_tell_which_gradients_came_before_they_send_the_last(workers, unused):
    for sent in workers(2).run(sends_in_order, unused):
        buckets = [name for name in sent if name != "record"]
        assert buckets == sorted(buckets, key=lambda name: int(name.split()[1]))
        assert 0 < sent.index("record") < len(sent) - 1


def raises_when_a_pass_failed_before_a_forward() -> tuple[str, str] | None:
    """A pass fails on rank 1, which then turns to a forward of the model and a collective of the program."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    opt = shardstep.shard(model, optim.SGD, lr=0.1)
    x = torch.ones(2, 8)
    found = None
    if dist.get_rank() == 1:
        hidden = model[0](x)
        hidden.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model[1](hidden).sum().backward()
        with torch.no_grad():
            model(x)
    else:
        model(x).sum().backward()
        found = raised(opt.step)
    dist.barrier()
    opt.zero_grad()
    model(x).sum().backward()
    opt.step()
    return found


def test_a_rank_waited_for_one_that_made_a_forward_after_a_failed_pass(workers):
    found, _ = workers(2).run(raises_when_a_pass_failed_before_a_forward, timeout=40)
    assert found is not None
    assert "the backward pass failed on ranks [1]" in found[1], found
