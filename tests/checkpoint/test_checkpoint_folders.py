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
from shardstep.comm.host_groups import separate_hosts
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
    other = folders.create_partial(tmp_path / "theirs", TOKEN)
    (other.path / "__0_0.distcp").write_text("half")
    shardstep.save(tmp_path / "ours", model, opt, keep=1)
    assert names(tmp_path) == [f".theirs.partial-{TOKEN}", "ours"]
    other.close(remove=False)  # as when it dies
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


# -- what is not the checkpoint's ------------------------------------------------------------------------------------


def refused(action: Any) -> str:
    kind, text = raised(action)
    assert kind == "ValueError", f"{kind}: {text}"
    return text


def saves_inside_a_checkpoint(folder: str) -> list[str]:
    """A GAN whose second network is saved in the folder of the first, in every way that leads there."""
    model, opt = small()
    run = Path(folder)
    first = dist.get_rank() == 0
    shardstep.save(run / "last", model, opt, extra={"n": 1})
    if first:
        (run / "link").symlink_to("last")
    dist.barrier()
    ways = ("last/disc", "last/new/disc", "link/disc", "last/new/../disc")
    texts = [refused(lambda way=way: shardstep.save(run / way, model, opt)) for way in ways]
    texts.append(refused(lambda: shardstep.save(run / "last/disc", model, opt, asynchronous=True)))
    shardstep.save(run / "last/../disc", model, opt, extra={"n": 2})  # which is beside it
    shardstep.save(run / "last", model, opt, extra={"n": 3})
    assert shardstep.load(run / "last", model, opt)["n"] == 3
    assert shardstep.load(run / "disc", model, opt)["n"] == 2
    return texts


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_inside_a_checkpoint_was_removed_by_the_next_save_of_that(workers, tmp_path, ranks):
    for texts in workers(ranks).run(saves_inside_a_checkpoint, str(tmp_path), timeout=60):
        for text in texts:
            assert f"is inside the checkpoint {tmp_path / 'last'}" in text
            assert "last-disc" in text, "it says where to save instead"
    assert names(tmp_path) == ["disc", "last", "link"]


def saves_over_notes(folder: str) -> list[str]:
    model, opt = small()
    last, first = Path(folder) / "last", dist.get_rank() == 0
    shardstep.save(last, model, opt, extra={"n": 1})
    if first:
        (last / "notes.txt").write_text("mine")
        (last / "plots").mkdir()
    dist.barrier()
    texts = [refused(lambda: shardstep.save(last, model, opt, extra={"n": 2}))]
    texts.append(refused(lambda: shardstep.save(last, model, opt, extra={"n": 2}, asynchronous=True)))
    assert shardstep.load(last, model, opt)["n"] == 1
    shardstep.save(last.with_name("next"), model, opt, keep=1)  # which would have removed it
    assert shardstep.load(last, model, opt)["n"] == 1
    dist.barrier()
    if first:
        (last / "notes.txt").unlink()
        (last / "plots").rmdir()
    dist.barrier()
    shardstep.save(last, model, opt, extra={"n": 2}, keep=1)
    assert shardstep.load(last, model, opt)["n"] == 2
    return texts


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_users_own_files_in_a_checkpoint_were_removed_by_a_save_of_its_name(workers, tmp_path, ranks):
    for texts in workers(ranks).run(saves_over_notes, str(tmp_path), timeout=60):
        assert all("notes.txt, plots" in text for text in texts), texts
    assert names(tmp_path) == ["last"]


def test_files_that_come_while_a_save_writes_stay_with_the_checkpoint_that_they_lie_in(tmp_path):
    model, opt = small()
    last = tmp_path / "last"
    shardstep.save(last, model, opt, extra={"n": 1})
    sealed = folders.sync

    def noted(path: Path) -> None:
        (last / "notes.txt").write_text("mine")
        sealed(path)

    with mock.patch.object(folders, "sync", noted), pytest.raises(ValueError, match=r"notes\.txt"):
        shardstep.save(last, model, opt, extra={"n": 2})
    assert names(tmp_path) == ["last"]
    assert (last / "notes.txt").read_text() == "mine"
    assert shardstep.load(last, model, opt)["n"] == 1


def test_other_files_in_a_checkpoint_with_a_damaged_manifest_are_not_removed_with_it(tmp_path):
    model, opt = small()
    last = tmp_path / "last"
    shardstep.save(last, model, opt)
    manifest = last / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:100])
    (last / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"notes\.txt"):
        shardstep.save(last, model, opt)
    (last / "notes.txt").unlink()
    shardstep.save(last, model, opt, extra={"n": 2})
    assert shardstep.load(last, model, opt)["n"] == 2


def saves_where_no_folder_can_be(folder: str) -> list[str]:
    model, opt = small()
    run = Path(folder)
    if dist.get_rank() == 0:
        (run / "file").write_text("mine")
        (run / "gone").symlink_to("nowhere")
    dist.barrier()
    return [
        refused(lambda way=way: shardstep.save(run / way, model, opt)) for way in ("file", "gone", "file/a", "gone/a")
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_save_over_a_file_or_a_link_that_leads_nowhere_says_what_to_do(workers, tmp_path, ranks):
    for texts in workers(ranks).run(saves_where_no_folder_can_be, str(tmp_path), timeout=60):
        words = ["is a file", "is a broken link", "is a file", "is a broken link"]
        for text, expected in zip(texts, words, strict=True):
            assert expected in text
            assert "give" in text
    assert names(tmp_path) == ["file", "gone"]
    assert (tmp_path / "file").read_text() == "mine"
