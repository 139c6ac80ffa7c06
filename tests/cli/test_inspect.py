"""shardstep inspect and shardstep convert on the command line: what they say, and their status."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from typer.testing import CliRunner

import shardstep
from checkpointing import KINDS, train
from converting import to, trained
from repository import FIXTURES
from shardstep.cli.app import app

pytestmark = pytest.mark.slow  # make test-slow


def invoke(*arguments: object):
    return CliRunner().invoke(app, [str(one) for one in arguments], prog_name="shardstep")


@pytest.fixture
def run(tmp_path):
    model, opt = trained()
    for step in (10, 20, 30):
        shardstep.save(tmp_path / "run" / f"step-{step}", model, opt, extra={"step": step, "note": "words"})
    return tmp_path / "run"


def damage(checkpoint: Path) -> Path:
    file = next(checkpoint.glob("*.distcp"))
    payload = bytearray(file.read_bytes())
    payload[len(payload) // 2] ^= 1
    file.write_bytes(payload)
    return file


# -- inspect -----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_described(run):
    result = invoke("inspect", run / "step-20")
    assert result.exit_code == 0
    for words in (
        "step 20",
        f"by shardstep {shardstep.__version__}, torch {torch.__version__}, 1 rank",
        "11 tensors in the model, 300 elements (297 float32, 3 int64); the optimizer has 10 parameters",
        "extra: step, note",
        "state exp_avg_sq",
        "group 0: torch.optim.adamw.AdamW, 10 parameters, 297 elements: lr=0.003, betas=[0.9, 0.999]",
        "complete: 3 files, sizes and checksums as they were written",
    ):
        assert words in result.output
    assert "sizes as they were written" in invoke("inspect", run / "step-20", "--quick").output


def test_json_has_the_same_for_machines(run):
    found = json.loads(invoke("inspect", run / "step-20", "--json").output)
    assert (found["step"], found["elements"], found["is_whole"]) == (20, 300, True)
    assert found["nbytes"]["model"] == 297 * 4 + 3 * 8
    assert found["nbytes"]["state exp_avg"] == (297 - 6 - 4) * 4  # frozen and unused have none
    assert found["groups"][0]["options"]["betas"] == [0.9, 0.999]
    assert found["writer"]["ranks"] == "1"
    listed = json.loads(invoke("inspect", run, "--json").output)
    assert [one["step"] for one in listed] == [30, 20, 10]


def test_a_folder_lists_its_checkpoints_newest_first_and_marks_the_damaged_one(run):
    assert invoke("inspect", run).exit_code == 0
    file = damage(run / "step-20")
    result = invoke("inspect", run)
    assert result.exit_code == 1
    rows = result.stdout.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["step-30", "step-20", "step-10"]
    assert [row.split()[-1] for row in rows] == ["complete", "DAMAGED", "complete"]
    assert f"{file} is damaged" in result.stderr
    assert invoke("inspect", run, "--quick").exit_code == 0  # sizes are right


@pytest.mark.parametrize("how", ["changed", "cut", "gone"])
@pytest.mark.parametrize("what", ["__0_0.distcp", "contents.json", "manifest.json"])
def test_damage_gives_status_1_and_the_file(run, how, what):
    file = run / "step-30" / what
    if how == "changed":
        payload = bytearray(file.read_bytes())
        payload[len(payload) // 2] ^= 1
        file.write_bytes(payload)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:50])
    else:
        file.unlink()
    result = invoke("inspect", run / "step-30")
    assert result.exit_code == 1
    assert what in result.stderr


def saves_narrow(folder: str) -> None:
    model, opt = KINDS["averaged"].build()
    train(model, opt, range(1))
    shardstep.save(f"{folder}/saved", model, opt)


def test_masters_and_averages_are_counted_by_themselves(workers, tmp_path):
    workers(2).run(saves_narrow, str(tmp_path))
    found = json.loads(invoke("inspect", tmp_path / "saved", "--json").output)
    assert found["writer"]["ranks"] == "2"
    assert found["nbytes"]["masters"] == found["nbytes"]["state exp_avg"] + 4 * 4  # unused has a master and no moment


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_foreign_ones_are_said_what_they_are_and_what_can_be_done(run, tmp_path):
    model, opt = trained()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "plain.pt")
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    to("safetensors", run, tmp_path / "weights.safetensors")
    for path, kind in (
        (tmp_path / "plain.pt", "a file of torch.save"),
        (tmp_path / "stock", "a folder of torch.distributed.checkpoint"),
        (tmp_path / "weights.safetensors", "safetensors"),
        (FIXTURES / "deepspeed" / "stage2-bf16", "a checkpoint of DeepSpeed"),
    ):
        result = invoke("inspect", path)
        assert result.exit_code == 0
        assert f"{path}: {kind}\n" in result.output
        assert f"`shardstep convert {path} DST --to dcp` makes a checkpoint" in result.output


def test_what_is_nothing_known_is_misuse(tmp_path):
    (tmp_path / "notes.txt").write_text("words and more words")
    for path, words in (
        (tmp_path / "gone", "there is nothing at"),
        (tmp_path / "notes.txt", "neither a file of torch.save nor of safetensors"),
        (tmp_path, "is not a checkpoint of a known format; it contains notes.txt"),
    ):
        result = invoke("inspect", path)
        assert result.exit_code == 2
        assert result.output.startswith("shardstep inspect: ")
        assert words in result.output


def test_a_file_of_a_checkpoint_is_told_its_folder(run):
    for name in ("manifest.json", ".metadata", "__0_0.distcp"):
        result = invoke("inspect", run / "step-20" / name)
        assert result.exit_code == 2
        assert f"is one file of a checkpoint of shardstep: give its folder, {run}/step-20" in result.output.replace(
            "\n", " "
        )


# -- convert -----------------------------------------------------------------------------------------------------------


def test_a_whole_conversion_in_a_process_of_its_own(run, tmp_path):
    command = [sys.executable, "-c", "from shardstep.cli import main; main()"]
    made = tmp_path / "new" / "model.pt"
    done = subprocess.run(
        [*command, "convert", str(run), str(made), "--to", "torch"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{made}: torch, from a checkpoint of shardstep, 3.5 kB of tensors.\n"
    assert torch.load(made, weights_only=True)["extra"]["step"] == 30


def test_notes_are_told(run, tmp_path):
    result = invoke("convert", run, tmp_path / "w", "--to", "safetensors")
    assert result.exit_code == 0
    assert "note: safetensors cannot contain the optimizer's state" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--to", "onnx"], "--to must be torch, dcp or safetensors, got 'onnx'."),
        (["--to", "dcp", "--with-state"], "--with-state is for --to safetensors"),
        (["--to", "safetensors", "--shard-mb", "0"], "--shard-mb must be at least 1, got 0."),
        (["--to", "dcp", "--names", "no-such-file"], "--names must be a file, and no-such-file is not a file."),
    ],
)
def test_bad_arguments_get_a_sentence_and_status_2(run, tmp_path, arguments, sentence):
    result = invoke("convert", run, tmp_path / "made", *arguments)
    assert result.exit_code == 2
    assert f"shardstep convert: {sentence}" in result.output
    assert not (tmp_path / "made").exists()


def test_status_says_whose_fault_it_was(run, tmp_path):
    (tmp_path / "taken").touch()
    assert invoke("convert", run, tmp_path / "taken", "--to", "torch").exit_code == 2
    assert invoke("convert", run, tmp_path / "taken", "--to", "torch", "--force").exit_code == 0
    assert invoke("convert", tmp_path / "gone", tmp_path / "made", "--to", "torch").exit_code == 2
    damage(run / "step-20")
    result = invoke("convert", run / "step-20", tmp_path / "made", "--to", "torch")
    assert result.exit_code == 1
    assert "is damaged" in result.output


def test_an_interrupted_conversion_says_so(run, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardstep.convert.to_torch.write", interrupted)
    result = invoke("convert", run, tmp_path / "made", "--to", "torch")
    assert (result.exit_code, result.output) == (130, "shardstep convert: stopped; nothing was written.\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
