"""Weights on their way, with gather="overlap": everything that reads or writes them finds them finished."""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.utils import parametrizations, prune, spectral_norm, vector_to_parameters, weight_norm
from torch.optim.swa_utils import AveragedModel

import shardstep
from as_collectives import by_collectives
from fast_lane_training import batch, loss_of
from shardstep import ShardConfig
from shardstep.params.proxy import is_in_flight
from training import assert_ranks_equal

TINY_BUCKETS = 0.0002  # MB: about a bucket for every parameter
LATE = 0.15  # seconds by which one rank's parameters come later than the other's


def small_net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 5))


def sends_late(opt: shardstep.ShardedOptimizer) -> None:
    """The last rank sends its parameters when the others have long gone on."""
    if dist.get_rank() != dist.get_world_size() - 1:
        return
    send = opt._engine.runtime.weights.send

    def late(buckets: Any) -> None:
        time.sleep(LATE / len(opt._engine.runtime.step_order))
        send(buckets)

    opt._engine.runtime.weights.send = late  # type: ignore[method-assign]


def sharded(model: nn.Module, gather: Any) -> shardstep.ShardedOptimizer:
    opt = shardstep.shard(model, optim.SGD, lr=0.5, config=ShardConfig(gather=gather, bucket_mb=TINY_BUCKETS))
    if gather == "overlap":
        sends_late(opt)
    return opt


Between = Callable[[nn.Module], Any]  # what a program does between two iterations; what it returns is compared


def train(model: nn.Module, gather: Any, call: nn.Module | None = None, between: Between | None = None) -> list[Any]:
    opt = sharded(model, gather)
    found: list[Any] = []
    for step in range(4):
        loss_of(call or model, batch(step)).backward()
        opt.step()
        opt.zero_grad()
        if between is not None:
            found.append(between(model))
    opt.synchronize()
    found.append([param.detach().clone() for param in model.parameters()])
    opt.close()
    return found


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


# -- what reads and writes weights -------------------------------------------------------------------------------------


def values(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def loads(model: nn.Module) -> None:
    model.load_state_dict({name: torch.full_like(value, 0.1) for name, value in model.state_dict().items()})


def averages(model: nn.Module) -> list[torch.Tensor]:
    average = AveragedModel(small_net())
    for _ in range(2):
        average.update_parameters(model)
    return values(average)


def saves(model: nn.Module) -> list[torch.Tensor]:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return values(torch.load(file, weights_only=False))


def writes_vector(model: nn.Module) -> None:
    vector_to_parameters(torch.linspace(-0.3, 0.3, sum(p.numel() for p in model.parameters())), model.parameters())


def writes_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.9)


def evaluates(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(batch(9))


BETWEEN: dict[str, Between] = {
    "reads": values,
    "data": lambda model: [param.data.clone() for param in model.parameters()],
    "numpy": lambda model: [param.detach().numpy().copy().tolist() for param in model.parameters()],
    "state_dict": lambda model: copy.deepcopy(model.state_dict()),
    "load_state_dict": loads,
    "AveragedModel": averages,
    "torch.save": saves,
    "deepcopy": lambda model: values(copy.deepcopy(model)),
    "parameters_to_vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).detach(),
    "vector_to_parameters": writes_vector,
    "in place": writes_in_place,
    "foreach": lambda model: torch._foreach_norm(list(model.parameters())),
    "functional_call": lambda model: torch.func.functional_call(model, dict(model.named_parameters()), (batch(8),)),
    "evaluation": evaluates,
    "a submodule alone": lambda model: model[2](torch.ones(1, 9)),
    "repr": lambda model: [repr(param) for param in model.parameters()],
}


def finds_finished_weights(name: str, collectives: bool) -> None:
    results = []
    for gather in ("wait", "overlap"):
        if collectives:
            with by_collectives():
                results.append(train(small_net(), gather, between=BETWEEN[name]))
        else:
            results.append(train(small_net(), gather, between=BETWEEN[name]))
    assert equal(*results), name


@pytest.mark.parametrize("name", BETWEEN)
def test_what_comes_after_step_finds_finished_weights(workers, name):
    workers(2).run(finds_finished_weights, name, False, timeout=60)


@pytest.mark.parametrize("name", ["reads", "load_state_dict"])
def test_what_comes_after_step_finds_finished_weights_with_collectives(workers, name):
    workers(2).run(finds_finished_weights, name, True, timeout=60)


# -- modules that compute their weights --------------------------------------------------------------------------------


def with_weight_norm() -> nn.Module:
    model = small_net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a newer one
        weight_norm(model[0])
    return model


def with_spectral_norm() -> nn.Module:
    model = small_net()
    spectral_norm(model[2])
    return model


def with_pruning() -> nn.Module:
    model = small_net()
    prune.l1_unstructured(model[0], "weight", amount=0.3)
    return model


def with_parametrization() -> nn.Module:
    model = small_net()
    parametrizations.weight_norm(model[2])
    return model


MADE = {"weight_norm": with_weight_norm, "spectral_norm": with_spectral_norm, "prune": with_pruning,
        "parametrization": with_parametrization}  # fmt: skip


def computes_its_weights_from_finished_ones(name: str) -> None:
    assert equal(train(MADE[name](), "wait"), train(MADE[name](), "overlap")), name


@pytest.mark.parametrize("name", MADE)
def test_weights_computed_in_hooks_come_from_finished_ones(workers, name):
    workers(2).run(computes_its_weights_from_finished_ones, name, timeout=60)


# -- code that does not ask --------------------------------------------------------------------------------------------


def four_steps(call: Any, opt: shardstep.ShardedOptimizer) -> None:
    for step in range(4):
        loss_of(call, batch(step)).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()


def compiled_after_shard(backend: str, **options: Any) -> list[Any]:
    """And the same parameters with gather="wait", not compiled; the compiler's own kernels may round otherwise."""
    results = []
    for gather in ("wait", "overlap"):
        model = small_net()
        opt = sharded(model, gather)
        call = torch.compile(model, backend=backend, **options) if gather == "overlap" else model
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            four_steps(call, opt)
        results.append(values(model))
        opt.close()
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6), (one - other).abs().max()
    return [str(warning.message) for warning in caught if "hides nothing" in str(warning.message)]


