"""Lightning's own Trainer, with the fast lane and with the drop-in, against its DDP and the plain optimizer."""

from __future__ import annotations

import io
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

pl = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed; make test-frameworks installs it")

from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO, MixedPrecision
from lightning.pytorch.strategies import DDPStrategy

import shardstep
from lightning_programs import (
    DROP_IN,
    FAST,
    PLAIN,
    Gan,
    Regression,
    Snapshots,
    assert_same,
    loader,
    trainer_of,
    under_torchrun,
    weights_of,
)
from repository import ROOT
from shardstep import ShardConfig
from shardstep.checkpoint.manifest import read_contents, read_manifest
from shardstep.integrations.lightning import ShardStepStrategy
from training import raised

pytestmark = pytest.mark.filterwarnings("ignore")  # what Lightning warns of is its own affair

UNUSED = "ddp_find_unused_parameters_true"

# -- 20 steps against Lightning's DDP and the plain optimizer ----------------------------------------------------------


def trains(
    kind: str, folder: Path, options: dict[str, Any], config: ShardConfig | None = None, *, recomputes: bool = False
) -> Any:
    with under_torchrun():
        model = Regression(kind, config, recomputes=recomputes)
        trainer = trainer_of(kind, folder, **options)
        trainer.fit(model, loader())
        assert trainer.global_step == 20
        return weights_of(model)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


EXACT: dict[str, dict[str, Any]] = {
    "fp32": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
}


@pytest.mark.parametrize("case", EXACT)
def test_twenty_steps_are_those_of_lightnings_ddp_to_the_bit(workers, tmp_path, case):
    # Lightning steps bf16 parameters as they are, without masters; with them, the default, ours would be better.
    config = ShardConfig(master="none") if case == "bf16-true" else None
    theirs = workers(2).run(trains, PLAIN, tmp_path, EXACT[case])
    ours = workers(2).run(trains, FAST, tmp_path, EXACT[case], config)
    for mine in ours:
        assert difference(mine, theirs[0]) == 0
    assert difference(theirs[0], weights_of(Regression(PLAIN))) > 1e-3, "it has trained"


def test_activation_checkpoints_and_weights_that_arrive_later_give_the_same_bits(workers, tmp_path):
    theirs = workers(2).run(trains, PLAIN, tmp_path, {}, recomputes=True)
    overlap = ShardConfig(gather="overlap", bucket_mb=1e-3)
    for ours in workers(2).run(trains, FAST, tmp_path, {}, overlap, recomputes=True):
        assert difference(ours, theirs[0]) == 0


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_clipping_by_norm_is_lightnings(workers, tmp_path, precision):
    options = {"gradient_clip_val": 0.05, "accumulate_grad_batches": 2, "precision": precision}
    theirs = workers(2).run(trains, PLAIN, tmp_path, options)
    ours = workers(2).run(trains, FAST, tmp_path, options)
    unclipped = workers(2).run(trains, FAST, tmp_path, options | {"gradient_clip_val": None})
    # The norm is summed up piece by piece, and differs in its last bits; a clipped gradient by as much, about 1e-7 of
    # it, and AdamW's step, which is no longer than its rate of 3e-3, by less than 1e-6 of that in each of 20 steps.
    assert difference(ours[0], theirs[0]) < 20 * 3e-3 * 1e-6 * 10
    assert difference(ours[0], ours[1]) == 0
    assert difference(ours[0], unclipped[0]) > 1e-4, "it was clipped"


def trains_in_fp16(kind: str, folder: Path, fused: bool) -> Any:
    """On the CPU, Lightning has no fp16 of its own: by its plugin, with a scaler that also skips a step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    with under_torchrun():
        model = WithSgd(kind, fused)
        trainer = trainer_of(kind, folder, plugins=[plugin], gradient_clip_val=0.05)
        trainer.fit(model, loader())
        assert getattr(trainer.optimizers[0], "_step_supports_amp_scaling", False) == fused
        return weights_of(model), trainer.precision_plugin.scaler.get_scale()


class WithSgd(Regression):
    """Whose steps are as long as its gradients, other than AdamW's."""

    def __init__(self, kind: str, fused: bool) -> None:
        super().__init__(kind)
        self.options = {"lr": 0.1, "fused": fused}

    def configure_optimizers(self) -> Any:
        if self.kind == FAST:
            return shardstep.shard(self, optim.SGD, **self.options)
        return optim.SGD(self.parameters(), **self.options)


@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_scales_and_clips(workers, tmp_path, fused):
    # With a fused optimizer, whose step unscales, Lightning itself refuses to clip; ours is unscaled before.
    theirs, scale = workers(2).run(trains_in_fp16, PLAIN, tmp_path, False)[0]
    for ours, own in workers(2).run(trains_in_fp16, FAST, tmp_path, fused):
        assert own == scale
        assert difference(ours, theirs) < 1e-6  # as in clipping by norm
    assert scale != 2.0**20, "it was changed"
    assert difference(theirs, weights_of(Regression(PLAIN))) > 1e-3, "it has trained"


