"""What programs do with checkpoints, right and wrong: refused with the reason, and nothing changed by it."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from checkpointing import ADAMW, FLAT, KINDS, Blocks, Odd, train
from fast_lane_training import SMALL_BUCKETS
from shardstep import ShardConfig
from training import raised


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


def is_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def alone(seed: int = 3) -> tuple[Odd, optim.Optimizer]:
    """In one process, without a process group."""
    model = Odd(seed)
    opt = optim.AdamW(model.parameters(), **ADAMW)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


# -- one process -------------------------------------------------------------------------------------------------------


def test_a_program_without_a_process_group_saves_and_loads(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "one", model, opt, extra={"epoch": 4})
    other = Odd(9)
    again = optim.AdamW(other.parameters(), lr=1.0)
    assert shardstep.load(tmp_path / "one", other, again) == {"epoch": 4}
    assert is_same(values(model), values(other))
    assert again.param_groups[0]["lr"] == ADAMW["lr"]
    for mine, theirs in zip(opt.state.values(), again.state.values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_weights_alone_are_saved_and_loaded_without_an_optimizer(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "weights", model)
    other = Odd(9)
    shardstep.load(tmp_path / "weights", other)
    assert is_same(values(model), values(other))
    with pytest.raises(ValueError, match="saved without an optimizer"):
        shardstep.load(tmp_path / "weights", model, opt)


def test_stock_dcp_reads_it_in_a_process_that_has_no_shardstep(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "saved", model, opt)
    torch.save({f"model.{key}": value for key, value in values(model).items()}, tmp_path / "expected.pt")
    program = f"""
import sys, torch, warnings
sys.modules["shardstep"] = None
warnings.simplefilter("ignore")
import torch.distributed.checkpoint as dcp
reader = dcp.FileSystemReader({str(tmp_path / "saved")!r})
found = reader.read_metadata().state_dict_metadata
state = {{key: torch.empty(one.size, dtype=one.properties.dtype) for key, one in found.items()}}
dcp.load(state, storage_reader=reader, no_dist=True)
expected = torch.load({str(tmp_path / "expected.pt")!r})
assert all(torch.equal(state[key], expected[key]) for key in expected), "weights differ"
assert state["optim.state.first.weight.exp_avg"].shape == (13, 7)
assert state["optim.state.first.weight.exp_avg"].abs().sum() > 0
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_newest_is_loaded_and_older_ones_are_pruned(tmp_path):
    model, opt = alone()
    for step in range(5):
        shardstep.save(tmp_path / f"step-{step}", model, opt, extra={"step": step}, keep=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3", "step-4"]
    extra = shardstep.load(tmp_path, model, opt)
    assert extra["step"] == 4
    assert extra.path.name == "step-4"


def test_what_is_saved_again_under_a_name_is_the_newest(tmp_path):
    model, opt = alone()
    for step, name in enumerate(["a", "b", "a"]):
        shardstep.save(tmp_path / name, model, opt, extra={"step": step})
    assert shardstep.load(tmp_path, model, opt)["step"] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_pruning_never_takes_the_only_complete_one(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "good", model, opt)
    shardstep.save(tmp_path / "bad", model, opt)
    next((tmp_path / "bad").glob("*.distcp")).write_bytes(b"short")
    from shardstep.checkpoint.folder import prune

    prune(tmp_path, 1)
    assert (tmp_path / "good" / "manifest.json").is_file()
    with pytest.warns(UserWarning, match="skipped a damaged checkpoint.*bad"):
        assert shardstep.load(tmp_path, model, opt).path.name == "good"


def test_another_models_checkpoint_is_refused_with_all_that_differs(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "saved", model, opt)
    other = Odd(9)
    other.second = nn.Linear(13, 6)
    other.new = nn.Parameter(torch.zeros(2))
    del other.unused
    before = values(other)
    again = optim.AdamW(other.parameters(), **ADAMW)
    with pytest.raises(ValueError, match="does not fit") as caught:
        shardstep.load(tmp_path / "saved", other, again)
    for word in ("missing in the checkpoint: new", "not in this model: unused", "second.weight has shape (5, 13)"):
        assert word in str(caught.value)
    assert is_same(before, values(other))
    assert not again.state


def test_with_strict_false_what_fits_is_loaded(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "saved", model, opt)
    other = Odd(9)
    other.second = nn.Linear(13, 6)
    before = values(other)
    again = optim.AdamW(other.parameters(), **ADAMW)
    shardstep.load(tmp_path / "saved", other, again, strict=False)
    assert torch.equal(other.first.weight, model.first.weight)
    assert torch.equal(other.second.weight, before["second.weight"])
    assert other.first.weight in again.state
    assert other.second.weight not in again.state


def test_another_class_of_optimizer_is_refused(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "saved", model, opt)
    with pytest.raises(ValueError, match=r"trained by torch\.optim\.adamw\.AdamW, and is trained by .*SGD here"):
        shardstep.load(tmp_path / "saved", model, optim.SGD(model.parameters(), lr=1.0))


def test_options_that_are_new_or_gone_are_listed_in_one_warning_and_kept(tmp_path):
    model, opt = alone()
    opt.param_groups[0]["warmed_up"] = True
    shardstep.save(tmp_path / "saved", model, opt)
    again = optim.AdamW(model.parameters(), **ADAMW)
    again.param_groups[0]["brand_new"] = 7
    with pytest.warns(
        UserWarning, match="stay as they are: brand_new; only in the checkpoint, and are kept: warmed_up"
    ):
        shardstep.load(tmp_path / "saved", model, again)
    assert again.param_groups[0]["brand_new"] == 7
    assert again.param_groups[0]["warmed_up"] is True


def test_parameters_may_be_reordered(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "saved", model, opt)
    other = Odd(9)
    again = optim.AdamW(list(other.parameters())[::-1], **ADAMW)
    shardstep.load(tmp_path / "saved", other, again)
    assert torch.equal(opt.state[model.second.weight]["exp_avg"], again.state[other.second.weight]["exp_avg"])


def test_a_scheduler_goes_on_where_it_was(tmp_path):
    model, opt = alone()
    scheduler = optim.lr_scheduler.CosineAnnealingLR(opt, 10)
    for _ in range(3):
        opt.step()
        scheduler.step()
    shardstep.save(tmp_path / "saved", model, opt, extra={"scheduler": scheduler.state_dict()})
    again = optim.AdamW(model.parameters(), **ADAMW)
    other = optim.lr_scheduler.CosineAnnealingLR(again, 10)
    other.load_state_dict(shardstep.load(tmp_path / "saved", model, again)["scheduler"])
    again.step()
    scheduler.step()
    other.step()
    assert opt.param_groups[0]["lr"] == again.param_groups[0]["lr"]


def test_what_cannot_be_read_without_running_code_is_not_saved(tmp_path):
    model, opt = alone()
    with pytest.raises(TypeError, match=r"extra.*cannot be sent without pickling"):
        shardstep.save(tmp_path / "saved", model, opt, extra={"loader": object()})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_a_keep_that_is_no_number_of_checkpoints_is_refused(tmp_path, keep):
    model, opt = alone()
    with pytest.raises(ValueError, match="keep must be"):
        shardstep.save(tmp_path / "saved", model, opt, keep=keep)


def test_a_folder_of_something_else_is_not_written_over(tmp_path):
    model, opt = alone()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="a folder with other files and no checkpoint"):
        shardstep.save(tmp_path, model, opt)
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_path_that_is_not_there_is_named_with_what_is(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "step-10", model, opt)
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint at .*step-11; .* has step-10"):
        shardstep.load(tmp_path / "step-11", model, opt)


