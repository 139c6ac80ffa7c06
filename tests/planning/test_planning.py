"""Planning alone: no process, no tensor."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardstep.gradients.passes import LaunchOrder
from shardstep.planning import (
    Bucket,
    EqualRanges,
    Layout,
    ParamSpec,
    Piece,
    Plan,
    Segment,
    WholeRanges,
    find_problems,
    make_plan,
)
from shardstep.planning.chunks import plan_chunks

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), max_size=12)
groups = st.integers(0, 3)
dtypes = st.sampled_from(["float32", "bfloat16", "complex64"])
devices = st.sampled_from(["cpu:0", "cuda:0", "cuda:1"])
layouts = st.sampled_from([Layout.WHOLE, Layout.FLAT])


@st.composite
def spec_lists(draw: st.DrawFn, *, one_class: bool = False) -> list[ParamSpec]:
    drawn = draw(shapes)
    numbers = sorted(draw(groups) for _ in drawn)
    return [
        ParamSpec(
            f"p{i}",
            shape,
            "float32" if one_class else draw(dtypes),
            "cpu:0" if one_class else draw(devices),
            numbers[i],
            trainable=one_class or draw(st.booleans()),
        )
        for i, shape in enumerate(drawn)
    ]


def simple(*shapes: tuple[int, ...]) -> list[ParamSpec]:
    return [ParamSpec(f"p{i}", shape, "float32", "cpu:0", 0) for i, shape in enumerate(shapes)]


def numels_by_rank(bucket: Bucket) -> tuple[int, ...]:
    """Return how many elements of parameters each rank holds of a bucket."""
    held = [0] * bucket.ranges.count
    for rank, numel in bucket.holdings():
        held[rank] += numel
    return tuple(held)


sizes = st.none() | st.integers(1, 400)


@given(spec_lists(), layouts, st.integers(1, 9), sizes, sizes, st.integers(1, 16))
def test_every_element_has_exactly_one_holder(specs, layout, world_size, bucket_numel, end_numel, alignment):
    plan = make_plan(
        specs, layout, world_size=world_size, bucket_numel=bucket_numel, end_numel=end_numel, alignment=alignment
    )
    assert find_problems(plan) == []
    # find_problems is code too; count the holders of every element without it.
    holders = {(i, e): 0 for i, spec in enumerate(specs) for e in range(spec.numel)}
    for piece in plan.pieces:
        for element in range(piece.start, piece.stop):
            holders[piece.param, element] += 1
    assert set(holders.values()) <= {1}
    assert {piece.param for piece in plan.pieces} == set(range(len(specs)))


@given(spec_lists(), layouts, st.integers(1, 9), st.integers(1, 400))
def test_plans_are_equal_on_every_rank_and_so_are_their_digests(specs, layout, world_size, bucket_numel):
    plans = [make_plan(list(specs), layout, world_size=world_size, bucket_numel=bucket_numel) for _ in range(2)]
    assert plans[0] == plans[1]
    assert hash(plans[0]) == hash(plans[1])
    assert plans[0].digest() == plans[1].digest()
    other = make_plan(specs, layout, world_size=world_size, bucket_numel=bucket_numel + 1)
    assert (other == plans[0]) == (other.digest() == plans[0].digest())


@given(spec_lists(), st.integers(1, 9))
def test_whole_is_the_sorted_greedy_partition_of_the_contract(specs, world_size):
    plan = make_plan(specs, Layout.WHOLE, world_size=world_size)
    # The contract, word for word, with a scan over the ranks.
    loads, expected = [0] * world_size, {}
    for _, members in itertools.groupby(range(len(specs)), key=lambda i: specs[i].group):
        for param in sorted(members, key=lambda i: specs[i].numel, reverse=True):
            rank = loads.index(min(loads))
            loads[rank] += specs[param].numel
            expected[param] = rank
    assert {piece.param: piece.rank for piece in plan.pieces} == expected
    assert all((piece.start, piece.stop) == (0, specs[piece.param].numel) for piece in plan.pieces)


@given(spec_lists(), spec_lists(), st.integers(1, 9))
def test_a_group_added_later_moves_nothing(earlier, later, world_size):
    last = max((spec.group for spec in earlier), default=0)
    added = [dataclasses.replace(spec, name=f"new{i}", group=last + 1) for i, spec in enumerate(later)]
    before = {p.param: p.rank for p in make_plan(earlier, Layout.WHOLE, world_size=world_size).pieces}
    after = {p.param: p.rank for p in make_plan([*earlier, *added], Layout.WHOLE, world_size=world_size).pieces}
    assert {param: after[param] for param in before} == before


@given(spec_lists(one_class=True), st.integers(1, 9), st.none() | st.integers(1, 400), st.integers(1, 16))
def test_flat_ranges_are_equal_and_padded_by_less_than_a_unit_for_each_rank(specs, world_size, bucket_numel, alignment):
    plan = make_plan(specs, Layout.FLAT, world_size=world_size, bucket_numel=bucket_numel, alignment=alignment)
    granule = world_size * alignment
    for bucket in plan.buckets:
        assert isinstance(bucket.ranges, EqualRanges)
        assert bucket.ranges.width % alignment == 0
        ends = [-(-segment.end // alignment) * alignment for segment in bucket.segments]
        assert bucket.numel - max(ends) < granule, "padded to equal ranges, and no further"
        assert bucket.numel <= -(-(bucket_numel or bucket.numel) // granule) * granule
        for segment in bucket.segments:
            assert segment.offset % alignment == 0, "parameters begin where a tensor of their own might"
    for piece in plan.pieces:
        assert piece.start % alignment == 0, "a piece begins where a kernel begins a vector of the whole parameter"


@given(spec_lists(one_class=True), st.integers(1, 9), st.integers(1, 60), sizes, st.integers(1, 16))
def test_a_bucket_follows_another_only_where_a_parameter_goes_through_both(
    specs, world_size, bucket_numel, end_numel, alignment
):
    """Then the parameter lies in one run: the bucket before is full to its end."""
    plan = make_plan(
        specs, Layout.FLAT, world_size=world_size, bucket_numel=bucket_numel, end_numel=end_numel, alignment=alignment
    )
    for before, bucket in itertools.pairwise(plan.buckets):
        last, first = before.segments[-1], bucket.segments[0]
        if bucket.follows:
            assert (last.param, last.stop, last.end) == (first.param, first.start, before.numel)
            assert first.offset == 0
        assert all(segment.start == 0 for segment in bucket.segments[1:])


@given(spec_lists(), layouts, st.integers(1, 9), st.integers(1, 60))
def test_the_pieces_of_each_rank_are_the_pieces_of_all(specs, layout, world_size, bucket_numel):
    plan = make_plan(specs, layout, world_size=world_size, bucket_numel=bucket_numel)
    assert sorted(map(str, plan.pieces)) == sorted(str(p) for rank in range(world_size) for p in plan.pieces_of(rank))
    for bucket in plan.buckets:
        for rank in range(world_size):
            low, high = bucket.ranges.bounds(rank)
            for piece, offset in bucket.placed(rank):
                assert piece.rank == rank
                assert 0 <= offset <= offset + piece.numel <= high - low
                assert piece in bucket.over(piece.param, piece.start, piece.stop)


def test_ten_elements_over_four_ranks():
    assert numels_by_rank(make_plan(simple((10,)), Layout.FLAT, world_size=4).buckets[0]) == (3, 3, 3, 1)
    assert numels_by_rank(make_plan(simple((10,)), Layout.WHOLE, world_size=4).buckets[0]) == (10, 0, 0, 0)


def test_whole_parameters_by_hand():
    plan = make_plan(simple((3,), (9,), (5,), (7,)), Layout.WHOLE, world_size=2)
    # 9 to rank 0, 7 to rank 1, 5 to rank 1 (7 < 9), 3 to rank 0 (9 < 12)
    assert [(piece.param, piece.rank) for piece in plan.buckets[0].pieces] == [(1, 0), (0, 0), (3, 1), (2, 1)]
    assert numels_by_rank(plan.buckets[0]) == (12, 12)


def test_a_large_parameter_is_cut_by_flat_and_travels_alone_under_whole():
    specs = simple((4,), (100,), (4,))
    flat = make_plan(specs, Layout.FLAT, world_size=2, bucket_numel=20)
    assert [bucket.numel for bucket in flat.buckets] == [4, 20, 20, 20, 20, 20, 4]
    assert [bucket.follows for bucket in flat.buckets] == [False, False, True, True, True, True, False]
    whole = make_plan(specs, Layout.WHOLE, world_size=2, bucket_numel=20)
    assert [[piece.param for piece in bucket.pieces] for bucket in whole.buckets] == [[0], [1], [2]]


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE])
def test_the_first_bucket_and_the_last_may_be_smaller(layout):
    """They end, or begin, with the parameter that brings them to the size: one tiny bias is not worth a message."""

    def members(*numels: int, end_numel: int) -> list[list[int]]:
        specs = simple(*((numel,) for numel in numels))
        plan = make_plan(specs, layout, world_size=1, bucket_numel=40, end_numel=end_numel)
        return [sorted(segment.param for segment in bucket.segments) for bucket in plan.buckets]

    assert members(*[10] * 10, end_numel=10) == [[0], [1, 2, 3, 4], [5, 6, 7, 8], [9]]
    assert members(1, 10, 10, 10, 10, 10, 1, end_numel=5) == [[0, 1], [2, 3, 4], [5, 6]]
    assert members(10, 10, end_numel=10) == [[0, 1]], "there is nothing between"
    assert members(10, 10, 10, end_numel=10) == [[0], [1], [2]]
    assert members(0, 10, 10, 0, end_numel=100) == [[0, 1, 2, 3]]
    assert members(end_numel=10) == []


def test_frozen_parameters_have_a_holder_and_do_not_travel():
    specs = [dataclasses.replace(spec, trainable=i != 1) for i, spec in enumerate(simple((4,), (6,), (2,)))]
    plan = make_plan(specs, Layout.WHOLE, world_size=2)
    assert [piece for bucket in plan.parked for piece in bucket.pieces] == [Piece(1, 0, 6, 0)]
    assert plan.buckets[0].numel == 6


def test_parameters_without_elements_and_more_ranks_than_elements():
    for layout in (Layout.WHOLE, Layout.FLAT):
        plan = make_plan(simple((0, 3), (), (0,)), layout, world_size=5)
        assert {piece.param for piece in plan.pieces} == {0, 1, 2}
        assert sum(plan.held()) == 1
        assert make_plan([], layout, world_size=5).buckets == ()


def damaged(plan: Plan, **changes: object) -> Plan:
    return dataclasses.replace(plan, **changes)


def parked(segment: Segment, holder: int = 1) -> tuple[Bucket, ...]:
    """One whole parameter that does not travel; the ranges are as they should be."""
    ends = (0, segment.stop) if holder else (segment.stop, segment.stop)
    return (Bucket((segment,), WholeRanges(ends, (holder,)), "float32", "cpu:0"),)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda p: damaged(p, buckets=()), "no rank holds it"),
        (lambda p: damaged(p, parked=parked(Segment(0, 0, 2, 0))), "held twice"),
        (lambda p: damaged(p, parked=parked(Segment(0, 0, 2, 0))), "trainable, but not sent"),
        (lambda p: damaged(p, parked=parked(Segment(9, 0, 2, 0))), "does not exist"),
        (lambda p: damaged(p, parked=parked(Segment(0, 0, 2, 0), 9)), "held by rank 9, which does not exist"),
        (lambda p: rebucket(p, segments=(Segment(0, 2, 10, 2),)), "no rank holds elements 0 to"),
        (lambda p: rebucket(p, segments=(Segment(0, 0, 8, 0),)), "the parameter at 10"),
        (lambda p: rebucket(p, segments=(Segment(0, 0, 6, 0), Segment(0, 6, 10, 5))), "segments overlap"),
        (lambda p: rebucket(p, segments=(Segment(0, 0, 10, 5),)), "outside of the bucket's 10 elements"),
        (lambda p: rebucket(p, ranges=EqualRanges(3, 4)), "3 ranges for 2 ranks"),
        (lambda p: rebucket(p, ranges=WholeRanges((4, 10), (0,))), "is outside of the range of rank 0"),
        (lambda p: rebucket(p, dtype="float64"), "cannot be sent in bucket 0"),
        (
            lambda p: damaged(p, params=(dataclasses.replace(p.params[0], trainable=False),)),
            "frozen, but sent in bucket",
        ),
    ],
)
def test_find_problems_names_what_is_wrong(damage, complaint):
    plan = damage(make_plan(simple((10,)), Layout.FLAT, world_size=2))
    assert any(complaint in problem for problem in find_problems(plan)), find_problems(plan)


def rebucket(plan: Plan, **changes: object) -> Plan:
    bucket: Bucket = dataclasses.replace(plan.buckets[0], **changes)
    return damaged(plan, buckets=(bucket,))


@pytest.mark.parametrize(
    "bad", [{"world_size": 0}, {"world_size": 2, "bucket_numel": 0}, {"world_size": 2, "alignment": 0}]
)
def test_sizes_below_one_are_refused(bad):
    with pytest.raises(ValueError, match="at least 1"):
        make_plan(simple((3,)), Layout.FLAT, **bad)


@given(st.lists(st.integers(0, 200), max_size=30), st.integers(1, 64), st.integers(1, 100))
def test_chunks_carry_every_byte_once_within_the_limit(sizes, limit, large):
    seen = [0] * len(sizes)
    for spans in plan_chunks(sizes, limit=limit, large=large):
        assert 0 < sum(span.nbytes for span in spans) <= limit
        for span in spans:
            assert span.start == seen[span.tensor], "a tensor travels in order"
            seen[span.tensor] = span.stop
    assert seen == sizes


def test_small_tensors_share_messages_and_large_ones_have_their_own():
    chunks = plan_chunks([4, 1000, 4, 1000], limit=800, large=100)
    assert [[span.tensor for span in spans] for spans in chunks] == [[0, 2], [1], [1], [3], [3]]


def test_planning_does_not_import_torch():
    code = "import sys, shardstep.planning; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def seconds_to_plan(params: int, world_size: int, layout: Layout) -> float:
    specs = [ParamSpec(f"p{i}", (1 + i * 7919 % 3001, 64), "float32", "cpu:0", i % 3) for i in range(params)]

    def once() -> float:
        start = time.perf_counter()
        make_plan(specs, layout, world_size=world_size)
        return time.perf_counter() - start

    return min(once() for _ in range(3))


@pytest.mark.parametrize("layout", [Layout.WHOLE, Layout.FLAT])
def test_ten_thousand_parameters_over_1024_ranks_take_less_than_a_second(layout):
    assert seconds_to_plan(10_000, 1024, layout) < 1.0


def test_a_plan_of_many_buckets_does_not_grow_with_the_ranks():
    specs = simple(*[(1600, 1600)] * 250)
    few, many = (make_plan(specs, Layout.FLAT, world_size=n, bucket_numel=2_560_000, alignment=16) for n in (8, 16_384))
    assert len(few.buckets) == len(many.buckets) == 250
    assert len(many.to_json()) < 1.1 * len(few.to_json())


def test_cost_does_not_grow_with_the_number_of_ranks():
    # A scan over the ranks for every parameter would take 64 times as long for 64 times the ranks; a heap takes twice.
    assert seconds_to_plan(5_000, 4096, Layout.WHOLE) < 8 * seconds_to_plan(5_000, 64, Layout.WHOLE)


def gpt2() -> list[ParamSpec]:
    """GPT-2's 124 M parameters: a tied embedding, positions, twelve blocks."""
    shapes = [(50_257, 768), (1024, 768)]
    for _ in range(12):
        shapes += [(768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,)]
        shapes += [(3072, 768), (768,)]
    return simple(*shapes, (768,), (768,))


