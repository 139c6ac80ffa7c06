"""examples/elastic.py, with SIGKILL at moments that its test chooses: `torchrun ... elastic_killed.py KILLS arguments`.

KILLS is "yes" or "no". Under "yes" rank 1 is killed while it trains, after the first start; rank 0 in the thread that
saves, before the checkpoint gets its name, after the second; the third lives. With RESUMED in the environment what was
loaded is saved there at once.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import elastic
import torch.distributed as dist

import shardstep
from shardstep.checkpoint import saving

TRAINING, SAVING = 8, 9  # steps; the checkpoint of step 6 may be under way at step 8, that of step 3 is there


def kill_this() -> None:
    print(f"rank {os.environ['RANK']} is killed", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_training(rank: int) -> None:
    true = elastic.Training.train_step

    def train_step(training: Any) -> float:
        if training.step == TRAINING and dist.get_rank() == rank:
            kill_this()
        return true(training)

    elastic.Training.train_step = train_step  # type: ignore[method-assign]


def die_in_saving(rank: int) -> None:
    true = saving.commit

    def commit(partial: Path, path: Path, token: str) -> None:
        if path.name == f"step-{SAVING}" and dist.get_rank() == rank:
            kill_this()
        true(partial, path, token)

    saving.commit = commit


def save_what_was_loaded(folder: str) -> None:
    true = elastic.Training.resume

    def resume(training: Any) -> None:
        true(training)
        shardstep.save(Path(folder, "resumed"), training.model, training.opt)

    elastic.Training.resume = resume  # type: ignore[method-assign]


def main() -> None:
    if sys.argv.pop(1) == "yes":
        start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        {0: lambda: die_in_training(1), 1: lambda: die_in_saving(0)}.get(start, lambda: None)()
    if "RESUMED" in os.environ:
        save_what_was_loaded(os.environ["RESUMED"])
    elastic.main()


if __name__ == "__main__":
    main()
