"""Compiled modules: their weights arrive before compiled code reads them, and gradients are reduced region by region.

Compiled code reads memory directly and runs no hooks in its middle. So a module that was compiled in place
(`block.compile()`) waits for its weights before its compiled code runs: `BeforeCompiled`. The backward of a compiled
region is one node of autograd, and its gradients are there when all of it has run. So a model that is compiled as a
whole is split into regions of about one bucket each, by torch's own DDPOptimizer, and each region waits for its own
weights: `compile_in_regions`, which is `opt.compile()`.

[Note: the class of a parameter] Dynamo compares the class of every parameter before it runs what it has compiled, so a
parameter in flight must be of its usual class by then. When a split model is called, its parameters get that class with
their values still in flight, and each region waits for those among its arguments. That is right only if nothing but
these regions reads weights: if forward is one graph, as the compiler is asked to make it. If it cannot, the model is
compiled with graph breaks, and waits for all weights before it is called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from shardstep.params.proxy import WeightSource


class InFlight(WeightSource, Protocol):
    """Weights in flight to this rank, as weight_arrival.py knows them."""

    def hand_over(self) -> None:
        """Give every parameter the class that it has at rest; the caller waits for it before it is read."""

    def run_compiled(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call compiled code whose weights the caller waits for."""


WeightsInFlight = Callable[[], InFlight | None]  # None: there are none, or the optimizer is gone


class BeforeCompiled:
    """Replaces what `module.compile()` has made: waits for the module's weights, and calls that."""

    def __init__(self, module: nn.Module, weights: WeightsInFlight) -> None:
        self.call: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]
        self._params, self._weights = list(module.parameters()), weights

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or (weights := self._weights()) is None:
            return self.call(*args, **kwargs)
        weights.wait_for(self._params)
        return weights.run_compiled(self.call, *args, **kwargs)


def cover_compiled(model: nn.Module, weights: WeightsInFlight) -> list[nn.Module]:
    """Put a BeforeCompiled before every module inside `model` that was compiled in place; return those that are new."""
    found = []
    for module in model.modules():
        call = module._compiled_call_impl
        if module is not model and call is not None and not isinstance(call, BeforeCompiled):
            module._compiled_call_impl = BeforeCompiled(module, weights)
            found.append(module)
    return found


def uncover(modules: Sequence[nn.Module]) -> None:
    """Take every BeforeCompiled of these modules away again."""
    for module in modules:
        if isinstance(module._compiled_call_impl, BeforeCompiled):
            module._compiled_call_impl = module._compiled_call_impl.call


# -- a model that is compiled as a whole -------------------------------------------------------------------------------


def compile_in_regions(
    model: nn.Module, weights: WeightsInFlight, sizes: tuple[int, int] | None, options: Mapping[str, Any]
) -> None:
    """Compile `model` in place, as `model.compile(**options)` does, in regions of `sizes` bytes of parameters.

    `sizes` are those of a region, and of the last one, whose backward runs first; None: one region.
    """
    chosen = dict(options)
    backend = _inner_backend(chosen.pop("backend", "inductor"), chosen.pop("mode", None), chosen.pop("options", None))
    model._compiled_call_impl = _SplitCall(model, partial(_compile_regions, backend, weights, sizes), weights, chosen)


def _inner_backend(backend: Any, mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """Return the backend that compiles one region, chosen as torch.compile would choose it."""
    if backend == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **(options or {})}
        return partial(compile_fx, config_patches=patches)
    if mode is not None:
        raise ValueError(f'mode="{mode}" is for backend="inductor", got backend={backend!r}')
    found: Callable[..., Any] = torch._dynamo.lookup_backend(backend)
    return partial(found, options=options) if options else found


def _compile_regions(
    inner: Callable[..., Any],
    weights: WeightsInFlight,
    sizes: tuple[int, int] | None,
    graph: torch.fx.GraphModule,
    inputs: list[Any],
) -> Callable[..., Any]:
    """Split `graph` and compile each region by the backend `inner`; itself a backend, for torch.compile."""
    if sizes is None:
        return _Region(inner(graph, inputs), weights)
    from torch._dynamo.backends.distributed import DDPOptimizer

    usual, last = sizes
    _ignore_tied(graph)
    split = DDPOptimizer(usual, inner, first_bucket_cap=min(last, usual)).compile_fn(graph, inputs)
    regions = list(split.named_children()) if isinstance(split, nn.Module) else []
    for name, region in regions:
        setattr(split, name, _Region(region, weights))
    return split if regions else _Region(split, weights)


def _ignore_tied(graph: torch.fx.GraphModule) -> None:
    """Have the splitter ignore the size of weights that are used more than once: their gradients come with the first.

    An output layer that is tied to the embedding would otherwise be the last region alone, and the first bucket of
    backward, which is a small one, would wait for all of the next region.
    """
    for node in graph.graph.nodes:
        value = node.meta.get("example_value") if len(node.users) > 1 else None
        if isinstance(value, nn.Parameter):  # the compiler's stand-in
            value._ddp_ignored = True  # type: ignore[attr-defined]


class _Region(nn.Module):
    """One compiled region, which waits for the weights among its arguments."""

    def __init__(self, compiled: Callable[..., Any], weights: WeightsInFlight) -> None:
        super().__init__()
        self._compiled, self._weights = compiled, weights

    def forward(self, *args: Any) -> Any:
        weights = self._weights()
        if weights is not None:
            weights.wait_for(args)
        return self._compiled(*args)


class _SplitCall:
    """Replaces what `model.compile()` makes: compiled in regions, or with graph breaks where that is not possible."""

    def __init__(
        self, model: nn.Module, backend: Callable[..., Any], weights: WeightsInFlight, options: dict[str, Any]
    ) -> None:
        def forward(*args: Any, **kwargs: Any) -> Any:
            return model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

        self._weights, self._must_be_one = weights, bool(options.get("fullgraph"))
        self._as_one_graph = torch.compile(forward, backend=backend, **{**options, "fullgraph": True})
        self._with_breaks = torch.compile(forward, backend=backend, **{**options, "fullgraph": False})
        from torch._dynamo.exc import FailOnRecompileLimitHit, Unsupported  # not before the program compiles something

        self._breaks = (Unsupported, FailOnRecompileLimitHit)
        self._can_be_one = True  # until the compiler finds a graph break

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        weights = self._weights()
        if torch.compiler.is_compiling() or weights is None:
            return (self._as_one_graph if self._must_be_one else self._with_breaks)(*args, **kwargs)
        try:
            if self._can_be_one:
                weights.hand_over()
                try:
                    return weights.run_compiled(self._as_one_graph, *args, **kwargs)
                except self._breaks as error:  # raised by tracing: nothing has run
                    if self._must_be_one:
                        raise
                    self._can_be_one = False
                    _warn_of_breaks(error)
            weights.wait_for_all()
            return weights.run_compiled(self._with_breaks, *args, **kwargs)
        finally:
            weights.wait_for_all()


def _warn_of_breaks(error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    warnings.warn(
        f'gather="overlap" hides nothing here: forward is not one graph ({reason}), so the model waits for all '
        "weights before it is called. Mend the graph break (opt.compile(fullgraph=True) shows where it is), or compile "
        "block by block: for block in model.blocks: block.compile()",
        stacklevel=4,
    )