@pytest.mark.parametrize("options", [{}, {"fullgraph": True}], ids=["graph breaks", "fullgraph"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_after_shard_trains_on_new_weights(workers, backend, options):
    for told in workers(2).run(compiled_after_shard, backend, timeout=100, **options):
        assert len(told) == 1
        assert "torch.compile" in told[0]


def test_torch_compile_with_inductor_trains_on_new_weights(workers):
    workers(2).run(compiled_after_shard, "inductor", timeout=110)


def compiled_before_shard(warm: bool) -> None:
    torch._dynamo.reset()
    model = small_net()
    call = torch.compile(model, backend="eager")
    if warm:  # the code that is kept knows nothing of our hooks
        loss_of(call, batch(0)).backward()
        model.zero_grad()
    result = train(model, "overlap", call=call)
    assert equal(train(small_net(), "wait"), result)


@pytest.mark.filterwarnings("ignore:gather=")
@pytest.mark.parametrize("warm", [False, True], ids=["not called before", "called before"])
def test_torch_compile_before_shard_trains_on_new_weights(workers, warm):
    workers(2).run(compiled_before_shard, warm, timeout=100)


def compiled_in_part() -> None:
    model = small_net()
    inner = model[2]
    model[2].forward = torch.compile(inner.forward, backend="eager")  # type: ignore[method-assign]
    assert equal(train(small_net(), "wait"), train(model, "overlap"))


@pytest.mark.filterwarnings("ignore:gather=", "ignore:The .grad attribute of a Tensor")
def test_a_compiled_layer_uses_new_weights(workers):
    workers(2).run(compiled_in_part, timeout=100)


def compiled_function() -> None:
    """Compiled code that takes weights itself, and no module is called."""
    results = []
    for gather in ("wait", "overlap"):
        torch._dynamo.reset()
        model = small_net()
        opt = sharded(model, gather)

        def first_layer(x: torch.Tensor, model: nn.Sequential = model) -> torch.Tensor:
            return x @ model[0].weight.T + model[0].bias

        call = torch.compile(first_layer, backend="aot_eager") if gather == "overlap" else first_layer
        found = []
        for step in range(4):
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
            found.append(call(batch(9)).detach().clone())
        opt.synchronize()
        results.append(found)
        opt.close()
    assert equal(*results)


@pytest.mark.filterwarnings("ignore:gather=")
def test_a_compiled_function_that_takes_weights_uses_new_ones(workers):
    workers(2).run(compiled_function, timeout=100)


def traced() -> None:
    results = []
    for gather in ("wait", "overlap"):
        model = small_net()
        opt = sharded(model, gather)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call = torch.jit.trace(model, batch(0).to(model[0].weight.device))
            four_steps(call, opt)
        results.append(values(model))
        opt.close()
    assert equal(*results)


@pytest.mark.filterwarnings("ignore")
def test_a_traced_model_uses_new_weights(workers):
    workers(2).run(traced, timeout=60)


# -- and it still overlaps ---------------------------------------------------------------------------------------------


def on_their_way(model: nn.Module) -> int:
    return sum(map(is_in_flight, model.parameters()))


def goes_on_before_the_others_have_sent() -> tuple[float, float]:
    """Seconds of step() and zero_grad() on this rank, and of the forward after them."""
    model = small_net()
    opt = sharded(model, "overlap")
    taken = (0.0, 0.0)
    for step in range(3):
        loss_of(model, batch(step)).backward()
        dist.barrier()
        start = time.perf_counter()
        opt.step()
        opt.zero_grad()
        between = time.perf_counter()
        assert on_their_way(model) or dist.get_rank()
        assert next(model.parameters()).shape == (9, 7)
        loss_of(model, batch(step))
        assert not on_their_way(model)
        taken = (between - start, time.perf_counter() - between)
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))
    return taken


def test_step_and_zero_grad_do_not_wait_for_weights(workers):
    (step, forward), _ = workers(2).run(goes_on_before_the_others_have_sent, timeout=30)
    assert step < LATE / 2
    assert forward > LATE / 4
