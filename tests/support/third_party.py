"""Optimizers of other packages, each trained under shard() against the plain one; and the table of how they fared.

`python tests/support/third_party.py` writes docs/optimizers.md, with the packages of requirements-third-party.txt:
`make third-party-table` installs them. test_third_party.py makes the same run and holds the file against it.
"""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

import shardstep
from repository import ROOT
from shardstep import Layout, ShardConfig, ZeroRedundancyOptimizer
from shardstep.optimizers.layout_policy import qualified_name
from worker_pool import WorkerPool

TABLE = ROOT / "docs" / "optimizers.md"
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
    "ScalableShampoo": {"start_preconditioning_step": 20, "preconditioning_compute_steps": 10},
    "transformers.optimization.Adafactor": {"lr": 1e-2, "relative_step": False},
    "torch_optimizer.adafactor.Adafactor": {"lr": 1e-2, "relative_step": False},
    "GaLoreAdafactor": {"lr": 1e-2, "relative_step": False},
}
# Of these a group says whether it is for Muon or for AdamW: matrices for the one, vectors for the other.
MUONS = ("Muon", "AdaGO", "AdaMuon", "DistributedMuon", "MuonClip", "NorMuon")
# Of these a group of matrices says that, and how, they are projected to a lower rank.
LOW_RANK = {
    "galore_torch": {"rank": 4, "update_proj_gap": 10, "scale": 0.25, "proj_type": "std"},
    "pytorch_optimizer.optimizer.galore": {"rank": 4, "update_proj_gap": 10, "scale": 0.25, "projection_type": "std"},
    "pytorch_optimizer.optimizer.fira": {"rank": 4, "update_proj_gap": 10, "scale": 0.25, "projection_type": "std"},
}
STEPS = 30
SMALL_BUCKETS = 0.02  # MB: 5,000 elements, so that the largest parameter is cut and most buckets hold several
WRAPPERS = "is not built from param groups: "


@dataclass(frozen=True, slots=True)
class Row:
    """How one class fared: `layout` by default, and what came of asking for Layout.FLAT; or why it was refused."""

    package: str
    name: str
    path: str  # module and class
    layout: str  # "FLAT", "WHOLE" or "refused"
    reason: str = ""
    cut: str = ""  # with Layout.FLAT: "equal", "differs", "refused"
    drop_in: str = ""  # "equal", "differs", "refused"
    difference: float = 0.0  # by default, from the plain optimizer; relative to the largest weight
    drop_in_reason: str = ""


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


def is_of_torch_optim(kind: type[Optimizer]) -> bool:
    """Of the package itself too: that is where torch says that its Muon and its Adafactor are."""
    return f"{kind.__module__}.".startswith("torch.optim.")


def classes_of(package: str) -> dict[str, type[Optimizer]]:
    """The optimizers that a package shows, by the name under which it does."""
    module = importlib.import_module(package)
    shown = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer and name[0] != "_"
        # Some show torch's own as well.
        if is_of_torch_optim(value) == (package == "torch.optim")
    }
    return dict(sorted(shown.items()))


def options_of(kind: type[Optimizer]) -> dict[str, Any]:
    if is_of_torch_optim(kind):
        return {"lr": 1e-2}
    return OPTIONS.get(qualified_name(kind), OPTIONS.get(kind.__name__, {}))


def groups_for(kind: type[Optimizer], model: nn.Module) -> list[dict[str, Any]] | None:
    """None for all parameters in one group."""
    low_rank = next((given for module, given in LOW_RANK.items() if kind.__module__.startswith(module)), None)
    is_muon = kind.__name__ in MUONS and kind is not torch.optim.Muon
    if low_rank is None and not is_muon:
        return None
    matrices = [param for param in model.parameters() if param.dim() == 2]
    others = [param for param in model.parameters() if param.dim() != 2]
    first, second = ({"use_muon": True}, {"use_muon": False}) if is_muon else (low_rank or {}, {})
    return [{"params": matrices, **first}, {"params": others, **second}]


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
    return model, opt._engine.runtime.recipe.layouts[0]


def difference(ours: nn.Module, plain: nn.Module) -> float:
    """Of the weights, relative to the largest of their parameter. Not a number where only one of them is one."""
    found = 0.0
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        if torch.equal(one.isnan(), other.isnan()):
            one, other = one.nan_to_num(), other.nan_to_num()
        found = max(found, float((one - other).abs().max() / other.abs().max().clamp(min=1e-30)))
    return found


def train_drop_in(kind: type[Optimizer], steps: int) -> nn.Module:
    model = model_for(kind)
    params = groups_for(kind, model) or list(model.parameters())
    zero = ZeroRedundancyOptimizer(params, kind, **options_of(kind))
    for step in range(steps):
        averaged(model, step)
        zero.step()
    return model


def try_class(package: str, name: str, kind: type[Optimizer]) -> Row:
    """On all ranks."""
    path = qualified_name(kind)
    if why := why_not_built(kind):
        return Row(package, name, path, "refused", WRAPPERS + why, drop_in="refused", drop_in_reason=WRAPPERS + why)
    try:
        ours, layout = train_sharded(kind, Layout.AUTO, STEPS)
    except Exception as error:
        drop_in, drop_in_reason = try_drop_in(kind, None)
        return Row(package, name, path, "refused", brief(str(error)), "", drop_in, 0.0, drop_in_reason)
    plain = train_plain(kind, STEPS)
    cut = try_cut(kind, plain) if layout is Layout.WHOLE else ""
    drop_in, drop_in_reason = try_drop_in(kind, plain)
    return Row(package, name, path, layout.name, "", cut, drop_in, difference(ours, plain), drop_in_reason)


