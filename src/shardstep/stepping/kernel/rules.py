"""Which optimizers the kernel reproduces, and the numbers that it takes from their options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from enum import IntEnum
from functools import partial
from typing import Any

import torch

from shardstep.optimizers.local_optimizer import bare_class, qualified_name


class Rule(IntEnum):
    """How an element is stepped. The numbers are the kernel's."""

    ADAM = 0  # also AdamW: whether the decay is coupled is an option of a group
    SGD = 1
    LION = 2


# By module and name, so that nothing is imported. A subclass may do anything.
_RULES = {
    "torch.optim.adam.Adam": Rule.ADAM,
    "torch.optim.adamw.AdamW": Rule.ADAM,
    "torch.optim.sgd.SGD": Rule.SGD,
    "lion_pytorch.lion_pytorch.Lion": Rule.LION,
}
# All that the constructors take, as of torch 2.11 to 2.15. The kernel does not know any other option.
_READ = {
    "params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable", "differentiable",
    "fused", "decoupled_weight_decay", "momentum", "dampening", "nesterov", "use_triton",
}  # fmt: skip
_NUMBERS = ("weight_decay", "eps", "momentum", "dampening")

# Of a group, in this order, in float64: 1 - beta is off in the fifth digit if beta was rounded to float32 before.
LR, WEIGHT_DECAY, BETA1, BETA2, EPS, MOMENTUM, DAMPENING, SIGN, DECOUPLED = range(9)
SCALARS = 9


def rule_of(optimizer_class: Any) -> Rule:
    """Return the rule of a class that `supports` accepts."""
    return _RULES[qualified_name(optimizer_class)]


def supports(optimizer_class: Any, group: Mapping[str, Any]) -> str | None:
    """Return why the kernel does not step like this class with these options; None if it does.

    `group` are the options of a param group, with what the class was built with. Whether they ask for foreach, fused or
    capturable makes no difference but in rounding.
    """
    name = qualified_name(optimizer_class)
    rule = _RULES.get(name)
    if rule is None:
        return f"{name} is not one of {', '.join(_RULES)}; a subclass may step in another way"
    options = {**_bound(optimizer_class), **group}
    unread = _unread_options(bare_class(optimizer_class))
    if unread:
        return f"{name} takes {unread[0]!r}, which is newer than the kernel"
    if options.get("differentiable"):
        return "differentiable=True: autograd does not see what a kernel does"
    if rule is Rule.LION and options.get("decoupled_weight_decay"):
        return "decoupled_weight_decay=True: Lion keeps the first learning rate on itself, where the kernel has no look"
    if any(isinstance(options.get(key), torch.Tensor) for key in _NUMBERS):
        return f"of the options only lr may be a tensor, not {', '.join(_NUMBERS)}"
    if any(isinstance(beta, torch.Tensor) for beta in options.get("betas", ())):
        return "of the options only lr may be a tensor, not betas"
    lr = options.get("lr")
    if isinstance(lr, torch.Tensor) and (lr.numel() != 1 or lr.requires_grad):
        return "a learning rate in a tensor must be one element that needs no gradient"
    return None


def is_decoupled(rule: Rule, group: Mapping[str, Any]) -> bool:
    """Whether the weights decay by themselves, rather than through the gradient."""
    return rule is Rule.LION or (rule is Rule.ADAM and bool(group.get("decoupled_weight_decay")))


def scalars_of(rule: Rule, group: Mapping[str, Any]) -> list[float]:
    """Return the numbers `LR` to `DECOUPLED`. A learning rate on a device is not waited for: it is 0 here."""
    lr = group["lr"]
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    return [
        0.0 if lr_on_device(group) is not None else float(lr),
        float(group.get("weight_decay", 0.0)),
        float(beta1),
        float(beta2),
        float(group.get("eps", 0.0)),
        float(group.get("momentum", 0.0)),
        float(group.get("dampening", 0.0)),
        -1.0 if group.get("maximize") else 1.0,
        float(is_decoupled(rule, group)),
    ]


def lr_on_device(group: Mapping[str, Any]) -> torch.Tensor | None:
    lr = group["lr"]
    return lr if isinstance(lr, torch.Tensor) and lr.device.type != "cpu" else None


@functools.cache
def _unread_options(optimizer_class: Any) -> list[str]:
    return [name for name in inspect.signature(optimizer_class).parameters if name not in _READ]


def _bound(optimizer_class: Any) -> dict[str, Any]:
    """Return the options that a `functools.partial` was given."""
    bound: dict[str, Any] = {}
    while isinstance(optimizer_class, partial):
        bound = {**optimizer_class.keywords, **bound}
        optimizer_class = optimizer_class.func
    return bound
