"""All that this rank holds: by a plan of whole parameters, an ordinary optimizer over its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shardstep.comm.agreement import Facts
from shardstep.optimizers.local_optimizer import build, dealt_to, qualified_name
from shardstep.optimizers.optimizer_copy import Counters, OptimizerCopy, resume
from shardstep.optimizers.param_groups import WatchedOptions, copy_options, local_groups, option_lines
from shardstep.optimizers.sliced_step import ElementwiseGroups, SlicedStep
from shardstep.params.views import storage_order
from shardstep.planning import Layout, Plan, make_plan, read_specs
from shardstep.state.state_dict import check_options, check_state_dict, local_part

_SCHEDULED = {"lr", "momentum", "betas", "weight_decay"}  # what programs change as they go

Groups = list[dict[str, Any]]  # the caller's, of all parameters; passed in, because a program may change them


class LocalShard:
    """A plan, and an `optimizer_class` over the parameters that it gives this rank."""

    def __init__(
        self, optimizer_class: type[Optimizer], options: Mapping[str, Any], rank: int, groups: Groups, plan: Plan
    ) -> None:
        self.optimizer_class, self.options, self._rank = optimizer_class, options, rank
        # Not what a class counts in its groups: a rank without parameters in one may not get that far.
        self._watched = WatchedOptions(among=_SCHEDULED | set(options))
        self._told: tuple[Plan, list[str], Facts] | None = None
        self.counted: Mapping[str, Any] = {}  # what the class had counted on itself when holders last changed
        self.adopt(plan)
        self._build(groups)

    def adopt(self, plan: Plan) -> None:
        """Another plan with the same holders: what travels has changed, or a group came."""
        self.plan = plan
        self.travels = [spec.trainable for spec in plan.params]

    def share_out(self, groups: Groups, plan: Plan, entries: Mapping[Any, Any]) -> None:
        """A plan with other holders; `entries` are the state of what this rank holds by it, as in `entries`."""
        self.adopt(plan)
        self.counted = self._counters.advanced()
        self._build(groups)
        resume(self.optim, self.counted)
        place = {index: number for number, index in enumerate(dealt_to(plan, self._rank))}
        state = {place[key] if isinstance(key, int) else key: entry for key, entry in entries.items()}
        self.optim.load_state_dict({**self.optim.state_dict(), "state": state})

    def grow(self, groups: Groups, plan: Plan) -> None:
        """Take this rank's part of the last of `groups`, which `plan` has and the optimizer has not."""
        own = self.groups_of(self._rank, groups, plan)[-1]
        # A trial, because some classes (Muon) look at their parameters in the constructor only.
        build(self.optimizer_class, [own], self.options, _names(groups, plan))
        self.optim.add_param_group(own)
        # The new group only: what a scheduler set in the others has not reached the local optimizer yet.
        copy_options(self.optim.param_groups[-1:], groups[-1:])

    def _build(self, groups: Groups) -> None:
        own = self.groups_of(self._rank, groups, self.plan)
        self.optim = build(self.optimizer_class, own, self.options, _names(groups, self.plan))
        self._counters = Counters(self.optim)
        self._sliced = SlicedStep(self.optim, self.make, ElementwiseGroups(self.make))

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Another optimizer of the same class and options."""
        make: Callable[..., Optimizer] = self.optimizer_class
        return make(groups, **self.options)

    @staticmethod
    def groups_of(rank: int, groups: Groups, plan: Plan) -> list[dict[str, Any]]:
        """The param groups of a rank, as its optimizer holds them."""
        return local_groups(groups, plan.params, dealt_to(plan, rank))

    def settings(self, groups: Groups, plan: Plan, *, bucket_view: bool) -> Facts:
        """What must be the same on every rank: how the optimizer was built, and every parameter."""
        lines = [f"optimizer_class {qualified_name(type(self.optim))}", f"parameters_as_bucket_view {bucket_view}"]
        for spec, param in zip(plan.params, params_of(groups), strict=True):
            # Flat buffers are sent in memory order, so channels_last on one rank alone would scramble values.
            order = f", dims in memory order {storage_order(param)}" if bucket_view else ""
            lines.append(f"{spec}{order}")
        lines.append(f"parameters in each group {[len(group['params']) for group in groups]}")
        return Facts([*lines, *option_lines(groups, [list(self.optim.defaults)] * len(groups))])

    def step(self, groups: Groups, closure: Any, kwargs: Mapping[str, Any]) -> Any:
        """Step this rank's parameters with the gradients that they have."""
        copy_options(groups, self.optim.param_groups)
        given = dict(kwargs) if closure is None else {**kwargs, "closure": closure}
        # With a closure the class itself decides how often it is called, and what happens between.
        result = self.optim.step(**given) if given else self._sliced.step()
        copy_options(self.optim.param_groups, groups)
        return result

    def step_facts(self, groups: Groups, plan: Plan) -> Facts:
        """What must be the same on every rank in a step under `plan`: its parameters, and the program's options."""
        self._watched.add_new(groups)
        lines = self._watched.lines(groups)
        if self._told is None or plan is not self._told[0] or lines is not self._told[1]:
            self._told = (plan, lines, Facts([*map(str, plan.params), *lines]))
        return self._told[2]

    def entries(self) -> dict[Any, Any]:
        """This rank's state under the indices of the unsharded optimizer."""
        mine = dealt_to(self.plan, self._rank)
        held = {param for group in self.optim.param_groups for param in group["params"]}
        for key in [key for key in self.optim.state if isinstance(key, torch.Tensor) and key not in held]:
            del self.optim.state[key]  # made by reading `zero.state[param]` of another rank's parameter
        state = self.optim.state_dict()["state"]
        return {mine[key] if isinstance(key, int) else key: entry for key, entry in state.items()}

    def loaded(self, state_dict: Mapping[str, Any], groups: Groups) -> OptimizerCopy:
        """Return a twin of the local optimizer that has loaded this rank's part, and may be taken."""
        specs, before = self.plan.params, self.optim.param_groups
        keys = check_state_dict(state_dict, specs, [len(group["params"]) for group in groups], type(self.optim))
        twin = OptimizerCopy(self.optim)
        twin.load(local_part(state_dict, keys, dealt_to(self.plan, self._rank), specs))
        check_options(twin.optimizer, before)
        return twin


def plan_for(groups: Groups, travels: Sequence[bool], world_size: int) -> Plan:
    """Who holds what, and what travels; made anew whenever one of them changes."""
    return make_plan(read_specs(groups, travels), Layout.WHOLE, world_size=world_size)


def loaded_groups(groups: Groups, local: Groups, saved: Sequence[Mapping[str, Any]]) -> Groups:
    """`groups` with the options that the local optimizer has loaded, and with the names that were saved, if any."""
    loaded: Groups = []
    for outer, own, theirs in zip(groups, local, saved, strict=True):
        names = theirs.get("param_names", outer.get("param_names"))
        loaded.append({**own, **({"param_names": list(names)} if names else {}), "params": outer["params"]})
    return loaded


def params_of(groups: Groups) -> list[torch.Tensor]:
    """In index order: group by group."""
    return [param for group in groups for param in group["params"]]


def travelling(params: Sequence[torch.Tensor]) -> list[bool]:
    """Which parameters a step can change. A frozen one with a gradient left over is still stepped, as torch does."""
    return [_is_trainable(param) or param.grad is not None for param in params]


def _is_trainable(param: torch.Tensor) -> bool:
    return param.requires_grad


def _names(groups: Groups, plan: Plan) -> dict[torch.Tensor, str]:
    return {param: spec.name for param, spec in zip(params_of(groups), plan.params, strict=True)}
