"""Lightning: `Trainer(strategy=ShardStepStrategy())` trains with the fast lane.

    class Model(LightningModule):
        def configure_optimizers(self):
            return shardstep.shard(self, torch.optim.AdamW, lr=3e-4)

The module itself calls `shard`, so that its schedulers refer to the sharded optimizer, and all options of the fast lane
can be used. Processes start as with Lightning's DDP strategy, by torchrun, Slurm or Lightning itself; the module is not
wrapped. A checkpoint is a folder that `shardstep.load` reads, too, on any number of ranks.

Works with `lightning` and with `pytorch_lightning`, whichever the program has imported.
"""

from __future__ import annotations

import copy
import functools
import importlib
import importlib.util
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.loading import load
from shardstep.checkpoint.saving import save
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.engine.registry import check_stepped
from shardstep.optimizer import ShardedOptimizer

_NEW, _OLD = "lightning.pytorch", "pytorch_lightning"
_is_old = (_OLD in sys.modules and _NEW not in sys.modules) or importlib.util.find_spec("lightning") is None
_package = _OLD if _is_old else _NEW
_DDPStrategy: Any = importlib.import_module(f"{_package}.strategies").DDPStrategy
_plugins: Any = importlib.import_module(f"{_package}.plugins")
_FITTING: Any = importlib.import_module(f"{_package}.trainer.states").TrainerFn.FITTING

_REST = "lightning"  # the key in extra of all that Lightning adds to a checkpoint
_SAVED_BY_US = ("state_dict", "optimizer_states")


