"""What a caller may pass as parameters: checked once, before anything is built from it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from shardstep.config import ShardConfig
from shardstep.engine.context import Recipe
from shardstep.engine.registry import check_stepped, check_unowned
from shardstep.gradients.inside_ddp import refuse_ddp
from shardstep.optimizers.layout_policy import why_uneven
from shardstep.optimizers.local_optimizer import (
    check_optimizer_class,
    check_shapes,
    check_takes_no_closure,
    is_of_torch,
)
from shardstep.optimizers.param_groups import option_keys, option_lines
from shardstep.optimizers.several_classes import check_class
from shardstep.params.shared_memory import overlaps_itself, places_of, sharing
from shardstep.planning import Layout, ParamSpec, Plan, read_specs
from shardstep.stepping.masters import check_can_be_rounded, check_is_encoded, why_it_stalls


def read_params(params: Any) -> list[dict[str, Any]]:
    """The param groups that `params` stands for, as new dicts with lists: the caller's own are never written to.

    `params` is an iterable of tensors, of (name, tensor) pairs, or of dicts with "params".
    """
    if isinstance(params, torch.Tensor):
        raise TypeError(f"params must be an iterable of tensors or dicts, got a single {torch.typename(params)}")
    if isinstance(params, set):
        raise TypeError("params must be in an order that is the same on every rank; a set has none")
    try:
        iterator = iter(params)
    except TypeError:
        raise TypeError(f"params must be an iterable of tensors or dicts, got {torch.typename(params)}") from None
    entries = list(iterator)
    if not entries:
        raise ValueError("params is empty: there is nothing to optimize")
    if all(isinstance(entry, dict) for entry in entries):
        return [read_group(entry) for entry in entries]
    if any(isinstance(entry, dict) for entry in entries):
        raise TypeError("params mixes tensors and dicts; give either parameters or param groups")
    return [read_group({"params": entries})]


def read_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """One param group as a new dict whose "params" is a list of tensors; names, if given, lie in "param_names"."""
    if not isinstance(group, dict):
        raise TypeError(f"a param group must be a dict, got {torch.typename(group)}")
    if "params" not in group:
        raise ValueError(f'a param group has no "params"; its keys are {sorted(map(str, group))}')
    given = group["params"]
    if isinstance(given, set):
        raise TypeError("the parameters of a group must be in an order that is the same on every rank; a set has none")
    members = [given] if isinstance(given, torch.Tensor) else list(given)
    pairs = [isinstance(member, tuple) and len(member) == 2 for member in members]
    tensors = [member[1] if pair else member for member, pair in zip(members, pairs, strict=True)]
    for place, tensor in enumerate(tensors):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"params must be tensors or (name, tensor) pairs; entry {place} is {torch.typename(tensor)}"
            )
    if any(pairs) and not all(pairs):
        raise TypeError("params mixes tensors and (name, tensor) pairs; name all of them or none")
    names = {"param_names": [str(member[0]) for member in members]} if any(pairs) else {}
    return {**group, "params": tensors, **names}


def check_sharded(
    model: nn.Module, optimizer_class: Any, groups: Any, config: ShardConfig, world_size: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the groups of a model to be sharded, and the names that no group has; raise if that cannot be done."""
    check_model(model)
    refuse_ddp(model)
    check_optimizer_class(optimizer_class, world_size)
    check_takes_no_closure(optimizer_class)
    chosen, left_out = read_groups(model, groups)
    if getattr(optimizer_class, "inner_classes", ()):
        check_stepped(model, left_out)
    check_parameters(chosen, allow_mixed_dtypes=True)
    check_apart(chosen, model)
    if world_size > 1:
        check_lookups(model, chosen)
    check_unowned(chosen, model)
    if config.master == "stochastic":
        check_can_be_rounded(chosen)
    if config.wire is not None:
        check_is_encoded(chosen, config.wire)
    check_shapes(optimizer_class, chosen, read_specs(chosen))
    if config.step == "backward" and not is_of_torch(optimizer_class):
        raise ValueError('step="backward" is for torch\'s optimizers: what others count in a step is not known')
    return chosen, left_out


def check_added_group(model: nn.Module, optimizer_class: Any, groups: Sequence[dict[str, Any]]) -> None:
    """Raise if the last of `groups` cannot be added to those before it."""
    check_parameters(groups, allow_mixed_dtypes=True)
    check_unowned(groups[-1:], model)
    check_class(optimizer_class, groups[-1])
    check_shapes(optimizer_class, groups, read_specs(groups))


