"""What an optimizer carries over to another instance of its class: counters, and all that it loads."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.optimizers.local_optimizer import qualified_name

_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")


def beside_state(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What classes save that save more than state and groups."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def run_pre_hooks(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the optimizer's hooks make of a state_dict. They are given a copy of it, one level deep."""
    state_dict = dict(state_dict)
    for hook in getattr(optimizer, _HOOKS[0], {}).values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_post_hooks(optimizer: Optimizer) -> None:
    for hook in getattr(optimizer, _HOOKS[1], {}).values():
        hook(optimizer)


def load_again(optimizer: Optimizer, others: Mapping[str, Any] | None = None) -> None:
    """Let the class of `optimizer` do with the state and the options that it has what it does when these are loaded.

    torch's own `load_state_dict` is passed by: it would round counters, and what a class keeps in fp32 beside 16-bit
    parameters. `others` is what a state_dict has beside state and groups.
    """
    with _in_words(optimizer):
        if _loads_as_torch_does(optimizer):
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        else:
            optimizer.load_state_dict({**optimizer.state_dict(), **(others or {})})


class OptimizerCopy:
    """A copy of `original` over the same parameters, and of the optimizers that it has inside. What it loads, and
    whatever else a class writes to itself then, `original` has when it takes it."""

    def __init__(self, original: Optimizer) -> None:
        self._originals: dict[int, Optimizer] = {}  # by the id of the twin
        self._copies: dict[int, Any] = {}  # by id: one optimizer may have the very groups and state of another
        self.original, self.optimizer = original, self._copy(original)

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load by the code of the class. Hooks of the original are the caller's affair.

        What its class saves beside state and groups, and `state_dict` has not got, stays what it is.
        """
        twin = self.optimizer
        own = {} if _loads_as_torch_does(twin) else beside_state(twin.state_dict())
        vars(twin).update((name, OrderedDict()) for name in _HOOKS if name in vars(twin))
        with _in_words(twin):
            twin.load_state_dict({**own, **state_dict})

    def take(self) -> None:
        """Give the original all that its twin has. No code of the class runs here."""
        vars(self.optimizer).update((name, vars(self.original)[name]) for name in _HOOKS if name in vars(self.original))
        for copied in list(self._copies.values()):
            if id(copied) in self._originals:
                vars(self._originals[id(copied)]).update(
                    (name, self._each(value, lambda one: self._originals.get(id(one), one)))
                    for name, value in vars(copied).items()
                )

    def _copy(self, optimizer: Optimizer) -> Optimizer:
        if id(optimizer) in self._copies:
            return self._copies[id(optimizer)]  # type: ignore[no-any-return]
        twin: Optimizer = object.__new__(type(optimizer))
        self._copies[id(optimizer)], self._originals[id(twin)] = twin, optimizer
        for name, value in vars(optimizer).items():
            if name in ("param_groups", "state", "defaults"):
                if id(value) not in self._copies:
                    self._copies[id(value)] = self._copy_of(name, value, deep=not _loads_as_torch_does(optimizer))
                value = self._copies[id(value)]
            vars(twin)[name] = self._each(value, self._copy)
        return twin

    def _copy_of(self, name: str, value: Any, *, deep: bool) -> Any:
        """`deep` where a `load_state_dict` may write to state in place."""
        if name == "param_groups":
            return [self._copies.setdefault(id(group), dict(group)) for group in value]
        copied = copy.copy(value)
        if name == "state":
            for key, entry in value.items():
                copied[key] = copy.deepcopy(entry) if deep else copy.copy(entry)
        return copied

    @staticmethod
    def _each(value: Any, change: Callable[[Optimizer], Optimizer]) -> Any:
        """An optimizer, or a list of them, with each one changed; anything else as it is."""
        if isinstance(value, Optimizer):
            return change(value)
        is_row = type(value) in (list, tuple) and value and all(isinstance(one, Optimizer) for one in value)
        return type(value)(map(change, value)) if is_row else value


def _loads_as_torch_does(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


@contextmanager
def _in_words(optimizer: Optimizer) -> Iterator[None]:
    """Code that takes for granted what is not there says no more than its name."""
    try:
        yield
    except (LookupError, AttributeError) as error:
        raise ValueError(
            f"{qualified_name(type(optimizer))} cannot load this state ({type(error).__name__}: {error}): it was saved "
            "by another optimizer, or by another version of it"
        ) from error


_COMMON = frozenset(vars(Optimizer([torch.zeros(1, device="cpu")], {})))  # attributes that every optimizer has


class Counters:
    """Of one instance, from its construction on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._at_first = {name: (_is_number(value), _look(value)) for name, value in self._own().items()}

    def _own(self) -> dict[str, Any]:
        return {
            f"{prefix}{name}": value
            for prefix, optimizer in _with_inner(self._optimizer).items()
            for name, value in vars(optimizer).items()
            if name not in _COMMON and name[:2] != "__"
        }

    def advanced(self) -> dict[str, Any]:
        """Numbers that have changed since, such as a count of steps. What stayed belongs to the instance alone."""
        return {name: copy.deepcopy(value) for name, value in self._changed().items() if _is_number(value)}

    def left_behind(self) -> list[str]:
        """Attributes that have changed and are no numbers: nobody can say what they would be in another instance."""
        return [name for name, value in self._changed().items() if not _is_number(value)]

    def _changed(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in sorted(self._own().items())
            if self._at_first.get(name) != (_is_number(value), _look(value))
        }


def resume(optimizer: Optimizer, advanced: Mapping[str, Any]) -> None:
    """Let `optimizer` go on where another instance has stopped."""
    for prefix, target in _with_inner(optimizer).items():
        for name, value in advanced.items():
            if name.startswith(prefix) and "." not in name.removeprefix(prefix):
                setattr(target, name.removeprefix(prefix), copy.deepcopy(value))


def _with_inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """It and those that it is made of (several.py), by what stands before their attributes."""
    return {"": optimizer, **{f"{type(inner).__name__}.": inner for inner in getattr(optimizer, "inner", ())}}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _look(value: Any) -> Any:
    """What can be told of a value later: numbers by what they are, containers by how much they hold."""
    if isinstance(value, torch.Tensor):
        return value.detach().item() if value.numel() == 1 else (value.shape, value._version)
    if _is_number(value):
        return value
    if isinstance(value, dict | list | set | tuple):
        return type(value), len(value)
    return None
