"""Decide how parameters are cut and which rank holds which elements. Works on integers, strings and tuples; this
package does not import torch."""

from shardstep.planning.make import make_plan
from shardstep.planning.plan import Bucket, EqualRanges, Piece, Plan, Segment, WholeRanges
from shardstep.planning.problems import find_problems
from shardstep.planning.spec import Layout, ParamSpec, read_specs

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