@pytest.mark.parametrize("case", ["fp32", "accumulation", "bf16-mixed"])
def test_the_drop_in_with_strategy_ddp_is_the_plain_one_to_the_bit(workers, tmp_path, case):
    theirs = workers(2).run(trains, PLAIN, tmp_path, EXACT[case])
    for ours in workers(2).run(trains, DROP_IN, tmp_path, EXACT[case]):
        assert difference(ours, theirs[0]) == 0


# -- checkpoint and resume ---------------------------------------------------------------------------------------------


def trains_and_saves(make: Any, kind: str, folder: Path, options: dict[str, Any]) -> Any:
    with under_torchrun():
        model = make(kind)
        saves = ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=-1, save_last=True)
        callbacks = [Snapshots(folder), saves]
        trainer = trainer_of(
            kind, folder, max_epochs=2, max_steps=-1, enable_checkpointing=True, callbacks=callbacks, **options
        )
        trainer.fit(model, loader())
        return weights_of(model)


def resumes(make: Any, kind: str, folder: Path, checkpoint: str, options: dict[str, Any]) -> Any:
    with under_torchrun():
        model = make(kind)
        nn.init.zeros_(next(model.parameters()))
        callback = Snapshots(folder)
        trainer = trainer_of(kind, folder, max_epochs=2, max_steps=-1, callbacks=[callback], **options)
        trainer.fit(model, loader(), ckpt_path=folder / "saved" / checkpoint)
        return callback.restored, weights_of(model)


CHECKPOINTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "fast lane": (Regression, FAST, {}),
    "fast lane, bf16 with masters": (Regression, FAST, {"precision": "bf16-true"}),
    "drop-in": (Regression, DROP_IN, {}),
    "two optimizers": (Gan, FAST, {}),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_saved_at_two_and_resumed_at_two_to_the_bit_and_at_three_and_one_with_equal_state(workers, tmp_path, case):
    make, kind, options = CHECKPOINTS[case]
    went_on = workers(2).run(trains_and_saves, make, kind, tmp_path, options)
    is_folder = (tmp_path / "saved" / "epoch=0.ckpt").is_dir()
    assert is_folder == (kind == FAST)
    saved = torch.load(tmp_path / "snapshot-0.pt", weights_only=True)
    for world_size in (2, 3, 1):
        found = workers(world_size).run(resumes, make, kind, tmp_path, "epoch=0.ckpt", options)
        assert_same(found[0][0], saved)
        if world_size == 2:
            assert_same(found[0][1], went_on[0])
            assert_same(found[1][1], went_on[0])


def test_the_last_checkpoint_is_kept_and_the_older_one_removed(workers, tmp_path):
    workers(2).run(keeps_one, tmp_path)
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["epoch=1.ckpt", "last.ckpt"]
    assert (tmp_path / "saved" / "last.ckpt" / "manifest.json").is_file()


def keeps_one(folder: Path) -> None:
    with under_torchrun():
        saves = ModelCheckpoint(folder / "saved", filename="{epoch}", save_top_k=1, save_last=True)
        trainer = trainer_of(FAST, folder, max_epochs=2, max_steps=-1, enable_checkpointing=True, callbacks=[saves])
        model = Regression(FAST)
        trainer.fit(model, loader())
        assert Path(trainer.checkpoint_callback.best_model_path).is_dir()
        trained = weights_of(model)
        nn.init.zeros_(model.net[0].weight)
        trainer.validate(model, loader(), ckpt_path=folder / "saved" / "last.ckpt", verbose=False)
        assert_same(weights_of(model), trained)


def saves_after_fit(folder: Path) -> None:
    with under_torchrun():
        model = Regression(FAST)
        trainer = trainer_of(FAST, folder)
        trainer.fit(model, loader())
        trainer.save_checkpoint(folder / "after.ckpt")
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        other = Regression(FAST)
        shardstep.load(folder / "weights.ckpt", other)
        assert_same(weights_of(other), weights_of(model))
        opt = other.configure_optimizers()["optimizer"]
        shardstep.load(folder / "after.ckpt", other, opt)
        opt.consolidate_state_dict(0)
        trainer.optimizers[0].consolidate_state_dict(0)
        if dist.get_rank() == 0:
            assert_same(dict(opt.state_dict()["state"]), dict(trainer.optimizers[0].state_dict()["state"]))
        kind, text = raised(lambda: trainer_of(FAST, folder).fit(other, loader(), ckpt_path=folder / "weights.ckpt"))
        assert "it was saved without an optimizer" in text, (kind, text)