class ShardStepStrategy(_DDPStrategy):
    """Trains a LightningModule whose `configure_optimizers` returns what `shardstep.shard(self, ...)` returned.

    Several optimizers need manual optimization, and each must have its own parameters:
    `shard(self, Adam, groups=[{"params": "generator.*"}], lr=2e-4)`.
    """

    _optimizers: list[Any]

    def __init__(
        self,
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = None,
        **others: Any,
    ) -> None:
        if others:
            raise TypeError(
                f"ShardStepStrategy has no option {', '.join(sorted(others))}: the module is not wrapped in "
                "DistributedDataParallel, parameters may be unused in any step, and processes are started as by "
                "Lightning's 'ddp'. Options of the fast lane go to shardstep.shard(self, ..., config=ShardConfig(...))"
            )
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            **({} if timeout is None else {"timeout": timeout}),
        )
        self._is_loaded = False  # whether `load` has already loaded the optimizers' state, so that Lightning must not

    # -- setting up ---------------------------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        _refuse_other_storage(self.checkpoint_io, trainer)
        super().setup(trainer)

    def configure_ddp(self) -> None:
        """No-op: the module is not wrapped in DistributedDataParallel."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        module = self.lightning_module
        problems = list(_problems(self.optimizers, module, trainer, self.precision_plugin))
        if problems:
            raise TypeError("ShardStepStrategy cannot train this module: " + "; ".join(problems))
        check_stepped(module, [name for name, param in module.named_parameters() if param.requires_grad])

    @property
    def precision_plugin(self) -> Any:
        return _DDPStrategy.precision_plugin.fget(self)

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else _with_sharded_clipping(plugin)

    # -- training -----------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the training step inside a call of the module, as DDP does, so that the hooks of `shard` are called."""
        module = self.lightning_module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Do not reduce gradients in the with block: for all passes of an accumulation but the last."""
        with ExitStack() as stack:
            for optimizer in self.optimizers:
                stack.enter_context(optimizer.no_sync())
            yield

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        for optimizer in self._sharded():
            with suppress(Exception):  # another rank may have ended; the first failure is the one to be raised
                optimizer.close()

    def teardown(self) -> None:
        """End training, but leave the state on its device, so that `trainer.save_checkpoint` works after `fit`."""
        for optimizer in self._sharded():
            if not optimizer.is_closed:
                optimizer.zero_grad()  # Lightning moves gradients to the CPU, and cannot read those in shards
        optimizers, self._optimizers = self._optimizers, []
        try:
            super().teardown()
        finally:
            self._optimizers = optimizers

    def _sharded(self) -> list[ShardedOptimizer]:
        return [optimizer for optimizer in self.optimizers if isinstance(optimizer, ShardedOptimizer)]

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # only then there are optimizers to load into

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        del optimizer
        return {}  # `save_checkpoint` saves the optimizers itself, each rank its part

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a checkpoint as a folder, to which each rank writes its part. Called on all ranks."""
        if storage_options is not None:
            raise TypeError(
                "storage_options cannot be used with ShardStepStrategy, which uses no CheckpointIO: leave it out"
            )
        module = self.lightning_module
        own = module.state_dict()
        added = checkpoint["state_dict"].keys() - own.keys()
        if added:
            raise ValueError(
                f"on_save_checkpoint has added {', '.join(sorted(added)[:5])} to 'state_dict', which is saved from the "
                "module itself: put it under a key of its own in the checkpoint"
            )
        rest = {key: value for key, value in checkpoint.items() if key not in _SAVED_BY_US}
        replaced = {key: value for key, value in checkpoint["state_dict"].items() if not _is_same(value, own[key])}
        if replaced:  # by on_save_checkpoint: a callback that averages weights saves the averages in their place
            rest["state_dict"] = replaced
        packed, failure = self.broadcast(_pack(rest) if self.is_global_zero else None)
        if failure:
            raise TypeError(f"what Lightning adds to the checkpoint cannot be saved: {failure}")
        optimizers = self.optimizers if "optimizer_states" in checkpoint else None
        extra = {_REST: torch.frombuffer(bytearray(packed), dtype=torch.uint8)}
        save(_local(self.broadcast(filepath)), module, optimizers, extra=extra)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load a folder that any number of ranks has saved, or a file that Lightning saved with plain optimizers."""
        path = self.broadcast(checkpoint_path)
        self._is_loaded = _is_folder(path)
        if not self._is_loaded:
            asked = {} if weights_only is None else {"weights_only": weights_only}
            loaded: dict[str, Any] = super().load_checkpoint(path, **asked)
            return loaded
        module = self.lightning_module
        optimizers = self.optimizers if module.trainer.state.fn == _FITTING else None
        extra = load(_local(path), module, optimizers, strict=module.strict_loading)
        if _REST not in extra:
            raise ValueError(f"{path} was not saved by a Trainer: load it with shardstep.load(path, module, optimizer)")
        packed = io.BytesIO(extra[_REST].numpy().tobytes())
        rest: dict[str, Any] = torch.load(packed, weights_only=weights_only is not False, map_location="cpu")
        # Weights and state are loaded. Lightning gives the weights to `on_load_checkpoint`, and loads its result.
        weights = {**module.state_dict(), **rest.get("state_dict", {})}
        return {**rest, "state_dict": weights, "optimizer_states": [{} for _ in self.optimizers]}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._is_loaded:
            return
        states = checkpoint["optimizer_states"]
        if len(states) != len(self.optimizers):
            raise ValueError(
                f"the checkpoint has {len(states)} optimizers, and the module has {len(self.optimizers)}: return those "
                "with which it was saved from configure_optimizers"
            )
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)


# -- checks ------------------------------------------------------------------------------------------------------------


def _problems(optimizers: list[Any], module: Any, trainer: Any, precision: Any) -> Iterator[str]:
    for number, optimizer in enumerate(optimizers):
        where, kind = f"optimizer {number} of configure_optimizers", type(optimizer).__name__
        if isinstance(optimizer, ZeroRedundancyOptimizer):
            yield f"{where} is the drop-in, which needs DDP: use Trainer(strategy='ddp') with it"
        elif not isinstance(optimizer, ShardedOptimizer):
            yield f"{where} is {kind}: return shardstep.shard(self, optimizer_class, lr=...), with groups=... as needed"
        elif optimizer.model is not module:
            yield (
                f"{where} was made for a {type(optimizer.model).__name__}, and checkpoints need names of the whole "
                'module: use shard(self, ..., groups=[{"params": "generator.*"}])'
            )
        elif optimizer.is_closed:
            yield f"{where} is closed, because a later shard(self, ...) has sharded its parameters again"
        elif optimizer.config.step == "backward" and (trainer.gradient_clip_val or getattr(precision, "scaler", None)):
            yield (
                f'{where} steps inside backward (step="backward"), where gradients can be neither clipped nor '
                "unscaled: use the default step"
            )


def _refuse_other_storage(checkpoint_io: Any, trainer: Any) -> None:
    if type(checkpoint_io) is not _plugins.TorchCheckpointIO:
        raise TypeError(
            f"{type(checkpoint_io).__name__} cannot be used with ShardStepStrategy, whose ranks write checkpoints "
            "without a CheckpointIO to a file system that all ranks share: leave it out"
        )
    folders = [trainer.default_root_dir, *(getattr(one, "dirpath", None) for one in trainer.checkpoint_callbacks)]
    for folder in folders:
        if folder is not None:
            _local(folder)


def _local(path: Any) -> Path:
    if "://" in str(path) and not str(path).startswith("file://"):
        raise ValueError(
            f"{path} is not a local path: give a folder on a file system that all ranks share, to which "
            "ShardStepStrategy can write checkpoints"
        )
    return Path(str(path).removeprefix("file://"))


def _is_folder(path: Any) -> bool:
    return "://" not in str(path).removeprefix("file://") and _local(path).is_dir()


# -- what Lightning adds to a checkpoint -------------------------------------------------------------------------------


def _is_same(value: Any, own: Any) -> bool:
    """Whether two tensors are equal; True for values that are not tensors, which cannot be compared."""
    if not isinstance(value, torch.Tensor) or not isinstance(own, torch.Tensor):
        return True
    return (value.data_ptr() == own.data_ptr() and value.shape == own.shape) or torch.equal(value, own)


def _pack(rest: Mapping[str, Any]) -> tuple[bytes, str]:
    """Return the bytes of torch.save, which can save any class as Lightning does; or an error message."""
    file = io.BytesIO()
    try:
        torch.save(dict(rest), file)
    except Exception as error:
        return b"", f"{type(error).__name__}: {error}"
    return file.getvalue(), ""


# -- clipping ----------------------------------------------------------------------------------------------------------


def _with_sharded_clipping(plugin: Any) -> Any:
    """Return a copy of the plugin, of a subclass that clips by the sharded optimizer."""
    if isinstance(plugin, _ShardedClipping):
        return plugin
    made = copy.copy(plugin)
    kind: Any = type(plugin)
    made.__class__ = _class_that_clips(kind)
    return made


@functools.cache
def _class_that_clips(kind: Any) -> type:
    # It has the same name, because Lightning saves a plugin's state under that.
    return type(kind.__name__, (_ShardedClipping, kind), {"__module__": kind.__module__})


class _ShardedClipping:
    """Clips sharded gradients, which torch's functions would not find in `param.grad`."""

    def clip_gradients(self, optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
        if clip_val <= 0:
            return
        bare = getattr(optimizer, "optimizer", optimizer)
        scaler = getattr(self, "scaler", None)
        if scaler is not None and bare._step_supports_amp_scaling:
            scaler.unscale_(bare)  # Lightning leaves this to the optimizer's step, which comes after clipping
        if gradient_clip_algorithm == "value":
            bare.clip_grad_value_(clip_val)
        else:
            bare.clip_grad_norm_(clip_val)
