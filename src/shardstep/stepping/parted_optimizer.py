"""Steps an optimizer's parameters part by part, each once per iteration, for any class of optimizer.

Every part has an optimizer of its own: an ordinary instance of the class, over the parameters of that part. So the
class need only be built and stepped, and a counter that it keeps per group, per parameter or in an attribute advances
once per iteration, as it would unsharded. The whole optimizer is never stepped. It has the state and the options of all
parts, and is what is saved and loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import SGD, Optimizer

from shardstep.optimizers.local_optimizer import is_of_torch
from shardstep.optimizers.optimizer_copy import Counters, resume
from shardstep.optimizers.param_groups import copy_options
from shardstep.optimizers.sliced_step import ElementwiseGroups, MakeOptimizer, SlicedStep
from shardstep.stepping.steppers import Scaling

_OF_PARAMS = ("params", "param_names")
_MUTABLE = (torch.Tensor, list, dict)


def takes_scaling(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step takes a `Scaling`; if not, the host must wait for `found_inf` before a step.

    SGD with momentum does not: if its first step is skipped, torch leaves the momentum's memory uninitialised.
    """
    takes = is_of_torch(type(optimizer)) and bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return takes and not (isinstance(optimizer, SGD) and any(group["momentum"] for group in optimizer.param_groups))


class PartedOptimizer:
    """Steps `whole` in parts: `parts[k]` are the parameters of part k, and all parts together are those of `whole`."""

    def __init__(
        self,
        whole: Optimizer,
        parts: Sequence[Sequence[torch.Tensor]],
        make: MakeOptimizer,
    ) -> None:
        self._whole = whole
        self._params = [list(part) for part in parts]
        self._optimizers = [make(_groups_of(whole.param_groups, part)) for part in parts]
        elementwise = ElementwiseGroups(make)
        self._steps = [SlicedStep(optimizer, make, elementwise) for optimizer in self._optimizers]
        self._is_of_torch = is_of_torch(type(whole))
        self._counters = [Counters(optimizer) for optimizer in self._optimizers]
        # A part without parameters has nothing to step, and some classes refuse to. But one part must advance options.
        filled = [number for number, part in enumerate(self._params) if part] or list(range(len(self._params)))[-1:]
        self._stepped = range(len(self._params)) if self._is_of_torch else filled

    def begin(self, param_groups: Sequence[Mapping[str, Any]]) -> None:
        """Begin an iteration: give every part the options as they are now.

        Not when each part is stepped: a counter that the first part has advanced would reach the second.
        """
        for optimizer in self._optimizers:
            given = param_groups if self._is_of_torch else _copy_mutable(param_groups)
            copy_options(given, optimizer.param_groups)

    def step(self, part: int, gradients: Sequence[torch.Tensor | None], scaling: Scaling | None = None) -> None:
        """Step one part with these gradients; `param.grad` is restored afterwards."""
        if part not in self._stepped:
            return
        params, attributes = self._params[part], vars(self._optimizers[part])
        before = [param.grad for param in params]
        try:
            if scaling is not None:
                attributes.update(found_inf=scaling.found_inf, grad_scale=scaling.grad_scale)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            self._steps[part].step()
        finally:
            for param, gradient in zip(params, before, strict=True):
                param.grad = gradient
            if scaling is not None:
                del attributes["found_inf"], attributes["grad_scale"]
        self._whole.state.update(self._optimizers[part].state)

    @torch.no_grad()
    def switch(self, mode: str) -> None:
        """Call the method `mode` of every part: `train` or `eval`."""
        for optimizer in self._optimizers:
            getattr(optimizer, mode)()

    def end(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """End an iteration: copy back options that the class has changed, which torch's own classes never do."""
        if self._optimizers and not self._is_of_torch:
            last = self._optimizers[self._stepped[-1]]
            copy_options(last.param_groups, self._whole.param_groups)
            copy_options(last.param_groups, param_groups)

    def counted(self) -> dict[str, Any]:
        """Return the class's counters (attributes that are numbers), for `resume` of the instances of the next plan."""
        return self._counters[self._stepped[-1]].advanced() if self._counters else {}

    def left_behind(self) -> list[str]:
        """Return the names of changed attributes that cannot be carried over to other instances."""
        return sorted({name for counters in self._counters for name in counters.left_behind()})

    def resume(self, counted: Mapping[str, Any]) -> None:
        """Set the class's counters of every part, so that they continue where other instances have stopped."""
        for optimizer in self._optimizers:
            resume(optimizer, counted)

    def reload(self) -> None:
        """Give every part its state and options of the whole optimizer, which has loaded them."""
        for optimizer, params in zip(self._optimizers, self._params, strict=True):
            optimizer.state.clear()
            own = set(params)
            for key, entry in self._whole.state.items():
                if not isinstance(key, torch.Tensor) or key in own:
                    optimizer.state[key] = entry
            copy_options(self._whole.param_groups, optimizer.param_groups)


def _copy_mutable(param_groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copy options that are mutable: a counter in a shared tensor or list would be advanced by each of the parts."""
    groups = [{key: value for key, value in group.items() if key not in _OF_PARAMS} for group in param_groups]
    return [
        {key: copy.deepcopy(value) if isinstance(value, _MUTABLE) else value for key, value in group.items()}
        for group in groups
    ]


def _groups_of(param_groups: Sequence[Mapping[str, Any]], params: Sequence[torch.Tensor]) -> list[dict[str, Any]]:
    """Return all groups, each with those of its parameters that are among `params`, or with a placeholder.

    Groups without parameters stay, because a step may count in the options of every group, equally on all ranks.
    """
    wanted = set(params)
    groups: list[dict[str, Any]] = []
    for group in param_groups:
        chosen = [i for i, param in enumerate(group["params"]) if param in wanted]
        part = {**group, "params": [group["params"][i] for i in chosen]}
        if "param_names" in group:
            part["param_names"] = [group["param_names"][i] for i in chosen]
        if group["params"] and not chosen:
            part["params"] = [placeholder(group["params"][0])]
            if "param_names" in group:
                part["param_names"] = ["nothing"]
        groups.append(part)
    return groups


def placeholder(like: torch.Tensor) -> torch.Tensor:
    """Return a parameter for a group that has none here, because a class may read the first one of each group.

    It has no elements, and never a gradient.
    """
    return like.new_zeros([0] * like.dim()).requires_grad_()
