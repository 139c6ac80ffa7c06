"""What a program sees of a fault (damage.py): the error on every rank, what became of its model, what it loads then."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import damage
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep

ROWS = 96  # of a matrix: all of it and its state are 400 kB, which is more than half of the small disk
DISK_KIB = 700


@dataclass(frozen=True, slots=True)
class Faced:
    """Of one rank."""

    error: str  # kind and text; empty: there was none
    warned: str  # by the load of the folder
    unchanged: bool  # the model and its optimizer, by the load that failed
    loads_by_name: bool  # the checkpoint before, bitwise
    loads_by_folder: bool
    ran: bool  # code in the checkpoint


class Program:
    """A model and a sharded optimizer on this rank; every rank has the same batches."""

    def __init__(self, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model: nn.Module = nn.Sequential(nn.Linear(ROWS, ROWS), nn.Tanh(), nn.Linear(ROWS, 2 * ROWS))
        self.opt = shardstep.shard(self.model, optim.AdamW, lr=1e-2)

    def train(self, steps: range) -> Program:
        for step in steps:
            x = torch.randn(4, ROWS, generator=torch.Generator().manual_seed(step))
            self.model(x).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()
        self.opt.synchronize()
        return self

    def snapshot(self) -> list[torch.Tensor]:
        """Bit for bit: the weights, this rank's state, and the options."""
        entries = sorted(
            self.opt._engine.runtime.local_step.entries().items(), key=lambda row: (row[0].param, row[0].start)
        )
        state = [entry[key] for _, entry in entries for key in sorted(entry)]
        options = [torch.tensor(float(group["lr"]), dtype=torch.float64) for group in self.opt.param_groups]
        return [torch.as_tensor(value).detach().clone() for value in (*self.model.parameters(), *state, *options)]

    def save(self, path: Path, **options: Any) -> Any:
        return shardstep.save(path, self.model, self.opt, extra={"name": path.name}, **options)

    def load(self, path: Path) -> str:
        return str(shardstep.load(path, self.model, self.opt)["name"])


def is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def error_of(action: Callable[[], Any]) -> str:
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def on_first(action: Callable[[], Any]) -> None:
    if dist.get_rank() == 0:
        action()
    dist.barrier()


def face_damage(title: str, folder: Path) -> Faced:
    """Two checkpoints, of which the second is damaged."""
    run, mark = folder / "run", folder / "ran"
    program = Program().train(range(2))
    program.save(run / "first")
    good = program.snapshot()
    program.train(range(2, 3)).save(run / "second")
    on_first(lambda: damage.FAULTS[title].make(run / "second", mark))
    other = Program(seed=9).train(range(7, 8))
    before = other.snapshot()
    error = error_of(lambda: other.load(run / "second"))
    unchanged = is_same(before, other.snapshot())
    found = _after(run, good, error, unchanged, mark)
    for one in (program, other):
        one.opt.close()
    on_first(lambda: shutil.rmtree(run))
    return found


def _after(run: Path, good: list[torch.Tensor], error: str, unchanged: bool, mark: Path) -> Faced:
    """What loads afterwards is the first, by name and by folder."""
    later = Program(seed=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        by_folder = later.load(run) == "first" and is_same(good, later.snapshot())
    again = Program(seed=11)
    by_name = again.load(run / "first") == "first" and is_same(good, again.snapshot())
    for one in (later, again):
        one.opt.close()
    told = "; ".join(str(one.message) for one in caught)
    return Faced(error, told, unchanged, by_name, by_folder, mark.exists())


def face_a_save_that_fails(folder: Path, asynchronous: bool, spoil: Callable[[Path], None]) -> Faced:
    """The first is saved, the folder is spoilt, and the second cannot be."""
    run = folder / "run"
    program = Program().train(range(2))
    program.save(run / "first")
    good = program.snapshot()
    on_first(lambda: spoil(run))
    program.train(range(2, 3))
    before = program.snapshot()

    def save() -> None:
        saving = program.save(run / "second", asynchronous=asynchronous)
        if saving is not None:
            saving.wait()

    error = error_of(save)
    unchanged = is_same(before, program.snapshot())
    program.opt.close()
    return _after(run, good, error, unchanged, folder / "ran")


def face_a_full_disk(folder: Path, asynchronous: bool = False) -> Faced:
    """`folder` is a small disk, and the first checkpoint takes more than half of it."""
    return face_a_save_that_fails(folder, asynchronous, lambda run: None)


def face_a_read_only_disk(folder: Path, asynchronous: bool = False) -> Faced:
    return face_a_save_that_fails(folder, asynchronous, lambda run: damage.make_read_only(folder))


# -- all of them, for the table of faults.py ---------------------------------------------------------------------------


def face_disk(name: str, folder: Path) -> Faced | None:
    """None where nothing can be mounted."""
    face = {"disk full": face_a_full_disk, "read-only folder": face_a_read_only_disk}[name]
    disk = damage.small_disk(folder, DISK_KIB)
    is_mounted = torch.zeros(1)
    if dist.get_rank() == 0:
        with contextlib.suppress(PermissionError):
            disk.__enter__()
            is_mounted += 1
    dist.broadcast(is_mounted, 0)
    if not is_mounted:
        return None
    try:
        return face(folder)
    finally:
        on_first(lambda: disk.__exit__(None, None, None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    titles = [*damage.FAULTS, "disk full", "read-only folder"]
    rows = []
    for number, title in enumerate(titles):
        folder = arguments.folder / str(number)
        on_first(lambda made=folder: made.mkdir(parents=True))
        faced = face_damage(title, folder) if title in damage.FAULTS else face_disk(title, folder)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, faced and asdict(faced))
        rows.append({"title": title, "folder": str(folder), "ranks": everyone})
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps({"faults": rows}))
    gc.collect()  # what optimizers left in cycles goes before the group does, and not at the end of the interpreter
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
