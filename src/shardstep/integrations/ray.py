"""Ray Train: checkpoints of a `TorchTrainer` whose workers train with the fast lane or the drop-in.

    def train_loop(config):
        model = make_model()
        opt = shardstep.shard(model, torch.optim.AdamW, lr=3e-4)
        extra = restore(model, opt) or {"step": 0}
        for step in range(extra["step"], 1000):
            ...
            if step % 100 == 99:
                report({"loss": loss.item()}, model, opt, extra={"step": step + 1})

Ray makes the process group. It starts workers again after a failure, perhaps another number of them, and `restore`
loads the checkpoint that was reported last. Each worker writes its part directly to the storage of the run, which must
be a file system that all workers share.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode
from torch import nn

from shardstep.checkpoint.loading import Extra, load
from shardstep.checkpoint.ranks import ranks_of
from shardstep.checkpoint.saving import save


def report(
    metrics: dict[str, Any], model: nn.Module, optimizer: Any = None, *, extra: Mapping[str, Any] | None = None
) -> None:
    """Save a checkpoint to the run's storage, and report it and the metrics to Ray. Called on all workers."""
    # The name is not a counter, because a restored run would count from the start again.
    name = f"checkpoint_{datetime.now(timezone.utc):%Y-%m-%d_%H-%M-%S.%f}"
    folder = _storage() / ranks_of(optimizer, model).broadcast_text(name)
    save(folder, model, optimizer, extra=extra)
    first = ray.train.get_context().get_world_rank() == 0
    checkpoint = Checkpoint.from_directory(str(folder)) if first else None
    ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)


def restore(model: nn.Module, optimizer: Any = None, *, strict: bool = True) -> Extra | None:
    """Load the checkpoint that was reported last; return its `extra`, or None without one. Called on all workers."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        return load(folder, model, optimizer, strict=strict)


def _storage() -> Path:
    storage = ray.train.get_context().get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise ValueError(
            f"the run's storage is {storage.storage_filesystem.type_name}, and workers can only write checkpoints to a "
            "file system that all of them share: give RunConfig(storage_path=...) a folder on one; or call "
            "shardstep.save(folder, ...) yourself, and upload the folder"
        )
    return Path(storage.experiment_fs_path)
