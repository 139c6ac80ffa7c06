"""Optimizers of other packages, each trained under shard() against the plain one; and the table of how they fared.

`python tests/third_party.py` writes docs/optimizers.md, with the packages of requirements-third-party.txt at hand (`make
third-party-table` sees to that). tests/test_third_party.py makes the same run and holds the file against it.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardstep
from shardstep import Layout, ShardConfig
from shardstep.stepping.known import qualified_name

TABLE = Path(__file__).parent.parent / "docs" / "optimizers.md"
PACKAGES = {  # module: distribution
    "torch.optim": "torch",
    "pytorch_optimizer": "pytorch_optimizer",
    "torch_optimizer": "torch-optimizer",
    "lion_pytorch": "lion-pytorch",
    "prodigyopt": "prodigyopt",
    "dadaptation": "dadaptation",
    "schedulefree": "schedulefree",
    "torchao.optim": "torchao",
    "galore_torch": "galore-torch",
    "transformers.optimization": "transformers",
}
# What a class cannot be built without, or without which it does nothing that it is known for.
OPTIONS: dict[str, dict[str, Any]] = {
    "BSAM": {"num_data": 100},
    "Ranger21": {"num_iterations": 100, "lr": 1e-2},
    "ScalableShampoo": {"start_preconditioning_step": 5, "preconditioning_compute_steps": 1},
    "transformers.optimization.Adafactor": {"lr": 1e-2, "relative_step": False},
    "torch_optimizer.adafactor.Adafactor": {"lr": 1e-2, "relative_step": False},
    "GaLoreAdafactor": {"lr": 1e-2, "relative_step": False},
}
# Of these a group says whether it is for Muon or for AdamW: matrices for the one, vectors for the other.
MUONS = ("Muon", "AdaGO", "AdaMuon", "DistributedMuon", "MuonClip", "NorMuon")
STEPS = 30
SMALL_BUCKETS = 0.02  # MB: 5,000 elements, so that the largest parameter is cut and most buckets hold several
WRAPPERS = "is not built from param groups: "


@dataclass(frozen=True, slots=True)
class Row:
    """How one class fared: `layout` by default, and what came of asking for Layout.FLAT; or why it was refused."""

    package: str
    name: str
    layout: str  # "FLAT", "WHOLE" or "refused"
    reason: str = ""
    cut: str = ""  # with Layout.FLAT: "equal", "differs", "refused"
    difference: float = 0.0  # by default, from the plain optimizer; relative to the largest weight


class Net(nn.Module):
    """A matrix above the size from which states are kept in 8 bits, smaller ones, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        shapes = {"embed": (80, 64), "first": (16, 24), "second": (24, 8), "bias": (24,), "gain": (40,)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Gradients that differ between ranks, parameters and steps, and follow the weights a little."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    terms = [
        (param * torch.randn(param.shape, generator=generator)).sum() * (1 + place) + 0.05 * param.square().sum()
        for place, param in enumerate(model.parameters())
    ]
    return torch.stack(terms).sum()


def classes_of(package: str) -> list[type[Optimizer]]:
    """The optimizers that a package shows, each once, by name."""
    module = importlib.import_module(package)
    shown = {
        value.__name__: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer and name[0] != "_"
        # Some show torch's own as well.
        if value.__module__.startswith("torch.optim.") == (package == "torch.optim")
    }
    return [shown[name] for name in sorted(shown)]


def options_of(kind: type[Optimizer]) -> dict[str, Any]:
    if kind.__module__.startswith("torch.optim."):
        return {"lr": 1e-2}
    return OPTIONS.get(qualified_name(kind), OPTIONS.get(kind.__name__, {}))


def groups_for(kind: type[Optimizer], model: nn.Module) -> list[dict[str, Any]] | None:
    """None for all parameters in one group."""
    named = dict(model.named_parameters())
    if kind.__name__ not in MUONS or kind.__module__.startswith("torch.optim."):
        return None
    return [
        {"params": [p for p in named.values() if p.dim() == 2], "use_muon": True},
        {"params": [p for p in named.values() if p.dim() != 2], "use_muon": False},
    ]