def name_parameters(group: dict[str, Any], model: nn.Module, number: int) -> dict[str, Any]:
    """Return a group with the names of its parameters, if it has none: `number` groups are before it."""
    names = {param: name for name, param in model.named_parameters()}
    group["param_names"] = group.get("param_names") or [
        names.get(param, f"param_groups[{number}]['params'][{place}]") for place, param in enumerate(group["params"])
    ]
    return group


def group_lines(groups: Sequence[dict[str, Any]]) -> list[str]:
    """Return what all ranks must have in common: every parameter, and every option."""
    options = option_lines(groups, [option_keys(group) for group in groups])
    return [*map(str, read_specs(groups)), *options]


def find_warnings(config: ShardConfig, recipe: Recipe, groups: Sequence[dict[str, Any]], plan: Plan) -> list[str]:
    """Return warnings about what is allowed, and seldom meant."""
    stalls = why_it_stalls(groups) if config.master == "none" else None
    is_asked_for = config.layout is Layout.WHOLE
    uneven = None if is_asked_for else why_uneven(recipe.optimizer_class, recipe.layouts, recipe.elementwise, plan)
    return [reason for reason in (stalls, uneven) if reason]


def check_parameters(
    param_groups: Sequence[dict[str, Any]], *, allow_mixed_dtypes: bool, differentiable: bool = False
) -> None:
    """Raise ValueError for what can not be sharded or optimized; the offending parameters are named."""
    named = list(zip(read_specs(param_groups), _tensors(param_groups), strict=True))
    if not named:
        raise ValueError("params is empty: there is nothing to optimize")
    sparse = [spec.name for spec, param in named if param.layout is not torch.strided]
    if sparse:
        raise ValueError(f"parameters must be dense tensors; sparse: {', '.join(sparse)}")
    unmade = [spec.name for spec, param in named if param.device.type == "meta"]
    if unmade:
        raise ValueError(
            f"{', '.join(unmade[:5])}{' and others' if len(unmade) > 5 else ''}: on the meta device, without values. "
            "Materialize the model first: model.to_empty(device=...), then initialize or load its weights"
        )
    derived = [spec.name for spec, param in named if not (differentiable or param.is_leaf or param.retains_grad)]
    if derived:
        raise ValueError(
            f"parameters must be leaf tensors; computed from others: {', '.join(derived)}. "
            "Give the tensors they are computed from, or detach them"
        )
    first_place: dict[int, str] = {}
    for spec, param in named:
        if id(param) in first_place:
            raise ValueError(
                f"the same parameter was given twice: {first_place[id(param)]} and {spec.name}; "
                "a tied weight is one parameter and is given once"
            )
        first_place[id(param)] = spec.name
    _check_memory(named)
    dtypes = {spec.dtype: spec.name for spec, _ in reversed(named)}
    if len(dtypes) > 1 and not allow_mixed_dtypes:
        found = ", ".join(f"{dtype} ({name})" for dtype, name in sorted(dtypes.items()))
        raise ValueError(f"parameters are of several dtypes: {found}; pass allow_mixed_dtypes=True to shard them all")


def _check_memory(named: Sequence[tuple[ParamSpec, torch.Tensor]]) -> None:
    """Raise if two parameters share memory: two ranks would step the same elements, each its own way."""
    # A frozen one may be so: it moves nowhere.
    expanded = [spec.name for spec, param in named if param.requires_grad and overlaps_itself(param)]
    if expanded:
        raise ValueError(
            f"{', '.join(expanded)}: several elements of a parameter share memory, because it was expanded, and no "
            "optimizer can step them. Give it memory of its own: nn.Parameter(tensor.contiguous())"
        )
    for one, other in sharing(places_of((spec.name, param) for spec, param in named)):
        raise ValueError(
            f"{one.name} and {other.name} share memory; a tied weight is one parameter and is given once, and a part "
            "of another parameter is taken from it in forward"
        )


def check_apart(param_groups: Sequence[dict[str, Any]], model: nn.Module) -> None:
    """Raise if a buffer, or a parameter in no group, lies over a parameter that trains and so moves to other memory."""
    named = zip(read_specs(param_groups), _tensors(param_groups), strict=True)
    moves = places_of((spec.name, param) for spec, param in named if param.requires_grad)
    given = set(_tensors(param_groups))
    # A tensor of a class of its own may have its memory elsewhere, and raise where it is asked for it.
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if type(buffer) is torch.Tensor]
    left_out = [(name, param) for name, param in model.named_parameters() if param not in given]
    stay = places_of([*buffers, *left_out])
    for one, other in sharing([*moves, *stay]):
        moved, left = (one, other) if one in moves else (other, one)
        if moved in moves and left in stay:
            raise ValueError(
                f"{left.name} lies in the memory of {moved.name}, which moves to other memory when it is sharded: "
                f"{left.name} would no longer follow it. Compute it from {moved.name} in forward, or clone() it"
            )


