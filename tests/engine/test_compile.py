"""torch.compile: weights arrive and gradients leave beside compiled code, which computes what it would without."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import batch
from shardstep import ShardConfig
from training import assert_ranks_equal

# The compiler's, of a module's inputs; in another process than the one that asks for it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.second(torch.tanh(self.first(self.norm(x))))
        return out


class Stack(nn.Module):
    """Blocks between two layers, of which the last has the weight of the first."""

    def __init__(self, blocks: int = 3, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.into = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.into.weight


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() >= 2]},
        {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
    ]


def whole(opt: shardstep.ShardedOptimizer, model: Any, options: dict[str, Any]) -> Any:
    opt.compile(**options)
    return model


def by_block(opt: shardstep.ShardedOptimizer, model: Any, options: dict[str, Any]) -> Any:
    for block in model.blocks:
        block.compile(**options)
    return model


def not_at_all(opt: shardstep.ShardedOptimizer, model: Any, options: dict[str, Any]) -> Any:
    return model


Compile = Callable[[shardstep.ShardedOptimizer, Any, dict[str, Any]], Any]


def train(
    how: Compile, options: dict[str, Any], steps: int = 5, make: Callable[[], nn.Module] = Stack, **config: Any
) -> tuple[list[torch.Tensor], dict[str, int]]:
    """The parameters after training, and how often the compiler has run after the second step."""
    torch._dynamo.reset()
    model = make()
    opt = shardstep.shard(
        model, optim.AdamW, groups=groups_of(model), config=ShardConfig(bucket_mb=0.0005, **config), **ADAMW
    )
    call = how(opt, model, options)
    late = 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(steps):
            before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            call(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if step >= 2:
                late += torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
    assert not [str(warning.message) for warning in caught if "hides nothing" in str(warning.message)]
    opt.synchronize()
    assert_ranks_equal(list(model.parameters()))
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    values = [param.detach().clone() for param in model.parameters()]
    opt.close()
    return values, {"late": late, "graphs": compiled}


def compiled_as_without(how: Compile, backend: str, collectives: bool, fullgraph: bool) -> None:
    options = {"backend": backend, "fullgraph": fullgraph}
    with by_collectives() if collectives else nullcontext():
        waited, _ = train(how, options, gather="wait")
        overlapped, counts = train(how, options, gather="overlap")
        plain, _ = train(not_at_all, {}, gather="wait")
    assert counts["graphs"] > 0, "compiled"
    assert counts["late"] == 0, "nothing is compiled again"
    for one, other, third in zip(overlapped, waited, plain, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(
            one, third, rtol=0 if backend != "inductor" else 1e-5, atol=0 if backend != "inductor" else 1e-6
        )


@pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
@pytest.mark.parametrize("how", [whole, by_block])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_models_have_the_same_bits_with_overlap_as_without(workers, backend, how, collectives):
    workers(2).run(compiled_as_without, how, backend, collectives, how is whole, timeout=100)


@pytest.mark.parametrize("how", [whole, by_block])
def test_inductor_has_the_same_bits_with_overlap_as_without(workers, how):
    workers(2).run(compiled_as_without, how, "inductor", True, False, timeout=115)


# -- what overlaps -----------------------------------------------------------------------------------------------------


def events_of_a_step(how: Compile, gather: str, options: dict[str, Any]) -> list[tuple[str, Any]]:
    """Of the fourth step: which buckets are waited for, when each block computes, and which are reduced when."""
    torch._dynamo.reset()
    model = Stack()
    opt = shardstep.shard(
        model,
        optim.AdamW,
        groups=groups_of(model),
        config=ShardConfig(bucket_mb=0.0005, gather=gather),  # type: ignore[arg-type]
        **ADAMW,
    )
    runtime, seen = opt._engine.runtime, []
    names = {param: name for name, param in model.named_parameters()}
    for param in model.parameters():
        param.register_hook(lambda grad, param=param: seen.append(("gradient", names[param])))
    call = how(opt, model, options)
    for step in range(3):
        call(batch(step)).square().mean().backward()
        opt.step()
        opt.zero_grad()

    def note(what: str, act: Callable[..., Any], of: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            seen.append((what, of(*args)))
            return act(*args, **kwargs)

        return noted

    seen.clear()
    sender, reducing = runtime.weights.sender, runtime.gradients.current
    numbers = {id(gather): number for number, gather in enumerate(runtime.weights.gathers)}
    with (
        mock.patch.object(
            sender, "finish", note("wait", sender.finish, lambda rows: [numbers[id(row)] for row in rows])
        ),
        mock.patch.object(reducing, "_launch", note("reduce", reducing._launch, lambda bucket, parts: bucket)),
    ):
        call(batch(3)).square().mean().backward()
        opt.step()
    opt.zero_grad()
    opt.close()
    return seen


def reduces_before_backward_ends(how: Compile) -> None:
    seen = events_of_a_step(how, "overlap", {"backend": "aot_eager"})
    kinds = [what for what, _ in seen]
    first, last = kinds.index("reduce"), len(kinds) - 1 - kinds[::-1].index("gradient")
    assert first < last, "a bucket is reduced before the last gradient is there"
    assert kinds[:last].count("reduce") >= 3, seen
    waits = [bucket for what, buckets in seen if what == "wait" for bucket in sorted(buckets, reverse=True)]
    assert sorted(waits) == list(range(max(waits) + 1)), "each bucket is waited for once"
    assert waits == sorted(waits, reverse=True), "in the order of forward"
    assert kinds.count("wait") >= 3, "one after the other, and not all at once"


@pytest.mark.parametrize("how", [not_at_all, by_block, whole])
def test_both_directions_overlap_with_two_param_groups(workers, how):
    """Norms and biases, which do not decay, were a bucket of their own: full when backward ends, needed at once."""
    workers(2).run(reduces_before_backward_ends, how, timeout=100)


# -- what would read weights that have not arrived ---------------------------------------------------------------------


class ReadsBetween(Stack):
    """Reads a weight outside compiled code, and without a module of its own: between two graphs."""

    opt: Any = None

    @torch.compiler.disable
    def read(self, weight: torch.Tensor) -> torch.Tensor:
        arrivals = None if self.opt is None else self.opt._engine.runtime.weights.arrivals
        assert arrivals is None or arrivals._in_flight.isdisjoint(arrivals._buckets_of[id(weight)]), "it has arrived"
        return weight.detach().sum()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.into(x))
        x = x + self.read(self.blocks[2].second.bias)
        for block in self.blocks[1:]:
            x = block(x)
        return self.norm(x) @ self.into.weight


class ReadsFirst(ReadsBetween):
    """The same before anything is compiled."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.read(self.blocks[2].second.bias)
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.into.weight


