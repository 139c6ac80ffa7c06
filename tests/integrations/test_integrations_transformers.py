"""Hugging Face's Trainer itself: `Trainer` with DDP + AdamW against `ShardedTrainer`. `make test-frameworks`."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

import shardstep
from hugging_face import assert_same, documented, errors_of, launched, torchrun, weights_of, whole_state
from repository import ROOT

pytest.importorskip("transformers", reason="transformers is not installed; make test-frameworks installs it")
pytest.importorskip("accelerate", reason="accelerate is not installed; make test-frameworks installs it")

# What the frameworks and torch warn of here is their own affair.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(170)]

STEPS = 20


class Tokens(Dataset):
    """Random tokens, the same on every rank; the Trainer deals them out."""

    def __init__(self, count: int, seed: int) -> None:
        self.rows = torch.randint(64, (count, 12), generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[place], "labels": self.rows[place]}


def make_model(kind: str) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=64, num_key_value_heads=2, **sizes))
    # With dropout, as it is: the random numbers are part of what is resumed.
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=4))


@dataclass(frozen=True)
class Run:
    kind: str = "sharded"  # or "plain", "drop-in", "given": by `optimizers`
    model: str = "llama"
    accumulate: int = 1
    max_norm: float = 0.0
    bf16: bool = False
    evaluates: bool = False
    stop_after: int | None = None  # and resume another time
    config: shardstep.ShardConfig | None = None


def make_trainer(run: Run, folder: Path) -> Any:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from shardstep.integrations.transformers import ShardedTrainer

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == run.stop_after

    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=2, learning_rate=1e-2, weight_decay=0.1,
        gradient_accumulation_steps=run.accumulate, max_grad_norm=run.max_norm, bf16=run.bf16, use_cpu=True,
        save_strategy="steps", save_steps=10, save_total_limit=2, logging_steps=5, report_to=[], disable_tqdm=True,
        lr_scheduler_type="cosine", warmup_steps=3, eval_strategy="steps" if run.evaluates else "no", eval_steps=5,
        load_best_model_at_end=run.evaluates,
    )  # fmt: skip
    model = make_model(run.model)
    given: dict[str, Any] = {}
    if run.kind == "drop-in":
        given["optimizers"] = shardstep.ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2), None
    elif run.kind == "given":
        given["optimizers"] = shardstep.shard(model, torch.optim.AdamW, lr=1e-2), None
    elif run.kind == "plain-given":
        given["optimizers"] = torch.optim.AdamW(model.parameters(), lr=1e-2), None
    if not run.kind.startswith("plain"):
        given["shard_config"] = run.config
    chosen = Trainer if run.kind.startswith("plain") else ShardedTrainer
    data, held_out = Tokens(4 * 3 * 2 * run.accumulate * STEPS, 1), Tokens(20, 2)
    return chosen(model=model, args=arguments, train_dataset=data, eval_dataset=held_out, callbacks=[Stop()], **given)


def result_of(trainer: Any) -> dict[str, Any]:
    history = [{key: value for key, value in row.items() if "loss" in key or key in ("grad_norm", "learning_rate")}
               for row in trainer.state.log_history]  # fmt: skip
    logged = {str(number): {k: torch.tensor(float(v)) for k, v in row.items()} for number, row in enumerate(history)}
    return {"weights": weights_of(trainer.model), "state": whole_state(trainer.optimizer), "logged": logged}


def train_all(runs: list[Run], folder: Path) -> list[dict[str, Any]]:
    results = []
    for number, run in enumerate(runs):
        with launched():
            trainer = make_trainer(run, folder / str(number))
            trainer.train()
            is_wrapped = isinstance(trainer.model_wrapped, nn.parallel.DistributedDataParallel)
            assert is_wrapped == (run.kind in ("plain", "plain-given", "drop-in") and dist.get_world_size() > 1)
            results.append(result_of(trainer))
    return results


@pytest.mark.parametrize(
    "run",
    [
        Run(model="llama", accumulate=2, evaluates=True),
        Run(model="gpt2", evaluates=True),
        Run(model="gpt2", bf16=True, accumulate=2),
    ],
    ids=["llama", "gpt2", "gpt2-bf16"],
)
def test_twenty_steps_are_those_of_the_trainer_with_ddp_and_adamw(workers, tmp_path, run):
    runs = [replace(run, kind="plain"), run]
    if run.model == "llama":
        runs.append(replace(run, config=shardstep.ShardConfig(gather="overlap")))
    for plain, *others in workers(2).run(train_all, runs, tmp_path, timeout=150):
        assert sum("eval_loss" in row for row in plain["logged"].values()) == (4 if run.evaluates else 0)
        for other in others:
            # Two addends commute, and nothing is clipped: to the bit. The norm that is logged adds up squares in
            # another order, which is some units in its last place.
            assert_same(other["weights"], plain["weights"])
            assert_same(other["state"], plain["state"])
            assert_same(other["logged"], plain["logged"], atol=1e-5)


def test_given_optimizers_are_taken(workers, tmp_path):
    runs = [Run(kind="plain-given", model="gpt2"), Run(kind="drop-in", model="gpt2"), Run(kind="given", model="gpt2")]
    for plain, drop_in, given in workers(2).run(train_all, runs, tmp_path, timeout=150):
        assert_same(drop_in["weights"], plain["weights"])
        assert_same(given["weights"], plain["weights"])


def test_clipping_differs_in_the_last_bits_of_the_norm(workers, tmp_path):
    run = Run(model="llama", max_norm=0.1, accumulate=2)
    for plain, sharded in workers(2).run(train_all, [replace(run, kind="plain"), run], tmp_path, timeout=150):
        # The norm adds squares piece by piece, not parameter by parameter: 1e-7 of a gradient, which Adam divides by
        # its own size. Twenty steps of at most 0.01 each, and their rounding: 2.4e-7 was seen.
        assert_same(sharded["weights"], plain["weights"], atol=1e-6)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def train_and_resume(run: Run, folder: Path, checkpoint: Path | None) -> dict[str, Any]:
    with launched():
        trainer = make_trainer(run, folder)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return result_of(trainer)


def load_alone(run: Run, folder: Path, checkpoint: Path) -> dict[str, Any]:
    """What the optimizer has when training would begin."""
    from transformers import TrainerCallback

    found: dict[str, Any] = {}

    class Look(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            found.update({"weights": weights_of(given["model"]), "state": whole_state(given["optimizer"])})
            found["step"] = torch.tensor(state.global_step)

    with launched():
        trainer = make_trainer(run, folder)
        trainer.add_callback(Look())
        trainer.train(resume_from_checkpoint=str(checkpoint))
        assert trainer.state.global_step == STEPS
    return found


@pytest.mark.parametrize("run", [Run(model="gpt2", accumulate=2, max_norm=0.5), Run(kind="drop-in", model="llama")],
                         ids=["gpt2", "drop-in"])  # fmt: skip
def test_save_at_two_ranks_resume_at_two_three_and_one(workers, tmp_path, run):
    whole = workers(2).run(train_and_resume, run, tmp_path / "whole", None, timeout=120)
    halves = replace(run, stop_after=STEPS // 2)
    middle = workers(2).run(train_and_resume, halves, tmp_path / "halves", None, timeout=120)
    saved = tmp_path / "halves" / "checkpoint-10"
    assert {path.name for path in saved.iterdir()} >= {"shardstep", "model.safetensors", "optimizer.pt", "scheduler.pt"}
    for resumed, reference in zip(
        workers(2).run(train_and_resume, run, tmp_path / "halves", saved, timeout=120), whole, strict=True
    ):
        assert_same(resumed["weights"], reference["weights"])
        assert_same(resumed["state"], reference["state"])
    for ranks in (3, 1):
        for found in workers(ranks).run(load_alone, run, tmp_path / f"at-{ranks}", saved, timeout=120):
            assert found.pop("step") == 10
            assert_same(found, {"weights": middle[0]["weights"], "state": middle[0]["state"]})


def test_a_checkpoint_of_the_trainer_with_ddp_and_adamw_is_gone_on_with(workers, tmp_path):
    plain = Run(kind="plain", model="gpt2")
    whole = workers(2).run(train_and_resume, plain, tmp_path / "plain", None, timeout=120)
    saved = tmp_path / "plain" / "checkpoint-10"
    for resumed, reference in zip(
        workers(2).run(train_and_resume, Run(model="gpt2"), tmp_path / "sharded", saved, timeout=120),
        whole,
        strict=True,
    ):
        assert_same(resumed["weights"], reference["weights"])


# -- calls in another order --------------------------------------------------------------------------------------------


def train_twice(run: Run, folder: Path, evaluate_first: bool) -> dict[str, Any]:
    with launched():
        trainer = make_trainer(run, folder)
        if evaluate_first:
            torch.manual_seed(0)
            trainer.evaluate()
        for _ in range(2):
            torch.manual_seed(0)
            trainer.train()
            trainer.evaluate()
        trainer.save_model(str(folder / "end"))
        return {"weights": weights_of(trainer.model), "state": whole_state(trainer.optimizer)}


def test_train_again_and_evaluate_before(workers, tmp_path):
    from transformers import LlamaForCausalLM

    run, two = Run(), workers(2)
    plain = two.run(train_twice, replace(run, kind="plain"), tmp_path / "plain", False, timeout=120)
    for evaluate_first in (False, True):
        for ours, theirs in zip(
            two.run(train_twice, run, tmp_path / "sharded", evaluate_first, timeout=120), plain, strict=True
        ):
            assert_same(ours, theirs)
    assert_same(weights_of(LlamaForCausalLM.from_pretrained(tmp_path / "sharded" / "end")), plain[0]["weights"])


# -- what is refused ---------------------------------------------------------------------------------------------------


def refused(folder: Path) -> list[str]:
    from transformers import TrainingArguments

    from shardstep.integrations.transformers import ShardedTrainer

    def train(gpus: int = 0, **given: Any) -> None:
        arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=1)
        if gpus:
            arguments._n_gpu = gpus
        ShardedTrainer(model, arguments, train_dataset=Tokens(8, 1), **given).train()

    with launched():
        model = make_model("gpt2")
        return errors_of(
            lambda: train(optimizers=(torch.optim.AdamW(model.parameters()), None)),
            lambda: train(optimizer_cls_and_kwargs=(lambda: torch.optim.AdamW, {})),
            lambda: train(optimizer_cls_and_kwargs=(torch.optim.LBFGS, {"lr": 0.1})),
            lambda: train(gpus=2),
        )


def test_what_cannot_be_sharded_is_refused_before_training(workers, tmp_path):
    for plain, factory, coupled, gpus in workers(2).run(refused, tmp_path, timeout=60):
        assert plain.startswith("TypeError: the trainer has a AdamW, which is not sharded")
        assert "is not built from param groups, and cannot be sharded" in factory
        assert coupled.startswith("ValueError: ")
        assert "LBFGS" in coupled
        assert gpus.startswith("ValueError: this process has 2 GPUs, for which the Trainer would use DataParallel")


def refuses_what_would_not_be_sharded(folder: Path) -> list[str]:
    from transformers import Trainer, TrainingArguments

    from shardstep.integrations.transformers import Sharded, ShardedTrainer

    class Own(ShardedTrainer):
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    def train(kind: Any, **given: Any) -> None:
        arguments = TrainingArguments(output_dir=str(folder), use_cpu=True, report_to=[], max_steps=1)
        kind(make_model("gpt2"), arguments, train_dataset=Tokens(8, 1), **given).train()

    with launched():
        return errors_of(
            lambda: train(Own),
            lambda: type("Mine", (Trainer, Sharded), {}),
            lambda: train(ShardedTrainer, shard_config=shardstep.ShardConfig(step="backward")),
        )


def test_a_trainer_that_would_train_without_shards_is_refused(workers, tmp_path):
    """Before: a plain optimizer from create_optimizer, and Sharded named last, trained with DDP, and nobody said so."""
    for own, order, config in workers(2).run(refuses_what_would_not_be_sharded, tmp_path, timeout=60):
        assert own.startswith("TypeError: the trainer has a SGD, which is not sharded")
        assert order.startswith("TypeError: Mine has a trainer before Sharded among its bases, and would not shard")
        assert config.startswith('ValueError: ShardConfig(step="backward") steps inside backward')


# -- whole programs ----------------------------------------------------------------------------------------------------


def test_the_program_in_the_documentation_runs(tmp_path):
    assert torchrun(documented("Hugging Face Trainer", tmp_path), ranks=2, folder=tmp_path).count("loss ") == 1
    assert (tmp_path / "trainer-run" / "checkpoint-20" / "shardstep" / "manifest.json").is_file()


def test_the_lora_example_trains_and_goes_on(tmp_path):
    def run() -> list[str]:
        printed = torchrun(ROOT / "examples" / "lora_finetune.py", "--smoke", ranks=2, folder=tmp_path)
        return [line for line in printed.splitlines() if line.startswith(("begin", "step"))]

    begin, middle, end = run()
    assert begin.startswith("begin at step 0: 8,192 elements are trained")
    assert middle.startswith("step 6: ")
    shutil.rmtree(tmp_path / "lora-run" / "step-12")
    begin, again = run()
    assert begin.startswith("begin at step 6: ")
    assert again == end  # the same batches: to the bit
