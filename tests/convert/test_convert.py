"""shardstep convert: what goes through a pair of formats and back is the same, bit for bit."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import shardstep
from checkpointing import ADAMW, KINDS, Blocks, Odd, train
from converting import loaded, same, state_by_name, to, trained
from shardstep.convert import from_dcp
from shardstep.convert.source import SourceError
from shardstep.convert.target import write_target
from shardstep.stepping.masters import MASTER

pytestmark = pytest.mark.slow  # make test-slow

EXTRA = {"step": 2, "noise": torch.arange(5.0), "scheduler": {"lrs": [0.1, 0.2], "last": (1, None)}}


def saved(folder: Path) -> tuple[nn.Module, optim.Optimizer]:
    model, opt = trained()
    shardstep.save(folder, model, opt, extra=EXTRA, extra_of_rank={"seed": torch.arange(3)})
    return model, opt


# -- torch files -------------------------------------------------------------------------------------------------------


def test_to_torch_and_back(tmp_path):
    model, opt = saved(tmp_path / "saved")
    to("torch", tmp_path / "saved", tmp_path / "plain.pt")
    to("dcp", tmp_path / "plain.pt", tmp_path / "again")
    other, again, extra = loaded(tmp_path / "again")
    same(dict(model.state_dict()), dict(other.state_dict()))
    same(state_by_name(model, opt), state_by_name(other, again))
    same(EXTRA, dict(extra))
    same({"seed": torch.arange(3)}, extra.own)
    stored = json.loads((tmp_path / "again" / "contents.json").read_text())
    assert stored["tensors"]["model.again.weight"] == stored["tensors"]["model.first.weight"]  # tied, and stored once
    assert "torch.optim.adamw.AdamW" in stored["groups"]


def test_plain_torch_loads_what_was_converted_and_goes_on_as_before(tmp_path):
    model, opt = saved(tmp_path / "saved")
    to("torch", tmp_path / "saved", tmp_path / "plain.pt")
    file = torch.load(tmp_path / "plain.pt", weights_only=True)
    other = Odd(9)
    again = optim.AdamW(other.named_parameters(), lr=1.0)
    other.load_state_dict(file["model"])
    again.load_state_dict(file["optimizer"])
    same(EXTRA, file["extra"])
    for one, own in ((model, opt), (other, again)):
        torch.manual_seed(7)
        one(torch.randn(4, 7)).square().mean().backward()
        own.step()
    same(dict(model.state_dict()), dict(other.state_dict()))
    assert again.param_groups[0]["param_names"] == [name for name, _ in other.named_parameters()]
    tied = file["model"]
    assert tied["again.weight"].data_ptr() == tied["first.weight"].data_ptr()
    storages = {
        tensor.untyped_storage().data_ptr()
        for entry in file["optimizer"]["state"].values()
        for tensor in entry.values()
        if tensor.numel()
    }
    assert len(storages) == 3 * 8 - 2  # each its own, as after training: `nothing` has two without elements


@pytest.mark.parametrize("form", ["numbers", "names in groups", "names as keys", "two files", "other keys"])
def test_every_form_of_a_torch_file_is_read(tmp_path, form):
    model, opt = trained()
    options: dict[str, Any] = {}
    state = opt.state_dict()
    if form == "names in groups":
        named = optim.AdamW(model.named_parameters(), **ADAMW)
        named.load_state_dict(state)
        state = named.state_dict()
        state["param_groups"][0]["param_names"] = [name for name, _ in model.named_parameters()]
    if form == "names as keys":
        state = get_optimizer_state_dict(model, opt)
    whole = {"model": model.state_dict(), "optimizer": state, "epoch": 3}
    if form == "other keys":
        whole = {"model_state_dict": model.state_dict(), "optimizer_state_dict": state, "epoch": 3}
    if form == "two files":
        torch.save(model.state_dict(), tmp_path / "weights.pt")
        whole, options = state, {"also": tmp_path / "weights.pt"}
    torch.save(whole, tmp_path / "source.pt")
    to("dcp", tmp_path / "source.pt", tmp_path / "made", **options)
    other, again, extra = loaded(tmp_path / "made")
    same(dict(model.state_dict()), dict(other.state_dict()))
    expected = state_by_name(model, opt)
    if form == "names as keys":  # torch makes state for parameters without gradients, of zeros, as it gives names
        expected = {name: state["state"][name] for name in state["state"]}
    same({name: dict(entry) for name, entry in expected.items()}, state_by_name(other, again))
    assert dict(extra) == ({} if form == "two files" else {"epoch": 3})
    assert again.param_groups[0]["lr"] == ADAMW["lr"]


def lightning_file(model: nn.Module, *optimizers: optim.Optimizer) -> dict[str, Any]:
    """What Lightning's DDP strategy saves."""
    return {
        "epoch": 1,
        "global_step": 2,
        "pytorch-lightning_version": "2.6.6",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {},
        "optimizer_states": [optimizer.state_dict() for optimizer in optimizers],
        "lr_schedulers": [],
        "best": None,
    }


