"""The wheel in an environment that has nothing else of this repository, from a folder outside it: `make test-wheel`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from zipfile import ZipFile

import pytest

import shardstep
from repository import ROOT

pytestmark = pytest.mark.skipif(
    "SHARDSTEP_WHEEL" not in os.environ, reason="no wheel is installed; make test-wheel does"
)


def run_outside(folder: Path, *command: str, **more: str) -> str:
    """A program of the wheel's environment, with nothing that leads back here."""
    bin_folder = Path(os.environ["SHARDSTEP_WHEEL"]).resolve() / "bin"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment |= {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1", **more}
    done = subprocess.run(
        [str(bin_folder / command[0]), *command[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_the_wheel_that_is_imported(tmp_path):
    found = run_outside(tmp_path, "python", "-c", "import shardstep; print(shardstep.__file__, shardstep.__version__)")
    path, version = found.split()
    assert Path(path).is_relative_to(Path(os.environ["SHARDSTEP_WHEEL"]).resolve())
    assert version == shardstep.__version__


def test_the_wheel_has_the_package_and_nothing_else():
    (wheel,) = (ROOT / "dist").glob("*.whl")
    names = set(ZipFile(wheel).namelist())
    own = {f"shardstep/{path.relative_to(ROOT / 'src/shardstep')}" for path in (ROOT / "src/shardstep").rglob("*.py")}
    assert {name for name in names if name.startswith("shardstep/")} == own | {"shardstep/py.typed"}
    assert {name.split("/")[0] for name in names} == {"shardstep", f"shardstep-{shardstep.__version__}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)


@pytest.mark.parametrize("command", [["shardstep"], ["python", "-m", "shardstep"]], ids=" ".join)
def test_the_command_is_there_under_both_names(command, tmp_path):
    assert run_outside(tmp_path, *command, "--version") == f"shardstep {shardstep.__version__}\n"


def test_a_shell_completes_it(tmp_path):
    asked = {"_SHARDSTEP_COMPLETE": "complete_bash", "COMP_WORDS": "shardstep ins", "COMP_CWORD": "1"}
    assert run_outside(tmp_path, "shardstep", **asked).split() == ["inspect"]


def test_the_demo_trains_and_draws(tmp_path):
    said = run_outside(tmp_path, "shardstep", "demo", "--model", "tiny", "--steps", "5", "--out", "pictures")
    assert "shard()" in said
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 2


def test_an_example_trains_with_torchrun(tmp_path):
    shutil.copy(ROOT / "examples/train_fast.py", tmp_path)
    run_outside(tmp_path, "torchrun", "--standalone", "--nproc-per-node", "2", "train_fast.py")


def test_frameworks_are_not_needed(tmp_path):
    listed = run_outside(tmp_path, "python", "-m", "pip", "list", "--format", "freeze").lower()
    assert not [name for name in ("lightning", "accelerate", "transformers", "ray") if f"\n{name}==" in listed]
