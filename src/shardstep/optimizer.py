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
from shardstep.comm.call_order import Call
from shardstep.comm.channel import accelerator_among, open_channel
from shardstep.comm.host_groups import FORKED, Forked
from shardstep.config import ShardConfig
from shardstep.engine import gradient_calls, state_calls
from shardstep.engine.build import make_recipe
from shardstep.engine.context import Recipe, params_of, trainable_of
from shardstep.engine.join import FastLaneJoinHook
from shardstep.engine.registry import check_stepped, close_earlier, take
from shardstep.engine.report import Report, make_report, measured
from shardstep.engine.state_calls import CheckpointView
from shardstep.engine.step import Engine
from shardstep.engine.validation import (
    check_added_group,
    check_sharded,
    find_warnings,
    group_lines,
    name_parameters,
    parameters_of,
    read_group,
)
from shardstep.gradients.grad_scaler import Unscaled
from shardstep.optimizers.local_optimizer import build, qualified_name
from shardstep.optimizers.param_groups import copy_options, without_params
from shardstep.optimizers.several_classes import read_classes, shared_options, with_own_options
from shardstep.params.proxy import attach_proxies, detach_proxies
from shardstep.planning import Layout
from shardstep.state.state_dict import ShownState, pack_groups, shown_state
from shardstep.stepping.masters import Source, given_masters
from shardstep.torch_internals import frame_at, is_init_optim_state


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


