"""The fast lane: `shard(model, AdamW, lr=...)` takes the place of DistributedDataParallel and of the optimizer."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.channel import accelerator_among, open_channel
from shardstep.comm.host_groups import FORKED, Forked
from shardstep.config import ShardConfig
from shardstep.engine.join import FastLaneJoinHook
from shardstep.engine.make_step import Recipe, costs_of_groups
from shardstep.engine.planned import params_of, trainable_of
from shardstep.engine.registry import check_stepped, check_unowned, close_earlier, take
from shardstep.engine.report import Report, describe_groups
from shardstep.engine.step import Engine
from shardstep.engine.validation import (
    check_apart,
    check_lookups,
    check_model,
    check_parameters,
    parameters_of,
    read_group,
    read_groups,
)
from shardstep.gradient_surface import GradientSurface
from shardstep.gradients.grad_scaler import Unscaled, unscale_kept
from shardstep.gradients.guard import guard, release
from shardstep.gradients.inside_ddp import refuse_ddp
from shardstep.optimizers.layout_policy import choose_layouts, why_uneven
from shardstep.optimizers.local_optimizer import (
    build,
    check_optimizer_class,
    check_shapes,
    check_takes_no_closure,
    is_of_torch,
    qualified_name,
)
from shardstep.optimizers.param_groups import copy_options, option_keys, option_lines, without_params
from shardstep.optimizers.several_classes import check_class, read_classes, shared_options, with_own_options
from shardstep.planning import Layout, Plan, read_specs
from shardstep.state_surface import StateSurface
from shardstep.stepping.masters import (
    Source,
    check_can_be_rounded,
    check_is_encoded,
    cut_masters,
    given_masters,
    why_it_stalls,
)
from shardstep.stepping.steppers import Scaling


def shard(
    model: nn.Module,
    optimizer_class: type[Optimizer] | None = None,
    *,
    groups: Any = None,
    process_group: dist.ProcessGroup | None = None,
    config: ShardConfig | None = None,
    masters_from: Source | None = None,
    **defaults: Any,
) -> ShardedOptimizer:
    """Train `model` on all ranks of `process_group` with one copy of the optimizer's state between them.

        opt = shardstep.shard(model, torch.optim.AdamW, lr=3e-4)
        loss.backward(); opt.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()

    The model stays as it is: no wrapper. All ranks take the parameters and buffers of the group's first rank. `groups`
    are param groups, whose "params" may be tensors, names or patterns (`"*.bias"`), or "rest". `defaults` go to
    `optimizer_class`. A group may have a class of its own, with options of its own:

        groups=[{"params": "blocks.*.weight", "optimizer": torch.optim.Muon, "lr": 0.02},
                {"params": "rest", "optimizer": torch.optim.AdamW, "lr": 3e-4}]

    bf16 and fp16 parameters are stepped by fp32 masters. These begin with what the parameters are; or with the values
    in `masters_from`, which is the model's state_dict() from before it was made 16-bit, or such a model.
    """
    config = ShardConfig() if config is None else config
    if not isinstance(config, ShardConfig):
        raise TypeError(f"config must be a ShardConfig, got {config!r}; write shardstep.ShardConfig(...)")
    return ShardedOptimizer(model, optimizer_class, groups, process_group, config, defaults, masters_from)


class ShardedOptimizer(GradientSurface, StateSurface, Joinable):
    """Made by `shard`. `param_groups` hold the model's own parameters; each rank steps an equal share of them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer] | None,
        groups: Any,
        process_group: dist.ProcessGroup | None,
        config: ShardConfig,
        defaults: dict[str, Any],
        masters_from: Source | None = None,
    ) -> None:
        self._ready = self._closed = self._is_averaged = False
        self._why_closed = "this optimizer was closed: shard(...) was called again on its model, or close()"
        self._unscaled = Unscaled()
        Joinable.__init__(self)
        self._model, self._config = model, config
        self._channel = channel = open_channel(process_group, accelerator_among(parameters_of(model)))
        failure, facts = None, Facts()
        given: Mapping[int, torch.Tensor] = {}
        try:
            self._class, groups, self._defaults = read_classes(optimizer_class, groups, defaults)
            facts = self._check(groups, has_masters=masters_from is not None)
            if masters_from is not None and config.master != "fp32":
                raise ValueError(
                    f'masters_from is for ShardConfig(master="fp32"): with {config.master!r} there are none'
                )
            if masters_from is not None:
                given = given_masters(masters_from, self.param_groups)
        except Exception as error:
            failure = error
        agree(channel, Claim("shard(...)", failure, facts))
        close_earlier(model, self.param_groups)  # its hooks would take the gradients away from this one
        recipe = self._make_recipe(self._layouts)
        self._engine = Engine(model, channel, recipe, config)
        plan = self._engine.plan_for(self.param_groups, trainable_of(self.param_groups))
        params, broadcast = params_of(self.param_groups), self._engine.transport.broadcast
        masters = cut_masters(given, params, plan, channel.rank, broadcast)
        self._engine.build(self.param_groups, plan, masters, "shard(...)")
        if config.master == "none" and channel.rank == 0 and (reason := why_it_stalls(self.param_groups)):
            warnings.warn(reason, stacklevel=3)
        if channel.rank == 0 and (reason := self._why_uneven(plan)):
            warnings.warn(reason, stacklevel=3)
        guard(self, params_of(self.param_groups))
        take(self)
        self._ready = True

    def _check(self, groups: Any, *, has_masters: bool) -> Facts:
        check_model(self._model)
        refuse_ddp(self._model)
        check_optimizer_class(self._class, self._channel.world_size)
        check_takes_no_closure(self._class)
        chosen, self._left_out = read_groups(self._model, groups)
        if getattr(self._class, "inner_classes", ()):
            check_stepped(self._model, self._left_out)
        check_parameters(chosen, allow_mixed_dtypes=True)
        check_apart(chosen, self._model)
        if self._channel.world_size > 1:
            check_lookups(self._model, chosen)
        check_unowned(chosen, self._model)
        if self._config.master == "stochastic":
            check_can_be_rounded(chosen)
        if self._config.wire is not None:
            check_is_encoded(chosen, self._config.wire)
        check_shapes(self._class, chosen, read_specs(chosen))
        if self._config.step == "backward" and not is_of_torch(self._class):
            raise ValueError('step="backward" is for torch\'s optimizers: what others count in a step is not known')
        # What the class makes of the options: its own defaults, and a first look at whether it takes them at all.
        empty = build(self._class, without_params(chosen), self._defaults, {})
        super().__init__(chosen, dict(empty.defaults))
        # And of the options of the groups: some keep their learning rate in a tensor, and refuse a number in its place.
        copy_options(empty.param_groups, self.param_groups)
        if getattr(self._class, "inner_classes", ()):
            self.defaults = shared_options(self.param_groups)
        self._layouts, self._elementwise = self._choose_layouts()
        settings = [f"optimizer_class {qualified_name(self._class)}", str(self._config), *map(str, self._layouts)]
        settings.append(f"masters_from given: {has_masters}")
        options = option_lines(self.param_groups, [option_keys(group) for group in self.param_groups])
        return Facts([*settings, *map(str, read_specs(self.param_groups)), *options])

    def _choose_layouts(self) -> tuple[list[Layout], list[bool]]:
        return choose_layouts(self._config.layout, self._class, self._defaults, self.param_groups)

    def _make_recipe(self, layouts: Sequence[Layout]) -> Recipe:
        costs = costs_of_groups(self._class, self._defaults, self._config, self.param_groups)
        return Recipe(self._class, self._defaults, layouts, costs)

    def _why_uneven(self, plan: Plan) -> str | None:
        asked = self._config.layout is Layout.WHOLE
        return None if asked else why_uneven(self._class, self._layouts, self._elementwise, plan)

    @property
    def model(self) -> nn.Module:
        return self._model

    def close(self) -> None:
        """Let go of the model: gradients are no longer reduced. `shard` on the same model closes the earlier one."""
        if not self._closed:
            self._closed = True
            try:
                self._engine.close(self.param_groups)
            finally:
                release(self, params_of(self.param_groups))

    def leave_peers(self) -> None:
        """This is a forked process: the model here is nobody's, and the optimizer cannot be used."""
        self._closed, self._why_closed = True, FORKED
        release(self, params_of(self.param_groups))
        self._engine.detach()
        self._engine = Forked(self._engine)  # type: ignore[assignment]

    def __del__(self) -> None:
        """As `close`, so that nothing of it stays with the model.

        By what is its own: a trainer's wrapper that is of this class, too, and finds all else in the optimizer inside
        it, must not close that when it goes.
        """
        if vars(self).get("_ready") and not self._closed and not sys.is_finalizing():
            with suppress(Exception):  # nobody is there to hear of it
                try:
                    self._engine.let_go(self.param_groups)
                finally:
                    release(self, params_of(self.param_groups))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a sharded optimizer belongs to its model and to its process group, and cannot be copied or pickled: save "
            "it with shardstep.save(path, model, opt)"
        )

    def __setstate__(self, state: Any) -> None:
        """torch's would set options alone, and no state: what this shows as its state is not where it is."""
        raise TypeError("a sharded optimizer takes no __setstate__: call load_state_dict() on all ranks")

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share with the mean of all ranks' gradients, and give every rank all of it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.is_closed:
            self.check_open()
        if self._is_averaged:
            self._check_not_averaged()
        if self._left_out:  # by now another optimizer may have them
            check_stepped(self._model, self._left_out)
            self._left_out = []
        self._engine.step(self.param_groups, self._scaling())
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's `GradScaler` asks: whether `step` takes its verdict on the device, and skips there."""
        return self._engine.share.takes_scaling

    def _scaling(self) -> Scaling | None:
        """What `GradScaler.step` has left on this optimizer, for its `step`."""
        found_inf, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        if found_inf is None:
            return None
        if self._engine.keeps_gradients and scale is not None:
            unscale_kept(params_of(self.param_groups), scale)
            scale = None
        return Scaling(found_inf, scale)

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval`, if the class has them (schedule-free ones do). They change weights: call on all ranks."""
        if name in ("train", "eval") and hasattr(vars(self).get("_class"), name) and not self._closed:
            return partial(self._change_mode, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _change_mode(self, mode: str) -> None:
        self.check_open()
        self._check_not_averaged()
        self._engine.switch(self.param_groups, mode)

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside, the model has the average of its weights that ShardConfig(ema=...) keeps. On all ranks.

        What is written to weights inside is lost at its end, and they are not stepped there.
        """
        self._check_not_averaged()
        self._is_averaged = True
        try:
            with self._engine.averaged():
                yield
        finally:
            self._is_averaged = False

    def synchronize(self) -> None:
        """Return when the weights of the last step are complete; raise if a rank failed in it.

        With `gather="overlap"` call it before anything but the model's own forward reads or writes the weights. On an
        accelerator the current stream waits, not the host.
        """
        if self._engine.lost:
            self.check_open()
        self._engine.synchronize()

    def compile(self, **options: Any) -> None:
        """Compile the model in place, as `model.compile(**options)` does, so that communication runs beside it.

        torch.compile makes one region of a whole model: its gradients come when all of its backward has run, and with
        `gather="overlap"` all weights must have arrived before it begins. This splits it into regions of about one
        bucket. `options` are those of torch.compile: backend, mode, dynamic, fullgraph, options. Modules that are
        compiled one by one (`for block in model.blocks: block.compile()`) need none of this.
        """
        if self._closed:
            raise RuntimeError("this optimizer was closed: compile the model by model.compile()")
        self._engine.compile(options)

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; on all ranks. State and gradients that move to another rank are sent there."""
        if not self._ready:  # torch.optim.Optimizer's constructor
            super().add_param_group(param_group)
            return
        self._check_not_averaged()
        self._engine.check_not_joined("add_param_group")
        self._engine.check_not_accumulating("add_param_group()")
        self.synchronize()
        self._engine.gradients.settle(None)  # a rank that made no pass makes up for it: the others wait for its part
        before, added = len(self.param_groups), []
        try:
            layouts, elementwise = self._take_group(param_group, before)
            added = self.param_groups[-1]["params"]
            guard(self, added)
            recipe = self._make_recipe(layouts)
            planned = self._engine.try_plan(self.param_groups, trainable_of(self.param_groups), recipe)
            self._engine.replan(self.param_groups, planned, added)
        except BaseException:
            release(self, added)
            del self.param_groups[before:]
            raise
        self._layouts, self._elementwise = list(layouts), list(elementwise)

    def _take_group(self, param_group: dict[str, Any], before: int) -> tuple[Sequence[Layout], Sequence[bool]]:
        """A group behind those that were there `before`, as far as all ranks can have it; the layouts of all."""
        failure: BaseException | None = None
        facts, layouts, elementwise = Facts(), self._layouts, self._elementwise
        try:
            super().add_param_group(self._named(with_own_options(self._class, read_group(param_group))))
            check_parameters(self.param_groups, allow_mixed_dtypes=True)
            check_unowned(self.param_groups[-1:], self._model)
            check_class(self._class, self.param_groups[-1])
            check_shapes(self._class, self.param_groups, read_specs(self.param_groups))
            empty = build(self._class, without_params(self.param_groups[-1:]), self._defaults, {})
            copy_options(empty.param_groups, self.param_groups[-1:])
            layouts, elementwise = self._choose_layouts()
            if layouts[:before] != self._layouts:
                raise ValueError("with the options of this group the optimizer cannot be cut as finely as before")
            options = option_lines(self.param_groups, [option_keys(group) for group in self.param_groups])
            facts = Facts([*map(str, read_specs(self.param_groups)), *options])
        except BaseException as error:
            failure = error
        agree(self._channel, Claim("add_param_group", failure, facts))
        return layouts, elementwise

    def _named(self, group: dict[str, Any]) -> dict[str, Any]:
        names = {param: name for name, param in self._model.named_parameters()}
        number = len(self.param_groups)
        group["param_names"] = group.get("param_names") or [
            names.get(param, f"param_groups[{number}]['params'][{place}]")
            for place, param in enumerate(group["params"])
        ]
        return group

    # -- uneven inputs ------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `with torch.distributed.algorithms.join.Join([opt]):` ranks may have different numbers of batches."""
        if self._config.step == "backward":
            raise RuntimeError('step="backward" and Join do not go together: use the default step')
        return FastLaneJoinHook(self, self._engine, kwargs)

    @property
    def join_device(self) -> torch.device:
        device: torch.device = params_of(self.param_groups)[0].device
        return device

    @property
    def join_process_group(self) -> Any:
        return self._channel.group

    # -- what it takes ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What every rank holds and sends; with times, if steps were `measured`. On all ranks; `print` it."""
        self.check_open()
        groups = describe_groups(self._class, self.param_groups, self._layouts)
        return self._engine.report(self.param_groups, groups)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, steps are measured for the next `report`: how much of their communication computation hides.

        No host waits for a device here. What is measured is a block: put whole steps into it, with their passes.
        """
        with self._engine.measured(self.param_groups):
            yield

    def bucket_nbytes(self) -> list[int]:
        """The bytes of each bucket."""
        return self._engine.bucket_nbytes()

    def predicted_nbytes(self) -> int:
        """What this rank needs for parameters, state, gradients and buckets on their way, by the plan."""
        return self._engine.predicted_nbytes()
