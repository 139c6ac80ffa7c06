"""The fast lane: `shard(model, AdamW, lr=...)` takes the place of DistributedDataParallel and of the optimizer."""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from shardstep.arguments import check_parameters, read_group, read_groups
from shardstep.config import BUCKET_MB, BUCKET_MB_BETWEEN_HOSTS, ShardConfig
from shardstep.local_share import LocalShare
from shardstep.planning import Layout, Piece, Plan, make_plan, read_specs
from shardstep.runtime.agreement import Claim, Facts, agree, step_agreement
from shardstep.runtime.buffers import DEVICE_ALIGNMENT_NBYTES, move_out
from shardstep.runtime.collectives import broadcast_tensors, open_channel, takes_many_messages
from shardstep.runtime.flat_memory import FlatMemory, RangeMessage
from shardstep.runtime.forward_hooks import wait_before_use
from shardstep.runtime.gathers import finish_gathers, make_gathers
from shardstep.runtime.gradient_guard import guard
from shardstep.runtime.gradients import KeptGradients, ShardedGradients
from shardstep.runtime.local_optimizer import build, check_optimizer_class, copy_options, is_of_torch
from shardstep.runtime.norms import norms_by_parameter, total_norm
from shardstep.runtime.probe import finest_layout
from shardstep.runtime.turns import Turn, Turns
from shardstep.state.resharding import Entry, cut_whole, join_entries, read_shard, reshard
from shardstep.state.state_dict import check_state_dict, pack_groups

_owner_of: weakref.WeakKeyDictionary[nn.Module, weakref.ref[ShardedOptimizer]] = weakref.WeakKeyDictionary()
_abandoned: list[Any] = []  # what ranks that went apart left under way
_GRADIENT = "shardstep.gradient"  # a gradient that moves with the state of its piece


def shard(
    model: nn.Module,
    optimizer_class: type[Optimizer],
    *,
    groups: Any = None,
    process_group: dist.ProcessGroup | None = None,
    config: ShardConfig | None = None,
    **defaults: Any,
) -> ShardedOptimizer:
    """Train `model` on all ranks of `process_group` with one copy of the optimizer's state between them.

        opt = shardstep.shard(model, torch.optim.AdamW, lr=3e-4)
        loss.backward(); opt.clip_grad_norm_(1.0); opt.step(); opt.zero_grad()

    The model stays as it is: no wrapper. All ranks take the parameters and buffers of the group's first rank. `groups`
    are param groups, whose "params" may be tensors, names or patterns ("*.bias"). `defaults` go to `optimizer_class`.
    """
    return ShardedOptimizer(model, optimizer_class, groups, process_group, config or ShardConfig(), defaults)


