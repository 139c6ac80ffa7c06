"""Puts one small fault at a time into a copy of the package and runs the tests: which faults does no test notice?

    python tests/mutate.py                 twenty faults in what sends, sums, steps and agrees: half an hour
    python tests/mutate.py --count 100 --seed 3
    python tests/mutate.py --files src/shardstep/comm/host_groups.py

Outside continuous integration: every fault costs a run of the tests, or half a minute of waiting where it makes ranks
hang. A fault that survives is either harmless (say why) or wants a test. Exit status: 1 if one survived.
"""

from __future__ import annotations

import argparse
import ast
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILES = [
    f"src/shardstep/{name}.py"
    for name in (
        "engine/step", "engine/build", "engine/replan", "engine/weights", "engine/step_timing",
        "comm/nccl", "comm/nccl_gathers", "comm/gloo", "comm/gloo_gathers",
        "comm/host_groups", "comm/control", "comm/agreement", "comm/call_order", "gradients/passes",
        "gradients/packing", "gradients/sharded",
        "stepping/local_step", "stepping/parted_optimizer", "params/flat", "params/proxy",
        "params/weight_arrival",
    )
]  # fmt: skip
# Fast ones that reach all of it; the whole suite would take a quarter of an hour for each.
TESTS = [
    f"tests/{name}.py"
    for name in (
        "engine/test_fuzz", "comm/test_collectives", "comm/test_call_order", "gradients/test_packing",
        "engine/test_fast_lane_unusual_programs", "params/test_overlapped_gather", "engine/test_step_preconditions",
        "stepping/test_runs",
    )
]  # fmt: skip
# For what those do not notice.
MORE = [
    f"tests/{name}.py"
    for name in (
        "params/test_gradient_guard", "optimizers/test_optimizer_surface", "drop_in/test_ring", "params/test_one_owner",
        "optimizers/test_several_classes", "engine/test_fast_lane_programs", "drop_in/test_drop_in_step",
        "drop_in/test_overlap_with_ddp", "engine/test_audit", "engine/test_fast_lane", "drop_in/test_conformance",
    )
]  # fmt: skip
SECONDS = 400
OPPOSITE = {ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
            ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}  # fmt: skip


@dataclass(frozen=True)
class Fault:
    path: str
    line: int
    what: str
    source: str  # of the whole file, with the fault in it


def faults_in(path: str) -> Iterator[Fault]:
    """One for every place where a call can be left out or a comparison turned round."""
    original = (ROOT / path).read_text()
    places = sum(1 for node in ast.walk(ast.parse(original)) if can_change(node))
    for number in range(places):
        tree = ast.parse(original)
        node = [node for node in ast.walk(tree) if can_change(node)][number]
        what = change(node)
        yield Fault(path, getattr(node, "lineno", 0), what, ast.unparse(ast.fix_missing_locations(tree)))


def can_change(node: ast.AST) -> bool:
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_comparison = isinstance(node, ast.Compare) and type(node.ops[0]) in OPPOSITE
    return is_call or is_comparison or (isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add))


def change(node: ast.AST) -> str:
    before = ast.unparse(node)
    if isinstance(node, ast.Expr):
        node.value = ast.Constant(None)
        return f"left out: {before}"
    if isinstance(node, ast.Compare):
        node.ops[0] = OPPOSITE[type(node.ops[0])]()
    elif isinstance(node, ast.AugAssign):
        node.op = ast.Sub()
    return f"{before} became {ast.unparse(node)}"


def survives(fault: Fault) -> bool:
    return passes(fault, TESTS) and passes(fault, MORE)


def passes(fault: Fault, tests: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, copy / name)
        shutil.copy(ROOT / "pyproject.toml", copy)
        (copy / fault.path).write_text(fault.source)
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        settings = {"PYTHONPATH": str(copy / "src"), "PATH": "/usr/bin:/bin"}
        try:
            done = subprocess.run(command, cwd=copy, env=settings, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return False
        return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20, help="how many faults, drawn at random (default: 20)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--files", nargs="+", default=FILES)
    parser.add_argument("--lines", nargs="+", type=int, help="only faults in these lines of --files, all of them")
    arguments = parser.parse_args()
    everything = [fault for path in arguments.files for fault in faults_in(path)]
    drawn = random.Random(arguments.seed).sample(everything, min(arguments.count, len(everything)))
    if arguments.lines:
        drawn = [fault for fault in everything if fault.line in arguments.lines]
    survivors = 0
    for number, fault in enumerate(drawn, start=1):
        survived = survives(fault)
        survivors += survived
        verdict = "SURVIVED" if survived else "noticed"
        print(f"{number} of {len(drawn)} {verdict}: {fault.path}:{fault.line}: {fault.what}", flush=True)
    print(f"{survivors} of {len(drawn)} faults survived ({len(everything)} places)")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
