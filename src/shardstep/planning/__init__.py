"""Decides what is cut where and who holds it. Integers, strings and tuples only; torch is not imported here."""

from shardstep.planning.layout import Layout
from shardstep.planning.plan import Bucket, Piece, Plan, find_problems, make_plan
from shardstep.planning.spec import ParamSpec, read_specs

__all__ = [
    "Bucket",
    "Layout",
    "ParamSpec",
    "Piece",
    "Plan",
    "find_problems",
    "make_plan",
    "read_specs",
]