def test_a_checkpoint_is_shardsteps_own_and_can_be_saved_after_fit(workers, tmp_path):
    workers(2).run(saves_after_fit, tmp_path)


def goes_on_from_a_file(folder: Path) -> Any:
    with under_torchrun():
        trainer_of(PLAIN, folder, max_steps=10).fit(model := Regression(PLAIN), loader())
        model.trainer.save_checkpoint(folder / "plain.ckpt")
        found = []
        for kind in (PLAIN, FAST):
            trainer = trainer_of(kind, folder)
            trainer.fit(other := Regression(kind), loader(), ckpt_path=folder / "plain.ckpt")
            found.append(weights_of(other))
        return found


def test_a_file_of_lightnings_ddp_goes_on_with_the_fast_lane(workers, tmp_path):
    for theirs, ours in workers(2).run(goes_on_from_a_file, tmp_path):
        assert difference(ours, theirs) == 0


class Halved(Regression):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {key: value / 2 for key, value in checkpoint["state_dict"].items()}


def loads_what_the_hook_made(folder: Path) -> None:
    with under_torchrun():
        model = Regression(FAST)
        trainer_of(FAST, folder, max_steps=2).fit(model, loader())
        model.trainer.save_checkpoint(folder / "whole.ckpt")
        other = Halved(FAST)
        trainer_of(FAST, folder, max_steps=2).fit(other, loader(), ckpt_path=folder / "whole.ckpt")
        assert_same({key: 2 * value for key, value in weights_of(other).items()}, weights_of(model))


def test_on_load_checkpoint_may_change_the_weights(workers, tmp_path):
    workers(2).run(loads_what_the_hook_made, tmp_path)


def averages(kind: str, folder: Path, epochs: int, checkpoint: Path | None = None) -> Any:
    """The weights that a run ends with, which are averages; and those that its last checkpoint gives to another."""
    with under_torchrun():
        model = Regression(kind)
        callbacks = [EMAWeightAveraging(decay=0.9), ModelCheckpoint(folder, save_last=True)]
        options = {"callbacks": callbacks, "enable_checkpointing": True, "max_steps": -1, "max_epochs": epochs}
        trainer_of(kind, folder, **options).fit(model, loader(), loader(), ckpt_path=checkpoint)
        other = Regression(kind)
        trainer_of(kind, folder).validate(other, loader(), ckpt_path=folder / "last.ckpt", verbose=False)
        return weights_of(model), weights_of(other)


def test_averages_that_a_callback_saves_in_the_place_of_weights_come_back(workers, tmp_path):
    """Before: the weights themselves were saved, the average went on from them, and nothing was said."""
    whole = {kind: workers(2).run(averages, kind, tmp_path / kind, 2)[0] for kind in (PLAIN, FAST)}
    assert_same(whole[FAST], whole[PLAIN])
    assert_same(*whole[FAST])
    workers(2).run(averages, FAST, tmp_path / "halves", 1)
    for ours in workers(2).run(averages, FAST, tmp_path / "halves", 2, tmp_path / "halves" / "last.ckpt"):
        assert_same(ours, whole[FAST])


# -- several optimizers ------------------------------------------------------------------------------------------------


def trains_a_gan(kind: str, folder: Path) -> Any:
    with under_torchrun():
        model = Gan(kind)
        trainer = trainer_of(kind, folder, max_steps=40, ddp=UNUSED)  # Lightning counts the steps of both
        trainer.fit(model, loader())
        return weights_of(model)


def test_a_gan_with_two_optimizers_is_that_of_lightnings_ddp_to_the_bit(workers, tmp_path):
    theirs = workers(2).run(trains_a_gan, PLAIN, tmp_path)
    for ours in workers(2).run(trains_a_gan, FAST, tmp_path):
        assert difference(ours, theirs[0]) == 0
    assert difference(theirs[0], weights_of(Gan(PLAIN))) > 1e-3


# -- what is refused, before training begins ---------------------------------------------------------------------------


class Refused(Regression):
    def __init__(self, returns: Any) -> None:
        super().__init__(FAST)
        self.returns = returns
        self.frozen_or_not = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return RETURNED[self.returns](self)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        raise AssertionError("training has begun")


def shard_twice(module: nn.Module) -> Any:
    return [shardstep.shard(module, optim.SGD, lr=0.1), shardstep.shard(module, optim.SGD, lr=0.2)]


