"""Accelerate: `ShardedAccelerator` takes the place of `accelerate.Accelerator`.

    accelerator = ShardedAccelerator()
    model.to(accelerator.device)
    optimizer = shardstep.shard(model, torch.optim.AdamW, lr=3e-4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

The rest of the program stays as it is. A sharded model is not wrapped in DistributedDataParallel; the drop-in
`shardstep.ZeroRedundancyOptimizer` works with DDP as before. In `save_state` every rank writes its part.

[Note: where the state is] Accelerate saves what `optimizer.state_dict()` returns on the main process, which would be
one rank's part. So all ranks save the state by `shardstep.save` into a folder beside Accelerate's files, and Accelerate
saves the name of that folder as the optimizer's state_dict. It loads the weights first, and then the optimizer's state
with the fp32 master weights of 16-bit parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn

from shardstep.checkpoint.contents import unwrapped
from shardstep.checkpoint.loading import load
from shardstep.checkpoint.saving import save
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.engine.context import params_of
from shardstep.engine.registry import owned_in
from shardstep.optimizer import ShardedOptimizer

STATE_IN = "the optimizer's state was saved by shardstep in"  # the only key of the state_dict that Accelerate saves
_OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


class PreparedOptimizer(AcceleratedOptimizer):
    """A sharded optimizer as `prepare` returns it. See [Note: where the state is]."""

    def __init__(self, optimizer: Any, scaler: Any, prepared: Callable[[], Sequence[nn.Module]]) -> None:
        """`prepared` returns the accelerator's models."""
        super().__init__(optimizer, device_placement=False, scaler=scaler)  # state is on its parameters' devices
        self._prepared = prepared
        self.saved_in: Path | None = None  # the folder of the state, while the accelerator saves
        self.loads_from: Path | None = None  # the folder with all state, while the accelerator loads
        self._is_accelerate_prepared = True

    def step(self, closure: Any = None) -> None:
        before = None if self.scaler is None else self.scaler.get_scale()
        super().step(closure)
        if before is not None and self.gradient_state.sync_gradients:
            # The step is always called, and skips itself on the device if the scaler has found inf or nan there.
            self._is_overflow = self.scaler.get_scale() < before

    def state_dict(self) -> Any:
        return super().state_dict() if self.saved_in is None else {STATE_IN: self.saved_in.name}

    def load_state_dict(self, state_dict: Any) -> None:
        if STATE_IN not in state_dict:  # the whole state, as the plain optimizer has saved it
            super().load_state_dict(state_dict)
        elif self.loads_from is None:
            raise RuntimeError(
                f"this state_dict has no state, only the note that {STATE_IN} {state_dict[STATE_IN]!r}: load it with "
                "load_state() of the ShardedAccelerator, or with shardstep.load(path of that folder, model, optimizer)"
            )
        else:
            load(self.loads_from / state_dict[STATE_IN], self.model, self.optimizer)

    def save_in(self, path: Path) -> None:
        """Save the model's and the optimizer's parts of all ranks in a folder. Called on all ranks."""
        save(path, self.model, self.optimizer)
        self.saved_in = path

    @property
    def model(self) -> nn.Module:
        if isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.model
        own = set(params_of(self.param_groups))
        for model in self._prepared():
            if own.issubset(model.parameters()):
                return model
        raise ValueError(
            "no prepared model has all parameters of this ZeroRedundancyOptimizer, whose names a checkpoint needs: "
            "give prepare() the whole model, too"
        )