def model_for(kind: type[Optimizer]) -> nn.Module:
    """torch's Muon, and those of others that take matrices alone, get matrices alone."""
    model = Net()
    if kind.__name__ == "SpectralSphere" or kind is torch.optim.Muon:
        del model.bias, model.gain
    return model


def averaged(model: nn.Module, step: int) -> None:
    """The mean of both ranks' gradients, as data parallelism leaves it: two addends commute, halves are exact."""
    ranks = [torch.autograd.grad(loss_of(model, step, rank), list(model.parameters())) for rank in range(2)]
    for param, one, other in zip(model.parameters(), *ranks, strict=True):
        param.grad = (one + other) / 2


def train_plain(kind: type[Optimizer], steps: int) -> nn.Module:
    model = model_for(kind)
    make: Callable[..., Optimizer] = kind
    optimizer = make(groups_for(kind, model) or list(model.parameters()), **options_of(kind))
    for step in range(steps):
        averaged(model, step)
        optimizer.step()
    return model


def train_sharded(kind: type[Optimizer], layout: Layout, steps: int) -> tuple[nn.Module, Layout]:
    model = model_for(kind)
    config = ShardConfig(layout=layout, bucket_mb=SMALL_BUCKETS)
    before = [param.detach().clone() for param in model.parameters()]
    try:
        opt = shardstep.shard(model, kind, groups=groups_for(kind, model), config=config, **options_of(kind))
    except Exception:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)), "a weight moved"
        raise
    for step in range(steps):
        loss_of(model, step, dist.get_rank()).backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    opt.close()
    return model, opt._layout


def difference(ours: nn.Module, plain: nn.Module) -> float:
    """Of the weights, relative to the largest of their parameter. Not a number where only one of them is one."""
    found = 0.0
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        if torch.equal(one.isnan(), other.isnan()):
            one, other = one.nan_to_num(), other.nan_to_num()
        found = max(found, float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return found


def try_class(package: str, kind: type[Optimizer]) -> Row:
    """On all ranks."""
    if why := why_not_built(kind):
        return Row(package, kind.__name__, "refused", WRAPPERS + why)
    try:
        ours, layout = train_sharded(kind, Layout.AUTO, STEPS)
    except Exception as error:
        return Row(package, kind.__name__, "refused", brief(str(error)))
    plain = train_plain(kind, STEPS)
    off, cut = difference(ours, plain), ""
    if layout is Layout.WHOLE:
        try:
            cut_up, _ = train_sharded(kind, Layout.FLAT, STEPS)
            cut = "equal" if difference(cut_up, plain) <= tolerance(kind, Layout.FLAT) else "differs"
        except ValueError:
            cut = "refused"
    return Row(package, kind.__name__, layout.name, "", cut, off)


def why_not_built(kind: type[Optimizer]) -> str:
    """Why the plain class cannot be made from parameters and options; empty if it can."""
    model = model_for(kind)
    make: Callable[..., Optimizer] = kind
    try:
        make(groups_for(kind, model) or [{"params": list(model.parameters())}], **options_of(kind))
    except Exception as error:
        return brief(f"{type(error).__name__}: {error}")
    return ""


def brief(text: str) -> str:
    """One line for a table: what differs from run to run is left out."""
    return re.sub(r"0x[0-9a-f]+", "0x...", " ".join(text.split())).replace("|", "/")


def tolerance(kind: type[Optimizer], layout: Layout) -> float:
    """Of `difference`. Elementwise arithmetic on the same numbers is the same to the bit.

    A sum over a parameter, or a product of matrices, depends on where in memory it lies: kernels begin their vector
    loops at an aligned address. That is rounding, 1e-7 in each step; where a sign or a root of it decides, more.
    """
    return LOOSER.get(qualified_name(kind), 0.0)


LOOSER: dict[str, float] = {}


def try_package(package: str, part: int, parts: int) -> list[Row]:
    """A body for worker pools: rows of every `parts`-th class, the same on all ranks."""
    torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for each shape
    rows: list[Row] = []
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for kind in classes_of(package)[part::parts]:
            torch.manual_seed(3)
            started = __import__("time").time()
            rows.append(try_class(package, kind))
            print(
                kind.__name__,
                f"{__import__('time').time() - started:.2f}",
                file=open(f"/tmp/times{dist.get_rank()}", "a"),
            )
    return rows
