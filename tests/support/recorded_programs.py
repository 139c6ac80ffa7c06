"""Programs whose collectives, streams, events and waits are recorded: what users write, with tiny models.

Each is a function of a recorder. The models say when a layer was computed and when its gradient is about to be, so that
a recording shows what runs beside what. All sizes differ, so that no two buckets can be taken for each other.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.amp import GradScaler
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import shardstep
from as_batched import by_batches
from as_collectives import by_collectives
from record_calls import recorded
from recorder import Recorder, Recording
from shardstep import Layout, ShardConfig, ZeroRedundancyOptimizer
from shardstep.ddp_zero_hook import hook_with_zero_step, hook_with_zero_step_interleaved, reduce_to_holders
from stand_in_streams import steps_on_two_streams

SMALL = 0.0004  # MB: a hundred elements of float32, so that parameters are cut by buckets and by ranks
WIDTHS = (6, 10, 14, 9, 5)
ITERATIONS = 3


class Mark(torch.autograd.Function):
    """The identity; its backward marks that the gradient of its input comes next."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, record: Recorder, text: str, number: int) -> torch.Tensor:
        ctx.note = lambda: record.mark(text, number)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.note()
        return gradient, None, None, None


class Layers(nn.Module):
    """Linear layers that mark when they are computed; `skip` is a layer that the next forward leaves out."""

    def __init__(self, record: Recorder, widths: Sequence[int] = WIDTHS, name: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(*pair) for pair in pairwise(widths)])
        self.record, self.title = record, f"{name}: " if name else ""
        self.skip: int | None = None
        record.names[f"{name}." if name else ""] = self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != self.skip:
                x = torch.tanh(layer(x))
                self.record.mark(f"{self.title}forward of layers", number)  # behind it: its weights have been read
                x = Mark.apply(x, self.record, f"{self.title}backward of layers", number)
        return x


class Normed(Layers):
    """With batch norm: buffers that follow rank 0."""

    def __init__(self, record: Recorder) -> None:
        super().__init__(record, (6, 8, 8))
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x))


def batch_for(model: nn.Module, seed: int = 0) -> torch.Tensor:
    first = next(model.parameters())
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    return torch.randn(4, first.shape[-1], generator=generator).to(first.dtype)