def try_cut(kind: type[Optimizer], plain: nn.Module) -> str:
    try:
        ours, _ = train_sharded(kind, Layout.FLAT, STEPS)
    except ValueError:
        return "refused"
    return "equal" if difference(ours, plain) <= tolerance(qualified_name(kind)) else "differs"


def try_drop_in(kind: type[Optimizer], plain: nn.Module | None) -> tuple[str, str]:
    try:
        ours = train_drop_in(kind, STEPS)
    except Exception as error:
        return "refused", brief(str(error))
    off = difference(ours, plain or train_plain(kind, STEPS))
    return ("equal", "") if off <= tolerance(qualified_name(kind)) else ("differs", f"by {off}")


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


# A decomposition depends on where in memory its matrix lies: kernels begin their vector loops at an aligned address.
# That is rounding, which these amplify: two runs of the plain optimizer in one process differ by it. MADGRAD's cube
# root rounds differently where a vector loop ends.
LOOSER = {
    "pytorch_optimizer.optimizer.racs.Alice": 1e-5,
    "pytorch_optimizer.optimizer.dash.DASH": 1e-4,
    "pytorch_optimizer.optimizer.shampoo.ScalableShampoo": 1e-5,
    "pytorch_optimizer.optimizer.madgrad.MADGRAD": 1e-6,
    "torch_optimizer.madgrad.MADGRAD": 1e-6,
}


def tolerance(path: str) -> float:
    """Of `difference`: none, because elementwise arithmetic on the same numbers is the same to the bit."""
    return LOOSER.get(path, 0.0)


def try_package(package: str, part: int, parts: int) -> list[Row]:
    """A body for worker pools: rows of every `parts`-th class."""
    rows: list[Row] = []
    # torchao compiles its steps, for each shape.
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, kind in list(classes_of(package).items())[part::parts]:
            torch.manual_seed(3)
            rows.append(try_class(package, name, kind))
    return rows


def jobs() -> list[tuple[str, int, int]]:
    """Arguments of `try_package`: some twenty classes at a time."""
    sizes = {"pytorch_optimizer": 6, "torch_optimizer": 2}
    return [(package, part, sizes.get(package, 1)) for package in PACKAGES for part in range(sizes.get(package, 1))]


# -- the table ---------------------------------------------------------------------------------------------------------

INTRODUCTION = """# Which optimizers work, and how

Made by `make third-party-table`, and held against the code by `make test-third-party`: every class is trained for
{steps} steps on two ranks, by `shard()`, by `shard()` with `Layout.FLAT` and by the drop-in, against the plain
optimizer on the same averaged gradients. *Equal* means to the bit, or for a few classes that decompose matrices but for
rounding.

- **FLAT**: parameters are cut anywhere; every rank holds the same share.
- **WHOLE**: parameters stay whole. The column *cut* says what comes of `ShardConfig(layout=Layout.FLAT)`: *equal*, so
  that a large embedding can be cut; *refused*, because the class is seen to look at whole parameters; or *differs*: a
  short trial does not show that it does, which is why nothing is cut unasked.
- **refused**, on all ranks and before a weight moves, for the reason given. The drop-in takes a class that cannot be
  tried, as torch's does; its own `step` then says what it lacks.

Classes that are not listed are tried when the optimizer is built, and treated alike:
see [concepts](concepts.md#optimizers-of-others).
"""


def render(row: Row) -> str:
    """A line of the table."""
    reason = shorten(row.reason)
    at_once = any(words in row.drop_in_reason for words in OURS)
    drop_in = "raises in `step`" if row.drop_in == "refused" and not at_once else row.drop_in
    if at_once and row.drop_in_reason != row.reason:
        reason += f"; in the drop-in, with a closure: {shorten(row.drop_in_reason)}"
    return f"| {row.name} | {row.layout} | {row.cut} | {drop_in} | {reason} |"


# Of reasons that are given when the optimizer is built; a class that only its own step refuses has reasons of its own.
OURS = ("treats all parameters", "draws random numbers", "talks to other ranks", "one line search", WRAPPERS)


def shorten(reason: str) -> str:
    """What is said of the class, without the advice."""
    for end in (", so that stepping", ". Every rank steps", ", while every rank", ". So it cannot", "; sharded over"):
        reason = reason.partition(end)[0]
    return re.sub(r"refuses tiny tensors of shapes \(.*?\)\): ", "cannot be tried: ", reason)


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield INTRODUCTION.format(steps=STEPS)
    for package, distribution in PACKAGES.items():
        of_package = sorted((row for row in rows if row.package == package), key=lambda row: row.name.lower())
        yield f"## {package} ({distribution} {version(distribution).partition('+')[0]})\n"
        yield "| class | `shard()` | cut | drop-in | reason |\n|---|---|---|---|---|"
        yield from map(render, of_package)
        yield ""


def main() -> None:
    pool, rows = WorkerPool(2), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for job in jobs():
            rows += pool.run(try_package, *job, timeout=300)[0]
    pool.close()
    TABLE.write_text("\n".join(table(rows)).rstrip() + "\n")


if __name__ == "__main__":
    import third_party  # the workers find its functions by that name

    third_party.main()