def by_name(file: dict[str, Any]) -> dict[str, Any]:
    """Named dicts of optimizers, as other trainers have."""
    return {**file, "optimizer_states": {"AdamW": file["optimizer_states"][0], "version": 3}}


@pytest.mark.parametrize("form", ["in a list", "in a dict"])
def test_of_a_file_of_lightnings_ddp_the_optimizers_state_was_dropped_without_a_word(tmp_path, form):
    model, opt = trained()
    file = lightning_file(model, opt)
    file = by_name(file) if form == "in a dict" else file
    torch.save(file, tmp_path / "last.ckpt")
    to("dcp", tmp_path / "last.ckpt", tmp_path / "made")
    other, again, extra = loaded(tmp_path / "made")
    same(dict(model.state_dict()), dict(other.state_dict()))
    same(state_by_name(model, opt), state_by_name(other, again))
    assert again.param_groups[0]["lr"] == ADAMW["lr"]
    rest = {key: value for key, value in file.items() if key not in ("state_dict", "optimizer_states")}
    same({**rest, "optimizer_states": {"version": 3}} if form == "in a dict" else rest, dict(extra))


def test_a_file_of_lightning_with_two_optimizers_is_refused_by_their_places(tmp_path):
    model, opt = trained()
    torch.save(lightning_file(model, opt, opt), tmp_path / "last.ckpt")
    with pytest.raises(SourceError, match=r"2 optimizers \(optimizer_states\[0\], optimizer_states\[1\]\)"):
        to("dcp", tmp_path / "last.ckpt", tmp_path / "made")
    torch.save(lightning_file(model), tmp_path / "last.ckpt")  # of a model that trains nothing
    to("dcp", tmp_path / "last.ckpt", tmp_path / "made")
    assert shardstep.load(tmp_path / "made", Odd(9))["optimizer_states"] == []


def test_an_optimizer_further_down_in_a_file_is_not_passed_over_without_a_word(tmp_path):
    model, opt = trained()
    state = opt.state_dict()
    torch.save({"model": model.state_dict(), "trainer": {"steps": [{"opt": state}]}}, tmp_path / "deep.pt")
    done = to("dcp", tmp_path / "deep.pt", tmp_path / "made")
    assert "trainer['steps'][0]['opt'] looks like an optimizer's state: it is kept in extra" in done.notes
    torch.save({"model": model.state_dict(), "optimizer": state, "swa": [copy.deepcopy(state)]}, tmp_path / "two.pt")
    done = to("dcp", tmp_path / "two.pt", tmp_path / "again")
    assert any("swa[0]" in note for note in done.notes)
    other, again, _ = loaded(tmp_path / "again")
    same(state_by_name(model, opt), state_by_name(other, again))


