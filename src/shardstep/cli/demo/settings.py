"""What a demo run can be told, and every way in which that can be wrong.

Without torch: `--help` need not wait for it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MAX_RANKS = 16  # all on one machine, each a whole Python with torch


@dataclass(frozen=True, slots=True)
class Size:
    """A GPTConfig, its vocabulary left to the text, and how many sequences of it each rank sees per step."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int


SIZES = {
    "small": Size(layers=4, heads=6, width=192, block=64, batch=8),
    "tiny": Size(layers=2, heads=2, width=64, block=32, batch=4),
}
# By optimizer, what the runs are called: without shardstep, with the drop-in, with the fast lane.
OPTIMIZERS = {
    "adamw": ("DDP + AdamW", "DDP + drop-in", "shard()"),
    "muon": ("DDP + Muon, AdamW", "DDP + drop-in", "shard()"),
}


@dataclass(frozen=True, slots=True)
class Settings:
    ranks: int
    steps: int
    model: str  # a key of SIZES
    optimizer: str  # a key of OPTIMIZERS
    out: Path


def find_problems(settings: Settings) -> list[str]:
    """Everything wrong with `settings`, as sentences; empty if the demo can run."""
    problems = []
    if not 1 <= settings.ranks <= MAX_RANKS:
        problems.append(f"--ranks must be between 1 and {MAX_RANKS}, got {settings.ranks}.")
    if settings.steps < 1:
        problems.append(f"--steps must be at least 1, got {settings.steps}.")
    if settings.model not in SIZES:
        problems.append(f"--model must be {' or '.join(SIZES)}, got {settings.model!r}.")
    if settings.optimizer not in OPTIMIZERS:
        problems.append(f"--optimizer must be {' or '.join(OPTIMIZERS)}, got {settings.optimizer!r}.")
    # The folder too: a problem is found before the training, not after it, when the pictures are to be written.
    nearest = next(path for path in (settings.out, *settings.out.absolute().parents) if path.exists())
    if not nearest.is_dir():
        problems.append(f"--out must be a folder, but {nearest} is a file; name another one.")
    elif not os.access(nearest, os.W_OK | os.X_OK):
        problems.append(f"--out: {nearest} may not be written to; name another folder.")
    return problems
