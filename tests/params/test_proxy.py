"""The class of a sharded parameter: its own in all that programs see, and gone with the optimizer."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from shardstep.params.proxy import attach_proxies, detach_proxies, is_in_flight, set_at_rest, set_in_flight


class Named(nn.Parameter):
    """A class of the program's own, with a text of its own."""

    note = "none"

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.note}: {self.tolist()}"


class Optimizer:
    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        return True

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None: ...

    def shows_memory_of(self, param: torch.Tensor) -> None: ...

    def gradient_to_unscale(self, param: torch.Tensor, call: Any) -> None: ...


class Source:
    """Weights become one while somebody waits for them."""

    def __init__(self) -> None:
        self.waits = 0

    def wait_for(self, params: Iterable[Any]) -> None:
        self.waits += 1
        for param in params:
            set_at_rest(param)
            with torch.no_grad():
                param.fill_(1.0)

    def wait_for_all(self) -> None: ...


def saved(param: torch.Tensor) -> Any:
    file = io.BytesIO()
    torch.save(param, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


READERS: dict[str, Callable[[Any], Any]] = {
    "repr": repr,
    "sum": lambda param: param.sum(),
    "data": lambda param: param.data.clone(),
    "deepcopy": copy.deepcopy,
    "torch.save": saved,
    "in a list": lambda param: torch.stack([param, param]),
}


@pytest.mark.parametrize("kind", [nn.Parameter, Named])
@pytest.mark.parametrize("name", READERS)
def test_a_reader_finds_values_that_have_arrived_and_the_parameters_own_class(kind, name):
    owner, source, plain, param = Optimizer(), Source(), kind(torch.ones(2)), kind(torch.zeros(2))
    plain.note = param.note = "kept"
    attach_proxies(owner, [param])
    set_in_flight(param, source)
    assert is_in_flight(param)
    assert param.shape == (2,)
    assert param.requires_grad
    assert source.waits == 0, "neither needs values"
    expected, found = READERS[name](plain), READERS[name](param)
    assert source.waits == 1
    assert type(found) is type(expected)
    assert torch.equal(found, expected) if isinstance(found, torch.Tensor) else found == expected
    assert isinstance(param, kind)
    assert type(param).__name__ == kind.__name__
    detach_proxies(owner, [param])
    assert type(param) is kind
    assert param.note == "kept"


def test_nobody_waits_for_weights_whose_optimizer_is_gone():
    owner, source, param = Optimizer(), Source(), nn.Parameter(torch.zeros(2))
    attach_proxies(owner, [param])
    set_in_flight(param, source)
    del source
    assert param.sum() == 0
    assert not is_in_flight(param)
    del owner
    assert param.grad is None


def test_a_parameter_is_its_last_owners():
    first, second, param = Optimizer(), Optimizer(), nn.Parameter(torch.zeros(2))
    attach_proxies(first, [param])
    attach_proxies(second, [param])
    detach_proxies(first, [param])
    with pytest.raises(RuntimeError, match="test_a_parameter_is_its_last_owners reads it"):
        print(param.grad)
    detach_proxies(second, [param])
    assert type(param) is nn.Parameter
    assert param.grad is None
