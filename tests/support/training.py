"""What the multi-process tests share: parameters, gradients, and the plain optimizer as the oracle."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardstep import ZeroRedundancyOptimizer

# A matrix, a vector, a scalar, three dims and no elements at all.
SHAPES: tuple[tuple[int, ...], ...] = ((7, 5), (5,), (), (3, 2, 2), (0, 3))


def make_params(
    shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(7)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def twins(params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad) for param in params]


def set_gradients(step: int, *param_lists: Sequence[torch.Tensor]) -> None:
    """The same gradients for every list and every rank: what a reduction would have left there."""
    for params in param_lists:
        generator = torch.Generator().manual_seed(1000 + step)
        for param in params:
            gradient = torch.randn(param.shape, generator=generator).to(param.device, param.dtype)
            param.grad = gradient if param.requires_grad else None


def assert_same(ours: Sequence[torch.Tensor], plain: Sequence[torch.Tensor], context: str = "") -> None:
    for index, (own, other) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(own.detach(), other.detach()), f"parameter {index} differs {context}: {own} {other}"


def assert_ranks_equal(params: Sequence[torch.Tensor], group: Any = None) -> None:
    for index, param in enumerate(params):
        own = param.detach().contiguous()
        everyone = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, own, group=group)
        assert all(torch.equal(other, own) for other in everyone), f"parameter {index} differs between ranks"


def assert_states_equal(ours: dict[str, Any], plain: dict[str, Any]) -> None:
    """Two state_dicts with the same keys, in the same order, and the same values."""
    assert list(ours) == list(plain)
    assert ours["param_groups"] == plain["param_groups"]
    assert list(ours["state"]) == sorted(plain["state"])  # in index order, whenever a parameter was first stepped
    for key, entry in plain["state"].items():
        assert list(ours["state"][key]) == list(entry), key
        for name, value in entry.items():
            other = ours["state"][key][name]
            if isinstance(value, torch.Tensor):
                assert other.device.type == "cpu"
                assert other.dtype == value.dtype
                assert other.shape == value.shape
                assert torch.equal(other, value.cpu()), f"state[{key}][{name}]"
            else:
                assert other == value, f"state[{key}][{name}]"


def consolidated(zero: ZeroRedundancyOptimizer, to: int = 0) -> dict[str, Any]:
    """The consolidated state_dict on every rank, as a program gets it there through a file."""
    zero.consolidate_state_dict(to=to)
    box = [zero.state_dict() if zero.rank == to else None]
    dist.broadcast_object_list(box, group=zero.process_group, group_src=to)
    assert box[0] is not None
    return box[0]


def raised(call: Any) -> tuple[str, str]:
    """(type, text) of what `call` raises; fails if it raises nothing."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("nothing was raised")


def small_model(seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches(count: int, *, rank: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(50 + rank)
    for _ in range(count):
        yield torch.randn(4, 6, generator=generator)


def copies(model: nn.Module, count: int) -> list[nn.Module]:
    return [copy.deepcopy(model) for _ in range(count)]


def all_same(results: Sequence[Any]) -> Any:
    """What every rank returned, which must be the same."""
    assert all(result == results[0] for result in results), results
    return results[0]
