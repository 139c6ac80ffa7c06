"""Checkpoints that DeepSpeed 0.19.8 wrote (fixtures/make_deepspeed.py) become ones for shardstep and plain torch."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import nn, optim

import shardstep
from converting import same, state_by_name, to
from repository import FIXTURES
from shardstep.checkpoint.contents import state_key
from shardstep.convert.from_deepspeed import read
from shardstep.convert.source import SourceError
from shardstep.stepping.masters import MASTER

pytestmark = pytest.mark.slow  # make test-slow

SAVED = FIXTURES / "deepspeed"


class Net(nn.Module):
    """That of the fixtures."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 13)
        self.norm = nn.LayerNorm(13)
        self.second = nn.Linear(13, 4)
        self.again = nn.Linear(7, 13, bias=False)
        self.again.weight = self.first.weight
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("count", torch.zeros(3, dtype=torch.long))

    def groups(self):
        trained = [param for param in self.parameters() if param.requires_grad]
        return [
            {"params": [param for param in trained if param.dim() > 1]},
            {"params": [param for param in trained if param.dim() <= 1]},
        ]


def expected(name: str) -> dict[str, dict[str, torch.Tensor]]:
    """What DeepSpeed itself said of every parameter."""
    return torch.load(SAVED / name / "expected.pt", weights_only=True)


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16"])
def test_every_parameter_has_the_state_that_deepspeed_says_it_has(name):
    source = read(SAVED / name)
    for param, told in expected(name).items():
        same(told["weight"], source.model[param].read(), param)
        state = source.trained[param].state
        for key in ("exp_avg", "exp_avg_sq"):
            same(told[key], state[key].read(), f"{param}.{key}")
        assert state["step"].read().item() == 3
        if name == "stage2-bf16":
            same(told["master"], state[MASTER].read(), param)
        else:
            assert MASTER not in state  # the weights are fp32 themselves
    assert source.tied == {"again.weight": "first.weight"}
    assert [group.options["weight_decay"] for group in source.groups] == [0.1, 0.0]
    assert source.extra == {"seen": 12, "step": 3}


def test_it_is_loaded_into_plain_torch(tmp_path):
    to("dcp", SAVED / "stage1-fp32", tmp_path / "made")
    model = Net()
    opt = optim.AdamW(model.groups(), lr=1.0)
    extra = shardstep.load(tmp_path / "made", model, opt)
    state = state_by_name(model, opt)
    for param, told in expected("stage1-fp32").items():
        same(told["weight"], model.get_parameter(param).detach(), param)
        same(told["exp_avg"], state[param]["exp_avg"], param)
    assert model.count.tolist() == [0, 1, 2]
    assert [group["lr"] for group in opt.param_groups] == [1e-3, 1e-3]
    assert extra["seen"] == 12
    to("torch", SAVED / "stage1-fp32", tmp_path / "made.pt")
    file = torch.load(tmp_path / "made.pt", weights_only=True)
    again = Net()
    again.load_state_dict(file["model"])
    other = optim.AdamW(again.groups(), lr=1.0)
    other.load_state_dict(file["optimizer"])
    same(state, state_by_name(again, other))


def loads_sharded(folder: str) -> None:
    model = Net().to(torch.bfloat16)
    opt = shardstep.shard(model, optim.AdamW, lr=1.0, groups=None)
    shardstep.load(f"{folder}/made", model, opt, strict=False)  # one group here, and two there
    told = expected("stage2-bf16")
    for piece, entry in opt._engine.runtime.local_step.entries().items():
        name = opt._engine.runtime.plan.params[piece.param].name
        if name in told:
            same(told[name]["master"].reshape(-1)[piece.start : piece.stop], entry[MASTER].reshape(-1), name)
            same(told[name]["exp_avg"].reshape(-1)[piece.start : piece.stop], entry["exp_avg"].reshape(-1), name)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bf16_with_masters_is_loaded_sharded_on_any_number_of_ranks(workers, tmp_path, ranks):
    to("dcp", SAVED / "stage2-bf16", tmp_path / "made")
    workers(ranks).run(loads_sharded, str(tmp_path))


def test_the_folder_of_one_step_is_read_too():
    one, other = read(SAVED / "stage1-fp32" / "global_step3"), read(SAVED / "stage1-fp32")
    assert list(one.model) == list(other.model)


def test_the_masters_are_in_the_converted_checkpoint_under_our_name(tmp_path):
    to("dcp", SAVED / "stage2-bf16", tmp_path / "made")
    assert state_key("first.weight", MASTER) in (tmp_path / "made" / "contents.json").read_text()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("zero_pp_rank_0_mp_rank_00_model_states.pt", "stage 3"),
        ("mp_rank_01_model_states.pt", "several parts"),
        ("layer_00-model_states.pt", "several parts"),
    ],
)
def test_what_is_not_read_is_refused_by_what_it_is(tmp_path, name, words):
    shutil.copytree(SAVED / "stage1-fp32", tmp_path / "source")
    folder = tmp_path / "source" / "global_step3"
    (folder / name).touch()
    if "stage 3" in words:
        (folder / "mp_rank_00_model_states.pt").unlink()
    with pytest.raises(SourceError, match=words):
        to("dcp", tmp_path / "source", tmp_path / "made")


def test_a_file_that_asks_for_another_class_of_deepspeed_is_refused_by_its_name(tmp_path):
    shutil.copytree(SAVED / "stage1-fp32", tmp_path / "source")
    file = tmp_path / "source" / "global_step3" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    payload = file.read_bytes()
    assert b"fragment_address" in payload
    file.write_bytes(payload.replace(b"fragment_address", b"fragment_addresz"))
    with pytest.raises(SourceError, match=r"asks for deepspeed\.utils\.tensor_fragment\.fragment_addresz"):
        to("dcp", tmp_path / "source", tmp_path / "made")
