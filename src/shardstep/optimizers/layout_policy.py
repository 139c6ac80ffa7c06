"""The layout of each param group: whose parameters may be cut, and whose stay whole.

A trial sees two dozen steps on 24 elements. Code that we have not read may do something else later: after a warm-up,
above a size, when a norm passes a bound. On cut parameters it would then silently compute something else, so parameters
of such classes stay whole unless the caller asks for Layout.FLAT. The trial alone is enough for torch's own classes,
whose code has been read, and for those listed below, which test_third_party.py trains on cut parameters against the
plain optimizer. With options under which these look at a whole parameter (gradients made zero-mean, a cautious mask)
the trial shows it, and they stay whole as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shardstep.optimizers.layout_trial import Finding, probe
from shardstep.optimizers.local_optimizer import class_of, is_of_torch, qualified_name
from shardstep.optimizers.several_classes import required, without_class
from shardstep.planning import Layout, Plan

# By module and name, so that nothing is imported, and a class of the same name elsewhere is not meant.
ELEMENTWISE = frozenset(
    {
        "lion_pytorch.lion_pytorch.Lion",
        "pytorch_optimizer.optimizer.adabelief.AdaBelief",
        "pytorch_optimizer.optimizer.adabound.AdaBound",
        "pytorch_optimizer.optimizer.adan.Adan",
        "pytorch_optimizer.optimizer.ademamix.AdEMAMix",
        "pytorch_optimizer.optimizer.adopt.ADOPT",
        "pytorch_optimizer.optimizer.diffgrad.DiffGrad",
        "pytorch_optimizer.optimizer.grams.Grams",
        "pytorch_optimizer.optimizer.laprop.LaProp",
        "pytorch_optimizer.optimizer.lion.Lion",
        "pytorch_optimizer.optimizer.madgrad.MADGRAD",
        "pytorch_optimizer.optimizer.qhadam.QHAdam",
        "pytorch_optimizer.optimizer.tiger.Tiger",
        "pytorch_optimizer.optimizer.yogi.Yogi",
        "torch_optimizer.adabelief.AdaBelief",
        "torch_optimizer.adabound.AdaBound",
        "torch_optimizer.adamod.AdaMod",
        "torch_optimizer.diffgrad.DiffGrad",
        "torch_optimizer.madgrad.MADGRAD",
        "torch_optimizer.qhadam.QHAdam",
        "torch_optimizer.yogi.Yogi",
    }
)

_MATTERS = 1_000_000  # elements: some megabytes of state


def choose_layout(wish: Layout, optimizer_class: Any, finding: Finding) -> Layout:
    """Return the layout for a class with this finding; ValueError if no layout gives the plain optimizer's numbers."""
    if finding.refusal:
        raise ValueError(finding.refusal)
    if finding.untried and wish is not Layout.WHOLE:
        raise ValueError(
            f"{finding.untried}. So it cannot be tried whether it treats parameters separately; if you know that it "
            "does, pass config=ShardConfig(layout=Layout.WHOLE)"
        )
    if wish is Layout.FLAT and finding.whole:
        raise ValueError(f"Layout.FLAT is not safe here: {finding.whole}. Use Layout.AUTO or Layout.WHOLE")
    if wish is not Layout.AUTO:
        return wish
    is_known = is_of_torch(optimizer_class) or qualified_name(optimizer_class) in ELEMENTWISE
    return Layout.FLAT if finding.is_elementwise and is_known else Layout.WHOLE


def choose_layouts(
    wish: Layout, optimizer_class: Any, defaults: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]
) -> tuple[list[Layout], list[bool]]:
    """Return, for each group, its layout (one per class) and whether a trial found it elementwise."""
    device = next(param.device for group in groups for param in group["params"])
    chosen: dict[Any, tuple[Layout, bool]] = {}
    for kind in dict.fromkeys(class_of(optimizer_class, group) for group in groups):
        own = [without_class(group) for group in groups if class_of(optimizer_class, group) is kind]
        given = defaults if kind is optimizer_class else required(kind, own[0])
        finding = probe(kind, given, own, device, of_torch=is_of_torch(kind))
        chosen[kind] = (choose_layout(wish, kind, finding), finding.is_elementwise)
    rows = [chosen[class_of(optimizer_class, group)] for group in groups]
    return [layout for layout, _ in rows], [elementwise for _, elementwise in rows]


def why_uneven(optimizer_class: Any, layouts: Sequence[Layout], elementwise: Sequence[bool], plan: Plan) -> str | None:
    """Return a warning if ranks are uneven because parameters stay whole that could perhaps be cut; else None."""
    if not any(layout is Layout.WHOLE and flag for layout, flag in zip(layouts, elementwise, strict=True)):
        return None
    held = plan.held()  # slow with thousands of ranks, so only where it is needed
    if not is_uneven(held):
        return None
    return (
        f"{qualified_name(optimizer_class)} is not known to treat every element alone, so parameters are not cut: "
        f"one rank holds {max(held):,} of {sum(held):,} elements. If it does, pass "
        "config=ShardConfig(layout=Layout.FLAT)"
    )


def is_uneven(held: Sequence[int]) -> bool:
    """Whether one rank holds over a quarter more elements than the mean, and enough of them to matter."""
    share = sum(held) / max(len(held), 1)
    return max(held, default=0) > max(1.25 * share, share + _MATTERS)
