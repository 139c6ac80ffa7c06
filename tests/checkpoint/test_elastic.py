"""examples/elastic.py under torchrun: killed while training and while saving, it ends as if nothing had happened."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn, optim

import shardstep
from repository import ROOT, SUPPORT

pytestmark = pytest.mark.slow  # make test-slow

PROGRAM = SUPPORT / "elastic_killed.py"
EXAMPLE = ROOT / "examples" / "elastic.py"


def launch(ranks: int, program: Path, *arguments: object, **settings: str) -> str:
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # as the example says
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | fresh | settings
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*starter, "--max-restarts", "2", "--monitor-interval", "0.1", program, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses_of(output: str) -> dict[tuple[int, int], str]:
    """By rank and step; of what was done twice, the last. Ranks share the pipe, and may lose a line's end."""
    rows = re.findall(r"rank (\d+): step (\d+), loss ([-+.e\d]+)", output)
    return {(int(rank), int(step)): loss for rank, step, loss in rows}


def read(path: Path) -> list[torch.Tensor]:
    """Everything in a checkpoint of the example, read by one process."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    opt = optim.AdamW(model.parameters(), lr=1.0)
    opt.param_groups[0]["initial_lr"] = 1.0  # as a scheduler leaves it there
    shardstep.load(path, model, opt)
    state = [opt.state[param][key] for param in model.parameters() for key in ("step", "exp_avg", "exp_avg_sq")]
    return [*model.parameters(), *state, torch.tensor(opt.param_groups[0]["lr"], dtype=torch.float64)]


def is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    return folder, launch(2, EXAMPLE, "--folder", folder, "--smoke")


def test_killed_while_training_and_while_saving_it_ends_bit_for_bit_as_without(undisturbed, tmp_path):
    folder, output = undisturbed
    killed = launch(2, PROGRAM, "yes", "--folder", tmp_path, "--smoke")
    assert killed.count("is killed") == 2
    resumed = [int(step) for step in re.findall(r"rank 0 of 2 goes on after step (\d+)", killed)]
    assert resumed in ([3, 6], [6, 6]), "the one of step 9, which was being written, is no checkpoint"
    assert losses_of(killed) == losses_of(output)
    assert len(losses_of(output)) == 24
    assert is_same(read(tmp_path), read(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-12", "step-6", "step-9"]


def test_another_number_of_ranks_goes_on_with_the_same_state(undisturbed, tmp_path):
    folder, _ = undisturbed
    before = read(folder / "step-12")
    output = launch(3, PROGRAM, "no", "--folder", folder, "--steps", 14, RESUMED=str(tmp_path))
    assert "rank 2 of 3 goes on after step 12" in output
    assert is_same(read(tmp_path / "resumed"), before)
    assert {step for _, step in losses_of(output)} == {13, 14}
    assert (folder / "step-14" / "manifest.json").is_file()