def loss_of(record: Recorder, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    record.phase("forward")
    return model(x).float().square().mean()


def backward(record: Recorder, loss: torch.Tensor) -> None:
    record.phase("backward")
    loss.backward()


def finish_iteration(record: Recorder, opt: Any) -> None:
    record.phase("step")
    opt.step()
    record.phase("zero_grad")
    opt.zero_grad()


def train(
    record: Recorder,
    model: nn.Module,
    opt: Any,
    iterations: int = ITERATIONS,
    between: Callable[[], None] = lambda: None,
) -> None:
    """`between` runs between backward and step."""
    x = batch_for(model)
    for _ in range(iterations):
        record.iteration()
        backward(record, loss_of(record, model, x))
        between()
        finish_iteration(record, opt)


def end(record: Recorder, *opts: Any) -> None:
    record.iteration("after training")
    for opt in opts:
        record.phase("synchronize")
        opt.synchronize()


def sharded(
    record: Recorder, model: nn.Module, kind: Any = optim.AdamW, *, groups: Any = None, lr: float = 0.01, **config: Any
) -> Any:
    """Return a sharded optimizer that uses NCCL's code. `config` are options of ShardConfig; buckets are small."""
    options = {"lr": lr} if groups is None else {}
    chosen = ShardConfig(**{"bucket_mb": SMALL, **config})
    with by_collectives("nccl"):
        return shardstep.shard(model, kind, groups=groups, process_group=record.group, config=chosen, **options)


def trains(record: Recorder, model: nn.Module | None = None, kind: Any = optim.AdamW, **config: Any) -> None:
    model = Layers(record) if model is None else model
    opt = sharded(record, model, kind, **config)
    train(record, model, opt)
    end(record, opt)


# -- layouts, gathers, buckets -----------------------------------------------------------------------------------------


def flat_wait(record: Recorder) -> None:
    """The defaults: elements are cut, and step() returns with finished weights."""
    trains(record)


def flat_overlap(record: Recorder) -> None:
    """gather="overlap": weights arrive in the next forward."""
    trains(record, gather="overlap")


def whole_wait(record: Recorder) -> None:
    """Layout.WHOLE: every parameter has one holder."""
    trains(record, layout=Layout.WHOLE)


def whole_overlap(record: Recorder) -> None:
    """Layout.WHOLE with gather="overlap"."""
    trains(record, layout=Layout.WHOLE, gather="overlap")


def one_bucket(record: Recorder) -> None:
    """Buckets of the usual size: all parameters are in one."""
    trains(record, bucket_mb=None)


def many_buckets_wait(record: Recorder) -> None:
    """More buckets than are stepped one by one: some are gathered in one launch."""
    trains(record, bucket_mb=SMALL / 2)


def many_buckets_overlap(record: Recorder) -> None:
    """The same with gather="overlap": each is gathered by itself."""
    trains(record, bucket_mb=SMALL / 2, gather="overlap")


def many_buckets_whole(record: Recorder) -> None:
    """Many buckets of whole parameters."""
    trains(record, Layers(record, (3, 5, 7, 4, 6, 3, 8, 2)), bucket_mb=SMALL / 4, layout=Layout.WHOLE)


# -- gradients ---------------------------------------------------------------------------------------------------------


def clips_flat(record: Recorder) -> None:
    """clip_grad_norm_ between backward and step."""
    model = Layers(record)
    opt = sharded(record, model)

    def clip() -> None:
        record.phase("clip_grad_norm_")
        opt.clip_grad_norm_(0.1)

    train(record, model, opt, between=clip)
    end(record, opt)


def clips_whole_overlap(record: Recorder) -> None:
    """The highest gradient, the norms of all parameters, and clipping by value, with gather="overlap"."""
    model = Layers(record)
    opt = sharded(record, model, layout=Layout.WHOLE, gather="overlap")

    def clip() -> None:
        record.phase("clip_grad_norm_ by the highest")
        opt.clip_grad_norm_(0.1, norm_type=float("inf"))
        record.phase("grad_norms")
        opt.grad_norms()
        record.phase("clip_grad_value_")
        opt.clip_grad_value_(0.01)

    train(record, model, opt, between=clip)
    end(record, opt)


def keeps_gradients(record: Recorder) -> None:
    """gradients="keep": every rank gets the whole mean."""
    trains(record, gradients="keep")


def keeps_whole_gradients(record: Recorder) -> None:
    """gradients="keep" with Layout.WHOLE and gather="overlap"."""
    trains(record, gradients="keep", layout=Layout.WHOLE, gather="overlap")


def ordered_sums(record: Recorder) -> None:
    """ordered_sums=True: an all-to-all in place of a reduce-scatter."""
    trains(record, ordered_sums=True)


def ordered_sums_whole(record: Recorder) -> None:
    """ordered_sums=True with ranges of different sizes."""
    trains(record, ordered_sums=True, layout=Layout.WHOLE)


def accumulates(record: Recorder, **config: Any) -> None:
    """Two passes inside no_sync(), and one that reduces; then two passes that both reduce."""
    model = Layers(record)
    opt = sharded(record, model, **config)
    for sends_each in (False, False, True, True):
        record.iteration()
        for last in (False, True) if sends_each else (False, False, True):
            with nullcontext() if last or sends_each else opt.no_sync():
                backward(record, loss_of(record, model, batch_for(model, int(last))))
        finish_iteration(record, opt)
    end(record, opt)


def accumulates_whole_overlap(record: Recorder) -> None:
    """The same with Layout.WHOLE and gather="overlap"."""
    accumulates(record, layout=Layout.WHOLE, gather="overlap")


def unused_on_one_rank(record: Recorder) -> None:
    """In one iteration rank 1 leaves a layer out, in another both do, in a third rank 1 has no backward pass."""
    model = Layers(record, (6, 10, 10, 5))
    opt = sharded(record, model)
    second = dist.get_rank() == 1
    for skips, passes in ((False, True), (second, True), (True, True), (False, not second), (False, True)):
        record.iteration()
        model.skip = 1 if skips else None
        if passes:
            backward(record, loss_of(record, model, batch_for(model)))
        finish_iteration(record, opt)
    end(record, opt)


def scales(record: Recorder) -> None:
    """A GradScaler, which unscales before it clips; in the second iteration a gradient is infinite on rank 1."""
    model = Layers(record)
    opt = sharded(record, model)
    scaler = GradScaler("cpu", init_scale=8.0, growth_interval=1)
    for iteration in range(ITERATIONS):
        record.iteration()
        loss = loss_of(record, model, batch_for(model))
        bad = float("inf") if iteration == 1 and dist.get_rank() == 1 else 1.0
        backward(record, scaler.scale(loss) * bad)
        record.phase("unscale_")
        scaler.unscale_(opt)
        record.phase("clip_grad_norm_")
        opt.clip_grad_norm_(0.1)
        record.phase("scaler.step")
        scaler.step(opt)
        scaler.update()
        record.phase("zero_grad")
        opt.zero_grad()
    end(record, opt)


# -- dtypes ------------------------------------------------------------------------------------------------------------


def masters_wait(record: Recorder) -> None:
    """bf16 parameters with fp32 masters."""
    trains(record, Layers(record).bfloat16())


def masters_whole_overlap(record: Recorder) -> None:
    """bf16 parameters with fp32 masters, Layout.WHOLE, gather="overlap", gradients reduced in float32."""
    settings = {"layout": Layout.WHOLE, "gather": "overlap", "reduce_dtype": torch.float32}
    trains(record, Layers(record).bfloat16(), **settings)


def stochastic_rounding(record: Recorder) -> None:
    """bf16 parameters without masters, rounded up or down by chance."""
    trains(record, Layers(record).bfloat16(), master="stochastic")


def mixed_dtypes(record: Recorder) -> None:
    """One layer in bf16 and the others in float32."""

    class Cast(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.bfloat16()).float()

    model = Layers(record)
    model.layers[1] = Cast(WIDTHS[1], WIDTHS[2], dtype=torch.bfloat16)
    trains(record, model)


def wire_bf16(record: Recorder) -> None:
    """wire="bf16": float32 matrices travel in half the bytes."""
    trains(record, wire="bf16")


def wire_bf16_whole_overlap(record: Recorder) -> None:
    """wire="bf16" with Layout.WHOLE and gather="overlap"."""
    trains(record, wire="bf16", layout=Layout.WHOLE, gather="overlap")


# -- optimizer classes -------------------------------------------------------------------------------------------------


def sgd(record: Recorder) -> None:
    """A class with less state."""
    trains(record, kind=optim.SGD)


def adafactor(record: Recorder) -> None:
    """A class that needs whole parameters: the layout follows from that."""
    trains(record, kind=optim.Adafactor)


def by_class(lr: float = 0.02) -> list[dict[str, Any]]:
    return [
        {"params": "*.weight", "optimizer": optim.Muon, "lr": lr},
        {"params": "rest", "optimizer": optim.AdamW, "lr": lr / 10},
    ]


def several_classes(record: Recorder) -> None:
    """Muon for matrices, AdamW for the rest, in one optimizer."""
    trains(record, kind=None, groups=by_class())


def several_classes_overlap(record: Recorder) -> None:
    """The same with gather="overlap" and clipping."""
    model = Layers(record)
    opt = sharded(record, model, None, groups=by_class(), gather="overlap")

    def clip() -> None:
        record.phase("clip_grad_norm_")
        opt.clip_grad_norm_(0.1)

    train(record, model, opt, between=clip)
    end(record, opt)


def muon_in_batches(record: Recorder) -> None:
    """Muon's matrices of one shape are stepped in batches, as on a GPU."""
    model = Layers(record, (8,) * 9)
    with by_batches():
        opt = sharded(record, model, None, groups=by_class(), bucket_mb=SMALL / 2)
        train(record, model, opt)
        end(record, opt)


def two_streams(record: Recorder) -> None:
    """Groups of buckets are stepped on two streams in turn, as those of large fused optimizers are on a GPU."""
    model = Layers(record)
    with steps_on_two_streams(record.streams):
        opt = sharded(record, model)
        train(record, model, opt)
        end(record, opt)


# -- the step inside backward ------------------------------------------------------------------------------------------


def step_in_backward(record: Recorder) -> None:
    """step="backward": each bucket is stepped as soon as it is reduced."""
    trains(record, step="backward")


def step_in_backward_overlap(record: Recorder) -> None:
    """The same with gather="overlap" and bf16 parameters with masters."""
    trains(record, Layers(record).bfloat16(), step="backward", gather="overlap")


def step_in_backward_whole(record: Recorder) -> None:
    """The same with whole parameters and a layer that is not used in the second iteration."""
    model = Layers(record, (6, 10, 10, 5))
    opt = sharded(record, model, step="backward", layout=Layout.WHOLE)
    for skip in (None, 1, None):
        model.skip = skip
        train(record, model, opt, 1)
    end(record, opt)


def step_in_backward_accumulates(record: Recorder) -> None:
    """The same with a pass inside no_sync() before the one that steps."""
    model = Layers(record)
    opt = sharded(record, model, step="backward")
    for _ in range(2):
        record.iteration()
        with opt.no_sync():
            backward(record, loss_of(record, model, batch_for(model)))
        backward(record, loss_of(record, model, batch_for(model, 1)))
        finish_iteration(record, opt)
    end(record, opt)


# -- several optimizers, new plans, averages ---------------------------------------------------------------------------


def two_models(record: Recorder) -> None:
    """Two models and two optimizers; one backward pass goes through both."""
    models = [Layers(record, (6, 10, 8), "first"), Layers(record, (8, 12, 5), "second")]
    opts = [sharded(record, model, gather=gather) for model, gather in zip(models, ("wait", "overlap"), strict=True)]
    for _ in range(ITERATIONS):
        record.iteration()
        record.phase("forward")
        loss = models[1](models[0](batch_for(models[0]))).square().mean()
        backward(record, loss)
        for opt in opts:
            finish_iteration(record, opt)
    end(record, *opts)


def two_optimizers_of_one_model(record: Recorder) -> None:
    """Matrices in one optimizer, the rest in another."""
    model = Layers(record)
    opts = [
        sharded(record, model, optim.Muon, groups=[{"params": "*.weight", "lr": 0.02}]),
        sharded(record, model, optim.AdamW, groups=[{"params": "*.bias", "lr": 0.01}]),
    ]
    for _ in range(2):
        record.iteration()
        backward(record, loss_of(record, model, batch_for(model)))
        for opt in opts:
            finish_iteration(record, opt)
    end(record, *opts)


def freezes(record: Recorder, **config: Any) -> None:
    """A layer is frozen for two iterations, and trains again: new plans, and state that moves between ranks."""
    model = Layers(record)
    opt = sharded(record, model, **config)
    for trainable in (True, False, False, True, True):
        model.layers[1].requires_grad_(trainable)
        train(record, model, opt, 1)
    end(record, opt)


def freezes_whole_overlap(record: Recorder) -> None:
    """The same with Layout.WHOLE and gather="overlap"."""
    freezes(record, layout=Layout.WHOLE, gather="overlap")


def adds_a_group(record: Recorder, **config: Any) -> None:
    """add_param_group in the middle of training."""
    model = Layers(record)
    late = list(model.layers[2].parameters())
    for param in late:
        param.requires_grad_(False)
    names = [name for name, param in model.named_parameters() if param.requires_grad]
    opt = sharded(record, model, groups=[{"params": names, "lr": 0.01}], **config)
    train(record, model, opt, 2)
    record.iteration("between iterations")
    record.phase("add_param_group")
    for param in late:
        param.requires_grad_(True)
    opt.add_param_group({"params": late, "lr": 0.02})
    train(record, model, opt, 2)
    end(record, opt)


def adds_a_group_overlap(record: Recorder) -> None:
    """The same with gather="overlap"."""
    adds_a_group(record, gather="overlap")


def ema(record: Recorder, **config: Any) -> None:
    """ShardConfig(ema=0.9): the average is swapped in and out between iterations."""
    model = Layers(record)
    opt = sharded(record, model, ema=0.9, **config)
    for _ in range(2):
        train(record, model, opt, 2)
        record.iteration("between iterations")
        record.phase("enter ema")
        with opt.ema():
            record.phase("evaluate")
            model(batch_for(model))
            record.phase("leave ema")
    end(record, opt)


def ema_whole_overlap(record: Recorder) -> None:
    """The same with Layout.WHOLE and gather="overlap"."""
    ema(record, layout=Layout.WHOLE, gather="overlap")


# -- what goes with training -------------------------------------------------------------------------------------------


def buffers_and_audit(record: Recorder) -> None:
    """Buffers follow rank 0 in every step; every second step ranks compare what they hold."""
    trains(record, Normed(record), audit=2)


def consolidates(record: Recorder) -> None:
    """The whole state on rank 0, and all of it loaded again."""
    model = Layers(record)
    opt = sharded(record, model)
    train(record, model, opt, 1)
    record.iteration("between iterations")
    record.phase("consolidate_state_dict")
    opt.consolidate_state_dict(to=0)
    record.phase("state_dict")
    opt.state_dict()
    record.phase("load_state_dict")
    opt.load_state_dict(opt.state_dict())
    train(record, model, opt, 1)
    end(record, opt)


def measured(record: Recorder) -> None:
    """Two iterations are measured, and reported."""
    model = Layers(record)
    opt = sharded(record, model, gather="overlap")
    train(record, model, opt, 1)
    with opt.measured():
        train(record, model, opt, 2)
        end(record, opt)
    record.phase("report")
    opt.report()


# -- the drop-in -------------------------------------------------------------------------------------------------------


def ddp_and_drop_in(record: Recorder, **options: Any) -> tuple[nn.Module, DistributedDataParallel, Any]:
    """Return a model, its DDP and its drop-in. What DDP itself sends goes from C++ to the backend: it is not seen."""
    model = Layers(record)
    ddp = DistributedDataParallel(model, process_group=record.group, bucket_cap_mb=SMALL)
    with by_collectives("nccl"):
        zero = ZeroRedundancyOptimizer(
            ddp.parameters(), optim.AdamW, process_group=record.group, lr=0.01, **options
        )  # fmt: skip
    return model, ddp, zero


def drop_in(record: Recorder) -> None:
    """ZeroRedundancyOptimizer steps after backward; parameters are packed to be sent."""
    model, ddp, zero = ddp_and_drop_in(record)
    train(record, ddp, zero)
    record.iteration("between iterations")
    record.phase("consolidate_state_dict")
    zero.consolidate_state_dict(to=0)
    model.layers[0].requires_grad_(False)
    for _ in range(2):  # without DDP, which refuses a parameter that no longer has a gradient
        record.iteration()
        backward(record, loss_of(record, model, torch.ones(4, WIDTHS[0])))
        finish_iteration(record, zero)


def drop_in_with_views(record: Recorder) -> None:
    """parameters_as_bucket_view=True: parameters are sent from where they lie. A group is added."""
    _, ddp, zero = ddp_and_drop_in(record, parameters_as_bucket_view=True)
    train(record, ddp, zero, 2)
    record.iteration("between iterations")
    record.phase("add_param_group")
    extra = nn.Parameter(torch.ones(7))
    zero.add_param_group({"params": [extra]})
    extra.grad = torch.ones(7)
    train(record, ddp, zero, 2)


def steps_inside_ddp(record: Recorder, wrap: Callable[..., Any], hook: Any, *, shards: bool, **options: Any) -> None:
    _, ddp, zero = ddp_and_drop_in(record, overlap_with_ddp=True, **options)
    ddp.register_comm_hook(None, wrap(hook, ddp, zero, shard_buckets=shards))
    x = batch_for(ddp)
    for _ in range(5):  # in the third DDP's buckets are final
        record.iteration()
        backward(record, loss_of(record, ddp, x))
        ddp.zero_grad()


def drop_in_inside_backward(record: Recorder) -> None:
    """hook_with_zero_step: the step follows the last bucket's gradients."""
    steps_inside_ddp(record, hook_with_zero_step, allreduce_hook, shards=False)


def drop_in_interleaved(record: Recorder) -> None:
    """hook_with_zero_step_interleaved, with buckets that are cut between ranks."""
    steps_inside_ddp(record, hook_with_zero_step_interleaved, allreduce_hook, shards=True)


def drop_in_to_holders(record: Recorder) -> None:
    """reduce_to_holders: a gradient goes only to the rank that steps it; updates begin with the first pass."""
    options = {"shards": True, "train_from_first_step": True}
    steps_inside_ddp(record, hook_with_zero_step_interleaved, reduce_to_holders, **options)


PROGRAMS: dict[str, Callable[[Recorder], None]] = {
    program.__name__: program
    for program in (
        flat_wait,
        flat_overlap,
        whole_wait,
        whole_overlap,
        one_bucket,
        many_buckets_wait,
        many_buckets_overlap,
        many_buckets_whole,
        clips_flat,
        clips_whole_overlap,
        keeps_gradients,
        keeps_whole_gradients,
        ordered_sums,
        ordered_sums_whole,
        accumulates,
        accumulates_whole_overlap,
        unused_on_one_rank,
        scales,
        masters_wait,
        masters_whole_overlap,
        stochastic_rounding,
        mixed_dtypes,
        wire_bf16,
        wire_bf16_whole_overlap,
        sgd,
        adafactor,
        several_classes,
        several_classes_overlap,
        muon_in_batches,
        two_streams,
        step_in_backward,
        step_in_backward_overlap,
        step_in_backward_whole,
        step_in_backward_accumulates,
        two_models,
        two_optimizers_of_one_model,
        freezes,
        freezes_whole_overlap,
        adds_a_group,
        adds_a_group_overlap,
        ema,
        ema_whole_overlap,
        buffers_and_audit,
        consolidates,
        measured,
        drop_in,
        drop_in_with_views,
        drop_in_inside_backward,
        drop_in_interleaved,
        drop_in_to_holders,
    )
}


def run_program(name: str) -> Recording:
    """Run a program on all ranks and return this rank's recording.

    It has a process group of its own, so that nothing that an earlier program left behind is seen.
    """
    gc.collect()
    group = dist.new_group()
    record = Recorder(group)
    try:
        with recorded(record):
            PROGRAMS[name](record)
            return record.finish()
    finally:
        record.names.clear()
        gc.collect()
        dist.destroy_process_group(group)