@pytest.mark.parametrize("world_size", [2, 4, 8, 64])
def test_whole_matrices_of_gpt2_take_the_bytes_of_ddp(world_size):
    """Each rank passes on what others hold, once as gradients to their holder and once as parameters from it."""
    matrices = simple(*(spec.shape for spec in gpt2()[2:] if len(spec.shape) == 2))
    plan = make_plan(matrices, Layout.WHOLE, world_size=world_size, bucket_numel=16_000_000, alignment=16)
    ranges = [[bucket.ranges.bounds(rank) for bucket in plan.buckets] for rank in range(world_size)]
    all_of_it = sum(bucket.numel for bucket in plan.buckets)
    most = max(2 * (all_of_it - sum(stop - start for start, stop in own)) for own in ranges)
    by_ddp = 2 * sum(spec.numel for spec in matrices) * (world_size - 1) / world_size
    assert most <= 1.05 * by_ddp


@pytest.mark.parametrize("world_size", [2, 4, 8, 64, 1024])
def test_flat_shares_of_gpt2_are_within_one_percent(world_size):
    plan = make_plan(gpt2(), Layout.FLAT, world_size=world_size, bucket_numel=6_250_000, alignment=16)
    assert max(plan.held()) <= 1.01 * sum(spec.numel for spec in plan.params) / world_size