class Remembers(nn.Module):
    """Has a state beside tensors, with tensors in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 3)
        self.kept: Any = None

    def get_extra_state(self) -> Any:
        return self.kept

    def set_extra_state(self, state: Any) -> None:
        self.kept = state

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("form", ["app", "model", "bare"])
def test_tensors_in_an_extra_state_that_torch_stores_item_by_item_became_weights(tmp_path, form):
    model, opt = trained(model=Remembers())
    model.kept = {"scale": torch.ones(2), "steps": 3, "history": [torch.zeros(1), {"a": torch.ones(1)}]}
    whole = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt)}
    source = {"app": {"app": whole}, "model": whole, "bare": model.state_dict()}[form]
    dcp.save(source, checkpoint_id=tmp_path / "source", no_dist=True)
    reversed_keys(tmp_path / "source")
    to("dcp", tmp_path / "source", tmp_path / "made")
    other = Remembers()
    if form == "bare":
        assert shardstep.load(tmp_path / "made", other) == {}
    else:
        loaded(tmp_path / "made", model=other)
    same(model.kept, other.kept)
    same(dict(model.layer.state_dict()), dict(other.layer.state_dict()))


# -- lists in DCP ------------------------------------------------------------------------------------------------------


def reversed_keys(folder: Path) -> None:
    """As if the last rank had been the first to say what it wrote."""
    description = folder / ".metadata"
    metadata = pickle.loads(description.read_bytes())
    entries = metadata.state_dict_metadata
    metadata.state_dict_metadata = {key: entries[key] for key in reversed(list(entries))}
    description.write_bytes(pickle.dumps(metadata))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("flat", [False, True])
def test_lists_whose_items_came_in_another_order_became_dicts(tmp_path, flat):
    """torch stores a list with tensors in it item by item."""
    model, opt = trained()
    betas = [torch.tensor(0.9), torch.tensor(0.99)]
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {"model": model.state_dict(), "optim": get_optimizer_state_dict(model, opt, options=options)}
    for group in [state["optim"]] if flat else state["optim"]["param_groups"]:
        group |= {key: list(betas) for key in group if key.split(".")[-1] == "betas"}
    extra = {"history": [torch.ones(2) * n for n in range(12)], "nested": [[torch.zeros(1), 1], {"a": torch.ones(1)}]}
    dcp.save({**state, **extra}, checkpoint_id=tmp_path / "made", no_dist=True)
    reversed_keys(tmp_path / "made")
    source = from_dcp.read(tmp_path / "made")
    same(extra, source.extra)
    assert len(source.groups) == 1
    same(betas, source.groups[0].options["betas"])
    assert sorted(source.groups[0].params) == sorted(name for name, _ in model.named_parameters())


def zero_saves(folder: str) -> None:
    """torch's class and ours, consolidated."""
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    for name, kind in (("torch", ZeroRedundancyOptimizer), ("ours", shardstep.ZeroRedundancyOptimizer)):
        ddp = DistributedDataParallel(Blocks())
        zero = kind(ddp.parameters(), optimizer_class=optim.AdamW, **ADAMW)
        train(ddp, zero, range(2))
        zero.consolidate_state_dict(0)
        if dist.get_rank() == 0:
            torch.save({"model": ddp.module.state_dict(), "optimizer": zero.state_dict()}, f"{folder}/{name}.pt")


def test_consolidated_state_dicts_of_both_zero_optimizers_are_read(workers, tmp_path):
    workers(2).run(zero_saves, str(tmp_path))
    for name in ("torch", "ours"):
        file = torch.load(tmp_path / f"{name}.pt", weights_only=True)
        to("dcp", tmp_path / f"{name}.pt", tmp_path / name)
        model, opt, _ = loaded(tmp_path / name, model=Blocks(9))
        same(dict(file["model"]), dict(model.state_dict()))
        for number, param in enumerate(model.parameters()):
            same(file["optimizer"]["state"][number], dict(opt.state[param]))


