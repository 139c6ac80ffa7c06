"""Checkpoints and what can happen to them: each fault is a clear error on all ranks, and costs no other checkpoint."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import damage
import facing
import pytest

pytestmark = pytest.mark.slow  # make test-slow

RANKS = [1, 2]


def file_named_in(text: str, name: str) -> bool:
    return (".distcp" if name == "*.distcp" else name) in text


# -- damaged ones ------------------------------------------------------------------------------------------------------


def faces(title: str, folder: str) -> dict[str, Any]:
    return asdict(facing.face_damage(title, Path(folder)))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("title", damage.FAULTS)
def test_a_damaged_checkpoint_is_refused_by_name_and_the_one_before_still_loads(workers, tmp_path, title, ranks):
    fault = damage.FAULTS[title]
    for faced in workers(ranks).run(faces, title, str(tmp_path)):
        assert not faced["ran"], "code in the checkpoint was run"
        assert faced["loads_by_name"]
        if not fault.file:
            assert faced["error"] == "", "nobody reads it, so nobody minds"
            continue
        assert file_named_in(faced["error"], fault.file)
        assert "second" in faced["error"]
        assert faced["unchanged"], "a load that failed changed something"
        assert faced["loads_by_folder"]
        assert "skipped a damaged checkpoint" in faced["warned"]
        assert file_named_in(faced["warned"], fault.file)


# -- disks -------------------------------------------------------------------------------------------------------------


@contextmanager
def disk_or_skip(folder: Path) -> Iterator[None]:
    try:
        disk = damage.small_disk(folder, facing.DISK_KIB)
        disk.__enter__()
    except PermissionError as error:
        pytest.skip(f"{error}; the next test does the same without a file system of its own")
    try:
        yield
    finally:
        disk.__exit__(None, None, None)


def check_failed_save(rows: list[Any], words: list[str]) -> None:
    for faced in rows:
        assert any(word in faced["error"] for word in words), faced["error"]
        assert "second" in faced["error"], "the error names the file"
        assert faced["unchanged"]
        assert faced["loads_by_name"]
        assert faced["loads_by_folder"]
        assert not faced["warned"]


def faces_a_full_disk(folder: str, asynchronous: bool) -> dict[str, Any]:
    return asdict(facing.face_a_full_disk(Path(folder), asynchronous))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_full_disk_fails_the_save_on_all_ranks_and_the_one_before_still_loads(workers, tmp_path, ranks, asynchronous):
    with disk_or_skip(tmp_path):
        rows = workers(ranks).run(faces_a_full_disk, str(tmp_path), asynchronous)
        assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["first"], "no room is lost"
    check_failed_save(rows, ["No space left on device"])


def limit_files_to(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def faces_a_limit(folder: str, asynchronous: bool) -> dict[str, Any]:
    """The first rank may not write large files any more: a write fails in the middle, as on a full disk."""
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that the write raises
    try:
        return asdict(facing.face_a_save_that_fails(Path(folder), asynchronous, lambda run: limit_files_to(100_000)))
    finally:
        limit_files_to(resource.RLIM_INFINITY)
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_write_that_fails_in_the_middle_fails_the_save_on_all_ranks(workers, tmp_path, ranks, asynchronous):
    rows = workers(ranks).run(faces_a_limit, str(tmp_path), asynchronous)
    check_failed_save(rows, ["File too large"])
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["first"]


def faces_a_read_only_disk(folder: str, asynchronous: bool) -> dict[str, Any]:
    return asdict(facing.face_a_read_only_disk(Path(folder), asynchronous))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("ranks", RANKS)
def test_a_read_only_folder_fails_the_save_on_all_ranks_and_still_loads(workers, tmp_path, ranks, asynchronous):
    with disk_or_skip(tmp_path):
        rows = workers(ranks).run(faces_a_read_only_disk, str(tmp_path), asynchronous)
    check_failed_save(rows, ["Read-only file system"])


def faces_a_file_for_a_folder(folder: str) -> dict[str, Any]:
    """Nobody may write there either, not even root."""
    program = facing.Program().train(range(2))
    facing.on_first(lambda: Path(folder, "run").write_text("mine"))
    error = facing.error_of(lambda: program.save(Path(folder, "run", "second")))
    return {"error": error, "left": Path(folder, "run").read_text()}


@pytest.mark.parametrize("ranks", RANKS)
def test_a_file_in_place_of_the_folder_fails_the_save_on_all_ranks(workers, tmp_path, ranks):
    for row in workers(ranks).run(faces_a_file_for_a_folder, str(tmp_path)):
        assert str(tmp_path / "run") in row["error"]
        assert row["left"] == "mine"


# -- kills -------------------------------------------------------------------------------------------------------------


def verdicts_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    runner = Path(facing.__file__).with_name("faults_runner.py")
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, runner, "--folder", folder, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        timeout=110,
        env=os.environ | settings,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def check_verdicts(verdicts: list[dict[str, Any]]) -> None:
    for word in ("lost", "incomplete", "hung", "left"):
        assert not [verdict for verdict in verdicts if verdict[word]], word


def test_twenty_kills_at_random_moments_lose_nothing_and_hang_nobody(tmp_path):
    """The other 480, and two ranks at every file operation, are in benchmarks/faults.py."""
    verdicts = verdicts_of(tmp_path, "--kills", "20")
    assert len(verdicts) == 20
    check_verdicts(verdicts)


@pytest.mark.parametrize("sweep", [0, 6], ids=["a save that prunes", "a save of the same name"])
def test_a_kill_at_every_file_operation_of_a_save_loses_nothing_and_leaves_nothing(tmp_path, sweep):
    verdicts = verdicts_of(tmp_path, "--sweeps", str(sweep))
    moments = {verdict["moment"] for verdict in verdicts}
    assert {
        "before fsync",
        "after open of manifest.json",
        "before rmdir of .step" if sweep == 0 else "before fsync",
    } <= moments
    assert len(verdicts) > 35
    check_verdicts(verdicts)
