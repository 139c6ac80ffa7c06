"""How much work it is to move state from one plan to another: counted in calls, not in seconds."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import shardstep
from shardstep.planning import Layout, ParamSpec, make_plan
from shardstep.state import resharding

SOURCE = str(Path(shardstep.__file__).parent)


def specs(count: int, trainable: bool = True) -> list[ParamSpec]:
    return [ParamSpec(f"p{n}", (3,), "float32", "cpu", 0, n > 0 or trainable) for n in range(count)]


def calls_of(count: int, layout: Layout) -> int:
    """Calls in all of our files, while rank 1's state is followed from one plan to another; one bucket."""
    old, new = (make_plan(specs(count, flag), [layout], world_size=3, bucket_numel=10**9) for flag in (True, False))
    calls = 0

    def count_call(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        del argument
        calls += event == "call" and frame.f_code.co_filename.startswith(SOURCE)

    sys.setprofile(count_call)
    try:
        found = resharding._fragments(old, new, 1)
    finally:
        sys.setprofile(None)
    assert sum(part.stop - part.start for part in found if part.old.rank == 1) == old.held()[1]
    return calls


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE])
def test_resharding_took_calls_that_grew_with_the_square_of_the_parameters(layout):
    few, many = calls_of(100, layout), calls_of(400, layout)
    assert many < 5 * few, (few, many)


@pytest.mark.parametrize("layout", [Layout.FLAT, Layout.WHOLE])
def test_every_element_of_a_piece_is_found_in_another_plan_once(layout):
    rows = [ParamSpec(f"p{n}", (n % 5, 3), "float32", "cpu", 0, n % 3 > 0) for n in range(40)]
    old = make_plan(rows, [layout], world_size=3, bucket_numel=50)
    thawed = [replace(row, trainable=not row.trainable) for row in rows]
    new = make_plan([*thawed, *specs(2)], [layout], world_size=3, bucket_numel=17)
    for rank in range(3):
        parts = resharding._fragments(old, new, rank)
        for piece in old.pieces_of(rank):
            covered = sorted((part.start, part.stop) for part in parts if part.old == piece)
            assert covered[0][0] == piece.start
            assert covered[-1][1] == piece.stop
            assert all(one[1] == other[0] for one, other in pairwise(covered))
        for part in parts:
            assert part.old in old.pieces_of(part.old.rank)
            assert part.new in new.pieces_of(part.new.rank)


def test_state_of_an_equal_plan_was_cut_and_joined_again():
    plan = make_plan(specs(20), [Layout.FLAT], world_size=3, bucket_numel=50)
    entries = {piece: {"step": torch.ones(()), "sum": torch.ones(piece.numel)} for piece in plan.pieces_of(1)}
    with mock.patch.object(resharding, "_fragments", side_effect=AssertionError("looked at")):
        again = resharding.reshard(mock.Mock(rank=1), plan, plan, entries, "load")
    assert again == entries
    assert all(again[piece] is not entry for piece, entry in entries.items()), "the caller's may be written to"
