"""The command line: what it says to bad input, and one whole `shardstep demo` on two ranks."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import shardstep.cli
from shardstep.cli.app import app
from shardstep.cli.demo.launch import WorkerError


def invoke(*arguments: str):
    return CliRunner().invoke(app, arguments, prog_name="shardstep")


def test_version():
    assert invoke("--version").output == f"shardstep {version('shardstep')}\n"


def test_help_does_not_wait_for_torch():
    loaded = "import sys, shardstep.cli.app; sys.exit(bool({'torch', 'matplotlib'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", loaded], check=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--help"], "shardstep demo"),
        (["demo", "--help"], "shardstep demo"),
        (["inspect", "--help"], "shardstep inspect run"),
        (["convert", "--help"], "shardstep convert run model.pt --to torch"),
    ],
)
def test_help_shows_an_example_line(arguments, line):
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert f"\n      {line}\n" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--ranks", "0"], "--ranks must be between 1 and 16, got 0."),
        (["--ranks", "1000"], "--ranks must be between 1 and 16, got 1000."),
        (["--steps", "0"], "--steps must be at least 1, got 0."),
        (["--model", "huge"], "--model must be small or tiny, got 'huge'."),
        (["--optimizer", "sgd"], "--optimizer must be adamw or muon, got 'sgd'."),
    ],
)
def test_bad_input_gets_one_sentence_and_status_2(arguments, sentence, tmp_path):
    result = invoke("demo", "--out", str(tmp_path), *arguments)
    assert result.exit_code == 2
    assert result.output == f"shardstep demo: {sentence}\n"


def test_out_may_not_be_a_file(tmp_path):
    file = tmp_path / "taken"
    file.touch()
    for out in (file, file / "below"):
        result = invoke("demo", "--out", str(out))
        assert result.exit_code == 2
        assert result.output == f"shardstep demo: --out must be a folder, but {file} is a file; name another one.\n"


def test_everything_wrong_is_named_at_once(tmp_path):
    result = invoke("demo", "--ranks", "0", "--steps", "0", "--model", "huge", "--out", str(tmp_path))
    assert len(result.output.splitlines()) == 3


def test_no_subcommand_and_unknown_options_are_misuse():
    assert invoke().exit_code == 2
    assert invoke("demo", "--rank", "2").exit_code == 2


@pytest.mark.parametrize(
    ("raised", "status", "words"),
    [
        (WorkerError("rank 1 failed:\nValueError: no wind"), 1, "rank 1 failed:\nValueError: no wind"),
        (KeyboardInterrupt(), 130, "stopped; the workers have ended."),
    ],
)
def test_a_run_that_ends_early_says_why(raised, status, words, monkeypatch, tmp_path):
    def end_early(*arguments):
        raise raised

    monkeypatch.setattr("shardstep.cli.app.run_workers", end_early)
    result = invoke("demo", "--out", str(tmp_path))
    assert result.exit_code == status
    assert result.output.endswith(f"shardstep demo: {words}\n")


def test_missing_extras_get_one_sentence(monkeypatch, capsys):
    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in ("rich", "matplotlib") else ModuleSpec(name, loader=None)

    monkeypatch.setattr("shardstep.cli.find_spec", find_spec)
    with pytest.raises(SystemExit) as exit_:
        shardstep.cli.main()
    assert exit_.value.code == 1
    assert capsys.readouterr().err == (
        'shardstep: the command line needs rich and matplotlib, not installed here: run pip install "shardstep[cli]".\n'
    )


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_whole_demo(tmp_path, optimizer):
    command = [sys.executable, "-c", "from shardstep.cli import main; main()", "demo", "--optimizer", optimizer]
    arguments = ["--model", "tiny", "--steps", "12", "--ranks", "2", "--out", str(tmp_path / "new" / "folder")]
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert "\x1b" not in run.stdout  # not a terminal: no bars, no colours
    assert "\r" not in run.stdout
    assert len(run.stdout.splitlines()) < 50
    assert "shard(): step 12 of 12" in run.stdout
    assert "DDP + drop-in equal bits, shard() equal bits." in run.stdout
    pictures = [Path(line.rpartition(": ")[2]) for line in run.stdout.splitlines()[-2:]]
    assert [picture.name for picture in pictures] == ["memory.png", "step.png"]
    for picture in pictures:
        assert picture.parent == tmp_path / "new" / "folder"
        assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "proposed"),
    [
        ("con", ["convert"]),
        ("demo --model t", ["tiny"]),
        ("demo --optimizer ", ["adamw", "muon"]),
        ("convert --to s", ["safetensors"]),
    ],
)
def test_a_shell_completes_commands_and_values(line, proposed):
    words = f"shardstep {line}"
    asked = {"_SHARDSTEP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="shardstep", env=asked)
    assert result.output.split() == proposed


def test_python_m_shardstep_is_the_command():
    command = [sys.executable, "-m", "shardstep", "--version"]
    assert subprocess.check_output(command, text=True, timeout=60) == f"shardstep {version('shardstep')}\n"
