"""Hugging Face's Trainer: `ShardedTrainer` takes the place of `transformers.Trainer`.

    trainer = ShardedTrainer(model=model, args=args, train_dataset=data)
    trainer.train(resume_from_checkpoint=True)

It trains with the optimizer that the Trainer would make, sharded over the ranks, and without DistributedDataParallel.
Checkpoints are the Trainer's, with a folder `shardstep` for the sharded state, and load on any number of ranks. For
other trainers, use `class MyTrainer(Sharded, SFTTrainer)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from transformers import Trainer

from shardstep.config import ShardConfig
from shardstep.drop_in.optimizer import ZeroRedundancyOptimizer
from shardstep.integrations.accelerate import PreparedOptimizer, ShardedAccelerator
from shardstep.optimizer import ShardedOptimizer, shard

_WITHOUT_GROUPS = ("params", "model", "optimizer_dict")  # options of optimizers that are not built from param groups


class Sharded:
    """Makes a `transformers.Trainer` shard its optimizer; must come before the trainer among the bases of a class."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        order = cls.__mro__
        if Trainer in order and order.index(Trainer) < order.index(Sharded):
            raise TypeError(
                f"{cls.__name__} has a trainer before Sharded among its bases, and would not shard: write "
                f"class {cls.__name__}(Sharded, ...)"
            )

    def __init__(self, *args: Any, shard_config: ShardConfig | None = None, **kwargs: Any) -> None:
        """Take the Trainer's arguments. `optimizers` may have an optimizer that `shardstep.shard` returned for the
        model, or a drop-in."""
        self.shard_config = shard_config
        super().__init__(*args, **kwargs)
        trainer: Any = self
        if trainer.args.n_gpu > 1:
            raise ValueError(
                f"this process has {trainer.args.n_gpu} GPUs, for which the Trainer would use DataParallel: start one "
                "process per GPU, with torchrun or accelerate launch"
            )
        _check_optimizer(trainer.optimizer)
        _check_config(shard_config)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        self.accelerator = _TrainersAccelerator.adopt(self.accelerator)  # type: ignore[has-type]

    def create_optimizer(self, model: nn.Module | None = None) -> Any:
        """Make a sharded optimizer of the class, options and param groups that the Trainer chooses."""
        trainer: Any = self
        _check_optimizer(trainer.optimizer)
        if trainer.optimizer is not None:
            return trainer.optimizer
        chosen, target = trainer.optimizer_cls_and_kwargs, trainer.model if model is None else model
        kind, options = chosen or trainer.get_optimizer_cls_and_kwargs(trainer.args, target)
        if (
            not isinstance(kind, type)
            or not issubclass(kind, Optimizer)
            or any(key in options for key in _WITHOUT_GROUPS)
        ):
            raise ValueError(
                f"optim={trainer.args.optim!s} is not built from param groups, and cannot be sharded: choose another, "
                "or give optimizers=(shardstep.shard(model, ...), None)"
            )
        trainer.optimizer_cls_and_kwargs = _sharding(target, kind, self.shard_config), options
        try:
            return super().create_optimizer(model)  # type: ignore[misc]
        finally:
            trainer.optimizer_cls_and_kwargs = chosen

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # the Trainer would look for gradients in `param.grad`, and they are in shards

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self.accelerator.optimizers_saved_in(output_dir):
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        with self.accelerator.optimizers_loaded_from(checkpoint or ""):
            super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]


class ShardedTrainer(Sharded, Trainer):
    """A `transformers.Trainer` whose optimizer is sharded."""


class _TrainersAccelerator(ShardedAccelerator):
    """Refuses optimizers that are not sharded, which a subclass may have made in its own `create_optimizer`."""

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        _check_optimizer(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)


def _sharding(model: nn.Module, kind: type[Optimizer], config: ShardConfig | None) -> type[Optimizer]:
    """Return a class that the Trainer calls with param groups, and that returns a sharded optimizer instead."""

    class MakesSharded(Optimizer):
        def __new__(cls, groups: Sequence[dict[str, Any]], **options: Any) -> Any:
            return shard(model, kind, groups=[group for group in groups if group["params"]], config=config, **options)

    return MakesSharded


def _check_optimizer(given: Any) -> None:
    known = ShardedOptimizer | ZeroRedundancyOptimizer | PreparedOptimizer
    if given is not None and not isinstance(given, known):
        raise TypeError(
            f"the trainer has a {type(given).__name__}, which is not sharded: give it optimizers with one that "
            "shardstep.shard(model, ...) returns, or a shardstep.ZeroRedundancyOptimizer, or leave them out; a "
            "create_optimizer of your own must return one of these"
        )
    if isinstance(given, ShardedOptimizer):
        _check_config(given.config)


def _check_config(config: ShardConfig | None) -> None:
    if config is not None and config.step == "backward":
        raise ValueError(
            'ShardConfig(step="backward") steps inside backward, and the Trainer needs the norm of all gradients '
            "before each step: use the default step"
        )
