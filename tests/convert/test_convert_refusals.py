"""What convert and inspect refuse: pickles that run code, damage, places that are taken; and nothing is left behind."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import shardstep
from converting import same, to, trained
from repository import FIXTURES
from shardstep.convert.inspection import inspect_checkpoint
from shardstep.convert.source import SourceError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Evil:
    """Makes a file when it is unpickled by anything that allows it."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return open, (str(self.mark), "w")


@pytest.fixture
def mark(tmp_path):
    return tmp_path / "code-was-run"


def evil_bytes(mark: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Evil(mark), buffer)
    return buffer.getvalue()


def torch_file(folder: Path, mark: Path) -> Path:
    torch.save({"model": {"a": torch.ones(2)}, "extra": Evil(mark)}, folder / "evil.pt")
    return folder / "evil.pt"


def old_torch_file(folder: Path, mark: Path) -> Path:
    torch.save({"a": Evil(mark)}, folder / "evil.pt", _use_new_zipfile_serialization=False)
    return folder / "evil.pt"


def bare_pickle(folder: Path, mark: Path) -> Path:
    (folder / "evil.pt").write_bytes(pickle.dumps(Evil(mark)))
    return folder / "evil.pt"


def named_safetensors(folder: Path, mark: Path) -> Path:
    torch.save({"a": Evil(mark)}, folder / "evil.safetensors")
    return folder / "evil.safetensors"


def dcp_folder(folder: Path) -> Path:
    dcp.save({"model": {"a": torch.ones(2)}, "note": "words"}, checkpoint_id=folder / "evil", no_dist=True)
    return folder / "evil"


def dcp_description(folder: Path, mark: Path) -> Path:
    made = dcp_folder(folder)
    (made / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    return made


def dcp_description_within(folder: Path, mark: Path) -> Path:
    made = dcp_folder(folder)
    description = pickle.loads((made / ".metadata").read_bytes())
    description.planner_data = {"x": Evil(mark)}
    (made / ".metadata").write_bytes(pickle.dumps(description))
    return made


def dcp_entry(key: str):
    def make(folder: Path, mark: Path) -> Path:
        made = dcp_folder(folder)
        description = pickle.loads((made / ".metadata").read_bytes())
        for index, info in description.storage_data.items():
            if index.fqn == key:
                info.relative_path, info.offset, info.length = "evil.distcp", 0, len(evil_bytes(mark))
        (made / ".metadata").write_bytes(pickle.dumps(description))
        (made / "evil.distcp").write_bytes(evil_bytes(mark))
        return made

    return make


def shardstep_block(folder: Path, mark: Path) -> Path:
    """With sums that are right: whoever changes a file can change these too."""
    made = folder / "evil"
    shardstep.save(made, nn.Linear(2, 2))
    file = next(made.glob("*.distcp"))
    contents = json.loads((made / "contents.json").read_text())
    chunk = contents["tensors"]["model.weight"]["chunks"][0]
    chunk["start"], chunk["length"] = file.stat().st_size, len(evil_bytes(mark))
    (made / "contents.json").write_text(json.dumps(contents))
    file.write_bytes(file.read_bytes() + evil_bytes(mark))
    reseal(made)
    return made


def reseal(made: Path) -> None:
    outer = json.loads((made / "manifest.json").read_text())
    inner = json.loads(outer["manifest"])
    for name, one in inner["files"].items():
        payload = (made / name).read_bytes()
        one["nbytes"], one["crc32"] = len(payload), zlib.crc32(payload)
    text = json.dumps(inner)
    (made / "manifest.json").write_text(json.dumps({"crc32": zlib.crc32(text.encode()), "manifest": text}))


def deepspeed_model(folder: Path, mark: Path) -> Path:
    return deepspeed(folder, "mp_rank_00_model_states.pt", mark)


def deepspeed_state(folder: Path, mark: Path) -> Path:
    return deepspeed(folder, "zero_pp_rank_1_mp_rank_00_optim_states.pt", mark)


def deepspeed(folder: Path, name: str, mark: Path) -> Path:
    made = folder / "evil"
    shutil.copytree(FIXTURES / "deepspeed" / "stage1-fp32", made)
    torch.save({"module": {"a": torch.ones(2)}, "optimizer_state_dict": Evil(mark)}, made / "global_step3" / name)
    return made


@pytest.mark.parametrize(
    "make",
    [
        torch_file, old_torch_file, bare_pickle, named_safetensors, dcp_description, dcp_description_within,
        dcp_entry("model.a"), dcp_entry("note"), shardstep_block, deepspeed_model, deepspeed_state,
    ],
)  # fmt: skip
def test_what_would_run_code_is_refused_by_name_and_not_run(tmp_path, mark, make):
    source = make(tmp_path, mark)
    before = sorted(tmp_path.rglob("*"))
    for kind in ("torch", "dcp", "safetensors"):
        with pytest.raises(SourceError, match=r"open|cannot be read|no description"):
            to(kind, source, tmp_path / "new" / "made")
    assert not mark.exists()
    assert sorted(tmp_path.rglob("*")) == before  # nor is anything left


def test_the_name_of_what_is_asked_for_is_told(tmp_path, mark):
    with pytest.raises(SourceError, match=r"evil\.pt asks for (io|builtins|_io)\.open"):
        to("dcp", torch_file(tmp_path, mark), tmp_path / "made")
    (tmp_path / "evil").mkdir()
    with pytest.raises(SourceError, match=r"\.metadata asks for (io|builtins|_io)\.open"):
        to("dcp", dcp_description(tmp_path / "evil", mark), tmp_path / "made")


def test_the_pickle_that_stock_programs_read_is_never_read_here(tmp_path, mark):
    model, opt = trained()
    shardstep.save(tmp_path / "saved", model, opt)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Evil(mark)))
    reseal(tmp_path / "saved")
    to("torch", tmp_path / "saved", tmp_path / "made.pt")
    same(dict(model.state_dict()), torch.load(tmp_path / "made.pt", weights_only=True)["model"])
    assert not mark.exists()