def saves_two_classes(folder: str) -> None:
    model, opt = KINDS["muon and adamw"].build()
    train(model, opt, range(2))
    shardstep.save(f"{folder}/saved", model, opt)


def test_groups_of_two_classes_are_told_of_and_go_back_as_they_were(workers, tmp_path):
    workers(2).run(saves_two_classes, str(tmp_path))
    done = to("torch", tmp_path / "saved", tmp_path / "plain.pt")
    assert any("Muon" in note and "AdamW" in note for note in done.notes)
    to("dcp", tmp_path / "plain.pt", tmp_path / "again")
    texts = [json.loads((tmp_path / name / "contents.json").read_text()) for name in ("saved", "again")]
    assert texts[0]["groups"] == texts[1]["groups"]
    assert texts[0]["parameters"] == texts[1]["parameters"]


# -- masters -----------------------------------------------------------------------------------------------------------


def saves_narrow(folder: str) -> None:
    model, opt = KINDS["averaged"].build()
    train(model, opt, range(2))
    shardstep.save(f"{folder}/saved", model, opt)


def loads_narrow(folder: str) -> None:
    found = []
    for name in ("saved", "again"):
        model, opt = KINDS["averaged"].build(seed=11)
        shardstep.load(f"{folder}/{name}", model, opt)
        entries = {
            (piece.param, piece.start): dict(entry) for piece, entry in opt._engine.runtime.local_step.entries().items()
        }
        found.append((dict(model.state_dict()), entries))
    same(found[0], found[1])


def test_masters_and_averages_go_through_a_torch_file_unrounded(workers, tmp_path):
    workers(2).run(saves_narrow, str(tmp_path))
    to("torch", tmp_path / "saved", tmp_path / "plain.pt")
    file = torch.load(tmp_path / "plain.pt", weights_only=True)
    assert file["model"]["first.weight"].dtype is torch.bfloat16
    masters = file["shardstep"]["masters"]
    assert masters["first.weight"].dtype is torch.float32
    same(masters["first.weight"].bfloat16(), file["model"]["first.weight"])
    assert all(MASTER not in entry for entry in file["optimizer"]["state"].values())
    wide = Odd(9)  # with the masters as weights, a plain fp32 model has all digits
    wide.load_state_dict(file["model"] | masters)
    same(wide.first.weight.detach(), masters["first.weight"])
    to("dcp", tmp_path / "plain.pt", tmp_path / "again")
    workers(2).run(loads_narrow, str(tmp_path))


# -- stock DCP ---------------------------------------------------------------------------------------------------------


def sharded(seed: int) -> tuple[nn.Module, optim.Optimizer]:
    model = Blocks(seed)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    weights = [param for param in model.parameters() if param.dim() > 1]
    others = [param for param in model.parameters() if param.dim() <= 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, optim.AdamW(groups, lr=3e-3)


def fsdp_state(model: nn.Module, opt: optim.Optimizer, *, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt, options=options)}


def fsdp_saves(folder: str) -> None:
    model, opt = sharded(6)
    train(model, opt, range(2))
    whole = StateDictOptions(full_state_dict=True)
    full = {"model": get_model_state_dict(model, options=whole)}
    full["optim"] = get_optimizer_state_dict(model, opt, options=whole)
    if dist.get_rank() == 0:
        torch.save(full, f"{folder}/full.pt")
    for name, flat in (("nested", False), ("flat", True)):
        extra = {"step": 2, "scheduler": {"last": [1, 2.5], "noise": torch.ones(2)}}
        dcp.save({**fsdp_state(model, opt, flat=flat), **extra}, checkpoint_id=f"{folder}/{name}")
    dcp.save({"app": fsdp_state(model, opt, flat=False)}, checkpoint_id=f"{folder}/app")