class ShardedOptimizer(Optimizer):
    """Made by `shard`. `param_groups` hold the model's own parameters; each rank steps an equal share of them."""

    def __init__(
        self,
        model: nn.Module,
        optimizer_class: type[Optimizer],
        groups: Any,
        process_group: dist.ProcessGroup | None,
        config: ShardConfig,
        defaults: dict[str, Any],
    ) -> None:
        self._channel = open_channel(process_group, _accelerator_of(model))
        self._model, self._class, self._config = model, optimizer_class, config
        self._syncs = True
        self._ready = False
        failure, facts = None, Facts()
        try:
            facts = self._check(groups, defaults)
        except Exception as error:
            failure = error
        agree(self._channel, Claim("shard(...)", failure, facts))
        self._take_the_model()
        on_hosts = all(takes_many_messages(self._channel, param.device) for param in self._params)
        self._turns = Turns(self._channel, announced=on_hosts)
        self._make_ranks_equal()
        self._claimed = False
        self._closed = False
        self._build_together(self._plan_for(_trainable(self.param_groups)), {}, "shard(...)")
        self._agreement = step_agreement(self._channel)
        guard(self)
        self._ready = True

    def _check(self, groups: Any, defaults: dict[str, Any]) -> Facts:
        check_optimizer_class(self._class, self._channel.world_size)
        chosen = read_groups(self._model, groups)
        check_parameters(chosen, allow_mixed_dtypes=True)
        # What the class makes of the options: its own defaults, and a first look at whether it takes them at all.
        empty = build(self._class, [{**g, "params": [], "param_names": []} for g in chosen], defaults, {})
        super().__init__(chosen, dict(empty.defaults))
        self._defaults = defaults
        self._layout = self._choose_layout()
        return Facts([*map(str, read_specs(self.param_groups)), str(self._config), str(self._layout)])

    def _choose_layout(self) -> Layout:
        device = self._params[0].device
        finest, reason = finest_layout(self._class, self._defaults, self.param_groups, device)
        if self._config.layout is Layout.AUTO:
            return finest
        if self._config.layout is Layout.FLAT and finest is not Layout.FLAT:
            raise ValueError(f"Layout.FLAT is not safe here: {reason}. Use Layout.AUTO or Layout.WHOLE")
        return self._config.layout

    def _take_the_model(self) -> None:
        """A model has one owner. The hooks of an earlier one would take the gradients away from this one."""
        earlier = _owner_of.get(self._model)
        owner = None if earlier is None else earlier()
        if owner is not None:
            owner.close()
        _owner_of[self._model] = weakref.ref(self)

    def close(self) -> None:
        """Let go of the model: gradients are no longer reduced. `shard` on the same model closes the earlier one."""
        if self._closed:
            return
        if self._turns.apart:
            self._leave_what_may_arrive()
        else:
            self.synchronize()
        self._gradients.remove_hooks()
        for handle in self._forward_hooks:
            handle.remove()
        self._closed = True

    def _leave_what_may_arrive(self) -> None:
        """Messages of a step that not all ranks made may still come, and must find memory that is nobody else's."""
        move_out(self._params, [values for memory in self._memory.buckets for values in memory.ranges])
        _abandoned.append((self._memory, self._gathers, self._gradients.reducer))

    @torch.no_grad()
    def _make_ranks_equal(self) -> None:
        if self._channel.world_size > 1:
            broadcast_tensors(self._channel, [*self._model.parameters(), *self._model.buffers()], source=0)

    # -- the plan, and everything that is made from it ----------------------------------------------------------------

    @property
    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _plan_for(self, trainable: Sequence[bool]) -> Plan:
        specs = read_specs(self.param_groups, trainable)
        usual = BUCKET_MB if self._channel.one_host else BUCKET_MB_BETWEEN_HOSTS
        bucket_nbytes = (usual if self._config.bucket_mb is None else self._config.bucket_mb) * 1e6
        itemsize = max((param.element_size() for param in self._params), default=4)
        # Gradients come from the last layer to the first, and so lie the buckets.
        return make_plan(
            specs,
            self._layout,
            world_size=self._channel.world_size,
            bucket_numel=max(int(bucket_nbytes / itemsize), 1),
            alignment=DEVICE_ALIGNMENT_NBYTES // min((param.element_size() for param in self._params), default=4),
            order=range(len(specs))[::-1],
        )

    def _build_together(self, plan: Plan, entries: Mapping[Piece, Entry], action: str) -> None:
        """Build on all ranks, or raise on all: a rank may be refused a parameter that others do not hold."""
        failure = None
        try:
            self._build_local(plan, entries)
        except Exception as error:
            failure = error
        agree(self._channel, Claim(action, failure, Facts()))
        self._connect(plan)

    def _build_local(self, plan: Plan, entries: Mapping[Piece, Entry]) -> None:
        """Memory and local optimizers for a plan; `entries` are the state of its pieces."""
        self._plan, self._facts = plan, Facts(map(str, plan.params))
        self._memory = FlatMemory(plan, self._params)
        self._share = LocalShare(
            self._class,
            self._defaults,
            plan,
            self._memory,
            self._channel.rank,
            self._layout,
            join=self._config.gradients == "shard",
        )
        self._share.build(self.param_groups, entries)

    def _connect(self, plan: Plan) -> None:
        """What talks to other ranks. Its messages are told apart by counting, so all ranks get here, or none."""
        params = self._params
        self._gathers = make_gathers(
            self._channel,
            [(memory.device, [[RangeMessage(values)] for values in memory.ranges]) for memory in self._memory.buckets],
            ring=self._config.gather == "wait",
        )
        self._arriving: set[int] = set()
        kind = KeptGradients if self._config.gradients == "keep" else ShardedGradients
        self._gradients = kind(
            self._channel,
            self._memory,
            params,
            self._model,
            self._config.reduce_dtype,
            lambda: self._syncs,
            self._turns,
            # What a class of somebody else's keeps of a gradient cannot be known; and "keep" needs shards for a moment.
            reuse_memory=self._config.gradients == "shard" and is_of_torch(self._class),
        )
        buckets_of: dict[torch.Tensor, list[int]] = {}
        for number, bucket in enumerate(plan.buckets):
            for piece in bucket.pieces:
                buckets_of.setdefault(params[piece.param], []).append(number)
        self._forward_hooks = (
            wait_before_use(self._model, buckets_of, self._wait_for, self.synchronize)
            if self._config.gather == "overlap"
            else []
        )

    # -- stepping -----------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step this rank's share with the mean of all ranks' gradients, and give every rank all of it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._closed:
            raise RuntimeError("this optimizer was closed: shard(...) was called again on its model, or close()")
        self.synchronize()
        self._agreement.begin()
        self._take_in_late_gradients(Turn.STEP)
        self._sync_buffers()
        self._memory.adopt()
        failure = self._step_and_send()
        self._turns.check()  # what follows waits for the others' step; all of their gradients have come
        trainable = _trainable(self.param_groups)
        changed = trainable != [spec.trainable for spec in self._plan.params]
        facts = Facts(map(str, read_specs(self.param_groups, trainable))) if changed else self._facts
        self._agreement.claim(Claim("step", failure, facts), changed)
        self._claimed = True
        if self._config.gather == "wait" or changed or failure is not None:
            self.synchronize()
        if changed:
            self._replan(trainable)
        return loss

    @torch.no_grad()
    def _sync_buffers(self) -> None:
        """Running means and the like follow rank 0.

        DDP does this in forward. Here it would be a collective that nobody sees: an evaluation on rank 0 alone, which
        under DDP goes round the wrapper, would hang.
        """
        buffers = list(self._model.buffers()) if self._config.sync_buffers and self._channel.world_size > 1 else []
        if buffers:
            self._turns.check()
            broadcast_tensors(self._channel, buffers, source=0)

    def _take_in_late_gradients(self, turn: Turn, *, waits: bool = True) -> None:
        """Before anything is done with gradients: `turn` says what, and `waits` whether it waits for other ranks."""
        if self._channel.world_size > 1:
            self._gradients.make_up_for_a_pass()
        self._turns.check()
        try:
            late = self._gradients.settle()
        except RuntimeError as error:
            raise self._why_not_to_step() or error from None  # this rank's own reason, if it has one
        if waits or any(late):
            self._turns.announce(turn)
        if not any(late):
            return
        self._turns.check()
        if any(flag and not spec.trainable for flag, spec in zip(late, self._plan.params, strict=True)):
            # Unfrozen since the last step: it has a gradient, and no place in the plan.
            trainable = _trainable(self.param_groups)
            agree(self._channel, Claim("step", None, Facts(map(str, read_specs(self.param_groups, trainable)))))
            self._replan(trainable)
        self._gradients.reduce_late(late)

    def _step_and_send(self) -> Exception | None:
        """Bucket by bucket: one is on its way while the next is stepped. Returns what failed on this rank."""
        failure = self._why_not_to_step()
        try:
            self._share.begin(self.param_groups, self._gradients.used)
        except Exception as error:  # the others wait for what this rank sends; all raise together at the end
            failure = failure or error
        for gather in self._gathers:
            gather.expect()
        for bucket, gather in enumerate(self._gathers):
            try:
                gradients = [self._gradients.of_run(bucket, run) for run in self._share.runs[bucket]]
                if failure is None:
                    self._share.step(bucket, gradients)
            except Exception as error:
                failure = error
            gather.send()
        if failure is None:
            self._share.end(self.param_groups)
        self._gradients.stepped()
        self._arriving = set(range(len(self._gathers)))
        return failure

    def _why_not_to_step(self) -> Exception | None:
        unsent = [self._plan.params[place].name for place in self._gradients.unsent()]
        if not unsent:
            return None
        return RuntimeError(
            f"{unsent[0]} and {len(unsent) - 1} other parameters have gradients that were never reduced: run the last "
            "backward pass before step() outside no_sync(), and set no param.grad yourself"
        )

    def synchronize(self) -> None:
        """Return when the weights of the last step are complete; raise if a rank failed in it.

        With `gather="overlap"` call it before anything but the model's own forward reads or writes the weights.
        """
        self._wait_for(sorted(self._arriving))
        if self._claimed:
            self._claimed = False
            self._agreement.finish()

    def _wait_for(self, buckets: Sequence[int]) -> None:
        waiting = [bucket for bucket in buckets if bucket in self._arriving]
        if waiting:
            self._turns.check()
            finish_gathers([self._gathers[bucket] for bucket in waiting])
            self._arriving.difference_update(waiting)

    # -- gradients ----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients: this rank's part of the mean, and whatever `no_sync` has left in `param.grad`."""
        self._gradients.clear(to_none=set_to_none)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward passes send nothing; their gradients add up in `param.grad` until one outside."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def grad_norms(self, norm_type: float = 2.0) -> dict[str, float]:
        """The norm of the mean gradient of every parameter, by name; the same on every rank. One small exchange."""
        self._take_in_late_gradients(Turn.NORMS)
        pieces = [(piece.param, gradient) for piece, gradient in self._gradients.present()]
        self._turns.check()
        norms = norms_by_parameter(self._channel, pieces, len(self._plan.params), norm_type)
        return {spec.name: norm for spec, norm in zip(self._plan.params, norms, strict=True) if spec.trainable}

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients so that their norm over all parameters is at most `max_norm`; returns what it was."""
        self._take_in_late_gradients(Turn.CLIP_NORM, waits=self._config.gradients == "shard")
        if self._config.gradients == "keep":
            return torch.nn.utils.clip_grad_norm_(self._params, max_norm, norm_type, error_if_nonfinite)
        gradients = [gradient for _, gradient in self._gradients.present()]
        self._turns.check()
        norm = total_norm(self._channel, gradients, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise RuntimeError(
                f"the total norm of order {norm_type} of the gradients is {norm}, so they cannot be clipped; "
                "pass error_if_nonfinite=False to scale by it anyway"
            )
        factor = max_norm / (norm + 1e-6)
        if not factor >= 1.0:  # nan too, as torch's
            self._gradients.scale(factor)
        return torch.tensor(norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Bring every element of the mean gradient between -`clip_value` and `clip_value`. On all ranks."""
        self._take_in_late_gradients(Turn.CLIP_VALUE, waits=False)
        if self._config.gradients == "keep":
            torch.nn.utils.clip_grad_value_(self._params, clip_value)
        else:
            self._gradients.clamp(clip_value)

    def holds_gradient_of(self, param: torch.Tensor) -> bool:
        """Whether `param` has a gradient that torch's functions do not see."""
        return not self._closed and self._gradients.hides(param)

    def zero_gradients_of(self, params: Sequence[torch.Tensor], set_to_none: bool) -> None:
        """`zero_grad` of a module with these parameters is called: of the model, or of a part of it."""
        if self._closed or not self._ready:
            return
        given = set(params)
        if given.issuperset(self._model.parameters()):
            self.zero_grad(set_to_none)
        elif any(param in given and self.holds_gradient_of(param) for param in self._params):
            raise RuntimeError(
                "zero_grad() of a part of the model cannot drop its part of gradients that are sharded over the ranks: "
                'call zero_grad() of the model or of the optimizer, or pass config=ShardConfig(gradients="keep")'
            )

    # -- other plans --------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; on all ranks. State and gradients that move to another rank are sent there."""
        if not self._ready:  # torch.optim.Optimizer's constructor
            super().add_param_group(param_group)
            return
        self.synchronize()
        failure, facts = None, Facts()
        before = list(self.param_groups)
        try:
            group = read_group(param_group)
            names = {param: name for name, param in self._model.named_parameters()}
            group["param_names"] = group.get("param_names") or [
                names.get(param, f"param_groups[{len(before)}]['params'][{place}]")
                for place, param in enumerate(group["params"])
            ]
            super().add_param_group(group)
            check_parameters(self.param_groups, allow_mixed_dtypes=True)
            if self._choose_layout() is not self._layout:
                raise ValueError("with the options of this group the optimizer cannot be cut as finely as before")
            facts = Facts(map(str, read_specs(self.param_groups)))
        except Exception as error:
            failure = error
        try:
            agree(self._channel, Claim("add_param_group", failure, facts))
        except Exception:
            self.param_groups = before
            raise
        with torch.no_grad():
            broadcast_tensors(self._channel, self.param_groups[-1]["params"], source=0)
        self._replan(_trainable(self.param_groups))

    def _replan(self, trainable: Sequence[bool]) -> None:
        """Make a new plan and move what changes its holder. Called on all ranks, which have agreed on `trainable`."""
        self._gradients.settle()
        old, entries = self._plan, self._share.entries()
        for piece, gradient in self._gradients.present():
            entries[piece] = {**entries.get(piece, {}), _GRADIENT: gradient}
        used, passed = self._gradients.used, self._gradients.reducer.passed
        plan = self._plan_for(trainable)
        moved = reshard(self._channel, old, plan, entries)
        gradients = {piece: entry.pop(_GRADIENT) for piece, entry in moved.items() if _GRADIENT in entry}
        self._gradients.remove_hooks()
        for handle in self._forward_hooks:
            handle.remove()
        buffers = [values for memory in self._memory.buckets for values in memory.ranges]
        self._build_together(plan, {piece: entry for piece, entry in moved.items() if entry}, "a new plan")
        move_out((p for p, travels in zip(self._params, trainable, strict=True) if not travels), buffers)
        self._gradients.take_over(gradients, used, passed=passed)

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> Any:
        """This rank's state by parameter: flat, the elements it holds, in order. To look at; writing has no effect."""
        params = self._params
        found: dict[torch.Tensor, list[tuple[Piece, Entry]]] = {}
        for piece, entry in sorted(self._share.entries().items(), key=lambda item: (item[0].param, item[0].start)):
            found.setdefault(params[piece.param], []).append((piece, entry))
        return {
            param: join_entries([entry for _, entry in rows], [piece.numel for piece, _ in rows])
            for param, rows in found.items()
        }

    @state.setter
    def state(self, value: Any) -> None:
        """torch.optim.Optimizer's constructor sets an empty one."""

    def state_dict(self) -> dict[str, Any]:
        """This rank's state and all options. `load_state_dict` takes it on as many ranks as it was saved on."""
        self.synchronize()
        params = self._params
        place = {param: i for i, param in enumerate(params)}
        return {
            "state": {place[param]: entry for param, entry in self.state.items()},
            "param_groups": pack_groups(self.param_groups),
            "shardstep": {"plan": self._plan.to_json(), "rank": self._channel.rank},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned on this rank, or the state_dict of the plain optimizer. On all ranks."""
        self.synchronize()
        failure, plan = None, self._plan
        entries: dict[Piece, Entry] = {}
        before = [{**group} for group in self.param_groups]
        try:
            if "shardstep" in state_dict:
                plan, entries = read_shard(state_dict, self._channel.rank, self._plan)
            else:
                sizes = [len(group["params"]) for group in self.param_groups]
                keys = check_state_dict(state_dict, self._plan.params, sizes, type(self._share.local))
                flat = self._params if self._layout is Layout.FLAT else None
                entries = cut_whole(state_dict["state"], keys, self._plan, self._channel.rank, flat)
            copy_options(state_dict["param_groups"], self.param_groups)
        except Exception as error:
            failure = error
        try:
            agree(self._channel, Claim("load_state_dict", failure, Facts([plan.digest()])))
        except Exception:
            copy_options(before, self.param_groups)
            raise
        self._share.build(self.param_groups, copy.deepcopy(reshard(self._channel, plan, self._plan, entries)))


def _trainable(param_groups: Sequence[Mapping[str, Any]]) -> list[bool]:
    return [bool(param.requires_grad) for group in param_groups for param in group["params"]]


def _accelerator_of(model: nn.Module) -> torch.device | None:
    """The device for messages where the backend takes no CPU tensors."""
    return next((param.device for param in model.parameters() if param.device.type != "cpu"), None)
