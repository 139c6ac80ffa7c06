"""The job that faults.py kills: it resumes from a folder of checkpoints, compares what it got, trains and saves.

All ranks have the same batches, so that one and two ranks compute the same, bit for bit, as the plain optimizer does
(`write_truth`); and what a checkpoint of step n has to hold is known without any checkpoint.

What happens is told through a pipe, which keeps what was written to it when the writer is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from shardstep.checkpoint import storage

STEPS = 400  # of which the truth is known
BETWEEN = 3  # steps from one save to the next
GROUP_TIMEOUT = timedelta(seconds=8)
WRITES = 150  # one in so many writes to a part counts as an operation: about five in a part

Truth = list[dict[str, torch.Tensor]]  # by step: weights by name, and state by "name.key", all flat


@dataclass(frozen=True, slots=True)
class Life:
    """One start of the job, from the loading to the kill."""

    folder: Path
    ranks: int
    asynchronous: bool
    keep: int | None  # None: every checkpoint has the same name
    saves: int | None = None  # then it ends by itself
    fatal: int | None = None  # the file operation, counted from the first of the first save, at which `victim` dies
    victim: int = 0

    def path_of(self, step: int) -> Path:
        return self.folder / ("latest" if self.keep is None else f"step-{step}")


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 8))


def train_step(model: nn.Module, opt: Any, step: int) -> None:
    x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()
    opt.step()
    opt.zero_grad()


def write_truth(path: Path) -> None:
    """By torch's own optimizer. In a process of its own: after a backward pass a process can have no children."""
    model = make_model()
    opt = optim.AdamW(model.parameters(), lr=1e-2)
    truth: Truth = []
    for step in range(STEPS + 1):
        rows = {name: param.detach().clone().view(-1) for name, param in model.named_parameters()}
        for name, param in model.named_parameters():
            state = opt.state.get(param, {})
            rows |= {f"{name}.{key}": value.clone().view(-1) for key, value in state.items()}
        truth.append(rows)
        train_step(model, opt, step)
    torch.save(truth, path)


class Job:
    """One rank of it."""

    def __init__(self, life: Life, rank: int, truth: Truth, tell: int) -> None:
        self._life, self._rank, self._truth, self._pipe = life, rank, truth, tell

    def tell(self, *words: object) -> None:
        os.write(self._pipe, (" ".join(str(word) for word in words) + "\n").encode())

    def run(self, meeting: Path) -> None:
        store = dist.FileStore(str(meeting), self._life.ranks)
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._life.ranks, timeout=GROUP_TIMEOUT
        )
        model = make_model()
        opt = shardstep.shard(model, optim.AdamW, lr=1e-2)
        step = self._resume(model, opt)
        self._train(model, opt, step)

    def _resume(self, model: nn.Module, opt: Any) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                step = int(shardstep.load(self._life.folder, model, opt)["step"])
            except FileNotFoundError:
                step = 0
        for one in caught:
            self.tell("warned", one.message)
        self.tell("loaded", step, "right" if self._is_right(step, model, opt) else "WRONG")
        return step

    def _is_right(self, step: int, model: nn.Module, opt: Any) -> bool:
        """Bit for bit what the plain optimizer has after `step`: all weights, and this rank's state."""
        truth = self._truth[step]
        rows = [(param.detach().view(-1), truth[name]) for name, param in model.named_parameters()]
        specs = opt._engine.runtime.plan.params
        entries = opt._engine.runtime.local_step.entries()
        for piece, entry in entries.items() if step else ():
            for key in ("exp_avg", "exp_avg_sq"):
                whole = truth[f"{specs[piece.param].name}.{key}"]
                rows.append((entry[key].view(-1), whole[piece.start : piece.stop]))
            rows.append((entry["step"].view(-1), truth[f"{specs[piece.param].name}.step"]))
        return all(torch.equal(*row) for row in rows) and (step == 0 or len(entries) > 0)

    def _train(self, model: nn.Module, opt: Any, step: int) -> None:
        life, saves, pending = self._life, 0, None
        while step + BETWEEN <= STEPS and saves != life.saves:
            for number in range(step, step + BETWEEN):
                train_step(model, opt, number)
            if pending is not None:
                pending.wait()
                self.tell("done", step)
            step += BETWEEN
            saves += 1
            fatal = life.fatal if saves == 1 and self._rank == life.victim else None
            with counted_operations(life.folder, fatal, self.tell):
                pending = self._save(model, opt, step)
                if pending is not None and fatal is not None:
                    pending.wait()
                if pending is None:
                    self.tell("done", step)
        if pending is not None:
            pending.wait()
            self.tell("done", step)
        self.tell("ended", step)

    def _save(self, model: nn.Module, opt: Any, step: int) -> Any:
        self.tell("begins", step)
        life = self._life
        return shardstep.save(
            life.path_of(step), model, opt, extra={"step": step}, keep=life.keep, asynchronous=life.asynchronous
        )


# -- file operations ---------------------------------------------------------------------------------------------------


class Countdown:
    """Kills this process at the n-th operation on files in a folder; what came before it is on the disk."""

    def __init__(self, folder: Path, fatal: int, tell: Any) -> None:
        self._folder, self._left, self._tell, self._is_killing = str(folder), fatal, tell, False

    def tick(self, what: str, last_act: Any = None) -> None:
        if self._is_killing:
            return
        if self._left == 0:
            self._is_killing = True
            if last_act is not None:
                last_act()
            self._tell("killed", what)
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= 1

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Python announces what it is about to do with files."""
        if event not in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
            return
        path = str(arguments[0])
        within = event in ("os.remove", "os.rmdir") and arguments[-1] != -1  # relative to a folder that is open
        if not within and not path.startswith(self._folder):
            return
        name = Path(path).name.split("-")[0] if "-" in Path(path).name else Path(path).name
        self.tick(f"before {event.removeprefix('os.')} of {name}")
        if event == "open" and int(arguments[2]) & os.O_CREAT:
            self.tick(f"after open of {name}", lambda: os.close(os.open(path, os.O_CREAT | os.O_WRONLY)))


_armed: Countdown | None = None
_is_audited = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _armed is not None:
        _armed.audit(event, arguments)


@contextmanager
def counted_operations(folder: Path, fatal: int | None, tell: Any) -> Iterator[None]:
    """Within, the `fatal`-th operation is the last thing that this process does."""
    if fatal is None:
        yield
        return
    global _armed, _is_audited
    if not _is_audited:
        sys.addaudithook(_audit)  # for ever: there is no way back
        _is_audited = True
    countdown = Countdown(folder, fatal, tell)
    fsync, write, count = os.fsync, storage._CheckedStream.write, iter(range(10**9))

    def fsync_counted(handle: int) -> None:
        countdown.tick("before fsync")
        fsync(handle)

    def write_counted(stream: Any, block: Any) -> int:
        if next(count) % WRITES == 0:
            countdown.tick("between writes to a part", stream.flush)
        return write(stream, block)

    os.fsync, storage._CheckedStream.write = fsync_counted, write_counted  # type: ignore[method-assign]
    _armed = countdown
    try:
        yield
    finally:
        _armed = None
        os.fsync, storage._CheckedStream.write = fsync, write  # type: ignore[method-assign]