def test_tied_weights_are_stored_once_and_readable_by_both_names(tmp_path):
    model, opt = alone()
    shardstep.save(tmp_path / "saved", model, opt)
    stored = json.loads((tmp_path / "saved" / "contents.json").read_text())["tensors"]
    assert stored["model.again.weight"] == stored["model.first.weight"]


# -- several ranks -----------------------------------------------------------------------------------------------------


def writes_its_share(folder: str) -> list[int]:
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3)
    model(torch.randn(2, 256)).square().mean().backward()
    opt.step()
    shardstep.save(f"{folder}/saved", model, opt)
    files = [path.stat().st_size for path in sorted(Path(folder, "saved").glob("*.distcp"))]
    total = sum(p.nbytes for p in model.parameters()) * 3
    return [len(files), max(files), total]


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_writes_its_share_and_no_more(workers, tmp_path, ranks):
    count, most, total = workers(ranks).run(writes_its_share, str(tmp_path))[0]
    assert count == ranks
    assert most <= 1.02 * total / ranks + 64 * 1024  # and a kilobyte for each of 64 tensors: this model is small


def tells_different_extra(folder: str) -> tuple[str, str]:
    model, opt = KINDS["flat"].build()
    return raised(lambda: shardstep.save(f"{folder}/saved", model, opt, extra={"rank": dist.get_rank()}))


def test_extra_that_differs_between_ranks_is_refused_with_the_remedy(workers, tmp_path):
    for kind, text in workers(2).run(tells_different_extra, str(tmp_path)):
        assert kind == "RuntimeError"
        assert "extra_of_rank" in text
    assert not list(tmp_path.iterdir())


def fails_on_one_rank(folder: str) -> tuple[tuple[str, str], bool]:
    model, opt = KINDS["flat"].build()
    train(model, opt, range(2))
    shardstep.save(f"{folder}/saved", model, opt)
    other, again = KINDS["flat"].build(seed=11)
    before = values(other)
    from unittest import mock

    def fails(*_: Any) -> None:
        raise OSError("the disk is gone")

    name = "shardstep.checkpoint.loading.read_blocks"
    with mock.patch(name, fails if dist.get_rank() == 1 else __import__("shardstep").checkpoint.storage.read_blocks):
        told = raised(lambda: shardstep.load(f"{folder}/saved", other, again))
    return told, is_same(before, values(other)) and not again.state