class ReadsLater(ReadsBetween):
    """Compiled as one graph at first; then it takes another way, and later the first again."""

    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            x = x + self.read(self.blocks[2].second.bias)
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.into.weight


def breaks_are_waited_for(make: Callable[[], Any]) -> None:
    torch._dynamo.reset()
    model = make()
    config = ShardConfig(bucket_mb=0.0005, gather="overlap")
    opt = shardstep.shard(model, optim.AdamW, groups=groups_of(model), config=config, **ADAMW)
    opt.compile(backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(8):
            model.breaks = step in (2, 5, 6)
            model.opt = opt
            model(batch(step)).square().mean().backward()
            model.opt = None
            opt.step()
            opt.zero_grad()
    assert ["forward is not one graph" in str(warning.message) for warning in caught].count(True) == 1
    opt.close()


@pytest.mark.parametrize("make", [ReadsBetween, ReadsFirst, ReadsLater])
def test_graph_breaks_find_finished_weights(workers, make):
    workers(2).run(breaks_are_waited_for, make, timeout=100)


def evaluates_between_steps() -> None:
    """Evaluation, another batch size, a weight that is read directly, and a frozen parameter: each on new weights."""
    results = []
    for gather in ("wait", "overlap"):
        torch._dynamo.reset()
        model = Stack()
        opt = shardstep.shard(
            model,
            optim.AdamW,
            config=ShardConfig(bucket_mb=0.0005, gather=gather),
            **ADAMW,  # type: ignore[arg-type]
        )
        opt.compile(backend="aot_eager")
        found = []
        for step in range(6):
            if step == 3:
                model.blocks[1].first.weight.requires_grad_(False)
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
            if step % 2:
                found.append(model.norm.weight.detach().clone())
                model.eval()
                with torch.no_grad():
                    found.append(model(batch(step)[:3]).clone())
                model.train()
        opt.synchronize()
        results.append([*found, *(param.detach().clone() for param in model.parameters())])
        opt.close()
        assert torch.isfinite(model(batch(0))).all(), "a closed optimizer leaves the model compiled"
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_evaluation_and_a_new_plan_between_compiled_steps(workers):
    workers(2).run(evaluates_between_steps, timeout=100)


def blocks_compiled_before_shard() -> None:
    results = []
    for gather in ("wait", "overlap"):
        torch._dynamo.reset()
        model = Stack()
        for block in model.blocks:
            block.compile(backend="aot_eager")
        opt = shardstep.shard(model, optim.AdamW, config=ShardConfig(bucket_mb=0.0005, gather=gather), **ADAMW)
        for step in range(4):
            model(batch(step)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        results.append([param.detach().clone() for param in model.parameters()])
        opt.close()
        assert not any(type(block._compiled_call_impl).__module__.startswith("shardstep") for block in model.blocks)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_blocks_that_were_compiled_before(workers):
    workers(2).run(blocks_compiled_before_shard, timeout=100)


def has_blocks_in_its_last_region() -> None:
    """The tied weight is larger than a bucket, and in both ends of the model."""
    model = Stack(3, 64)
    model.into = nn.Linear(256, 64)
    opt = shardstep.shard(model, optim.AdamW, lr=1e-2, config=ShardConfig(bucket_mb=0.06))
    regions: list[list[torch.Size]] = []

    def record(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        del inputs
        values = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        regions.append([value.shape for value in values if isinstance(value, nn.Parameter)])
        return graph

    opt.compile(backend=record)
    model(torch.randn(4, 256)).square().mean().backward()
    assert len(regions) > 2
    tied = [shapes for shapes in regions if model.into.weight.shape in shapes]
    assert len(tied) == 2
    assert any({torch.Size([64, 128]), torch.Size([128, 64])} & set(shapes) for shapes in tied)
    assert not hasattr(model.into.weight, "_ddp_ignored")
    opt.close()


def test_a_tied_output_layer_is_not_a_region_of_its_own(workers):
    workers(2).run(has_blocks_in_its_last_region, timeout=100)


def refuses_what_it_cannot_do() -> None:
    model = Stack()
    opt = shardstep.shard(model, optim.AdamW, **ADAMW)
    with pytest.raises(ValueError, match='mode="reduce-overhead" is for backend="inductor"'):
        opt.compile(backend="eager", mode="reduce-overhead")
    assert model._compiled_call_impl is None
    opt.close()
    with pytest.raises(RuntimeError, match=r"model.compile\(\)"):
        opt.compile()


def test_refusals_of_compile(workers):
    workers(1).run(refuses_what_it_cannot_do)
