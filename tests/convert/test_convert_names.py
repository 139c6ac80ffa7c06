"""Which parameter is which number of an optimizer: by order and shape, or not at all."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn, optim

from converting import same, to, trained
from shardstep.convert.names import match_names, shape_of
from shardstep.convert.source import SourceError, lazy_tensor

pytestmark = pytest.mark.slow  # make test-slow


def model_of(**shapes: tuple[int, ...]):
    return {name.replace("__", "."): lazy_tensor(torch.zeros(shape)) for name, shape in shapes.items()}


def state_of(*shapes: tuple[int, ...] | None):
    return {number: {"exp_avg": torch.zeros(shape)} for number, shape in enumerate(shapes) if shape is not None}


def test_numbers_are_keys_in_order_with_buffers_between():
    model = model_of(a=(2, 3), b=(3,), table=(5, 5), c=(3, 4), d=(4,))
    assert match_names([[0, 1, 2, 3]], state_of((2, 3), (3,), (3, 4), (4,)), model, {}) == dict(enumerate("abcd"))


def test_groups_are_each_in_order():
    model = model_of(a=(2, 3), b=(3,), c=(3, 4), d=(4,))
    found = match_names([[0, 1], [2, 3]], state_of((2, 3), (3, 4), (3,), (4,)), model, {})
    assert found == {0: "a", 1: "c", 2: "b", 3: "d"}


def test_a_parameter_without_state_is_what_is_left():
    model = model_of(a=(2, 3), b=(3,), c=(3, 4))
    assert match_names([[0, 1, 2]], state_of((2, 3), None, (3, 4)), model, {})[1] == "b"


def test_statistics_of_a_batch_norm_are_no_parameters():
    net = nn.Sequential(nn.Linear(7, 4), nn.BatchNorm1d(4), nn.Linear(4, 5))
    model = {key: lazy_tensor(value) for key, value in net.state_dict().items()}
    state = state_of(*(param.shape for param in net.parameters()))
    found = match_names([list(state)], state, model, {})
    assert [found[number] for number in state] == [name for name, _ in net.named_parameters()]


def test_tied_keys_count_once():
    model = model_of(embed=(9, 4), norm=(4,), head=(9, 4))
    assert match_names([[0, 1]], state_of((9, 4), (4,)), model, {"head": "embed"}) == {0: "embed", 1: "norm"}


def test_rows_and_columns_tell_a_shape_together():
    assert shape_of({"row_var": torch.zeros(5, 1), "col_var": torch.zeros(1, 7), "step": torch.tensor(1.0)}) == (5, 7)
    assert shape_of({"step": torch.tensor(1.0)}) is None
    assert shape_of({"a": torch.zeros(3), "b": torch.zeros(4)}) is None


@pytest.mark.parametrize(
    ("groups", "shapes", "model", "words"),
    [
        ([[0]], [(3,)], {"a": (3,), "b": (3,)}, "more than one way"),
        ([[0], [1]], [(3,), (3,)], {"a": (3,), "b": (3,)}, "more than one way"),
        ([[0, 1]], [(3,), (4,)], {"a": (4,), "b": (3,)}, "do not fit the model's in its order: at a of shape"),
        ([[0, 1]], [(3,), (4,)], {"a": (3,)}, "has 2 parameters, and the model's state_dict has 1"),
    ],
)
def test_what_fits_in_no_way_or_in_two_is_refused_with_the_reason(groups, shapes, model, words):
    with pytest.raises(SourceError, match=words):
        match_names(groups, state_of(*shapes), model_of(**model), {})


def test_many_parameters_of_one_shape_are_matched_quickly():
    model = model_of(**{f"w{n}": (8, 8) if n % 2 else (8,) for n in range(2000)})
    order = [*range(1, 2000, 2), *range(0, 2000, 2)]
    state = {number: {"m": torch.zeros((8, 8) if number < 1000 else (8,))} for number in range(2000)}
    found = match_names([list(range(1000)), list(range(1000, 2000))], state, model, {})
    assert [found[number] for number in range(2000)] == [f"w{n}" for n in order]


def pair_of_heads(model: nn.Module):
    """Two groups that shapes cannot tell apart, the second first."""
    return [{"params": list(model[1].parameters())}, {"params": list(model[0].parameters()), "lr": 0.5}]


@pytest.mark.parametrize("form", ["lines", "json"])
def test_names_that_a_person_gives_are_taken(tmp_path, form):
    model, opt = trained(model=nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)), groups=pair_of_heads)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "source.pt")
    with pytest.raises(SourceError, match=r"more than one way.*--names FILE"):
        to("dcp", tmp_path / "source.pt", tmp_path / "made")
    names = ["1.weight", "1.bias", "0.weight", "0.bias"]
    (tmp_path / "names").write_text(json.dumps(names) if form == "json" else "\n".join(names) + "\n")
    to("torch", tmp_path / "source.pt", tmp_path / "made.pt", names=tmp_path / "names")
    made = torch.load(tmp_path / "made.pt", weights_only=True)["optimizer"]
    assert made["param_groups"][0]["param_names"] == names[:2]
    same(made["state"][2], dict(opt.state[model[0].weight]))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["0.weight"], "has 4 parameters, and 1 names were given"),
        (["0.weight", "0.weight", "1.bias", "x"], "0.weight is named twice; x is not in the model"),
        (["0.bias", "0.weight", "1.weight", "1.bias"], "in another order"),
    ],
)
def test_names_that_do_not_fit_are_refused(tmp_path, names, words):
    model, opt = trained(model=nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)))
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "source.pt")
    (tmp_path / "names").write_text("\n".join(names))
    with pytest.raises(SourceError, match=words):
        to("dcp", tmp_path / "source.pt", tmp_path / "made", names=tmp_path / "names")
    assert not (tmp_path / "made").exists()


def test_an_optimizer_that_keeps_nothing_is_converted(tmp_path):
    model = nn.Linear(7, 7)
    opt = optim.SGD(model.parameters(), lr=0.1)
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict()}, tmp_path / "source.pt")
    to("torch", tmp_path / "source.pt", tmp_path / "made.pt")
    opt.load_state_dict(torch.load(tmp_path / "made.pt", weights_only=True)["optimizer"])
