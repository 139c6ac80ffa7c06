"""How evenly whole matrices are dealt: by elements, and by what stepping them costs. A part of planning.py.

The matrices are those of the hidden layers, which Muon steps; embeddings, heads and vectors are another optimizer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from report import Grid, Target

from shardstep.planning import Layout, ParamSpec, Plan, make_plan
from shardstep.planning.balance import MOST_TRAFFIC
from shardstep.planning.cost import muon_cost

MOST = 1.15  # cost of the costliest rank over the mean, where whole matrices allow it
BUCKET_NUMEL = 16_000_000  # 64 MB of float32, as with NCCL

_LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]
_LATENT = [(1536, 5120), (24576, 1536), (576, 5120), (32768, 512), (5120, 16384)]
MODELS = {
    "GPT-2": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "Llama-3-8B": _LLAMA * 32,
    # Attention by way of narrow matrices, and narrow experts: cost and elements go far apart.
    "latent attention": (_LATENT + [(1536, 5120), (1536, 5120), (5120, 1536)] * 3) * 20,
}


@dataclass(frozen=True, slots=True)
class Case:
    model: str
    device: str
    ranks: int


@dataclass(frozen=True, slots=True)
class Dealing:
    """Of one case: what the costliest rank has over the mean, and what comes with it."""

    case: Case
    by_elements: float
    by_cost: float
    bound: float  # no dealing of whole matrices has less
    elements: float  # of the fullest rank over the mean, by cost
    largest: float  # the elements of the largest matrix over the mean: no rank that holds it has less
    traffic: float  # of the rank that sends most over DistributedDataParallel's, by cost


def least_possible(costs: Sequence[int], world_size: int) -> float:
    """No dealing of whole parameters leaves the costliest rank with less; it may not be reachable.

    Not less than the mean; and of the k N + 1 costliest, k + 1 share a rank: at least the cheapest k + 1 of them.
    """
    ordered, n = sorted(costs, reverse=True), world_size
    shared = [sum(ordered[k * n - k : k * n + 1]) for k in range((len(ordered) - 1) // n + 1)]
    return max([sum(ordered) / n, *shared])


CASES = [
    Case(model, device, ranks) for device in ("cuda", "cpu") for model in MODELS for ranks in (2, 4, 8, 16, 32, 64)
]
QUICK_CASES = CASES[:3]


def look_at(case: Case) -> Dealing:
    specs = [ParamSpec(f"p{i}", shape, "float32", f"{case.device}:0", 0) for i, shape in enumerate(MODELS[case.model])]
    costs = [muon_cost(case.device).of(spec) for spec in specs]
    mean, numel = sum(costs) / case.ranks, sum(spec.numel for spec in specs)

    def plan(given: list[int] | None) -> Plan:
        order = range(len(specs))[::-1]
        return make_plan(
            specs, Layout.WHOLE, world_size=case.ranks, bucket_numel=BUCKET_NUMEL, order=order, costs=given
        )

    def imbalance(found: Plan) -> float:
        loads = [0] * case.ranks
        for cost, rank in zip(costs, found.holders(), strict=True):
            loads[rank] += cost
        return max(loads) / mean

    by_cost = plan(costs)
    held = by_cost.held()
    return Dealing(
        case,
        imbalance(plan(None)),
        imbalance(by_cost),
        least_possible(costs, case.ranks) / mean,
        max(held) * case.ranks / numel,
        max(spec.numel for spec in specs) * case.ranks / numel,
        (numel - min(held)) / (numel - numel / case.ranks),
    )


NOTE = """\
Muon on the matrices of the hidden layers. Cost is that of shardstep.planning.cost, for a GPU and for a CPU: of the
costliest rank over the mean, when dealt by elements and when dealt by cost. The bound is what no dealing of whole
matrices can be below. Elements are those of the fullest rank over the mean, beside those of the largest matrix alone;
traffic is that of the rank that sends most over DDP's. In "latent attention" cost and elements go far apart."""


def dealing_grid(dealings: Sequence[Dealing]) -> Grid:
    columns = ("model", "device", "N", "by elements", "by cost", "bound", "elements", "largest", "traffic / DDP")
    rows = [
        (
            dealing.case.model,
            dealing.case.device,
            str(dealing.case.ranks),
            *(
                f"{value:.3f}"
                for value in (
                    dealing.by_elements,
                    dealing.by_cost,
                    dealing.bound,
                    dealing.elements,
                    dealing.largest,
                    dealing.traffic,
                )
            ),
        )
        for dealing in dealings
    ]
    return Grid("Whole matrices, dealt by cost", NOTE, columns, tuple(rows), labels=2)


def dealing_targets(dealings: Sequence[Dealing]) -> tuple[Target, ...]:
    """The first of the two models whose matrices are known; a bound above `MOST` takes its place."""
    known = [dealing for dealing in dealings if dealing.case.model in ("GPT-2", "Llama-3-8B")]
    allowed = max(dealing.by_cost / max(MOST, dealing.bound) for dealing in known)
    return (
        Target(f"cost of the worst case over {MOST} of the mean, or over its bound if that is more", 1.0, allowed),
        Target("traffic over DDP's, worst case", MOST_TRAFFIC, max(dealing.traffic for dealing in dealings)),
        Target("cost of the worst case over what dealing by elements has", 1.0,
               max(dealing.by_cost / dealing.by_elements for dealing in dealings)),
    )  # fmt: skip