RETURNED: dict[str, Any] = {
    r"optimizer 0 of configure_optimizers is AdamW: return shardstep\.shard\(self": lambda module: optim.AdamW(
        module.parameters()
    ),
    r"is the drop-in, which needs DDP: use Trainer\(strategy='ddp'\)": lambda module: shardstep.ZeroRedundancyOptimizer(
        module.parameters(), optim.AdamW, lr=0.1
    ),
    "was made for a Sequential, and checkpoints need names of the whole module": lambda module: shardstep.shard(
        module.net, optim.AdamW, lr=0.1
    ),
    "no group has frozen_or_not.weight, frozen_or_not.bias: add a group": lambda module: shardstep.shard(
        module, optim.AdamW, groups=[{"params": "net.*"}], lr=0.1
    ),
    'steps inside backward (step="backward")': lambda module: shardstep.shard(
        module, optim.AdamW, lr=0.1, config=ShardConfig(step="backward")
    ),
}


def is_refused(folder: Path) -> list[tuple[str, str]]:
    with under_torchrun():
        clipped = {"gradient_clip_val": 1.0}
        found = [raised(lambda r=r: trainer_of(FAST, folder, **clipped).fit(Refused(r), loader())) for r in RETURNED]
        asynchronous = trainer_of(FAST, folder, plugins=[AsyncCheckpointIO()])
        found.append(raised(lambda: asynchronous.fit(Regression(FAST), loader())))
        elsewhere = trainer_of(FAST, folder)
        elsewhere._default_root_dir = "s3://bucket/run"
        found.append(raised(lambda: elsewhere.fit(Regression(FAST), loader())))
        found.append(raised(lambda: trainer_of("ddp", folder).fit(Regression(FAST), loader())))
        return found


def test_what_cannot_be_trained_is_refused_before_training(workers, tmp_path):
    expected = [
        *RETURNED,
        "AsyncCheckpointIO cannot be used with ShardStepStrategy",
        "s3://bucket/run is not a local path: give a folder on a file system that all ranks share",
        "called inside DistributedDataParallel, which averages its gradients, too",
    ]
    for found in workers(2).run(is_refused, tmp_path):
        for (_, text), words in zip(found, expected, strict=True):
            assert words in text or re.search(words, text), text


class Failing(Regression):
    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        if number == 3:
            raise ValueError("no wind")
        return super().training_step(batch, number)


def fails_and_trains_again(folder: Path) -> tuple[str, str]:
    with under_torchrun():
        model = Failing(FAST)
        found = raised(lambda: trainer_of(FAST, folder).fit(model, loader()))
        assert type(model.net[0].weight) is nn.Parameter, "it was let go of"
        trainer_of(FAST, folder).fit(again := Regression(FAST), loader())
        assert difference(weights_of(again), weights_of(model)) > 0
        return found


def test_a_failure_while_training_is_the_one_that_is_shown(workers, tmp_path):
    assert workers(2).run(fails_and_trains_again, tmp_path) == [("ValueError", "no wind")] * 2


def test_options_of_ddp_are_refused_with_what_to_do():
    with pytest.raises(TypeError, match="no option find_unused_parameters: the module is not wrapped"):
        ShardStepStrategy(find_unused_parameters=True)
    with pytest.raises(TypeError, match="no option start_method"):
        ShardStepStrategy(start_method="spawn")
    assert issubclass(ShardStepStrategy, DDPStrategy)


# -- by Lightning's own launcher ---------------------------------------------------------------------------------------


def run_program(folder: Path, program: str, *arguments: str) -> str:
    file = folder / "train.py"
    file.write_text(program)
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, sys.path)])
    loopback = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
    told = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback}
    done = subprocess.run(
        [sys.executable, str(file), *arguments],
        cwd=folder,
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stderr + done.stdout


def saved_by(folder: Path) -> tuple[int, int]:
    """How many ranks have written the last checkpoint, and of which step."""
    last = folder / "run" / "last.ckpt"
    packed = shardstep.load(last, small_of_the_docs())["lightning"]
    rest = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    return read_contents(last, read_manifest(last)).world_size, rest["global_step"]


def small_of_the_docs() -> nn.Module:
    return nn.ModuleDict({"net": nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 1))})


def test_the_program_in_the_docs_trains_on_two_processes_and_goes_on_with_one_under_lightnings_other_name(tmp_path):
    section = (ROOT / "docs" / "integrations.md").read_text().split("\n## Lightning\n")[1]
    program = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    run_program(tmp_path, program, "2", "2")
    # 256 samples in batches of 16 are 8 batches for each of two ranks, and 4 steps of two batches, in each of 2 epochs.
    assert saved_by(tmp_path) == (2, 8)
    said = run_program(tmp_path, program.replace("lightning.pytorch", "pytorch_lightning"), "1", "4")
    assert "last.ckpt" in said
    assert saved_by(tmp_path) == (1, 8 + 2 * 8)


def test_shardstep_alone_imports_no_framework():
    program = (
        "import sys, shardstep; shardstep.shard, shardstep.save, shardstep.ZeroRedundancyOptimizer; "
        "print({'lightning', 'pytorch_lightning', 'ray'} & {name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
