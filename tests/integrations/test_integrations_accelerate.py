"""Accelerate itself, with DDP + AdamW against both of shardstep's optimizers. `make test-frameworks`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shardstep
from hugging_face import assert_same, documented, errors_of, launched, torchrun, weights_of, whole_state

pytest.importorskip("accelerate", reason="accelerate is not installed; make test-frameworks installs it")

# What Accelerate and torch warn of here is their own affair: a scheduler without a step, few threads.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(170)]

STEPS = 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.body = nn.Sequential(nn.Linear(16, 33), nn.GELU(), nn.LayerNorm(33), nn.Linear(33, 16))
        self.unused = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.body(self.embedding(tokens)) @ self.embedding.weight.T


@dataclass(frozen=True)
class Run:
    """One training: which optimizer, and how."""

    kind: str = "fast"  # or "drop-in", "plain": all with ours or with Accelerate's own accelerator
    sharded: bool = True  # a ShardedAccelerator
    accumulate: int = 1
    max_norm: float | None = None
    clip_value: float | None = None
    precision: str = "no"
    scaled: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    overflow_at: int | None = None
    bf16_parameters: bool = False


class Training:
    """A program as people write it: only `__init__` knows what is sharded."""

    def __init__(self, run: Run) -> None:
        from accelerate import Accelerator

        from shardstep.integrations.accelerate import ShardedAccelerator

        self.run, self.skipped = run, 0
        kind = ShardedAccelerator if run.sharded else Accelerator
        self.accelerator = kind(gradient_accumulation_steps=run.accumulate, mixed_precision=run.precision)
        if run.scaled:  # Accelerate makes one itself on a GPU only
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=7)
        torch.manual_seed(5)
        model = Model().to(torch.bfloat16 if run.bf16_parameters else torch.float32)
        options = {"lr": 1e-2, **dict(run.options)}
        trained = list(model.parameters())
        match run.kind:
            case "fast":
                optimizer: Any = shardstep.shard(model, torch.optim.AdamW, **options)
            case "drop-in":
                optimizer = shardstep.ZeroRedundancyOptimizer(trained, torch.optim.AdamW, **options)
            case _:
                optimizer = torch.optim.AdamW(trained, **options)
        count = STEPS * run.accumulate * 4 * 6  # for as many steps at 3 ranks, or at 2 and some over
        tokens = torch.randint(50, (count, 5), generator=torch.Generator().manual_seed(1))
        loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=4)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
        self.model, self.optimizer, self.loader, self.scheduler = self.accelerator.prepare(
            model, optimizer, loader, scheduler
        )
        self.steps = 0

    def train(self, steps: int) -> None:
        from accelerate import skip_first_batches

        for tokens, targets in skip_first_batches(self.loader, self.steps * self.run.accumulate):
            if steps == 0:
                break
            with self.accelerator.accumulate(self.model):
                logits = self.model(tokens)
                loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
                if self.steps == self.run.overflow_at and dist.get_rank() == 0:
                    loss = loss * torch.inf
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self._clip()
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.skipped += self.accelerator.optimizer_step_was_skipped
                self.steps, steps = self.steps + 1, steps - 1

    def _clip(self) -> None:
        if self.run.scaled and self.run.max_norm:  # as Accelerate does where it has made the scaler
            self.accelerator.scaler.unscale_(self.optimizer.optimizer)
        if self.run.max_norm:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.run.max_norm)
        if self.run.clip_value:
            self.accelerator.clip_grad_value_(self.model.parameters(), self.run.clip_value)

    def result(self) -> dict[str, Any]:
        bare = self.accelerator.unwrap_model(self.model)
        return {"weights": weights_of(bare), "lr": torch.tensor(self.scheduler.get_last_lr()),
                "skipped": torch.tensor(self.skipped), "state": whole_state(self.optimizer)}  # fmt: skip


def train_all(runs: list[Run]) -> list[dict[str, Any]]:
    results = []
    for run in runs:
        with launched():
            training = Training(run)
            is_wrapped = isinstance(training.model, nn.parallel.DistributedDataParallel)
            assert is_wrapped == (run.kind != "fast" and dist.get_world_size() > 1)
            training.train(STEPS)
            results.append(training.result())
    return results


def three_ways(run: Run) -> list[Run]:
    ours, accelerates = {"sharded": True}, {"sharded": False}
    return [replace(run, kind="plain", **accelerates), replace(run, kind="drop-in", **accelerates),
            replace(run, kind="drop-in", **ours), replace(run, kind="fast", **ours)]  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [
        Run(accumulate=3, clip_value=0.01),
        Run(precision="bf16", accumulate=2),
        Run(scaled=True, overflow_at=4),
    ],
    ids=["accumulate-and-clip-values", "bf16", "scaler"],
)
def test_twenty_steps_are_those_of_ddp_with_adamw(workers, run):
    for rank in workers(2).run(train_all, three_ways(run), timeout=120):
        plain, *others = rank
        assert plain["skipped"] == (run.overflow_at is not None)
        for other in others:
            # Two addends commute, and nothing else is added up in another order: to the bit.
            assert_same(other, plain)


def test_a_step_that_skips_on_the_device_is_a_skipped_step(workers):
    """Not so with Accelerate's own wrapper: it counts calls of step(), and schedulers go on."""
    run = Run(scaled=True, overflow_at=0, options=(("fused", True),))
    for rank in workers(2).run(train_all, three_ways(run), timeout=120):
        plain, with_theirs, with_ours, fast = rank
        assert plain["skipped"] == 0
        assert fast["skipped"] == 1
        assert_same(with_ours, with_theirs)
        assert_same(fast, with_ours)


