"""What the host does does not grow with the number of ranks: counted in a group of which one rank is there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from repository import ROOT

BENCHMARKS = ROOT / "benchmarks"
BUCKETS = 12
PROGRAM = f"""
import json, sys
sys.path.insert(0, {str(BENCHMARKS)!r})
import scale_worker as worker

calls = dict(build=0, iteration=0)
part = "build"

def count(frame, event, argument):
    calls[part] += event == "call"

worker.join(int(sys.argv[1]))
model = worker.make_model({BUCKETS})
sys.setprofile(count)
optimizer = worker.shard(model, {BUCKETS})
sys.setprofile(None)
part = "iteration"
assert worker.count_buckets(optimizer) == {BUCKETS}
for step in range(2):
    loss = sum(param.sum() for param in model.parameters())
    sys.setprofile(count if step else None)  # the first makes things that last
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    sys.setprofile(None)
print("calls: " + json.dumps(calls))
"""


def calls_with(ranks: int) -> dict[str, int]:
    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(ranks)], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    found = next(line for line in ended.stdout.splitlines() if line.startswith("calls: "))
    return dict(json.loads(found.removeprefix("calls: ")))


@pytest.fixture(scope="module")
def few() -> dict[str, int]:
    return calls_with(8)


@pytest.mark.parametrize("ranks", [1_024, 16_384])
def test_building_and_stepping_take_as_many_calls_at_any_number_of_ranks(few, ranks):
    many = calls_with(ranks)
    for part in ("build", "iteration"):
        assert few[part] > 50 * BUCKETS / 2, "they are counted"
        # Beyond 32 ranks hosts have a tree of groups, of at most three levels.
        assert many[part] <= 1.25 * few[part] + 200, (part, few, many)
