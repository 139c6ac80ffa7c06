"""What those who were killed leave behind, and what is done about it: each test is named after what was seen."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from checkpointing import KINDS, train
from shardstep.checkpoint import folder as folders
from shardstep.checkpoint.background import stage
from shardstep.checkpoint.storage import write_parts
from shardstep.wire.hosts import separate_hosts
from training import raised

pytestmark = pytest.mark.slow  # make test-slow

TOKEN = "0123abcd"


def small() -> tuple[nn.Module, optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Killed(BaseException):
    """In place of SIGKILL: nothing that follows is done."""


def killed_at(name: str, number: int = 0) -> Any:
    """The `number`-th call of a function of folder.py's is the end; its exceptions are not BaseExceptions."""
    calls = iter(range(1000))
    true = getattr(folders, name)

    def call(*arguments: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise Killed
        return true(*arguments, **options)

    return mock.patch.object(folders, name, call)


# -- pruned, put aside, left -------------------------------------------------------------------------------------------


def test_a_prune_that_was_killed_half_way_does_not_block_its_name(tmp_path):
    model, opt = small()
    shardstep.save(tmp_path / "a", model, opt)
    with mock.patch.object(folders.shutil, "rmtree", side_effect=Killed), pytest.raises(Killed):
        shardstep.save(tmp_path / "b", model, opt, keep=1)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["b"]
    shardstep.save(tmp_path / "a", model, opt, keep=2)
    assert names(tmp_path) == ["a", "b"]


def test_what_killed_saves_left_is_removed_by_the_next_save_of_any_name(tmp_path):
    model, opt = small()
    for left in (f".step-1.partial-{TOKEN}", f".step-2.removed-{TOKEN}"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "__0_0.distcp").write_text("half")
    shardstep.save(tmp_path / "step-3", model, opt)  # and nothing was said of how many to keep
    assert names(tmp_path) == ["step-3"]


def test_a_checkpoint_that_another_job_is_writing_is_not_swept_away(tmp_path):
    model, opt = small()
    other = folders.begin(tmp_path / "theirs", TOKEN)
    (other.path / "__0_0.distcp").write_text("half")
    shardstep.save(tmp_path / "ours", model, opt, keep=1)
    assert names(tmp_path) == [f".theirs.partial-{TOKEN}", "ours"]
    other.end(remove=False)  # as when it dies
    shardstep.save(tmp_path / "ours", model, opt, keep=1)
    assert names(tmp_path) == ["ours"]


def test_without_locks_what_was_written_lately_is_left_alone(tmp_path):
    model, opt = small()
    fresh, old = (tmp_path / f".{name}.partial-{TOKEN}" for name in ("fresh", "old"))
    for one in (fresh, old):
        one.mkdir()
    os.utime(old, (1, 1))
    with mock.patch.object(folders.fcntl, "flock", side_effect=OSError(38, "not implemented")):
        shardstep.save(tmp_path / "a", model, opt)
    assert names(tmp_path) == [fresh.name, "a"]


@pytest.mark.parametrize("name", ["a", "step[1]", "a*b", "of.partial-1"])
def test_killed_between_the_two_renames_the_one_put_aside_is_found_by_name_and_by_folder(tmp_path, name):
    model, opt = small()
    shardstep.save(tmp_path / name, model, opt, extra={"step": 1})
    shardstep.save(tmp_path / "other", model, opt, extra={"step": 2})
    shardstep.save(tmp_path / name, model, opt, extra={"step": 3})
    (tmp_path / name).rename(tmp_path / f".{name}.replaced-{TOKEN}")
    assert shardstep.load(tmp_path / name, model, opt)["step"] == 3
    assert shardstep.load(tmp_path, model, opt)["step"] == 3
    shardstep.save(tmp_path / name, model, opt, extra={"step": 4})
    assert names(tmp_path) == sorted([name, "other"])


def test_one_that_was_put_aside_and_replaced_does_not_count_among_those_that_are_kept(tmp_path):
    model, opt = small()
    shardstep.save(tmp_path / "old", model, opt)
    shardstep.save(tmp_path / "a", model, opt)
    with killed_at("remove"), pytest.raises(Killed):
        shardstep.save(tmp_path / "a", model, opt)
    assert len(names(tmp_path)) == 3
    folders.prune(tmp_path, 2)
    assert [name for name in names(tmp_path) if not name.startswith(".")] == ["a", "old"]


def test_a_rename_that_fails_gives_the_one_before_its_name_back(tmp_path):
    model, opt = small()
    shardstep.save(tmp_path / "a", model, opt, extra={"step": 1})
    true = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if ".partial-" in path.name:
            raise OSError(5, "Input/output error", str(path))
        return true(path, target)

    with mock.patch.object(Path, "rename", fails), pytest.raises(OSError, match="partial"):
        shardstep.save(tmp_path / "a", model, opt, extra={"step": 2})
    assert names(tmp_path) == ["a"]
    assert shardstep.load(tmp_path / "a", model, opt)["step"] == 1


def test_a_name_like_ours_that_the_program_chose_is_loaded(tmp_path):
    model, opt = small()
    shardstep.save(tmp_path / "best.partial-1", model, opt, extra={"step": 1})
    assert shardstep.load(tmp_path, model, opt)["step"] == 1


def test_an_old_one_that_cannot_be_removed_stays_whole_and_does_not_fail_the_save(tmp_path):
    model, opt = small()
    shardstep.save(tmp_path / "a", model, opt, extra={"step": 1})
    true = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == "a":
            raise PermissionError(1, "Operation not permitted", str(path))
        return true(path, target)

    with mock.patch.object(Path, "rename", fails):
        shardstep.save(tmp_path / "b", model, opt, keep=1)
    assert shardstep.load(tmp_path / "a", model, opt)["step"] == 1


# -- durable -----------------------------------------------------------------------------------------------------------


def test_every_file_and_every_new_folder_is_durable_before_the_checkpoint_has_its_name(tmp_path):
    """Where power fails, what was not synchronized may be there by name and have no bytes."""
    model, opt = small()
    synced: list[str] = []
    true, renamed = os.fsync, Path.rename

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        true(handle)

    before: list[str] = []

    def rename(path: Path, target: Path) -> Path:
        before.extend(synced)
        return renamed(path, target)

    with mock.patch.object(os, "fsync", fsync), mock.patch.object(Path, "rename", rename):
        shardstep.save(tmp_path / "new" / "run" / "a", model, opt)
    files = {Path(path).name for path in before if ".partial-" in Path(path).parent.name}
    assert {path.name for path in (tmp_path / "new" / "run" / "a").iterdir()} <= files
    assert any(Path(path).name.startswith(".a.partial-") for path in before), "their names"
    assert {str(tmp_path), str(tmp_path / "new")} <= set(before), "the folders above, which are new"
    assert synced[-1] == str(tmp_path / "new" / "run"), "and last the new name"


# -- failures on one rank ----------------------------------------------------------------------------------------------


def cannot_copy(folder: str) -> tuple[str, str]:
    """What an asynchronous save copies does not fit into one rank's memory."""
    model, opt = KINDS["flat"].build()
    train(model, opt, range(1))
    fails = mock.Mock(side_effect=RuntimeError("out of memory"))
    name = "shardstep.checkpoint.saving.stage"
    with mock.patch(name, fails if dist.get_rank() == 1 else stage):
        told = raised(lambda: shardstep.save(f"{folder}/a", model, opt, asynchronous=True))
    shardstep.save(f"{folder}/b", model, opt)
    return told


def test_an_asynchronous_save_that_one_rank_has_no_memory_for_raises_on_all_and_does_not_hang(workers, tmp_path):
    for kind, text in workers(2).run(cannot_copy, str(tmp_path), timeout=20):
        assert (kind, "out of memory" in text) == ("RuntimeError", True)
    assert names(tmp_path) == ["b"]


def waits_for_a_peer_that_does_not_come() -> float:
    group = dist.new_group([0, 1], timeout=timedelta(seconds=2))  # the store of the pool waits for a minute
    seconds = 0.0
    if dist.get_rank() == 0:
        begin = time.monotonic()
        with pytest.raises(RuntimeError):
            separate_hosts(group, "a test")
        seconds = time.monotonic() - begin
    dist.barrier()
    return seconds


def test_a_rank_whose_peer_died_just_before_the_first_asynchronous_save_waits_no_longer_than_its_group(workers):
    assert workers(2).run(waits_for_a_peer_that_does_not_come)[0] < 15


class Opinionated(nn.Module):
    """Keeps something that is no tensor, and may refuse what it is given."""

    def __init__(self, word: str, *, refuses: bool = False) -> None:
        super().__init__()
        self.inner, self.word, self.refuses = nn.Linear(3, 2), word, refuses

    def get_extra_state(self) -> dict[str, str]:
        return {"word": self.word}

    def set_extra_state(self, state: dict[str, str]) -> None:
        if self.refuses and state["word"] != self.word:
            raise ValueError("I have a word already")
        self.word = state["word"]


def refuses_on_one_rank(folder: str) -> list[Any]:
    model = Opinionated("saved")
    shardstep.save(f"{folder}/a", model, shardstep.shard(model, optim.AdamW, lr=0.1))
    other = Opinionated("own", refuses=dist.get_rank() == 1)
    opt = shardstep.shard(other, optim.AdamW, lr=0.1)
    before = [param.detach().clone() for param in other.parameters()]
    told = raised(lambda: shardstep.load(f"{folder}/a", other, opt))
    same = all(torch.equal(one, two) for one, two in zip(before, other.parameters(), strict=True))
    return [told, other.word, same]


def test_a_module_that_refuses_its_extra_state_on_one_rank_leaves_all_as_they_were(workers, tmp_path):
    for (kind, text), word, same in workers(2).run(refuses_on_one_rank, str(tmp_path)):
        assert (kind, "I have a word" in text, word, same) == ("ValueError", True, "own", True)


def refuses_state_on_one_rank(folder: str) -> list[Any]:
    def refuse(*_: Any) -> None:
        raise ValueError("not this state")

    model, opt = small()
    shardstep.save(f"{folder}/a", model, opt)
    other, again = small()
    if dist.get_rank() == 1:
        again.register_load_state_dict_pre_hook(refuse)
    with torch.no_grad():
        other.weight.zero_()
    told = raised(lambda: shardstep.load(f"{folder}/a", other, again))
    return [told, bool((other.weight == 0).all())]


def test_an_optimizer_that_refuses_its_state_on_one_rank_raises_on_all_and_no_weight_is_loaded(workers, tmp_path):
    for (kind, text), unchanged in workers(2).run(refuses_state_on_one_rank, str(tmp_path)):
        assert (kind, "not this state" in text, unchanged) == ("ValueError", True, True)


def fails_in_the_thread(folder: str, then: str) -> list[tuple[str, str]]:
    model, opt = KINDS["flat"].build()
    train(model, opt, range(1))
    shardstep.save(f"{folder}/first", model, opt)
    fails = mock.Mock(side_effect=OSError(28, "No space left on device", "there"))
    name = "shardstep.checkpoint.saving.write_parts"
    with mock.patch(name, fails if dist.get_rank() == 1 else write_parts):
        saving = shardstep.save(f"{folder}/second", model, opt, asynchronous=True)
        saving._thread.join()
    calls = {"load": lambda: shardstep.load(f"{folder}/first", model, opt), "wait": saving.wait}
    before = [param.detach().clone() for param in model.parameters()]
    told = raised(calls[then])
    assert all(torch.equal(one, two) for one, two in zip(before, model.parameters(), strict=True))
    shardstep.load(f"{folder}/first", model, opt)  # told once
    return [told]


@pytest.mark.parametrize("then", ["load", "wait"])
def test_an_asynchronous_failure_is_raised_on_all_ranks_by_a_load_and_by_wait(workers, tmp_path, then):
    for ((kind, text),) in workers(2).run(fails_in_the_thread, str(tmp_path), then):
        assert (kind, "No space left" in text) == ("OSError", True)


PROGRAM = """
import sys, resource, signal, torch, shardstep
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
model = torch.nn.Linear(300, 300)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
shardstep.save(sys.argv[1] + "/a", model, asynchronous=True)
"""


def test_a_program_that_ends_without_another_call_says_that_its_last_save_failed(tmp_path):
    done = subprocess.run([sys.executable, "-c", PROGRAM, tmp_path], capture_output=True, text=True, timeout=60)
    assert "a checkpoint could not be saved" in done.stderr
    assert "File too large" in done.stderr
    assert names(tmp_path) == []


def test_a_program_that_ends_without_another_call_has_its_last_save(tmp_path):
    program = PROGRAM.replace("(1000, 1000)", "(10**7, 10**7)")
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
    shardstep.load(tmp_path / "a", nn.Linear(300, 300))