@given(spec_lists(one_class=True), st.randoms(use_true_random=False), st.integers(1, 5), st.integers(1, 60))
def test_buckets_are_launched_once_each_and_in_order(specs, random, world_size, bucket_numel):
    plan = make_plan(specs, Layout.FLAT, world_size=world_size, bucket_numel=bucket_numel)
    order = LaunchOrder([[piece.param for piece in bucket.pieces] for bucket in plan.buckets])
    told: list[int] = []
    hooks = [order.hook(index, told.append) for index in range(len(specs))]
    gradient = torch.zeros(())
    for hook in hooks:
        hook(gradient)
    assert told == list(range(len(specs))), "between passes each is told: the first begins one"
    for _ in range(2):
        order.begin()
        coming = [index for index in range(len(specs)) if random.random() < 0.8]
        random.shuffle(coming)
        launched: list[int] = []
        seen: set[int] = set()
        for param in [*coming, *coming[:2]]:
            seen.add(param)
            told.clear()
            hooks[param](gradient)
            if told:
                while (bucket := order.due()) is not None:
                    assert {piece.param for piece in plan.buckets[bucket].pieces} <= seen
                    launched.append(bucket)
                    order.launched()
            assert order.due() is None, "nothing waits that the hook has not told of"
            assert order.all_came() == (seen >= {piece.param for piece in plan.pieces})
        launched.extend(order.left())
        order.end()
        assert launched == list(range(len(plan.buckets)))


def test_hooks_of_another_thread_count_only_what_has_begun():
    """A parameter is awaited when everything is ready to count it: hooks of another device take no lock."""
    order = LaunchOrder([[0, 1], [2]])

    class Watched(set):
        def update(self, *values):
            assert order._missing == [2, 1, -1]
            super().update(*values)

    order._awaited = Watched()
    for _ in range(2):
        order.begin()
        assert order._awaited == {0, 1, 2}
        order.note(0)
        order.launched()
        order.end()