def test_files_outside_of_the_folder_are_not_read(tmp_path):
    made = dcp_folder(tmp_path)
    description = pickle.loads((made / ".metadata").read_bytes())
    for info in description.storage_data.values():
        info.relative_path = f"../{info.relative_path}"
    (made / ".metadata").write_bytes(pickle.dumps(description))
    with pytest.raises(SourceError, match="not in the folder"):
        to("torch", made, tmp_path / "made.pt")


# -- safetensors that lie ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        (10**12).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        b'X\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'.ljust(96),
        b'X\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,-16]}}'.ljust(96),
        b'X\0\0\0\0\0\0\0{"a":{"dtype":"F33","shape":[4],"data_offsets":[0,16]}}'.ljust(112),
    ],
)
def test_damaged_safetensors_are_refused(tmp_path, payload):
    (tmp_path / "bad.safetensors").write_bytes(payload)
    with pytest.raises(SourceError, match=r"bad\.safetensors is damaged"):
        to("torch", tmp_path / "bad.safetensors", tmp_path / "made.pt")


# -- damage ------------------------------------------------------------------------------------------------------------


def test_a_damaged_checkpoint_is_refused_and_the_file_named(tmp_path):
    model, opt = trained()
    shardstep.save(tmp_path / "saved", model, opt)
    file = next((tmp_path / "saved").glob("*.distcp"))
    payload = bytearray(file.read_bytes())
    payload[len(payload) // 2] ^= 1
    file.write_bytes(payload)
    with pytest.raises(SourceError, match=rf"{file.name} is damaged"):
        to("torch", tmp_path / "saved", tmp_path / "made.pt")
    file.write_bytes(payload[:100])
    with pytest.raises(SourceError, match=rf"{file.name} has 100 bytes"):
        to("torch", tmp_path / "saved", tmp_path / "made.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]


def test_of_a_folder_the_newest_whole_one_is_converted_and_the_other_told_of(tmp_path):
    model, opt = trained()
    for step in range(3):
        shardstep.save(tmp_path / "run" / f"step-{step}", model, opt, extra={"step": step})
    next((tmp_path / "run" / "step-2").glob("*.distcp")).write_bytes(b"")
    done = to("torch", tmp_path / "run", tmp_path / "made.pt")
    assert torch.load(tmp_path / "made.pt", weights_only=True)["extra"]["step"] == 1
    assert any("step-2" in note for note in done.notes)


@pytest.mark.parametrize("name", ["mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_deepspeed_checkpoint_is_refused_and_the_file_named(tmp_path, name, damage):
    shutil.copytree(FIXTURES / "deepspeed" / "stage1-fp32", tmp_path / "source")
    file = tmp_path / "source" / "global_step3" / name
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:1000])
    else:
        file.unlink()
    with pytest.raises(SourceError, match=name if damage == "cut" or "model" in name else "files of 1 ranks"):
        to("dcp", tmp_path / "source", tmp_path / "made")
    assert not (tmp_path / "made").exists()


def test_a_dcp_folder_with_a_file_cut_off_is_refused(tmp_path):
    made = dcp_folder(tmp_path)
    file = next(made.glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(SourceError, match=file.name):
        to("torch", made, tmp_path / "made.pt")


def test_a_description_that_does_not_cover_a_tensor_is_refused(tmp_path):
    made = dcp_folder(tmp_path)
    description = pickle.loads((made / ".metadata").read_bytes())
    description.state_dict_metadata["model.a"].size = torch.Size([5])
    (made / ".metadata").write_bytes(pickle.dumps(description))
    with pytest.raises(SourceError, match=r"incomplete: 2 of the 5 elements of model\.a are stored"):
        to("torch", made, tmp_path / "made.pt")


# -- places that are taken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
def test_what_is_there_stays_unless_forced(tmp_path, kind):
    model, opt = trained()
    shardstep.save(tmp_path / "saved", model, opt)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("mine")
    with pytest.raises(FileExistsError, match="--force"):
        to(kind, tmp_path / "saved", taken)
    assert (taken / "mine").read_text() == "mine"
    to(kind, tmp_path / "saved", taken, force=True)
    assert not (taken / "mine").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "taken"]


@pytest.mark.parametrize("kind", ["torch", "dcp", "safetensors"])
@pytest.mark.parametrize("raised", [OSError("the disk is full"), KeyboardInterrupt()])
def test_a_conversion_that_fails_leaves_nothing_and_what_was_there(tmp_path, monkeypatch, kind, raised):
    model, opt = trained()
    shardstep.save(tmp_path / "saved", model, opt)
    (tmp_path / "taken").write_text("mine")

    def fails(*_: Any) -> None:
        raise raised

    monkeypatch.setattr("shardstep.convert.stored.load_torch_bytes", fails)
    with pytest.raises(type(raised)):
        to(kind, tmp_path / "saved", tmp_path / "taken", force=True)
    with pytest.raises(type(raised)):
        to(kind, tmp_path / "saved", tmp_path / "new" / "folder" / "made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "taken"]
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_checkpoint_may_be_converted_onto_itself(tmp_path):
    model, opt = trained()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "a.pt")
    to("torch", tmp_path / "a.pt", tmp_path / "a.pt", force=True)
    same(dict(model.state_dict()), torch.load(tmp_path / "a.pt", weights_only=True)["model"])


def test_extra_that_has_no_place_is_refused_with_the_remedy(tmp_path):
    torch.save({"model": {"a": torch.ones(2)}, "seen": {1, 2}}, tmp_path / "a.pt")
    with pytest.raises(SourceError, match="--no-extra"):
        to("dcp", tmp_path / "a.pt", tmp_path / "made")
    to("dcp", tmp_path / "a.pt", tmp_path / "made", with_extra=False)


def test_inspecting_runs_no_code_either(tmp_path, mark):
    from shardstep.checkpoint.folder import find_checkpoints

    summary = inspect_checkpoint(find_checkpoints(shardstep_block(tmp_path, mark))[0][0])
    assert summary.tensors == 2
    assert not mark.exists()


def test_a_conversion_into_a_checkpoint_is_refused_as_the_next_save_there_would_remove_it(tmp_path):
    model, opt = trained()
    shardstep.save(tmp_path / "last", model, opt)
    for kind, name in (("torch", "all.pt"), ("dcp", "again")):
        for force in (False, True):
            with pytest.raises(ValueError, match="is inside the checkpoint"):
                to(kind, tmp_path / "last", tmp_path / "last" / name, force=force)
    shardstep.save(tmp_path / "last", model, opt)