class ShardedAccelerator(Accelerator):
    """An `accelerate.Accelerator` that trains with shardstep's optimizers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begin()

    @classmethod
    def adopt(cls, accelerator: Accelerator) -> ShardedAccelerator:
        """Return one with all attributes of `accelerator`, for trainers that have already made theirs."""
        made = cls.__new__(cls)
        made.__dict__.update(accelerator.__dict__)
        made._begin()
        return made

    def _begin(self) -> None:
        self._refuse_other_engines()
        self._check_ranks()
        if not dist.is_initialized():  # shard(...) needs a process group, also in a program of one process
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        self.register_save_state_pre_hook(lambda models, weights, folder: self.save_optimizers_in(folder))
        self.register_load_state_pre_hook(lambda models, folder: self._load_from(Path(folder)))

    def _check_ranks(self) -> None:
        ranks = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
        if ranks != self.num_processes:
            raise RuntimeError(
                f"there are {ranks} ranks, and Accelerate has found {self.num_processes}: all ranks would train on the "
                "same data. On CPUs pass cpu=True (in TrainingArguments: use_cpu=True)"
            )

    def _refuse_other_engines(self) -> None:
        if self.distributed_type in _OTHERS:
            raise ValueError(
                f"this accelerator is configured for {self.distributed_type.value}, which cannot be combined with "
                "shardstep: configure plain multi-GPU or multi-CPU training, or use accelerate.Accelerator without "
                "shardstep"
            )
        plan = self.parallelism_config
        if plan is not None and plan.total_size > plan.dp_replicate_size:
            raise ValueError(
                f"shardstep shards over data-parallel ranks, and this accelerator has {plan!r}: use dp_replicate_size "
                "alone, or accelerate.Accelerator without shardstep"
            )

    # -- preparing ----------------------------------------------------------------------------------------------------

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model as Accelerate does, but do not wrap a sharded model in DistributedDataParallel."""
        if not evaluation_mode and (owned := owned_in(unwrapped(model))):
            self._check_sharded(unwrapped(model), owned, moves=self.device_placement and device_placement is not False)
            evaluation_mode = True  # Accelerate then applies autocast and compilation, and does not wrap the model
        return super().prepare_model(model, device_placement, evaluation_mode)

    def _check_sharded(self, model: nn.Module, owned: set[torch.Tensor], *, moves: bool) -> None:
        left = [name for name, param in model.named_parameters() if param.requires_grad and param not in owned]
        if left:
            raise ValueError(
                f"no sharded optimizer trains {', '.join(left[:5])}{' and others' if len(left) > 5 else ''} of this "
                f"{type(model).__name__}, so their gradients would not be reduced: give them to shard(...), too, or "
                "freeze them with requires_grad_(False)"
            )
        hook = getattr(self.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
        if hook != DDPCommunicationHookType.NO:
            raise ValueError(
                f"comm_hook={hook.value!r} of DistributedDataParallelKwargs has no effect without DDP: leave it out; "
                "ShardConfig(reduce_dtype=torch.float16) sends gradients in 16 bits"
            )
        target = torch.empty(0, device=self.device).device
        away = [name for name, param in model.named_parameters() if param in owned and param.device != target]
        if moves and away:
            raise ValueError(
                f"{away[0]} is on {dict(model.named_parameters())[away[0]].device} and would be moved to {target}: "
                "call model.to(accelerator.device) before shard(...)"
            )

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, ShardedOptimizer | ZeroRedundancyOptimizer):
            optimizer = PreparedOptimizer(optimizer, self.scaler, lambda: self._models)
        return super().prepare_optimizer(optimizer, device_placement)

    # -- gradients ----------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Do not reduce gradients of `model` in the with block. `accumulate` calls it."""
        bare = unwrapped(model)
        with ExitStack() as stack:
            found = [one.optimizer for one in self._fast() if one.optimizer.model is bare]
            for context in [one.no_sync() for one in found] or [super().no_sync(model)]:
                stack.enter_context(context)
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = _as_list(parameters)
        sharded = self._optimizer_of(given, "clip_grad_norm_")
        if sharded is None:
            return super().clip_grad_norm_(given, max_norm, norm_type)
        self.unscale_gradients(sharded)
        return sharded.optimizer.clip_grad_norm_(max_norm, norm_type)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        given = _as_list(parameters)
        sharded = self._optimizer_of(given, "clip_grad_value_")
        if sharded is None:
            super().clip_grad_value_(given, clip_value)
        else:
            self.unscale_gradients(sharded)
            sharded.optimizer.clip_grad_value_(clip_value)

    def join_uneven_inputs(self, joinables: Iterable[Any], even_batches: bool | None = None) -> Any:
        """Join models as Accelerate does; for a sharded model, its optimizer joins."""
        found: list[Any] = []
        for one in joinables:
            bare = unwrapped(one) if isinstance(one, nn.Module) else None
            own = [fast.optimizer for fast in self._fast() if fast.optimizer.model is bare]
            found += own or [one.optimizer if isinstance(one, PreparedOptimizer) else one]
        return super().join_uneven_inputs(list(dict.fromkeys(found)), even_batches)

    def _fast(self) -> list[PreparedOptimizer]:
        return [one for one in self._optimizers if isinstance(getattr(one, "optimizer", None), ShardedOptimizer)]

    def _optimizer_of(self, given: Sequence[torch.Tensor], what: str) -> PreparedOptimizer | None:
        """Return the sharded optimizer whose parameters these are; None if no sharded optimizer has any of them."""
        asked = {param for param in given if param.requires_grad}
        for one in self._fast():
            own = {param for param in params_of(one.optimizer.param_groups) if param.requires_grad}
            if asked == own:
                return one
            if not asked.isdisjoint(own):
                raise ValueError(
                    f"{what} was given {len(asked & own)} of the {len(own)} trainable parameters of a sharded optimizer"
                    f"{' and others' if asked - own else ''}, and sharded gradients can only be clipped together: give "
                    "it model.parameters() of one sharded model"
                )
        return None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """Save as Accelerate does; each rank writes its part of sharded state. Called on all ranks.

        The files of all ranks are complete when it returns.
        """
        try:
            saved = super().save_state(*args, **kwargs)
        finally:
            self._forget_folders()
        self.wait_for_everyone()  # the main process writes the weights, and others may load them at once
        return saved

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load what `save_state` has saved on any number of ranks. Called on all ranks."""
        try:
            super().load_state(*args, **kwargs)
        finally:
            self._forget_folders()

    @contextmanager
    def optimizers_saved_in(self, folder: str | Path) -> Iterator[None]:
        """Save the sharded optimizers; in the with block their state_dict() refers to that. Called on all ranks."""
        try:
            self.save_optimizers_in(folder)
            yield
        finally:
            self._forget_folders()

    @contextmanager
    def optimizers_loaded_from(self, folder: str | Path) -> Iterator[None]:
        """Let load_state_dict() of the sharded optimizers load what `optimizers_saved_in` has saved, in the with
        block."""
        try:
            self._load_from(Path(folder))
            yield
        finally:
            self._forget_folders()

    def save_optimizers_in(self, folder: str | Path) -> None:
        """Save the sharded optimizers in folders below `folder`."""
        for number, one in enumerate(self._prepared()):
            one.save_in(Path(folder) / (f"shardstep_{number}" if number else "shardstep"))

    def _load_from(self, folder: Path) -> None:
        for one in self._prepared():
            one.loads_from = folder

    def _forget_folders(self) -> None:
        for one in self._prepared():
            one.saved_in = one.loads_from = None

    def _prepared(self) -> list[PreparedOptimizer]:
        return [one for one in self._optimizers if isinstance(one, PreparedOptimizer)]


def _as_list(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