def test_clipping_by_norm_differs_in_the_last_bits_of_the_norm(workers):
    for rank in workers(2).run(train_all, three_ways(Run(accumulate=2, max_norm=0.05)), timeout=120):
        plain, with_theirs, with_ours, fast = rank
        assert_same(with_theirs, plain)
        assert_same(with_ours, plain)
        # The norm adds squares piece by piece, not parameter by parameter: 1e-7 of a gradient, which Adam divides by
        # its own size. Twenty steps of at most 0.01 each, and their rounding: 1.2e-7 was seen.
        assert_same(fast["weights"], plain["weights"], atol=1e-6)


def trains_on_uneven_inputs(kind: str) -> dict[str, Any]:
    """Without state: under DDP a rank without inputs does not step, and its own copy of it would stay behind."""
    from accelerate import Accelerator

    from shardstep.integrations.accelerate import ShardedAccelerator

    with launched():
        accelerator = (Accelerator if kind == "plain" else ShardedAccelerator)()
        torch.manual_seed(5)
        model: Any = nn.Linear(4, 4)
        match kind:
            case "fast":
                optimizer: Any = shardstep.shard(model, torch.optim.SGD, lr=1e-2)
            case "drop-in":
                optimizer = shardstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2)
            case _:
                optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        x = torch.randn(18, 4, generator=torch.Generator().manual_seed(1))
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x), batch_size=2))
        joinables = [model, optimizer] if kind != "plain" else [model]
        batches = 0
        for _ in range(2):
            # On CPUs Accelerate does not join.
            with (
                mock.patch.object(Accelerator, "multi_device", True),
                accelerator.join_uneven_inputs(joinables, even_batches=False),
            ):
                for (inputs,) in loader:
                    accelerator.backward(model(inputs).square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
                    batches += 1
        assert batches == (10 if dist.get_rank() == 0 else 8)
        return weights_of(accelerator.unwrap_model(model))


def test_join_uneven_inputs_takes_the_model_that_is_not_ddps(workers):
    """Before: 'Linear' object has no attribute 'join_hook'."""
    plain = workers(2).run(trains_on_uneven_inputs, "plain", timeout=60)
    for kind in ("fast", "drop-in"):
        for ours in workers(2).run(trains_on_uneven_inputs, kind, timeout=60):
            assert_same(ours, plain[0])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def save_in_the_middle(run: Run, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with launched():
        training = Training(run)
        training.train(STEPS // 2)
        training.accelerator.save_state(str(folder))
        at_save = training.result()
        training.train(STEPS // 2)
        return at_save, training.result()


def load_and_go_on(run: Run, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    with launched():
        training = Training(run)
        training.train(1)  # what is loaded replaces what is there
        training.accelerator.load_state(str(folder))
        training.steps = STEPS // 2
        at_load = training.result()
        training.train(STEPS // 2)
        return at_load, training.result()


@pytest.mark.parametrize(
    "run",
    [Run(accumulate=2, max_norm=0.5), Run(bf16_parameters=True), Run(kind="drop-in", accumulate=2)],
    ids=["fast", "fast-with-masters", "drop-in"],
)
def test_save_at_two_ranks_resume_at_two_three_and_one(workers, tmp_path, run):
    saved = workers(2).run(save_in_the_middle, run, tmp_path / "state", timeout=120)
    assert (tmp_path / "state" / "shardstep" / "manifest.json").is_file()
    assert (tmp_path / "state" / "model.safetensors").is_file()
    for loaded, before in zip(workers(2).run(load_and_go_on, run, tmp_path / "state", timeout=120), saved, strict=True):
        for one, other in zip(loaded, before, strict=True):
            del one["skipped"], other["skipped"]
            assert_same(one, other)
    for ranks in (3, 1):
        for at_load, _ in workers(ranks).run(load_and_go_on, run, tmp_path / "state", timeout=120):
            del at_load["skipped"]
            assert_same(at_load, saved[0][0])


def test_a_state_that_ddp_with_adamw_has_saved_is_gone_on_with(workers, tmp_path):
    plain = Run(kind="plain", sharded=False)
    saved = workers(2).run(save_in_the_middle, plain, tmp_path / "state", timeout=120)
    for run in (Run(), Run(kind="drop-in"), Run(kind="drop-in", sharded=False)):
        for (_, end), (_, reached) in zip(
            workers(2).run(load_and_go_on, run, tmp_path / "state", timeout=120), saved, strict=True
        ):
            assert_same(end["weights"], reached["weights"])


def save_by_number(folder: Path) -> list[str]:
    """Automatic names, and a limit: Accelerate decides where, and removes what is old."""
    from accelerate.utils import ProjectConfiguration

    from shardstep.integrations.accelerate import ShardedAccelerator

    with launched():
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
        accelerator = ShardedAccelerator(project_config=project)
        model = nn.Linear(4, 4)
        model, optimizer = accelerator.prepare(model, shardstep.shard(model, torch.optim.AdamW))
        weights = []
        for _ in range(3):
            accelerator.backward(model(torch.ones(1, 4)).square().sum())
            optimizer.step()
            optimizer.zero_grad()
            accelerator.save_state()
            weights.append(weights_of(model))
        with torch.no_grad():
            model.weight.zero_()
        accelerator.load_state()
        assert_same(weights_of(model), weights[-1])
        texts = errors_of(
            lambda: optimizer.load_state_dict(torch.load(folder / "checkpoints" / "checkpoint_2" / "optimizer.bin")),
            lambda: torch.save(optimizer.state_dict(), folder / "alone"),
        )
        return [*sorted(path.name for path in (folder / "checkpoints").iterdir()), *texts]


def test_names_by_number_and_what_is_refused_outside_of_save_state(workers, tmp_path):
    for *names, alone, by_hand in workers(2).run(save_by_number, tmp_path, timeout=60):
        assert names == ["checkpoint_1", "checkpoint_2"]
        assert "saved by shardstep in 'shardstep': load it with load_state()" in alone
        assert "one rank's part of a sharded optimizer's state. Save with shardstep.save" in by_hand


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused() -> list[str]:
    from shardstep.integrations.accelerate import ShardedAccelerator

    with launched():
        accelerator = ShardedAccelerator()
        model, half, wrapped = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        prepared, _ = accelerator.prepare(model, shardstep.shard(model, torch.optim.AdamW))
        opt = shardstep.shard(half, torch.optim.AdamW)
        half.extra = nn.Parameter(torch.ones(2))
        ddp = accelerator.prepare(wrapped)
        found = errors_of(
            lambda: accelerator.clip_grad_norm_([model.weight], 1.0),
            lambda: accelerator.clip_grad_value_([*model.parameters(), *wrapped.parameters()], 1.0),
            lambda: accelerator.prepare(half, opt),
            lambda: shardstep.shard(ddp, torch.optim.AdamW),
        )
        del prepared
        return found


def refuses_another_engine() -> list[str]:
    from accelerate.state import PartialState
    from accelerate.utils import (
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        DistributedType,
        ParallelismConfig,
    )

    from shardstep.integrations.accelerate import ShardedAccelerator

    found = []
    with launched():
        PartialState()._shared_state["distributed_type"] = DistributedType.FSDP  # as where a GPU lets it be configured
        found += errors_of(ShardedAccelerator)
    with launched():
        accelerator = ShardedAccelerator()
        accelerator.state.parallelism_config = ParallelismConfig(dp_shard_size=2)
        found += errors_of(lambda: ShardedAccelerator.adopt(accelerator))
    with launched():
        hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
        accelerator, model = ShardedAccelerator(kwargs_handlers=[hook]), nn.Linear(4, 4)
        opt = shardstep.shard(model, torch.optim.AdamW)
        found += errors_of(lambda: accelerator.prepare(model, opt))
    return found


def test_what_cannot_be_done_is_refused_before_training(workers):
    for norm, value, half, ddp in workers(2).run(refused, timeout=60):
        assert norm.startswith("ValueError: clip_grad_norm_ was given 1 of the 2 trainable parameters")
        assert "2 of the 2 trainable parameters of a sharded optimizer and others" in value
        assert half.startswith("ValueError: no sharded optimizer trains extra of this Linear")
        assert ddp.startswith("TypeError: this model is wrapped in DistributedDataParallel")


def test_another_engine_is_refused(workers):
    for fsdp, mesh, hook in workers(2).run(refuses_another_engine, timeout=60):
        assert fsdp.startswith("ValueError: this accelerator is configured for FSDP, which cannot be combined with")
        assert hook.startswith("ValueError: comm_hook='fp16' of DistributedDataParallelKwargs has no effect without")
        assert mesh.startswith("ValueError: shardstep shards over data-parallel ranks, and this accelerator has")


# -- one process, and none of it where it is not asked for -------------------------------------------------------------

ALONE = """
import torch, shardstep
from shardstep.integrations.accelerate import ShardedAccelerator

accelerator = ShardedAccelerator(cpu=True)
model = torch.nn.Linear(4, 4)
model, optimizer = accelerator.prepare(model, shardstep.shard(model, torch.optim.AdamW))
accelerator.backward(model(torch.ones(1, 4)).square().sum())
optimizer.step()
accelerator.end_training()
print("stepped")
"""


def test_a_program_on_one_process_needs_no_process_group():
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "stepped"), done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU Accelerate knows better")
def test_one_of_several_processes_is_not_taken_for_the_only_one(tmp_path):
    (tmp_path / "script.py").write_text(ALONE.replace("cpu=True", ""))
    failure = torchrun(tmp_path / "script.py", ranks=2, folder=tmp_path, fails=True)
    assert "RuntimeError: there are 2 ranks, and Accelerate has found 1" in failure


def test_the_program_in_the_documentation_runs(tmp_path):
    assert torchrun(documented("Accelerate", tmp_path), ranks=2, folder=tmp_path).count("loss ") == 1
    assert (tmp_path / "accelerate-run" / "shardstep" / "manifest.json").is_file()


def test_shardstep_imports_no_framework():
    code = (
        "import shardstep, sys; shardstep.shard, shardstep.save; print({'accelerate', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"
