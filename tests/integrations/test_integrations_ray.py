"""Ray Train's own TorchTrainer with the fast lane in its loop, against its DDP; saved with two workers, restored with
two and with three."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from repository import ROOT, SUPPORT

pytest.importorskip("ray.train", reason="Ray is not installed; make test-frameworks installs it")

QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "OMP_NUM_THREADS": "1",
}


def run(program: Path, *arguments: str) -> str:
    paths = os.pathsep.join([str(ROOT / "src"), str(SUPPORT), *filter(None, sys.path)])
    told = {**os.environ, **QUIET, "PYTHONPATH": paths}
    command = [sys.executable, str(program), *arguments]
    done = subprocess.run(command, env=told, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the workers of tests/support/ray_program.py have left."""
    folder = tmp_path_factory.mktemp("ray")
    run(SUPPORT / "ray_program.py", str(folder))
    return {path.stem: torch.load(path) for path in folder.glob("*.pt")}


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


pytestmark = pytest.mark.timeout(300)


def test_twenty_steps_are_those_of_rays_ddp_to_the_bit(left):
    assert left["first"]["ranks"] == 2
    assert_same(dict(left["first"]["weights"]), dict(left["ddp"]))


def test_restored_with_two_workers_it_goes_on_to_the_bit(left):
    assert_same(left["second-restored"], left["saved"])
    assert_same(left["second"], left["first"])


def test_restored_with_three_workers_it_has_the_same_state(left):
    assert left["three-restored"]["ranks"] == 3
    for key in ("weights", "state"):
        assert_same(left["three-restored"][key], left["saved"][key])


def test_the_example_runs(tmp_path):
    said = run(ROOT / "examples" / "ray_train.py", "--smoke", "--storage", str(tmp_path))
    assert "'step': 5" in said
    assert "'workers': 2" in said