def fsdp_loads(folder: str, flat: bool) -> None:
    model, opt = sharded(11)
    state = fsdp_state(model, opt, flat=flat)
    dcp.load(state, checkpoint_id=f"{folder}/made")
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, opt, state["optim"], options=options)
    full = torch.load(f"{folder}/full.pt", weights_only=True)
    whole = StateDictOptions(full_state_dict=True)
    model_state = get_model_state_dict(model, options=whole)
    optim_state = get_optimizer_state_dict(model, opt, options=whole)
    if dist.get_rank() == 0:
        same(dict(full["model"]), dict(model_state))
        same(full["optim"]["state"], optim_state["state"])
        assert [group["weight_decay"] for group in optim_state["param_groups"]] == [0.1, 0.0]


@pytest.mark.parametrize("form", ["nested", "flat", "app"])
def test_what_fsdp2_programs_save_is_loaded_by_shardstep_and_by_fsdp2_again(workers, tmp_path, form):
    workers(2).run(fsdp_saves, str(tmp_path))
    to("dcp", tmp_path / form, tmp_path / "made")
    full = torch.load(tmp_path / "full.pt", weights_only=True)
    model = Blocks(9)
    groups = [
        {"params": [param for param in model.parameters() if param.dim() > 1]},
        {"params": [param for param in model.parameters() if param.dim() <= 1]},
    ]
    opt = optim.AdamW(groups, lr=1.0)
    extra = shardstep.load(tmp_path / "made", model, opt)
    same(dict(full["model"]), dict(model.state_dict()))
    same(full["optim"]["state"], state_by_name(model, opt))
    assert [group["weight_decay"] for group in opt.param_groups] == [0.1, 0.0]
    expected = {} if form == "app" else {"step": 2, "scheduler": {"last": [1, 2.5], "noise": torch.ones(2)}}
    same(expected, dict(extra))
    workers(3).run(fsdp_loads, str(tmp_path), form == "flat")


def test_what_shardstep_saved_is_loaded_by_an_fsdp2_program_after_a_conversion(workers, tmp_path):
    model = Blocks()
    named = dict(model.named_parameters())
    groups = [
        {"params": [param for param in named.values() if (param.dim() > 1) == wide], "weight_decay": decay}
        for wide, decay in ((True, 0.1), (False, 0.0))
    ]
    opt = optim.AdamW(groups, lr=3e-3)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    shardstep.save(tmp_path / "saved", model, opt)
    to("dcp", tmp_path / "saved", tmp_path / "made")
    full = {"model": model.state_dict(), "optim": {"state": state_by_name(model, opt)}}
    torch.save(full, tmp_path / "full.pt")
    for flat in (False, True):
        workers(2).run(fsdp_loads, str(tmp_path), flat)


