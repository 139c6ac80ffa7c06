"""Optimizers of several classes as one: Muon for the matrices, AdamW for the rest.

To everything else it is an ordinary class of optimizers, whose groups say under "optimizer" which class steps them.
"""

from __future__ import annotations

import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.optimizers.optimizer_copy import load_again
from shardstep.optimizers.param_groups import CLASS, option_keys, without_params
from shardstep.optimizers.sliced_step import step_as_a_part


class SeveralOptimizers(Optimizer):
    """Steps each param group with an optimizer of its class; `several` makes subclasses.

    Inner optimizers share this one's group dicts and its state dict.
    """

    inner_classes: tuple[type[Optimizer], ...] = ()

    def __init__(self, params: Iterable[dict[str, Any]]) -> None:
        groups = list(params)
        super().__init__(groups, {})
        used = {group[CLASS] for group in self.param_groups}
        self.inner: tuple[Optimizer, ...] = tuple(self._make(kind) for kind in self.inner_classes if kind in used)

    def _make(self, kind: Callable[..., Optimizer]) -> Optimizer:
        own = [group for group in self.param_groups if group[CLASS] is kind]
        # Without keys that the class does not know: some check the keys of their groups.
        optimizer = kind([without_class(group) for group in own], **required(kind, own[0]))
        for group, known in zip(own, optimizer.param_groups, strict=True):
            group.update({key: value for key, value in known.items() if key != "params"})
        optimizer.param_groups = own
        self.state.update(optimizer.state)  # some make theirs in the constructor: Adagrad of torch 2.11 does
        optimizer.state = self.state
        return optimizer

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Let each class load the state of its own groups: it does not know that of the others."""
        super().__setstate__(state)
        for optimizer in self.inner:
            groups = [group for group in self.param_groups if group[CLASS] is type(optimizer)]
            own = {param: self.state[param] for group in groups for param in group["params"] if param in self.state}
            optimizer.param_groups = [without_class(group) for group in groups]
            optimizer.state = defaultdict(dict, own)
            load_again(optimizer)
            for group, loaded in zip(groups, optimizer.param_groups, strict=True):
                group.update(loaded)
            self.state.update(optimizer.state)
            optimizer.param_groups, optimizer.state = groups, self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None, "a rank steps its part without a closure"
        for optimizer in self.inner:
            if any(group["params"] for group in optimizer.param_groups):
                step_as_a_part(optimizer)


def required(kind: Callable[..., Optimizer], group: Mapping[str, Any]) -> dict[str, Any]:
    """Return those options of a group that the class's constructor requires, because it has no default for them."""
    wanted = inspect.signature(kind).parameters.values()
    names = [one.name for one in wanted if one.default is one.empty and one.kind is not one.VAR_KEYWORD]
    return {name: group[name] for name in names if name in group and name != "params"}


@functools.cache
def several(classes: tuple[type[Optimizer], ...]) -> type[SeveralOptimizers]:
    """Return a class of optimizers whose groups are stepped by these classes."""
    names = [kind.__name__ for kind in classes]
    return type(" + ".join(names), (SeveralOptimizers,), {"inner_classes": classes, "__module__": __name__})


def read_classes(optimizer_class: Any, groups: Any, defaults: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """Return the class, the groups and the options to build with.

    They are returned as given unless groups name a class each; then groups that do not get `optimizer_class` and
    `defaults`.
    """
    groups = groups if groups is None or isinstance(groups, Sequence) else list(groups)
    if groups is None or not any(isinstance(group, dict) and CLASS in group for group in groups):
        return optimizer_class, groups, dict(defaults)
    if optimizer_class is None and defaults:
        raise TypeError(
            f"{', '.join(defaults)}: options belong into the groups, each of which has an optimizer of its own; or "
            "pass the class that they are for, which steps the groups without one"
        )
    read = [
        group
        if not isinstance(group, dict) or CLASS in group
        else {**({CLASS: optimizer_class, **defaults} if optimizer_class is not None else {}), **group}
        for group in groups
    ]
    for number, group in enumerate(read):
        if isinstance(group, dict) and not isinstance(group.get(CLASS), type):
            raise TypeError(
                f'groups[{number}] says "optimizer": {group.get(CLASS)!r}; give a class, such as torch.optim.AdamW, to '
                "each group, or one for the others as the second argument of shard(...)"
            )
    classes = tuple(dict.fromkeys(group[CLASS] for group in read if isinstance(group, dict)))
    modes = [kind.__name__ for kind in classes if hasattr(kind, "train") or hasattr(kind, "eval")]
    if modes:
        raise ValueError(f"{modes[0]} has train() and eval(), which change weights: shard(...) takes it alone only")
    return several(classes), read, {}


def shared_options(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the options that every group has, as in the first: schedulers ask for a momentum, or betas, of all."""
    first, *others = groups
    return {key: first[key] for key in option_keys(first) if key != CLASS and all(key in other for other in others)}


def with_own_options(optimizer_class: Any, group: dict[str, Any]) -> dict[str, Any]:
    """Return a group that is added, completed with the default options of its own class."""
    if group.get(CLASS) not in getattr(optimizer_class, "inner_classes", ()):
        return group
    (own,) = optimizer_class(without_params([group])).param_groups
    return {**own, **group}


def check_class(optimizer_class: Any, group: Mapping[str, Any]) -> None:
    """Raise if a group that is added has no class, or one that no other group has."""
    inner = getattr(optimizer_class, "inner_classes", ())
    if (inner and group.get(CLASS) not in inner) or (not inner and CLASS in group):
        names = ", ".join(kind.__name__ for kind in inner) or "no class of its own"
        raise ValueError(f'the "optimizer" of a group that is added must be one that there is already: {names}')


def without_class(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the group without the key that names its class."""
    return {key: value for key, value in group.items() if key != CLASS}
