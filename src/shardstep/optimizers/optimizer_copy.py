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
    """Return what a class saves beside state and groups."""
    return {key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}


def run_pre_hooks(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Run the optimizer's pre-load hooks on a shallow copy of a state_dict, and return what they make of it."""
    state_dict = dict(state_dict)
    for hook in getattr(optimizer, _HOOKS[0], {}).values():
        state_dict = hook(optimizer, state_dict) or state_dict
    return state_dict


def run_post_hooks(optimizer: Optimizer) -> None:
    """Run the optimizer's post-load hooks."""
    for hook in getattr(optimizer, _HOOKS[1], {}).values():
        hook(optimizer)


def load_again(optimizer: Optimizer, others: Mapping[str, Any] | None = None) -> None:
    """Let the class of `optimizer` process the state and options that it has as it does when they are loaded.

    torch's own `load_state_dict` is not called: it would round counters, and what a class keeps in fp32 beside 16-bit
    parameters. `others` is what a state_dict has beside state and groups.
    """
    with _explain_errors(optimizer):
        if _loads_as_torch_does(optimizer):
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})
        else:
            optimizer.load_state_dict({**optimizer.state_dict(), **(others or {})})


class OptimizerCopy:
    """A copy of `original` over the same parameters, and of its inner optimizers, which loads in its place.

    If loading succeeds, `take` gives `original` everything that the copy has, attributes included.
    """

    def __init__(self, original: Optimizer) -> None:
        self._originals: dict[int, Optimizer] = {}  # by the id of the copy
        self._copies: dict[int, Any] = {}  # by the id of the original: optimizers may share groups and state
        self.original, self.optimizer = original, self._copy(original)

    def load(self, state_dict: Mapping[str, Any]) -> None:
        """Load with the code of the class, without hooks: the caller runs those of the original.

        What the class saves beside state and groups stays as it is where `state_dict` does not have it.
        """
        copied = self.optimizer
        own = {} if _loads_as_torch_does(copied) else beside_state(copied.state_dict())
        vars(copied).update((name, OrderedDict()) for name in _HOOKS if name in vars(copied))
        with _explain_errors(copied):
            copied.load_state_dict({**own, **state_dict})

    def take(self) -> None:
        """Give the original everything that the copy has. No code of the class runs here."""
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
        copied: Optimizer = object.__new__(type(optimizer))
        self._copies[id(optimizer)], self._originals[id(copied)] = copied, optimizer
        for name, value in vars(optimizer).items():
            if name in ("param_groups", "state", "defaults"):
                if id(value) not in self._copies:
                    self._copies[id(value)] = self._copy_of(name, value, deep=not _loads_as_torch_does(optimizer))
                value = self._copies[id(value)]
            vars(copied)[name] = self._each(value, self._copy)
        return copied

    def _copy_of(self, name: str, value: Any, *, deep: bool) -> Any:
        """Copy groups, state or defaults; `deep` where a `load_state_dict` may write to state in place."""
        if name == "param_groups":
            return [self._copies.setdefault(id(group), dict(group)) for group in value]
        copied = copy.copy(value)
        if name == "state":
            for key, entry in value.items():
                copied[key] = copy.deepcopy(entry) if deep else copy.copy(entry)
        return copied

    @staticmethod
    def _each(value: Any, change: Callable[[Optimizer], Optimizer]) -> Any:
        """Apply `change` to an optimizer, or to each of a list of them; return anything else as it is."""
        if isinstance(value, Optimizer):
            return change(value)
        is_row = type(value) in (list, tuple) and value and all(isinstance(one, Optimizer) for one in value)
        return type(value)(map(change, value)) if is_row else value


def _loads_as_torch_does(optimizer: Optimizer) -> bool:
    return type(optimizer).load_state_dict is Optimizer.load_state_dict


@contextmanager
def _explain_errors(optimizer: Optimizer) -> Iterator[None]:
    """A context that turns a KeyError or AttributeError of loading code into a ValueError with an explanation."""
    try:
        yield
    except (LookupError, AttributeError) as error:
        raise ValueError(
            f"{qualified_name(type(optimizer))} cannot load this state ({type(error).__name__}: {error}): it was saved "
            "by another optimizer, or by another version of it"
        ) from error


_COMMON = frozenset(vars(Optimizer([torch.zeros(1, device="cpu")], {})))  # attributes that every optimizer has


class Counters:
    """The attributes of one optimizer that have changed since its construction."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._at_first = {name: (_is_number(value), _fingerprint(value)) for name, value in self._own().items()}

    def _own(self) -> dict[str, Any]:
        return {
            f"{prefix}{name}": value
            for prefix, optimizer in _with_inner(self._optimizer).items()
            for name, value in vars(optimizer).items()
            if name not in _COMMON and name[:2] != "__"
        }

    def advanced(self) -> dict[str, Any]:
        """Return numbers that have changed, such as a count of steps, for `resume` of another instance."""
        return {name: copy.deepcopy(value) for name, value in self._changed().items() if _is_number(value)}

    def left_behind(self) -> list[str]:
        """Return the names of attributes that have changed and are not numbers, so that they cannot be carried over."""
        return [name for name, value in self._changed().items() if not _is_number(value)]

    def _changed(self) -> dict[str, Any]:
        return {
            name: value
            for name, value in sorted(self._own().items())
            if self._at_first.get(name) != (_is_number(value), _fingerprint(value))
        }


def resume(optimizer: Optimizer, advanced: Mapping[str, Any]) -> None:
    """Set the counters of `optimizer` to those of another instance, as `Counters.advanced` returned them."""
    for prefix, target in _with_inner(optimizer).items():
        for name, value in advanced.items():
            if name.startswith(prefix) and "." not in name.removeprefix(prefix):
                setattr(target, name.removeprefix(prefix), copy.deepcopy(value))


def _with_inner(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Return it and its inner optimizers (several_classes.py), by the prefix of their attributes' names."""
    return {"": optimizer, **{f"{type(inner).__name__}.": inner for inner in getattr(optimizer, "inner", ())}}


def _is_number(value: Any) -> bool:
    return isinstance(value, bool | int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _fingerprint(value: Any) -> Any:
    """Return something that differs when the value has changed: numbers themselves, the sizes of containers."""
    if isinstance(value, torch.Tensor):
        return value.detach().item() if value.numel() == 1 else (value.shape, value._version)
    if _is_number(value):
        return value
    if isinstance(value, dict | list | set | tuple):
        return type(value), len(value)
    return None
