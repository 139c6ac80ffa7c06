"""What is read from frames and private tables of torch: these tests fail when torch changes its names or variables."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.algorithms.join import Join, Joinable
from torch.distributed.checkpoint import state_dict as torchs_state_dict

import shardstep
from shardstep import torch_internals
from worker_pool import WorkerPool

SOURCE = Path(shardstep.__file__).parent


def test_no_other_file_inspects_frames_or_fills_a_table_of_torch():
    tricks = re.compile(r"\b(_getframe|f_code|f_locals|f_back|currentframe|inspect\.stack|pg_names)\b")
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if tricks.search(path.read_text())}
    assert found == {"torch_internals.py"}


class Watched(nn.Parameter):
    """Calls `ask` with the frame of whatever reads its gradient."""

    ask: Callable[[Any], object]

    @property
    def grad(self) -> Any:
        self.ask(torch_internals.frame_at(1))
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, value: Any) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def watched(ask: Callable[[Any], object]) -> Watched:
    param = Watched(torch.ones(2))
    param.ask = ask
    return param


def test_a_grad_scaler_unscales_in_a_function_of_its_own():
    found: list[Any] = []
    param = watched(lambda frame: found.append(torch_internals.variables_of_unscale(frame, opt)))
    opt, other = optim.SGD([param], lr=0.1), optim.SGD([param], lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(param.sum()).backward()
    assert param.grad is not None
    assert found.pop() is None, "here reads the test"
    scaler.unscale_(other)
    assert set(map(str, found)) == {"None"}, "the scaler asks for another optimizer"
    found.clear()
    scaler.unscale_(opt)
    assert found[0]["inv_scale"].item() == 0.25
    assert found[0]["found_inf"].shape == ()
    assert found[0]["allow_fp16"] is False


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_of_a_module_reads_the_gradient_itself(set_to_none):
    found: list[Any] = []
    model = nn.Module()
    model.weight = watched(lambda frame: found.append(torch_internals.variables_of_zero_grad(frame)))
    assert model.weight.grad is None
    assert found.pop() is None
    nn.Sequential(model).zero_grad(set_to_none)
    assert isinstance(found[0]["self"], nn.Sequential)
    assert found[0]["set_to_none"] is set_to_none


def test_the_name_of_a_function_that_reads_a_gradient():
    names: list[str] = []
    param = watched(lambda frame: names.append(torch_internals.name_of(frame)))

    def reads() -> None:
        assert [one.grad for one in [param, param]] == [None, None]

    reads()
    torch.nn.utils.clip_grad_norm_([param], 1.0)
    assert names[:3] == ["reads", "reads", "clip_grad_norm_"]


def test_checkpoints_of_torch_make_state_in_a_function_of_their_own():
    found: list[bool] = []

    class Stateful(optim.SGD):
        @property
        def state(self) -> Any:
            found.append(torch_internals.is_init_optim_state(torch_internals.frame_at(1)))
            return {"here": True}

        @state.setter
        def state(self, value: Any) -> None: ...

    opt = Stateful([nn.Parameter(torch.ones(2))], lr=0.1)
    assert opt.state
    found.clear()
    torchs_state_dict._init_optim_state(opt)
    assert found == [True]


class Joined(Joinable):
    def __init__(self) -> None:
        super().__init__()
        self.found: Any = None

    def join_hook(self, **kwargs: Any) -> Any:
        self.found = dict(torch_internals.variables_of_join())
        raise ArithmeticError("that is enough of it")

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return None


def test_join_asks_for_hooks_in_its_constructor():
    one, other = Joined(), Joined()
    with pytest.raises(ArithmeticError):
        Join([one, other], enable=False)
    assert one.found["joinables"] == [one, other]
    assert one.found["enable"] is False
    assert isinstance(one.found["self"], Join)
    with pytest.raises(RuntimeError, match="join_hook"):
        one.join_hook()


def names_groups() -> list[str]:
    """Rank 1 is in one group more than rank 0 has ever heard of."""
    if dist.get_rank() == 1:
        dist.new_group([1], use_local_synchronization=True)
    before = torch_internals.count_process_groups()
    with torch_internals.process_groups_counted_as(before + 5 - dist.get_rank()):
        group = dist.new_group([0, 1], use_local_synchronization=True)
    assert torch_internals.count_process_groups() == before + 1
    number = torch.ones(1)
    dist.all_reduce(number, group=group)
    assert number.item() == 2
    return [group.group_name, *dist.distributed_c10d._world.pg_names.values()]


def test_a_new_group_is_named_after_the_number_of_groups():
    """In processes of its own: torch 2.15 lets ranks that have made different groups wait for each other later on."""
    pool = WorkerPool(2)
    try:
        (name, *names), (same, *_) = pool.run(names_groups, timeout=30)
    finally:
        pool.close()
    assert name == same
    assert not any(own.startswith("shardstep/") for own in names)