def test_a_load_that_fails_on_one_rank_raises_on_all_and_changes_nothing(workers, tmp_path):
    for (kind, text), unchanged in workers(2).run(fails_on_one_rank, str(tmp_path)):
        assert kind == "OSError"
        assert "the disk is gone" in text
        assert unchanged


def saves_what_cannot_be_written(folder: str) -> list[tuple[str, str]]:
    """The folder goes while the thread writes."""
    from unittest import mock

    model, opt = KINDS["flat"].build()
    train(model, opt, range(1))
    shardstep.save(f"{folder}/first", model, opt)

    def fails(*_: Any) -> None:
        raise OSError("no space left")

    name = "shardstep.checkpoint.saving.write_parts"
    with mock.patch(name, fails if dist.get_rank() == 1 else shardstep.checkpoint.storage.write_parts):
        saving = shardstep.save(f"{folder}/second", model, opt, asynchronous=True)
        while not saving.is_done:
            pass
    found = [raised(lambda: shardstep.save(f"{folder}/third", model, opt))]
    shardstep.save(f"{folder}/fourth", model, opt)
    return found


def test_an_asynchronous_failure_is_raised_by_the_next_call_on_all_ranks(workers, tmp_path):
    for ((kind, text),) in workers(2).run(saves_what_cannot_be_written, str(tmp_path)):
        assert kind == "OSError"
        assert "the previous save failed on rank" in text
        assert "no space left" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["first", "fourth"]


def loads_averages(folder: str) -> list[str]:
    model, opt = KINDS["averaged"].build()
    train(model, opt, range(2))
    shardstep.save(f"{folder}/with", model, opt)
    without, plain = KINDS["averaged"].build(FLAT)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardstep.load(f"{folder}/with", without, plain)
        told += [str(one.message) for one in caught]
    train(without, plain, range(2, 3))
    shardstep.save(f"{folder}/without", without, plain)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardstep.load(f"{folder}/without", model, opt)
        told += [str(one.message) for one in caught]
    return told


def test_averages_that_have_no_place_or_no_source_are_told_of(workers, tmp_path):
    for told in workers(2).run(loads_averages, str(tmp_path)):
        assert ["keeps none" in told[0], "begin with the loaded weights" in told[1]] == [True, True]


def narrows(folder: str) -> None:
    """bf16 with masters into fp32 gets the masters; and fp32 into bf16 has its weights as masters."""
    model, opt = KINDS["bf16"].build()
    train(model, opt, range(3))
    shardstep.save(f"{folder}/narrow", model, opt)
    wide, again = KINDS["flat"].build(seed=11)
    shardstep.load(f"{folder}/narrow", wide, again)
    for param, narrow in zip(wide.parameters(), model.parameters(), strict=True):
        assert torch.equal(param.bfloat16(), narrow)
    assert not torch.equal(wide.first.weight, wide.first.weight.bfloat16().float())
    kept = wide.first.weight.detach().clone()
    shardstep.save(f"{folder}/wide", wide, again)
    shardstep.load(f"{folder}/wide", model, opt)
    assert torch.equal(model.first.weight, kept.bfloat16())
    back, once_more = KINDS["flat"].build(seed=12)
    shardstep.save(f"{folder}/again", model, opt)
    shardstep.load(f"{folder}/again", back, once_more)
    assert torch.equal(back.first.weight, kept)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_digits_survive_a_change_of_precision_where_there_is_room_for_them(workers, tmp_path, ranks):
    workers(ranks).run(narrows, str(tmp_path))


def saves_in_a_subgroup(folder: str) -> None:
    """Two jobs in one: ranks 0 and 1, and ranks 2 and 3."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = dist.get_rank() // 2
    model = Blocks(half)
    opt = shardstep.shard(model, optim.AdamW, process_group=groups[half], config=FLAT, **ADAMW)
    train(model, opt, range(2))
    shardstep.save(f"{folder}/{half}", model, opt, asynchronous=True)
    shardstep.load(f"{folder}/{half}", model, opt)


def test_groups_of_ranks_save_each_its_own(workers, tmp_path):
    workers(4).run(saves_in_a_subgroup, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def refuses(folder: str) -> list[tuple[str, str]]:
    model, opt = KINDS["averaged"].build()
    train(model, opt, range(1))
    found = []
    with opt.ema():
        found.append(raised(lambda: shardstep.save(f"{folder}/a", model, opt)))
    model, opt = KINDS["flat"].build(ShardConfig(step="backward", bucket_mb=SMALL_BUCKETS))
    model(torch.randn(4, 7)).sum().backward()
    found.append(raised(lambda: shardstep.save(f"{folder}/b", model, opt)))
    return found


def test_a_model_that_is_not_itself_just_now_is_not_saved(workers, tmp_path):
    for found in workers(2).run(refuses, str(tmp_path)):
        assert ["average" in found[0][1], "step()" in found[1][1]] == [True, True]