def _tensors(param_groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [param for group in param_groups for param in group["params"]]


def read_groups(model: nn.Module, groups: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """The param groups of a model, with names; `groups` are dicts whose "params" are tensors, names or name patterns.

    "rest" (or "*") are all that no other group asks for; a parameter may be asked for once. Also returned: trainable
    parameters that nobody asks for.
    """
    named = dict(model.named_parameters())
    if not named:
        raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to optimize")
    if groups is None:
        return [{"params": list(named.values()), "param_names": list(named)}], []
    name_of = {param: name for name, param in named.items()}
    group_of: dict[str, int] = {}
    rest: list[int] = []
    found: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        if not isinstance(group, dict) or "params" not in group:
            raise TypeError(f'groups[{number}] must be a dict with "params", got {group!r}')
        asked = group["params"]
        wishes = [asked] if isinstance(asked, str | torch.Tensor) else list(asked)
        names: list[str] = []
        for wish in wishes:
            if isinstance(wish, str) and wish in _REST:
                rest.append(number)
                continue
            for name in _matches(wish, number, named, name_of):
                if group_of.setdefault(name, number) != number:
                    raise ValueError(f"groups[{group_of[name]}] and groups[{number}] both ask for {name}")
                names.append(name)
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        found.append({**options, "params": [], "param_names": list(dict.fromkeys(names))})
    if len(rest) > 1:
        raise ValueError(f"groups[{rest[0]}] and groups[{rest[1]}] both ask for the rest")
    left = [name for name in named if name not in group_of]
    if rest:
        found[rest[0]]["param_names"] += left
        left = []
    for group in found:
        group["params"] = [named[name] for name in group["param_names"]]
    return found, [name for name in left if named[name].requires_grad]


_REST = ("rest", "*")


def _matches(wish: Any, number: int, named: Mapping[str, Any], name_of: Mapping[Any, str]) -> list[str]:
    if isinstance(wish, tuple) and len(wish) == 2:
        wish = wish[1]
    if isinstance(wish, torch.Tensor):
        if wish not in name_of:
            raise ValueError(f"groups[{number}] has a tensor of shape {tuple(wish.shape)} that is not in the model")
        return [name_of[wish]]
    if not isinstance(wish, str):
        raise TypeError(f"groups[{number}]: params are tensors, names or patterns, got {torch.typename(wish)}")
    found = [name for name in named if name == wish or fnmatchcase(name, wish)]
    if not found:
        raise ValueError(f"groups[{number}]: no parameter is called {wish!r}; the first is {next(iter(named))!r}")
    return found


def check_model(model: Any) -> None:
    """Raise for what is no module, or has gradients that cannot be sharded, before anything is asked of it."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"shard(...) takes the model itself, an nn.Module, got {type(model).__name__}; pass the module, and "
            "param groups as groups=..."
        )
    sparse = [name for name, module in model.named_modules() if getattr(module, "sparse", False) is True]
    if sparse:
        raise ValueError(
            f"{sparse[0] or type(model).__name__} is built with sparse=True, and gradients are sent dense: build it "
            "with sparse=False, or keep it out of the model that is sharded"
        )


def check_lookups(model: nn.Module, param_groups: Sequence[dict[str, Any]]) -> None:
    """Raise for an embedding whose forward writes to its weight: each rank would write to other rows than the others.

    Of a row that is cut, one part would be scaled and the other not.
    """
    trained = {param for param in _tensors(param_groups) if param.requires_grad}
    tables = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    for name, table in tables:
        if table.max_norm is not None and table.weight in trained:
            raise ValueError(
                f"{name or type(model).__name__} is built with max_norm={table.max_norm}: its forward scales the rows "
                "that this rank looks up, and the ranks' weights part. Build it with max_norm=None, and after each "
                f"step, on all ranks: with torch.no_grad(): weight.renorm_({table.norm_type}, 0, {table.max_norm})"
            )


def parameters_of(model: Any) -> list[torch.Tensor]:
    """Of whatever was passed as a model: what has no parameters, or none with values, is refused on all ranks later."""
    params = list(model.parameters()) if isinstance(model, nn.Module) else []
    return [param for param in params if param.device.type != "meta"]