def test_torchs_own_tool_makes_a_file_of_a_converted_checkpoint(tmp_path):
    model, _ = saved(tmp_path / "saved")
    to("dcp", tmp_path / "saved", tmp_path / "made")
    program = f"""
import warnings
warnings.simplefilter("ignore")
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
dcp_to_torch_save({str(tmp_path / "made")!r}, {str(tmp_path / "tool.pt")!r})
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
    made = torch.load(tmp_path / "tool.pt", weights_only=True)
    same(dict(model.state_dict()), made["model"])
    assert made["optim"]["param_groups"][0]["lr"] == ADAMW["lr"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_model_alone_goes_from_dcp_under_any_name(tmp_path):
    model, _ = trained()
    for name, state in (("wrapped", {"model": model.state_dict()}), ("bare", dict(model.state_dict()))):
        dcp.save(state, checkpoint_id=tmp_path / name, no_dist=True)
        to("torch", tmp_path / name, tmp_path / f"{name}.pt")
        same(dict(model.state_dict()), torch.load(tmp_path / f"{name}.pt", weights_only=True)["model"])


# -- safetensors -------------------------------------------------------------------------------------------------------


def test_to_safetensors_and_back(tmp_path):
    model, _ = saved(tmp_path / "saved")
    to("safetensors", tmp_path / "saved", tmp_path / "weights.safetensors")
    to("dcp", tmp_path / "weights.safetensors", tmp_path / "again")
    other = Odd(9)
    shardstep.load(tmp_path / "again", other)
    same(dict(model.state_dict()), dict(other.state_dict()))
    to("torch", tmp_path / "weights.safetensors", tmp_path / "weights.pt")
    same(dict(model.state_dict()), torch.load(tmp_path / "weights.pt", weights_only=True)["model"])


def test_the_safetensors_package_reads_what_was_written(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    model, opt = saved(tmp_path / "saved")
    to("safetensors", tmp_path / "saved", tmp_path / "with.safetensors", with_state=True)
    read = package.load_file(tmp_path / "with.safetensors")
    for name, entry in state_by_name(model, opt).items():
        for key, value in entry.items():
            same(value.contiguous(), read[f"optim.state.{name}.{key}"])
    other = Odd(9)
    to("safetensors", tmp_path / "saved", tmp_path / "weights.safetensors")
    package.load_model(other, tmp_path / "weights.safetensors")  # which knows of tied weights
    same(dict(model.state_dict()), dict(other.state_dict()))


def test_what_the_safetensors_package_wrote_is_read(tmp_path):
    package = pytest.importorskip("safetensors.torch")
    tensors = {
        "a": torch.randn(3, 5).bfloat16(), "b": torch.arange(4), "c": torch.tensor(True), "d": torch.empty(0, 2),
        "e": torch.randn(7).half(), "f": torch.randn(2, 2).to(torch.float8_e4m3fn),
    }  # fmt: skip
    package.save_file(tensors, tmp_path / "model.safetensors")
    to("torch", tmp_path / "model.safetensors", tmp_path / "made.pt")
    made = torch.load(tmp_path / "made.pt", weights_only=True)["model"]
    for key in tensors:
        assert made[key].dtype is tensors[key].dtype
        same(
            tensors[key].view(torch.uint8) if key == "f" else tensors[key],
            made[key].view(torch.uint8) if key == "f" else made[key],
        )


def test_large_weights_are_cut_into_files_with_an_index(tmp_path):
    model = nn.Sequential(*(nn.Linear(200, 200) for _ in range(5)))
    shardstep.save(tmp_path / "saved", model)
    to("safetensors", tmp_path / "saved", tmp_path / "folder", shard_nbytes=400_000)
    names = sorted(path.name for path in (tmp_path / "folder").iterdir())
    assert names == [*(f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)), "model.safetensors.index.json"]
    index = json.loads((tmp_path / "folder" / names[-1]).read_text())
    assert list(index["weight_map"]) == list(model.state_dict())
    assert index["metadata"]["total_size"] == 5 * (200 * 200 + 200) * 4
    to("torch", tmp_path / "folder", tmp_path / "made.pt")
    same(dict(model.state_dict()), torch.load(tmp_path / "made.pt", weights_only=True)["model"])


def test_small_weights_are_one_file_in_a_folder(tmp_path):
    saved(tmp_path / "saved")
    to("safetensors", tmp_path / "saved", tmp_path / "folder")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["model.safetensors"]
    assert not to("dcp", tmp_path / "folder", tmp_path / "made").notes


def test_a_save_beside_it_does_not_sweep_a_conversion_away(tmp_path):
    """A job saves to the folder in which somebody converts an old checkpoint."""
    model = torch.nn.Linear(3, 2)
    opt = torch.optim.AdamW(model.parameters())
    with write_target(tmp_path / "step-0", force=False) as target:
        target.partial.mkdir()
        (target.partial / "manifest.json").write_text("half")
        shardstep.save(tmp_path / "step-1", model, opt)
        assert shardstep.load(tmp_path, model, opt).path.name == "step-1"
    assert (tmp_path / "step-0" / "manifest.json").read_text() == "half"
