"""The drop-in: torch's ZeroRedundancyOptimizer by name and behaviour. docs/contract.md says where each name lives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.optim import Optimizer

from shardstep.arguments import check_parameters, read_group, read_params
from shardstep.overlap import OverlappedStep, _DDPBucketAssignment, _OverlapInfo, _OverlapStatus, agree_on_buckets
from shardstep.planning import Layout, Plan, make_plan, read_specs
from shardstep.runtime.agreement import Claim, Facts, agree, step_agreement
from shardstep.runtime.buffers import move_out, storage_order
from shardstep.runtime.collectives import gather_records, open_channel
from shardstep.runtime.exchange import Exchange
from shardstep.runtime.local_optimizer import (
    WatchedClosure,
    build,
    check_optimizer_class,
    copy_options,
    dealt_to,
    local_groups,
)
from shardstep.runtime.objects import _broadcast_object as _broadcast_object
from shardstep.runtime.objects import _recursive_copy_to_device as _recursive_copy_to_device
from shardstep.runtime.sliced_step import ElementwiseGroups, SlicedStep
from shardstep.state.consolidation import consolidate, move_state
from shardstep.state.state_dict import check_options, check_state_dict, describe, local_part, pack_groups
from shardstep.state.uneven_inputs import hand_over

__all__ = ["ZeroRedundancyOptimizer"]

logger = logging.getLogger(__name__)


class _FunctionalOptimMap:
    """torch's table of functional optimizers, for programs that read it; nothing here needs it.

    Imported when read: that takes a second and compiles TorchScript.
    """

    def __get__(self, instance: object, owner: type) -> dict[Any, Any]:
        from torch.distributed.optim.utils import functional_optim_map

        return functional_optim_map


class ZeroRedundancyOptimizer(Optimizer, Joinable):
    """Steps this rank's share of the parameters with `optimizer_class`, then gives every rank the whole.

    Takes the place of `torch.distributed.optim.ZeroRedundancyOptimizer`. The gradients must be the same on every rank
    (DistributedDataParallel sees to that). Construction, `add_param_group`, `consolidate_state_dict`, `load_state_dict`
    and `step` are called on all ranks of the group; where one of them cannot go on, all of them raise.

    Args:
        params: tensors, (name, tensor) pairs, or dicts with "params".
        optimizer_class: the class whose work is shared out, e.g. `torch.optim.AdamW`.
        process_group: the ranks that share; default: all.
        parameters_as_bucket_view: keep parameters in one flat buffer per device and rank, so that nothing is copied
            before it is sent. `param.data` moves.
        overlap_with_ddp: step inside the backward pass, by one of the hooks of `shardstep.ddp_zero_hook`.
        train_from_first_step: with `overlap_with_ddp`, update in the first backward passes too. By default, as in
            torch, the first two (three with a static graph) update nothing: DDP has not fixed its buckets yet.
        allow_mixed_dtypes: shard parameters of several dtypes, each in buffers of its own.
        **defaults: options of `optimizer_class`, e.g. `lr`.

    Example:
        >>> ddp = DistributedDataParallel(model)
        >>> opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4)
        >>> loss_of(ddp(batch)).backward()
        >>> opt.step()
    """

    functional_optim_map = _FunctionalOptimMap()

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        process_group: Any | None = None,
        parameters_as_bucket_view: bool = False,
        overlap_with_ddp: bool = False,
        *,
        allow_mixed_dtypes: bool = False,
        train_from_first_step: bool = False,
        **defaults: Any,
    ) -> None:
        if overlap_with_ddp and parameters_as_bucket_view:
            logger.warning("with overlap_with_ddp=True parameters live in DDP's buckets; bucket views are not made")
        self.initialized = False
        self.parameters_as_bucket_view = parameters_as_bucket_view and not overlap_with_ddp
        self._overlap_with_ddp = overlap_with_ddp
        self._train_from_first_step = train_from_first_step
        self._overlapped: OverlappedStep | None = None
        self._allow_mixed_dtypes = allow_mixed_dtypes
        self._optimizer_class = optimizer_class
        self._given = defaults
        self._steps = 0
        self._buckets: list[list[torch.Tensor]] = []
        self._snapshot: dict[Any, Any] | None = None  # all ranks' state, on the rank it was consolidated to
        self._snapshot_lost = "was never consolidated"

        groups: list[dict[str, Any]] = []
        failure: Exception | None = None
        facts = Facts()
        try:
            groups = read_params(params)
        except Exception as error:
            failure = error
        self._channel = open_channel(process_group, _accelerator_of(groups))
        if failure is None:
            try:
                facts = self._build(groups, defaults)
            except Exception as error:
                failure = error
        agree(self._channel, Claim("ZeroRedundancyOptimizer(...)", failure, facts))
        self._overlap_info = _OverlapInfo(self.world_size)
        self._place(self._plan)
        self._agreement = step_agreement(self._channel)
        self.initialized = True

    def _build(self, groups: list[dict[str, Any]], defaults: dict[str, Any]) -> Facts:
        """Plan and local optimizer; nothing of the caller's is touched. Returns what must be the same on every rank."""
        self._check(groups)
        check_optimizer_class(self._optimizer_class, self.world_size)
        Optimizer.__init__(self, groups, defaults)
        Joinable.__init__(self)
        self._plan = self._plan_for(_travelling(self._all_params))
        self.optim = self._make_local(local_groups(self.param_groups, self._plan.params, self._held_by(self.rank)))
        self._sliced = self._slice_steps_of(self.optim)
        # A scheduler asks for options that only the local optimizer knows, such as momentum.
        self.defaults = dict(self.optim.defaults)
        copy_options(self.optim.param_groups, self.param_groups)
        return Facts(self._settings(self._plan))

    def _check(self, groups: Sequence[dict[str, Any]]) -> None:
        differentiable = bool(self._given.get("differentiable", False))
        check_parameters(groups, allow_mixed_dtypes=self._allow_mixed_dtypes, differentiable=differentiable)

    def _plan_for(self, travels: Sequence[bool]) -> Plan:
        return make_plan(read_specs(self.param_groups, travels), Layout.WHOLE, world_size=self.world_size)

    def _held_by(self, rank: int) -> list[int]:
        """The parameters that a rank holds, by index, in the order in which its optimizer has them."""
        if self._overlapped is None:
            return dealt_to(self._plan, rank)
        return sorted(self._overlapped.held[rank], key=lambda index: self._plan.params[index].group)

    def _place(self, plan: Plan) -> None:
        """Adopt `plan`: messages for what it sends, and memory of their own for parameters it no longer sends."""
        params = self._all_params
        old_buffers = [buffer for row in self._buckets for buffer in row]
        self._plan, self._plan_facts = plan, _facts_of(plan)
        self._travels = [spec.trainable for spec in plan.params]
        self._exchange = Exchange(self._channel, plan, params, bucket_view=self.parameters_as_bucket_view)
        self._buckets = self._exchange.buffers
        move_out((params[piece.param] for piece in plan.parked), old_buffers)

    def _make_local(self, groups: list[dict[str, Any]]) -> Optimizer:
        """An optimizer of the caller's class and options; if it refuses a parameter, the error names it."""
        specs = read_specs(self.param_groups)
        names = {param: spec.name for param, spec in zip(self._all_params, specs, strict=True)}
        return build(self._optimizer_class, groups, self._given, names)

    def _make_part(self, groups: list[dict[str, Any]]) -> Optimizer:
        make: Callable[..., Optimizer] = self._optimizer_class
        return make(groups, **self._given)

    def _slice_steps_of(self, optim: Optimizer) -> SlicedStep:
        return SlicedStep(optim, self._make_part, ElementwiseGroups(self._make_part))

    def _settings(self, plan: Plan) -> Iterator[str]:
        """What must be the same on every rank: how the optimizer was built, and every parameter."""
        kind = type(self.optim)
        yield f"optimizer_class {kind.__module__}.{kind.__qualname__}"
        yield f"parameters_as_bucket_view {self.parameters_as_bucket_view}"
        for spec, param in zip(plan.params, self._all_params, strict=True):
            # Flat buffers are sent in memory order, so channels_last on one rank alone would scramble values.
            order = f", dims in memory order {storage_order(param)}" if self.parameters_as_bucket_view else ""
            yield f"{spec}{order}"
        yield f"parameters in each group {[len(group['params']) for group in self.param_groups]}"

    # -- what programs read -------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> Any:
        return self._channel.group

    @property
    def world_size(self) -> int:
        return self._channel.world_size

    @property
    def rank(self) -> int:
        """Rank within the process group."""
        return self._channel.rank

    @property
    def global_rank(self) -> int:
        return self._channel.global_rank

    @property
    def state(self) -> Any:
        """This rank's state, by parameter: the local optimizer's own."""
        return self.optim.state if hasattr(self, "optim") else self._state_before_build

    @state.setter
    def state(self, value: Any) -> None:
        # torch.optim.Optimizer's constructor assigns an empty dict.
        if hasattr(self, "optim"):
            self.optim.state = value
        else:
            self._state_before_build = value

    @property
    def _all_params(self) -> list[torch.Tensor]:
        """In index order: group by group."""
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        return self._all_params

    @property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        return {param: index for index, param in enumerate(self._all_params)}

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        params = self._all_params
        return {params[piece.param]: piece.rank for piece in self._plan.pieces}

    @property
    def _device_to_device_index(self) -> dict[torch.device, int]:
        return {device: number for number, device in enumerate(dict.fromkeys(p.device for p in self._all_params))}

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """The param groups of every rank, as the local optimizers hold them."""
        ranks = range(self.world_size)
        return [local_groups(self.param_groups, self._plan.params, self._held_by(rank)) for rank in ranks]

    # -- stepping -----------------------------------------------------------------------------------------------------

    @overload
    def step(self, closure: None = None, **kwargs: Any) -> None: ...
    @overload
    def step(self, closure: Callable[[], float], **kwargs: Any) -> float: ...
    def step(self, closure: Callable[[], float] | None = None, **kwargs: Any) -> float | None:
        """Step this rank's share, then bring all parameters up to date on every rank. Called on all ranks.

        Returns what the local optimizer returned. `kwargs` go to its step. With `overlap_with_ddp` it does nothing:
        the backward pass has stepped already.
        """
        if self._overlap_with_ddp:
            logger.warning("step() does nothing with overlap_with_ddp=True: the backward pass has stepped already")
            return None
        Join.notify_join_context(self)
        return self._step(closure, kwargs, joined=False)

    def _step(self, closure: Any, kwargs: dict[str, Any], *, joined: bool) -> float | None:
        self._agreement.begin()
        if self._join_config.enable and self.world_size > 1:
            hand_over(self._channel, self._plan, self._all_params, self.param_groups, joined)
        watched = WatchedClosure(closure) if callable(closure) else None
        loss, failure = None, None
        try:
            self._exchange.prepare()
        except Exception as error:
            failure = error
        if watched is None:  # a closure reads all parameters; without one, others' may arrive while this rank steps
            self._exchange.expect()
        try:
            if failure is None:
                loss = self._local_step(closure=watched or closure, **kwargs)
        except Exception as error:
            if watched is not None and watched.raised:
                # The others are in the middle of their closures, perhaps in a collective of theirs: no exchange now.
                raise
            failure = error
        if watched is not None:
            self._exchange.expect()
        self._lose_snapshot(f"was consolidated at step {self._steps}, and a step was taken since")
        self._sync_params(failure)
        self._steps += 1
        return loss

    def _sync_params(self, failure: Exception | None) -> None:
        """Give every rank what every other rank has stepped; raise on all of them if one of them failed."""
        travels = _travelling(self._all_params)
        changed = travels != self._travels
        plan = self._plan_for(travels) if changed else self._plan
        facts = _facts_of(plan) if changed else self._plan_facts
        self._agreement.claim(Claim("step", failure, facts), changed)
        self._exchange.send()
        self._exchange.finish()
        self._agreement.finish()
        if changed:
            logger.warning("the set of trainable parameters has changed; what is sent at each step follows")
            self._place(plan)
            # Parameters that were frozen until now were stepped, but the messages so far followed the plan before.
            self._exchange.expect()
            self._exchange.send()
            self._exchange.finish()

    def _local_step(
        self, gradients: Sequence[torch.Tensor | None] | None = None, closure: Any = None, **kwargs: Any
    ) -> float | None:
        """Step this rank's share only; parameters of other ranks stay as they are."""
        if gradients is not None:
            if self._overlapped is None:
                raise RuntimeError(
                    "_local_step takes gradients only with overlap_with_ddp=True, once DDP has its buckets"
                )
            self._overlapped.step_given(gradients, self.param_groups)
            return None
        copy_options(self.param_groups, self.optim.param_groups)
        if closure is not None:
            kwargs["closure"] = closure
        # With a closure the class itself decides how often it is called, and what happens between.
        loss: float | None = self.optim.step(**kwargs) if kwargs else self._sliced.step()
        copy_options(self.optim.param_groups, self.param_groups)
        return loss

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, shared out over all ranks; nothing that was shared out before moves. On all ranks."""
        if not self.initialized:  # torch.optim.Optimizer's constructor; the groups were checked before
            super().add_param_group(param_group)
            return
        if self._overlap_with_ddp:
            raise RuntimeError(
                "with overlap_with_ddp=True parameters live in DDP's buckets, which are fixed; give all param groups "
                "to the constructor, or build DDP and the optimizer again"
            )
        outer, local = len(self.param_groups), len(self.optim.param_groups)
        failure, facts, plan = None, Facts(), self._plan
        try:
            group = read_group(param_group)
            self._check([*self.param_groups, group])
            super().add_param_group(group)
            plan = self._plan_for(self._travels + _travelling(group["params"]))
            own = local_groups(self.param_groups, plan.params, dealt_to(plan, self.rank))[-1]
            # A trial, because some classes (Muon) look at their parameters in the constructor only.
            self._make_local([own])
            self.optim.add_param_group(own)
            # The new group only: what a scheduler set in the others has not reached the local optimizer yet.
            copy_options(self.optim.param_groups[-1:], self.param_groups[-1:])
            facts = Facts(self._settings(plan))
        except Exception as error:
            failure = error
        try:
            agree(self._channel, Claim("add_param_group", failure, facts))
        except Exception:
            del self.param_groups[outer:], self.optim.param_groups[local:]
            raise
        self._lose_snapshot("was consolidated before add_param_group")
        self._place(plan)

    # -- state --------------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all ranks' state to rank `to` of the group, where `state_dict()` then returns it. On all ranks."""
        self._check_overlap_initialized()
        copy_options(self.param_groups, self.optim.param_groups)
        self._snapshot = consolidate(self._channel, self._indexed_state, to)
        self._snapshot_lost = f"was consolidated to rank {to}"

    def _indexed_state(self) -> dict[Any, Any]:
        """This rank's state under the indices of the unsharded optimizer."""
        mine = self._held_by(self.rank)
        held = {param for group in self.optim.param_groups for param in group["params"]}
        for key in [key for key in self.optim.state if isinstance(key, torch.Tensor) and key not in held]:
            del self.optim.state[key]  # made by reading `zero.state[param]` of another rank's parameter
        state = self.optim.state_dict()["state"]
        return {mine[key] if isinstance(key, int) else key: entry for key, entry in state.items()}

    def _lose_snapshot(self, why: str) -> None:
        """The state has moved on: a snapshot would be old, and is memory."""
        if self._snapshot is not None:
            self._snapshot, self._snapshot_lost = None, why

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state_dict, tensors on the CPU; on the rank it was consolidated to."""
        self._check_overlap_initialized()
        if self._snapshot is None:
            raise RuntimeError(
                f"rank {self.rank} does not have the optimizer's state: it {self._snapshot_lost}. "
                f"Call consolidate_state_dict(to={self.rank}) on all ranks, then state_dict() on rank {self.rank}"
            )
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        in_order = sorted(key for key in self._snapshot if isinstance(key, int))
        others = [key for key in self._snapshot if not isinstance(key, int)]
        packed: dict[str, Any] = {
            "state": {key: copy.copy(self._snapshot[key]) for key in [*in_order, *others]},
            "param_groups": pack_groups(self.param_groups),
        }
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            packed = post_hook(self, packed) or packed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict of the unsharded optimizer, or one from `state_dict()`, saved by any number of ranks.

        Called on all ranks with the same dict; each keeps its part. The dict is not written to. If it does not fit, all
        ranks raise and the optimizer is as before.
        """
        self._check_overlap_initialized()
        before = (self.optim.state, self.optim.param_groups)
        failure, facts = None, Facts()
        try:
            for hook in self._optimizer_load_state_dict_pre_hooks.values():
                state_dict = dict(state_dict)
                state_dict = hook(self, state_dict) or state_dict
            specs = self._plan.params
            sizes = [len(group["params"]) for group in self.param_groups]
            keys = check_state_dict(state_dict, specs, sizes, type(self.optim))
            mine = self._held_by(self.rank)
            self.optim.load_state_dict(local_part(state_dict, keys, mine, specs))
            check_options(self.optim, before[1])
            facts = Facts(describe(state_dict))
        except Exception as error:
            failure = error
        try:
            agree(self._channel, Claim("load_state_dict", failure, facts))
        except Exception:
            self.optim.state, self.optim.param_groups = before
            raise
        for index, (saved, local) in enumerate(zip(state_dict["param_groups"], self.optim.param_groups, strict=True)):
            outer = self.param_groups[index]
            names = (
                {"param_names": list(given)} if (given := saved.get("param_names", outer.get("param_names"))) else {}
            )
            self.param_groups[index] = {**local, **names, "params": outer["params"]}
        if self._overlapped is not None:
            self._overlapped.reload()
        self._lose_snapshot("was consolidated before load_state_dict")
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # -- inside DDP's backward pass ------------------------------------------------------------------------------------

    @property
    def _bucket_assignments_per_rank(self) -> list[dict[int, _DDPBucketAssignment]]:
        """Who steps which part of DDP's buckets."""
        if self._overlapped is None:
            raise RuntimeError("DDP's buckets are not known yet; they are after the first backward passes")
        return self._overlapped.assignments_per_rank

    def _get_assigned_rank(self, bucket_index: int) -> int:
        """The rank that steps a whole bucket."""
        if self._overlap_info.shard_buckets:
            raise RuntimeError("with shard_buckets=True a bucket may be stepped by several ranks")
        return bucket_index % self.world_size

    def _check_overlap_initialized(self) -> None:
        if self._overlap_with_ddp and self._overlapped is None and not self._train_from_first_step:
            raise RuntimeError(
                "with overlap_with_ddp=True there is no state before DDP has fixed its buckets, in the third backward "
                "pass (the fourth with a static graph); pass train_from_first_step=True to have it from the start"
            )

    def _init_zero_for_overlap(self) -> None:
        """DDP's buckets are final: share out the parameters by them. Called by a hook on all ranks."""
        if not self._overlap_with_ddp:
            raise RuntimeError("the optimizer was built without overlap_with_ddp=True")
        info, specs, params = self._overlap_info, self._plan.params, self._all_params
        layout = agree_on_buckets(self._channel, info, self._plan, params)
        moved = move_state(self._channel, self._indexed_state(), self._plan.holders(), layout.holders)
        self._plan = make_plan(specs, Layout.WHOLE, world_size=self.world_size, holders=layout.holders)
        self._plan_facts = _facts_of(self._plan)

        mine = sorted(layout.held[self.rank], key=lambda index: specs[index].group)
        self.optim = self._make_local(local_groups(self.param_groups, specs, mine))
        self._sliced = self._slice_steps_of(self.optim)
        state = {place: moved[index] for place, index in enumerate(mine) if index in moved}
        self.optim.load_state_dict({"state": state, "param_groups": self.optim.state_dict()["param_groups"]})
        self._overlapped = OverlappedStep(self._channel, info, layout, self.optim, self._make_part)
        self._overlapped.reload()
        if any(param.is_cuda for param in params):
            # torch's interleaved hook steps on a stream of its own, which waits for the reduction but not for the
            # copies into the buffers that were just enqueued here. This happens once.
            torch.cuda.synchronize()
        info.status = _OverlapStatus.INITIALIZED

    def _begin_overlapped(self, reduced: Container[torch.Tensor]) -> Exception | None:
        """A backward pass begins. Returns what is wrong; all ranks raise it at the end: they wait for each other."""
        self._agreement.begin()
        self._lose_snapshot(f"was consolidated at step {self._steps}, and a backward pass was taken since")
        for spec, param in zip(self._plan.params, self._all_params, strict=True):
            if param.requires_grad and param not in reduced:
                return RuntimeError(
                    f"{spec.name} was frozen when DDP was built, so DDP does not reduce its gradient; "
                    "unfreeze it before, or build DDP and the optimizer again"
                )
        return None

    def _finish_overlapped(self, claim: Claim) -> None:
        """A backward pass ends: everything has been sent."""
        assert self._overlapped is not None
        self._agreement.claim(claim, changed=False)
        self._overlapped.finish()
        self._agreement.finish()
        self._steps += 1

    def _gather_flags(self, flags: bytes) -> list[bytes]:
        """The flags of every rank."""
        return gather_records(self._channel, flags).read() if self.world_size > 1 else [flags]

    # -- uneven inputs ------------------------------------------------------------------------------------------------

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """For `torch.distributed.algorithms.join.Join`: a rank without inputs goes on taking part in `step`."""
        del kwargs
        return _ZeROJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return self._all_params[0].device

    @property
    def join_process_group(self) -> Any:
        return self.process_group


class _ZeROJoinHook(JoinHook):
    """What a rank that ran out of inputs does while others go on."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self.zero = zero
        super().__init__()

    def main_hook(self) -> None:
        """Take part in one step of the others, with the gradients that they have."""
        if not self.zero._overlap_with_ddp:  # DDP's own hook runs the communication hook, which steps
            self.zero._step(None, {}, joined=True)


def _is_trainable(param: torch.Tensor) -> bool:
    return param.requires_grad


def _travelling(params: Sequence[torch.Tensor]) -> list[bool]:
    """Which parameters a step can change. A frozen one with a gradient left over is still stepped, as torch does."""
    return [_is_trainable(param) or param.grad is not None for param in params]


def _facts_of(plan: Plan) -> Facts:
    return Facts(map(str, plan.params))


def _accelerator_of(groups: Sequence[Mapping[str, Any]]) -> torch.device | None:
    """The device for messages where the backend takes no CPU tensors: that of the first parameter on one."""
    on_device = (p.device for group in groups for p in group["params"] if p.device.type != "cpu")
    return next(on_device, torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None)
