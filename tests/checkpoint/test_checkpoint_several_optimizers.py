"""Several optimizers of one model, as a GAN has them, in one checkpoint."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardstep
from checkpointing import Blocks, assert_holds, leave_reference, muon_groups, read_reference
from fast_lane_training import batch, loss_of
from training import raised


def two_optimizers(seed: int) -> tuple[Blocks, list[Any]]:
    """Of one model, as a GAN has them: with classes and options of their own."""
    model = Blocks(seed)
    groups = muon_groups()
    kinds = [group.pop("optimizer") for group in groups]
    rest = [name for name, _ in model.named_parameters() if not fnmatch(name, "blocks.*.weight")]
    groups[1]["params"] = rest
    return model, [shardstep.shard(model, kind, groups=[group]) for kind, group in zip(kinds, groups, strict=True)]


def train_both(model: nn.Module, opts: list[Any], steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step)).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()


def saves_two(folder: Path) -> None:
    model, opts = two_optimizers(3)
    train_both(model, opts, range(3))
    shardstep.save(folder / "two", model, opts, extra={"step": 3})
    for number, opt in enumerate(opts):
        leave_reference(opt, model, made(folder / f"of-{number}"))
    train_both(model, opts, range(3, 6))
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), folder / "went-on.pt")


def made(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    return folder


def holds_what_was_saved(folder: Path) -> None:
    model, opts = two_optimizers(11)
    shardstep.load(folder / "two", model, opts)
    shapes = {name: param.shape for name, param in model.named_parameters()}
    for number, opt in enumerate(opts):
        assert_holds(opt, model, read_reference(folder / f"of-{number}", shapes))


def loads_two(folder: Path) -> dict[str, torch.Tensor]:
    model, opts = two_optimizers(11)
    assert shardstep.load(folder / "two", model, opts) == {"step": 3}
    train_both(model, opts, range(3, 6))
    return model.state_dict()


def loads_as_one_with_two_groups(folder: Path) -> dict[str, torch.Tensor]:
    model = Blocks(11)
    opt = shardstep.shard(model, groups=muon_groups())
    shardstep.load(folder / "two", model, opt)
    train_both(model, [opt], range(3, 6))
    return model.state_dict()


def test_several_optimizers_of_one_model_are_one_checkpoint(workers, tmp_path):
    workers(2).run(saves_two, tmp_path)
    went_on = torch.load(tmp_path / "went-on.pt")
    for found in (*workers(2).run(loads_two, tmp_path), *workers(2).run(loads_as_one_with_two_groups, tmp_path)):
        assert all(torch.equal(found[key], went_on[key]) for key in went_on)
    workers(3).run(holds_what_was_saved, tmp_path)


def saves_the_same_twice(folder: Path) -> tuple[str, str]:
    model, opts = two_optimizers(3)
    return raised(lambda: shardstep.save(folder / "same", model, [opts[0], opts[0]]))


def test_optimizers_that_share_parameters_are_not_one_checkpoint(workers, tmp_path):
    for _, message in workers(2).run(saves_the_same_twice, tmp_path):
        assert "optimizers 0 and 1 both train a parameter called" in message
