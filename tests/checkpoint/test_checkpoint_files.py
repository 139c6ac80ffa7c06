"""What a review found in the files of a checkpoint, and in who waits for whom; tests are named after what was seen."""

from __future__ import annotations

import enum
import json
import time
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from shardstep.checkpoint import background, saving, storage
from shardstep.checkpoint.manifest import FORMAT, MANIFEST
from shardstep.checkpoint.options import group_problems
from shardstep.checkpoint.storage import Part
from training import raised

SOON = 20.0  # seconds; the time-out of the workers' group is 60


def small(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def sharded(seed: int = 1, **options: Any) -> tuple[nn.Module, Any]:
    model = small(seed)
    return model, shardstep.shard(model, optim.AdamW, **{"lr": 0.1, **options})


def plain() -> tuple[nn.Module, optim.Optimizer]:
    model = small()
    return model, optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- paths that differ -------------------------------------------------------------------------------------------------


def one_rank_has_no_path(folder: str) -> tuple[list[tuple[str, str]], float]:
    model, opt = sharded()
    shardstep.save(f"{folder}/there", model, opt)
    path: Any = f"{folder}/there" if dist.get_rank() == 0 else None
    start = time.monotonic()
    told = [raised(lambda: shardstep.save(path, model, opt)), raised(lambda: shardstep.load(path, model, opt))]
    opt.close()
    return told, time.monotonic() - start


def test_ranks_waited_for_one_that_had_no_path(workers, tmp_path):
    for told, seconds in workers(2).run(one_rank_has_no_path, str(tmp_path)):
        assert seconds < SOON
        for kind, text in told:
            assert kind == "TypeError"
            assert "rank 1" in text
            assert "not None" in text


def ranks_load_different_paths(folder: str) -> tuple[str, str]:
    model, opt = sharded()
    for name in "ab":
        shardstep.save(f"{folder}/{name}", model, opt)
    told = raised(lambda: shardstep.load(f"{folder}/{'ab'[dist.get_rank()]}", model, opt))
    opt.close()
    return told


def test_ranks_that_asked_for_different_checkpoints_all_got_that_of_the_first(workers, tmp_path):
    for kind, text in workers(2).run(ranks_load_different_paths, str(tmp_path)):
        assert kind == "RuntimeError"
        assert f"path={tmp_path / 'b'}" in text


# -- saves of several groups -------------------------------------------------------------------------------------------


def saves_of_a_subgroup(folder: str, fails: bool) -> tuple[tuple[str, str] | None, float]:
    model, opt = sharded()
    pair = dist.new_group([0, 1])
    start = time.monotonic()

    def broken(*_: Any) -> Any:
        raise OSError("the disk is full")

    with mock.patch.object(saving, "write_parts", broken if fails and dist.get_rank() == 1 else saving.write_parts):
        shardstep.save(f"{folder}/all", model, opt, asynchronous=True)
        background._last[id(dist.group.WORLD)][1].join()
    if dist.get_rank() < 2:
        other = small(2)
        inner = shardstep.shard(other, optim.AdamW, lr=0.1, process_group=pair)
        shardstep.save(f"{folder}/pair", other, inner)
        inner.close()
    told = raised(lambda: shardstep.save(f"{folder}/next", model, opt)) if fails else None
    shardstep.save(f"{folder}/last", model, opt)
    opt.close()
    return told, time.monotonic() - start


@pytest.mark.parametrize("fails", [False, True])
def test_a_save_of_some_ranks_waited_for_the_others_to_speak_of_the_save_before(workers, tmp_path, fails):
    for told, seconds in workers(3).run(saves_of_a_subgroup, str(tmp_path), fails):
        assert seconds < SOON
        assert told is None or ("the previous save failed on rank 1" in told[1] and "the disk is full" in told[1])
        assert (told is not None) == fails
    assert names(tmp_path) == (["last", "pair"] if fails else ["all", "last", "pair"])


def test_memory_of_a_save_is_taken_again_by_the_next_of_any_group(tmp_path):
    model, opt = plain()
    shardstep.save(tmp_path / "a", model, opt, asynchronous=True)
    memory = background._memory
    assert memory is not None
    assert shardstep.save(tmp_path / "b", model, opt, asynchronous=True) is not None
    assert background._memory is memory
    shardstep.load(tmp_path, model, opt)


# -- what is damage, and what is not -----------------------------------------------------------------------------------


def fails_by_no_fault_of_the_file(folder: str, kind: str) -> tuple[tuple[str, str], list[str]]:
    model, opt = sharded()
    for number in (1, 2):
        shardstep.save(f"{folder}/step-{number}", model, opt)
    error = {"memory": torch.OutOfMemoryError("CUDA out of memory"), "disk": OSError(5, "Input/output error")}[kind]

    def breaks(*_: Any) -> Any:
        raise error

    where = storage._Targets if kind == "memory" else storage.FileSystemReader
    name = "resolve_tensor" if kind == "memory" else "read_data"
    true = getattr(where, name)
    with (
        mock.patch.object(where, name, breaks if dist.get_rank() == 1 else true),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        told = raised(lambda: shardstep.load(folder, model, opt))
    opt.close()
    return told, [str(one.message) for one in caught if "skipped a damaged checkpoint" in str(one.message)]


@pytest.mark.parametrize(("kind", "words"), [("memory", "CUDA out of memory"), ("disk", "Input/output error")])
def test_a_rank_without_memory_made_all_go_back_to_an_older_checkpoint(workers, tmp_path, kind, words):
    for (name, text), passed in workers(2).run(fails_by_no_fault_of_the_file, str(tmp_path), kind):
        assert name != "DamagedError"
        assert words in text
        assert not passed


@pytest.mark.parametrize("file", ["manifest.json", "contents.json", "__0_0.distcp"])
def test_a_file_that_may_not_be_read_was_taken_for_a_damaged_one(tmp_path, file):
    model, opt = plain()
    for number in (1, 2):
        shardstep.save(tmp_path / f"step-{number}", model, opt)
    true_open = Path.open

    def refuses(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == tmp_path / "step-2" / file:
            raise PermissionError(13, "Permission denied", str(path))
        return true_open(path, *arguments, **options)

    def refuses_bytes(path: Path) -> bytes:
        with refuses(path, "rb") as stream:
            return bytes(stream.read())

    with (
        mock.patch.object(Path, "open", refuses),
        mock.patch.object(Path, "read_bytes", refuses_bytes),
        pytest.raises(PermissionError, match=file),
    ):
        shardstep.load(tmp_path, model, opt)


def test_a_missing_file_is_damage(tmp_path):
    model, opt = plain()
    for number in (1, 2):
        shardstep.save(tmp_path / f"step-{number}", model, opt, extra={"n": number})
    (tmp_path / "step-2" / "__0_0.distcp").unlink()
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert shardstep.load(tmp_path, model, opt)["n"] == 1


# -- copies of what is saved -------------------------------------------------------------------------------------------


def test_a_save_beside_training_waited_for_the_current_device_alone():
    devices = [torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu"), torch.device("cuda", 1)]
    with mock.patch.object(torch.cuda, "synchronize") as synchronize:
        background._synchronize(devices)
    assert sorted(call.args[0].index for call in synchronize.call_args_list) == [0, 1]


def test_what_lies_on_no_cuda_device_is_copied_before_stage_returns():
    parts = [Part("x", (3,), (0,), torch.arange(3.0))]
    true, ways = torch.Tensor.copy_, []

    def copy(home: torch.Tensor, values: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        ways.append(non_blocking)
        return true(home, values, non_blocking)

    with mock.patch.object(torch.Tensor, "copy_", copy):
        staged, _ = background.stage(parts)
    assert ways == [False]
    assert torch.equal(staged[0].values, parts[0].values)


# -- what is no checkpoint ---------------------------------------------------------------------------------------------


def test_a_link_to_the_latest_counted_as_a_checkpoint_and_was_pruned(tmp_path):
    model, opt = plain()
    latest = tmp_path / "latest"
    for number in range(1, 6):
        shardstep.save(tmp_path / f"step-{number}", model, opt, extra={"n": number}, keep=3)
        latest.unlink(missing_ok=True)
        latest.symlink_to(f"step-{number}")
    assert names(tmp_path) == ["latest", "step-3", "step-4", "step-5"]
    assert shardstep.load(latest, model, opt)["n"] == 5
    assert shardstep.load(tmp_path, model, opt).path.name == "step-5"


def test_a_save_under_the_name_of_a_link_replaces_the_link_alone(tmp_path):
    model, opt = plain()
    shardstep.save(tmp_path / "step-1", model, opt, extra={"n": 1})
    (tmp_path / "latest").symlink_to("step-1")
    shardstep.save(tmp_path / "latest", model, opt, extra={"n": 2})
    assert names(tmp_path) == ["latest", "step-1"]
    assert not (tmp_path / "latest").is_symlink()
    assert [shardstep.load(tmp_path / name, model, opt)["n"] for name in ("step-1", "latest")] == [1, 2]


def other_manifests() -> dict[str, bytes]:
    sealed = json.dumps({"format": "another", "version": 1})
    return {
        "plain": b'{"name": "my web app"}',
        "list": b"[]",
        "no JSON": b"name: my web app",
        "sealed": json.dumps({"crc32": storage.zlib.crc32(sealed.encode()), "manifest": sealed}).encode(),
    }


@pytest.mark.parametrize("kind", other_manifests())
def test_a_folder_of_another_program_with_a_manifest_was_deleted(tmp_path, kind):
    model, opt = plain()
    web = tmp_path / "web"
    web.mkdir()
    (web / MANIFEST).write_bytes(other_manifests()[kind])
    (web / "precious").write_text("x")
    with pytest.raises(ValueError, match="a folder with other files and no checkpoint"):
        shardstep.save(web, model, opt)
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        shardstep.load(web, model, opt)
    for number in (1, 2):
        shardstep.save(tmp_path / f"step-{number}", model, opt, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert shardstep.load(tmp_path, model, opt).path.name == "step-2"
    assert names(tmp_path) == ["step-2", "web"]
    assert names(web) == [MANIFEST, "precious"]


@pytest.mark.parametrize("harm", ["empty", "truncated", "format changed by a bit"])
def test_one_of_ours_with_a_damaged_manifest_is_named_and_its_name_can_be_taken(tmp_path, harm):
    model, opt = plain()
    for number in (1, 2):
        shardstep.save(tmp_path / f"step-{number}", model, opt)
    manifest = tmp_path / "step-2" / MANIFEST
    whole = manifest.read_bytes()
    bit = whole.replace(FORMAT.encode(), b"s" + bytes([FORMAT.encode()[1] ^ 1]) + FORMAT.encode()[2:])
    manifest.write_bytes({"empty": b"", "truncated": whole[: len(whole) // 2]}.get(harm, bit))
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint"):
        assert shardstep.load(tmp_path, model, opt).path.name == "step-1"
    shardstep.save(tmp_path / "step-2", model, opt)
    assert shardstep.load(tmp_path, model, opt).path.name == "step-2"


def test_a_manifest_of_another_format_is_not_read(tmp_path):
    model, opt = plain()
    shardstep.save(tmp_path / "a", model, opt)
    text = json.loads((tmp_path / "a" / MANIFEST).read_text())["manifest"].replace(FORMAT, "another")
    sealed = {"crc32": storage.zlib.crc32(text.encode()), "manifest": text}
    (tmp_path / "a" / MANIFEST).write_text(json.dumps(sealed))
    with pytest.raises((ValueError, FileNotFoundError)):
        shardstep.load(tmp_path / "a", model, opt)
    with pytest.raises(ValueError, match="a folder with other files and no checkpoint"):
        shardstep.save(tmp_path / "a", model, opt)


# -- groups ------------------------------------------------------------------------------------------------------------


def test_ten_thousand_parameters_took_a_second_to_compare():
    many = [f"layer.{number}" for number in range(10_000)]
    group = {"params": many, "class": "x", "options": {}}
    start = time.process_time()
    assert group_problems([group], [group], set(many)) == []
    assert time.process_time() - start < 0.2, "0.6 s and more when each name was looked for in a list"


def split(model: nn.Module, decay: float, lr: Any = 0.1) -> optim.Optimizer:
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() == 1]
    return optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": decay}], lr=lr, weight_decay=0.3)


def test_a_group_that_was_split_lost_its_own_options_in_silence(tmp_path):
    model = small()
    shardstep.save(tmp_path / "a", model, optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.3))
    opt = split(model, 0.0)
    with pytest.raises(ValueError, match=r"0\.weight and 0\.bias were in one group .* weight_decay \(0\.3 and 0\.0\)"):
        shardstep.load(tmp_path / "a", model, opt)
    assert [group["weight_decay"] for group in opt.param_groups] == [0.3, 0.0]
    alike = split(model, 0.3, 0.5)
    shardstep.load(tmp_path / "a", model, alike)
    assert [group["lr"] for group in alike.param_groups] == [0.1, 0.1], "as of one group: what was saved counts"


def test_two_groups_that_were_one_had_the_same_tensor_as_their_lr(tmp_path):
    model = small()
    shardstep.save(tmp_path / "a", model, optim.AdamW(model.parameters(), lr=torch.tensor(0.05), weight_decay=0.3))
    opt = split(model, 0.3)
    shardstep.load(tmp_path / "a", model, opt)
    one, two = (group["lr"] for group in opt.param_groups)
    assert one is not two
    one.fill_(1.0)
    assert float(two) == pytest.approx(0.05)


# -- values ------------------------------------------------------------------------------------------------------------


class Mode(str, enum.Enum):
    A = "a"


class Number(enum.IntEnum):
    TWO = 2


def test_an_enumeration_of_texts_came_back_with_its_name_instead_of_its_value(tmp_path):
    model, _ = plain()
    shardstep.save(tmp_path / "a", model, extra={"mode": Mode.A, Mode.A: Number.TWO})
    extra = shardstep.load(tmp_path / "a", model)
    assert extra == {"mode": "a", "a": 2}
    assert [type(value) for value in extra.values()] == [str, int]


def test_a_sparse_buffer_was_refused_without_its_name(tmp_path):
    model, _ = plain()
    model.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"mask has layout torch\.sparse_coo"):
        shardstep.save(tmp_path / "a", model)