class ShardedOptimizer(Optimizer, Joinable):
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
        self._left_out: list[str] = []  # parameters that no group has
        self._why_closed = "this optimizer was closed: shard(...) was called again on its model, or close()"
        self._unscaled = Unscaled()
        Joinable.__init__(self)
        self.model, self.config = model, config
        self._channel = channel = open_channel(process_group, accelerator_among(parameters_of(model)))
        failure, facts = None, Facts()
        given: Mapping[int, torch.Tensor] = {}
        try:
            self._class, groups, self._defaults = read_classes(optimizer_class, groups, defaults)
            recipe, facts = self._take_groups(groups, has_masters=masters_from is not None)
            if masters_from is not None:
                if config.master != "fp32":
                    raise ValueError(
                        f'masters_from is for ShardConfig(master="fp32"): with {config.master!r} there are none'
                    )
                given = given_masters(masters_from, self.param_groups)
        except Exception as error:
            failure = error
        agree(channel, Claim("shard(...)", failure, facts))
        close_earlier(model, self.param_groups)  # its hooks would take the gradients away from this one
        self._engine = Engine(model, channel, config)
        self._engine.start(recipe, self.param_groups, given)
        if channel.rank == 0:
            for reason in find_warnings(config, recipe, self.param_groups, self._engine.runtime.plan):
                warnings.warn(reason, stacklevel=3)
        attach_proxies(self, params_of(self.param_groups))
        take(self)
        self._ready = True

    def _take_groups(self, groups: Any, *, has_masters: bool) -> tuple[Recipe, Facts]:
        """Become an optimizer of these groups, if they can be sharded; return what ranks must have in common."""
        chosen, self._left_out = check_sharded(self.model, self._class, groups, self.config, self._channel.world_size)
        # What the class makes of the options: its own defaults, and a first look at whether it takes them at all.
        empty = build(self._class, without_params(chosen), self._defaults, {})
        Optimizer.__init__(self, chosen, dict(empty.defaults))
        # And of the options of the groups: some keep their learning rate in a tensor, and refuse a number in its place.
        copy_options(empty.param_groups, self.param_groups)
        if getattr(self._class, "inner_classes", ()):
            self.defaults = shared_options(self.param_groups)
        recipe = make_recipe(self._class, self._defaults, self.config, self.param_groups)
        settings = [f"optimizer_class {qualified_name(self._class)}", str(self.config), *map(str, recipe.layouts)]
        return recipe, Facts([*settings, f"masters_from given: {has_masters}", *group_lines(self.param_groups)])

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Whether it has let go of its model: by `close`, or because something failed that could not be taken back."""
        return self._closed or bool(self._engine.lost)

    def check_open(self) -> None:
        if self._closed:
            raise RuntimeError(self._why_closed)
        if self._engine.lost:
            raise RuntimeError(f"this optimizer was closed: {self._engine.lost}")

    def close(self) -> None:
        """Let go of the model: gradients are no longer reduced. `shard` on the same model closes the earlier one."""
        if not self._closed:
            self._closed = True
            try:
                self._engine.close(self.param_groups)
            finally:
                detach_proxies(self, params_of(self.param_groups))

    def leave_peers(self) -> None:
        """This is a forked process: the model here is nobody's, and the optimizer cannot be used."""
        self._closed, self._why_closed = True, FORKED
        detach_proxies(self, params_of(self.param_groups))
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
                    detach_proxies(self, params_of(self.param_groups))

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
        self.check_open()
        self._check_not_averaged()
        if self._left_out:  # by now another optimizer may have them
            check_stepped(self.model, self._left_out)
            self._left_out = []
        scaling = gradient_calls.scaling_of(self, self._engine) if "found_inf" in vars(self) else None
        self._engine.step(self.param_groups, scaling)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch's `GradScaler` asks: whether `step` takes its verdict on the device, and skips there."""
        return self._engine.runtime.local_step.takes_scaling

    def __getattr__(self, name: str) -> Any:
        """`train` and `eval`, if the class has them (schedule-free ones do). They change weights: call on all ranks."""
        if name in ("train", "eval") and hasattr(vars(self).get("_class"), name) and not self._closed:
            return partial(self._change_mode, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def _change_mode(self, mode: str) -> None:
        self.check_open()
        self._check_not_averaged()
        state_calls.switch_mode(self._engine, self.param_groups, mode)

    @contextmanager
    def ema(self) -> Iterator[None]:
        """Inside, the model has the average of its weights that ShardConfig(ema=...) keeps. On all ranks.

        What is written to weights inside is lost at its end, and they are not stepped there.
        """
        self._check_not_averaged()
        self._is_averaged = True
        try:
            with state_calls.averaged(self._engine):
                yield
        finally:
            self._is_averaged = False

    def synchronize(self) -> None:
        """Return when the weights of the last step are complete; raise if a rank failed in it.

        With `gather="overlap"` call it before anything but the model's own forward reads or writes the weights. On an
        accelerator the current stream waits, not the host.
        """
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
        engine = self._engine
        self._check_not_averaged()
        engine.check_not_joined("add_param_group")
        engine.check_not_accumulating("add_param_group()")
        self.synchronize()
        engine.runtime.gradients.settle(None)  # a rank that made no pass makes up for it: others wait for its part
        before, added = len(self.param_groups), []
        try:
            recipe = self._take_group(param_group, engine.runtime.recipe.layouts)
            added = self.param_groups[-1]["params"]
            attach_proxies(self, added)
            planned = engine.try_plan(self.param_groups, trainable_of(self.param_groups), recipe)
            engine.replan(self.param_groups, planned, added)
        except BaseException:
            detach_proxies(self, added)
            del self.param_groups[before:]
            raise

    def _take_group(self, param_group: dict[str, Any], layouts: Sequence[Layout]) -> Recipe:
        """Append a group, as far as all ranks can have it; `layouts` are of those before it."""
        failure: BaseException | None = None
        facts = Facts()
        try:
            group = with_own_options(self._class, read_group(param_group))
            super().add_param_group(name_parameters(group, self.model, len(self.param_groups)))
            check_added_group(self.model, self._class, self.param_groups)
            empty = build(self._class, without_params(self.param_groups[-1:]), self._defaults, {})
            copy_options(empty.param_groups, self.param_groups[-1:])
            recipe = make_recipe(self._class, self._defaults, self.config, self.param_groups)
            if recipe.layouts[: len(layouts)] != layouts:
                raise ValueError("with the options of this group the optimizer cannot be cut as finely as before")
            facts = Facts(group_lines(self.param_groups))
        except BaseException as error:
            failure = error
        agree(self._channel, Claim("add_param_group", failure, facts))
        return recipe

    # -- gradients ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: this rank's part of the mean, and whatever `no_sync` has left in `param.grad`."""
        self._engine.zero_grad(set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes send nothing; their gradients add up in `param.grad` until one outside."""
        call_order = self._engine.call_order  # as long as the optimizer lives: a new plan may be made inside
        before, call_order.syncs = call_order.syncs, False
        try:
            yield
        finally:
            call_order.syncs = before

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """The norm of the mean gradient of every parameter, by name; the same on every rank. The host waits for it."""
        self._engine.announce_call(Call.NORMS, self.param_groups, options={"norm_type": norm_type})
        return gradient_calls.grad_norms(self._engine, self.param_groups, norm_type)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`; returns what it was.

        What is returned lies where the gradients do, and nothing here waits for it; `error_if_nonfinite` does.
        """
        options = {"max_norm": max_norm, "norm_type": norm_type, "error_if_nonfinite": error_if_nonfinite}
        waits = not self._engine.keeps_gradients
        self._engine.announce_call(Call.CLIP_NORM, self.param_groups, waits=waits, options=options)
        return gradient_calls.clip_grad_norm(self._engine, self.param_groups, max_norm, norm_type, error_if_nonfinite)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Bring every element of the mean gradient between -`clip_value` and `clip_value`. On all ranks."""
        options = {"clip_value": clip_value}
        self._engine.announce_call(Call.CLIP_VALUE, self.param_groups, waits=False, options=options)
        gradient_calls.clip_grad_value(self._engine, self.param_groups, clip_value)

    def gradient_to_unscale(self, param: torch.Tensor, call: Mapping[str, Any]) -> torch.Tensor | None:
        """What torch's `GradScaler` is to find in `param.grad`; `call` are the variables of its function."""
        if self._unscaled.call is not call["found_inf"]:
            self._engine.announce_call(Call.UNSCALE, self.param_groups)
            inverse, allow_fp16 = call["inv_scale"], call["allow_fp16"]
            verdict = gradient_calls.unscale_gradients(self._engine, self.param_groups, inverse, allow_fp16)
            self._unscaled = Unscaled(call["found_inf"], verdict)
        return self._unscaled.of(param)

    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that torch's functions do not see."""
        return not self.is_closed and self._engine.runtime.gradients.hides(param)

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None:
        """`zero_grad` of a module with these parameters is called: of the model, or of a part of it."""
        if not self._ready or self.is_closed:
            return
        if not set_to_none and self._engine.runtime.gradients.are_zero:
            return
        given = set(params)
        if given.issuperset(self.model.parameters()):
            self.zero_grad(set_to_none)
        elif any(param in given and self.holds_gradient_of(param) for param in params_of(self.param_groups)):
            raise RuntimeError(
                "zero_grad() of a part of the model cannot drop its part of gradients that are sharded over the ranks: "
                'call zero_grad() of the model or of the optimizer, or pass config=ShardConfig(gradients="keep")'
            )

    def shows_memory_of(self, param: torch.Tensor) -> None:
        """`param.data` is read, and may be written to."""
        if self._ready and not self.is_closed and self._engine.runtime.local_step.masters is not None:
            self._engine.runtime.local_step.masters.shown(param)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """By parameter, the elements of the state that this rank holds, flat and in order. Writing to it raises."""
        shown = shown_state(self._engine.runtime.local_step.entries(), params_of(self.param_groups))
        if not shown and is_init_optim_state(frame_at(1)):
            raise RuntimeError(
                "this sharded optimizer has no state yet, and torch.distributed.checkpoint.state_dict would make some "
                "by a step of its own: load with shardstep.load(path, model, opt), after `shardstep convert` where "
                "torch has written it; or give opt.load_state_dict() the whole state"
            )
        return shown

    @state.setter
    def state(self, value: Any) -> None:
        """torch.optim.Optimizer's constructor sets an empty one; nobody else can."""
        if self._ready:
            ShownState().update(value)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all ranks' state to rank `to` of the group, where `state_dict()` then returns it. On all ranks."""
        self._engine.synchronize()
        self.check_whole("consolidate_state_dict")
        state_calls.consolidate_state(self._engine, self.param_groups, to)

    def state_dict(self) -> dict[str, Any]:
        """As that of the plain optimizer: state by the number of the parameter, and its name in the group.

        On one rank, and on the rank to which it was consolidated since the last step, the whole. Elsewhere it is this
        rank's part: torch.distributed.checkpoint saves and loads it, as does this optimizer; it cannot be pickled.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        self._engine.synchronize()
        state = state_calls.state_to_save(self._engine, self.param_groups)
        saved: dict[str, Any] = {"state": state, "param_groups": pack_groups(self.param_groups)}
        for after in self._optimizer_state_dict_post_hooks.values():
            saved = after(self, saved) or saved
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a whole state_dict, of this or of the plain optimizer, or this rank's part. Called on all ranks.

        Parameters are found by their names, in whatever order they were saved; by their places, if it has no names.
        """
        self._check_not_averaged()
        self._engine.check_not_joined("load_state_dict")
        self._engine.synchronize()
        state_calls.load_state_dict(self, self._engine, state_dict)

    def check_whole(self, what: str) -> None:
        """Raise where ranks hold something else than the weights and the state of the last step."""
        self._check_not_averaged()
        self._engine.check_not_joined(what)
        self._engine.check_not_stepped(what)

    def _check_not_averaged(self) -> None:
        if self._is_averaged:
            raise RuntimeError("inside ema() the model has averages of its weights: step, load and add groups outside")

    def checkpoint_view(self) -> CheckpointView:
        """What a checkpoint of this optimizer reads and writes, on this rank."""
        return CheckpointView(self._engine)

    # -- uneven inputs ------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `with torch.distributed.algorithms.join.Join([opt]):` ranks may have different numbers of batches."""
        if self.config.step == "backward":
            raise RuntimeError('step="backward" and Join do not go together: use the default step')
        return FastLaneJoinHook(self, self._engine, kwargs)

    @property
    def join_device(self) -> torch.device:
        return params_of(self.param_groups)[0].device

    @property
    def join_process_group(self) -> Any:
        return self._channel.group

    # -- what it takes ------------------------------------------------------------------------------------------------

    def report(self) -> Report:
        """What every rank holds and sends; with times, if steps were `measured`. On all ranks; `print` it."""
        self.check_open()
        return make_report(self._engine, self.param_groups)

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Inside, steps are measured for the next `report`: how much of their communication computation hides.

        No host waits for a device here. What is measured is a block: put whole steps into it, with their passes.
        """
        with measured(self._engine):
            yield

    def bucket_nbytes(self) -> list[int]:
        """The bytes of each bucket."""
        return self._engine.runtime.bucket_nbytes()

    def predicted_nbytes(self) -> int:
        """What this rank needs for parameters, state, gradients and buckets on their way, by the plan."""
        return self._engine.runtime.predicted_nbytes(self._engine.context.transport)
