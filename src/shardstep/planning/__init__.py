"""Decides what is cut where and who holds it. Integers, strings and tuples only; torch is not imported here."""

from shardstep.planning.layout import Layout
from shardstep.planning.make import make_plan
from shardstep.planning.plan import Bucket, EqualRanges, Piece, Plan, Segment, WholeRanges
from shardstep.planning.problems import find_problems
from shardstep.planning.spec import ParamSpec, read_specs

__all__ = [
    "Bucket",
    "EqualRanges",
    "Layout",
    "ParamSpec",
    "Piece",
    "Plan",
    "Segment",
    "WholeRanges",
    "find_problems",
    "make_plan",
    "read_specs",
]
