"""The drop-in: torch's ZeroRedundancyOptimizer by name and behaviour. docs/contract.md says where each name lives."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.optim import Optimizer

from shardstep.comm.agreement import Claim, Facts, agree
from shardstep.comm.channel import Channel, accelerator_among, open_channel
from shardstep.drop_in.after_backward import AfterBackward
from shardstep.drop_in.buckets import _DDPBucketAssignment, _OverlapInfo
from shardstep.drop_in.inside_backward import InsideBackward
from shardstep.drop_in.local_shard import LocalShard, loaded_groups, params_of, plan_for, travelling
from shardstep.drop_in.strategy import Setting, Strategy
from shardstep.engine.validation import check_parameters, read_group, read_params
from shardstep.optimizers.layout_trial import probe
from shardstep.optimizers.local_optimizer import check_optimizer_class, is_of_torch
from shardstep.optimizers.optimizer_copy import OptimizerCopy, run_post_hooks, run_pre_hooks
from shardstep.optimizers.param_groups import copy_options
from shardstep.state.consolidation import consolidate
from shardstep.state.saved_state import SavedState
from shardstep.state.state_dict import describe, pack_groups

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
        self._allowed = {
            "allow_mixed_dtypes": allow_mixed_dtypes,
            "differentiable": bool(defaults.get("differentiable", False)),
        }
        # Until the ranks agree on their parameters nothing may depend on them, not even how their hosts talk.
        self._channel = open_channel(process_group, None)
        failure, facts = None, Facts()
        try:
            facts = self._build(read_params(params), optimizer_class, defaults)
        except Exception as error:
            failure = error
        agree(self._channel, Claim("ZeroRedundancyOptimizer(...)", failure, facts))
        self._channel = open_channel(process_group, accelerator_among(self._all_params))
        self._overlap_info = _OverlapInfo(self.world_size)
        self._saved = SavedState()
        setting = Setting(self._channel, self._shard, self._saved)
        self._strategy: Strategy = (
            InsideBackward(setting, self.param_groups, self._overlap_info, trains_at_once=train_from_first_step)
            if overlap_with_ddp
            else AfterBackward(setting, self.param_groups, bucket_view=parameters_as_bucket_view)
        )
        self.initialized = True

    def _build(self, groups: list[dict[str, Any]], optimizer_class: type[Optimizer], defaults: dict[str, Any]) -> Facts:
        """Plan and local optimizer; nothing of the caller's is touched. Returns what must be the same on every rank."""
        check_parameters(groups, **self._allowed)
        check_optimizer_class(optimizer_class, self.world_size)
        self._refuse_coupled(optimizer_class, defaults, groups)
        Optimizer.__init__(self, groups, defaults)
        Joinable.__init__(self)
        plan = plan_for(self.param_groups, travelling(self._all_params), self.world_size)
        self._shard = LocalShard(optimizer_class, defaults, self.rank, self.param_groups, plan)
        # A scheduler asks for options that only the local optimizer knows, such as momentum.
        self.defaults = dict(self.optim.defaults)
        copy_options(self.optim.param_groups, self.param_groups)
        return self._shard.settings(self.param_groups, plan, bucket_view=self.parameters_as_bucket_view)

    def _refuse_coupled(
        self, optimizer_class: type[Optimizer], defaults: Mapping[str, Any], groups: Sequence[dict[str, Any]]
    ) -> None:
        """Raise if the class treats all parameters together. One that cannot be tried is taken, as torch takes it."""
        if is_of_torch(optimizer_class) or (self.world_size == 1 and not self._overlap_with_ddp):
            return
        device = params_of(list(groups))[0].device
        finding = probe(optimizer_class, defaults, groups, device, closure=True)
        if finding.refusal:
            raise ValueError(finding.refusal)

    # -- what programs read -------------------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        """Explain what a copied or unpickled optimizer lacks; a copy of torch's class is of no use either."""
        what = f"{type(self).__name__!r} object has no attribute {name!r}"
        if "initialized" not in vars(self):
            what = (
                "this is a copy of a ZeroRedundancyOptimizer, or was unpickled: it has no process group and steps "
                "nothing. Build one over the parameters, and give it the state by load_state_dict()"
            )
        raise AttributeError(what)

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
    def optim(self) -> Optimizer:
        """The local optimizer, over this rank's parameters."""
        return self._shard.optim

    @property
    def state(self) -> Any:
        """This rank's state, by parameter: the local optimizer's own."""
        return self.optim.state if hasattr(self, "_shard") else self._state_before_build

    @state.setter
    def state(self, value: Any) -> None:
        # torch.optim.Optimizer's constructor assigns an empty dict.
        if hasattr(self, "_shard"):
            self.optim.state = value
        else:
            self._state_before_build = value

    @property
    def _all_params(self) -> list[torch.Tensor]:
        """All parameters, in the order of the param groups: the order of a state_dict."""
        return params_of(self.param_groups)

    @property
    def _index_to_param(self) -> list[torch.Tensor]:
        return self._all_params

    @property
    def _param_to_index(self) -> dict[torch.Tensor, int]:
        return {param: index for index, param in enumerate(self._all_params)}

    @property
    def _param_to_rank(self) -> dict[torch.Tensor, int]:
        return dict(zip(self._all_params, self._shard.plan.holders(), strict=True))

    @property
    def _device_to_device_index(self) -> dict[torch.device, int]:
        return {device: number for number, device in enumerate(dict.fromkeys(p.device for p in self._all_params))}

    @property
    def _buckets(self) -> list[list[torch.Tensor]]:
        """The buffers that parameters are views of, by device and dtype, and rank."""
        return self._strategy.buffers

    def _partition_parameters(self) -> list[list[dict[str, Any]]]:
        """The param groups of every rank, as the local optimizers hold them."""
        ranks = range(self.world_size)
        return [self._shard.groups_of(rank, self.param_groups, self._shard.plan) for rank in ranks]

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
        loss: float | None = self._strategy.step(self.param_groups, closure, kwargs, self)
        return loss

    def _sync_params(self) -> None:
        """Give every rank what every other rank has stepped. On all ranks."""
        self._strategy.sync(self.param_groups)

    def _local_step(
        self, gradients: Sequence[torch.Tensor | None] | None = None, closure: Any = None, **kwargs: Any
    ) -> float | None:
        """Step this rank's share only; parameters of other ranks stay as they are."""
        self._saved.is_new = False
        loss: float | None = self._strategy.local_step(self.param_groups, gradients, closure, kwargs)
        return loss

    # -- groups -------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group, shared out over all ranks; nothing that was shared out before moves. On all ranks."""
        if not self.initialized:  # torch.optim.Optimizer's constructor; the groups were checked before
            super().add_param_group(param_group)
            return
        self._strategy.check_may_grow()
        outer, local = len(self.param_groups), len(self.optim.param_groups)
        failure, facts, plan = None, Facts(), self._shard.plan
        try:
            group = read_group(param_group)
            check_parameters([*self.param_groups, group], **self._allowed)
            self._refuse_coupled(self._shard.optimizer_class, self._shard.options, [group])
            super().add_param_group(group)
            plan = plan_for(self.param_groups, self._shard.travels + travelling(group["params"]), self.world_size)
            self._shard.grow(self.param_groups, plan)
            facts = self._shard.settings(self.param_groups, plan, bucket_view=self.parameters_as_bucket_view)
        except Exception as error:
            failure = error
        try:
            agree(self._channel, Claim("add_param_group", failure, facts))
        except Exception:
            del self.param_groups[outer:], self.optim.param_groups[local:]
            raise
        self._saved.lose("was consolidated before add_param_group")
        self._strategy.grow(self.param_groups, plan)

    # -- state --------------------------------------------------------------------------------------------------------

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Bring all ranks' state to rank `to` of the group, where `state_dict()` then returns it. On all ranks."""
        self._check_overlap_initialized()
        copy_options(self.param_groups, self.optim.param_groups)
        self._saved.keep(consolidate(self._channel, self._shard.entries, to), to)

    def state_dict(self) -> dict[str, Any]:
        """The unsharded optimizer's state_dict, tensors on the CPU; on the rank it was consolidated to.

        Before the first step there is no state to consolidate, and every rank has all of it.
        """
        self._check_overlap_initialized()
        # Some make state when they are built (Adagrad): that has to be brought here as any other.
        has_none = self._saved.is_new and not self.optim.state
        saved = {} if has_none else self._saved.read(self.rank)
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        packed: dict[str, Any] = {
            "state": {key: copy.copy(entry) for key, entry in saved.items()},
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
        failure, loaded, facts = None, None, Facts()
        self._check_overlap_initialized()
        try:
            loaded = self.prepare_state(state_dict)
            facts = Facts(describe(loaded.state_dict))
        except Exception as error:
            failure = error
        agree(self._channel, Claim("load_state_dict", failure, facts))
        assert loaded is not None, "agreed"
        self.take_state(loaded)
        run_post_hooks(self)

    def prepare_state(self, state_dict: Mapping[str, Any]) -> LoadedPart:
        """Load this rank's part beside what there is, for `take_state`; only hooks may change anything here."""
        state_dict = run_pre_hooks(self, state_dict) if isinstance(state_dict, Mapping) else state_dict
        return LoadedPart(self._shard.loaded(state_dict, self.param_groups), state_dict)

    def take_state(self, loaded: LoadedPart) -> None:
        """Take what was prepared. No code of the class runs here."""
        loaded.twin.take()
        saved = loaded.state_dict
        self.param_groups[:] = loaded_groups(self.param_groups, self.optim.param_groups, saved["param_groups"])
        self._strategy.reloaded()
        self._saved.loaded(empty=not saved["state"])

    def checkpoint_view(self) -> LocalShard:
        """Return what a checkpoint reads of this rank: which parameters it holds, and their state."""
        self._check_overlap_initialized()
        return self._shard

    @property
    def channel(self) -> Channel:
        """The ranks that share the state, and how they talk to each other."""
        return self._channel

    def _check_overlap_initialized(self) -> None:
        self._strategy.check_has_state()

    # -- inside DDP's backward pass -----------------------------------------------------------------------------------

    def inside_backward(self) -> InsideBackward:
        """What communication hooks drive; ValueError for an optimizer that is stepped after the backward pass."""
        if not isinstance(self._strategy, InsideBackward):
            raise ValueError("build the ZeroRedundancyOptimizer with overlap_with_ddp=True to use it with this hook")
        return self._strategy

    @property
    def _bucket_assignments_per_rank(self) -> list[dict[int, _DDPBucketAssignment]]:
        """Who steps which part of DDP's buckets."""
        return self.inside_backward().assignments_per_rank

    def _get_assigned_rank(self, bucket_index: int) -> int:
        """The rank that steps a whole bucket."""
        if self._overlap_info.shard_buckets:
            raise RuntimeError("with shard_buckets=True a bucket may be stepped by several ranks")
        return bucket_index % self.world_size

    def _init_zero_for_overlap(self) -> None:
        """DDP's buckets are final: share out the parameters by them. Called by a hook on all ranks."""
        self.inside_backward().share_out(self.param_groups)

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


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A twin of the local optimizer that has loaded `state_dict`, and takes its place when all ranks agree."""

    twin: OptimizerCopy
    state_dict: Mapping[str, Any]


class _ZeROJoinHook(JoinHook):
    """What a rank that ran out of inputs does while others go on."""

    def __init__(self, zero: ZeroRedundancyOptimizer) -> None:
        self.zero = zero
        super().__init__()

    def main_hook(self) -> None:
        """Take part in one step of the others, with the gradients that they have."""
        self.zero._strategy.take_part(self.zero.param_groups)
