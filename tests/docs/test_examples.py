"""The example scripts run: `--smoke` is a few steps of each, on two ranks by torchrun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from repository import ROOT

pytestmark = pytest.mark.slow  # make test-slow

LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def run(*command: str) -> str:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def on_ranks(ranks: int, example: str, *arguments: str) -> str:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
    return run(*torchrun, f"examples/{example}", *arguments)


def on_two_ranks(example: str) -> str:
    return on_ranks(2, example, "--smoke")


def test_a_gan_trains_with_two_optimizers_and_loads_both():
    said = on_two_ranks("gan.py")
    assert "step 10: losses" in said
    assert all(f"rank {rank} loaded step 10" in said for rank in range(2))


def test_images_with_batchnorm_train_in_bf16_and_running_means_are_the_same_on_all_ranks():
    said = on_two_ranks("image_batchnorm.py").splitlines()
    means = {line.split()[-1] for line in said if "running means" in line}
    assert any(line.startswith("step 6: loss") for line in said)
    assert len(means) == 1


def test_the_slurm_script_is_a_valid_shell_script():
    """It is NOT run: there is no Slurm here."""
    if not Path("/bin/bash").exists():
        pytest.skip("there is no bash")
    run("/bin/bash", "-n", "examples/slurm.sbatch")
    assert "NOT RUN" in (ROOT / "examples" / "slurm.sbatch").read_text()


@pytest.mark.parametrize("options", [[], ["--muon"], ["--bf16"]], ids=["AdamW", "Muon", "bf16"])
def test_a_gpt_is_pretrained_and_goes_on_with_another_number_of_ranks(tmp_path, options):
    folder = ["--folder", str(tmp_path / "run"), *options]
    assert "step 8: loss" in on_ranks(2, "pretrain_gpt.py", "--smoke", "--steps", "8", *folder)
    said = on_ranks(3, "pretrain_gpt.py", "--smoke", "--steps", "12", *folder)
    assert "step 12: loss" in said
    assert "step 8: loss" not in said, "it does not begin anew"


@pytest.mark.parametrize("name", ["train_fast.py", "train_ddp.py", "zero2_by_hand.py"])
def test_the_first_examples_run(name):
    assert on_ranks(2, name)
