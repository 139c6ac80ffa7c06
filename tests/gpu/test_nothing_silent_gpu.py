"""The programs of several other test files (see the imports) once more, on a GPU with NCCL."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
import test_audit
import test_fast_lane_bad_input
import test_fast_lane_join as uneven
import test_gradient_guard as guard
import test_one_owner
import test_optimizer_surface
import test_overlapped_gather
import test_saved_size
import test_step_preconditions as preconditions
from fast_lane_training import batch, loss_of
from shardstep import Layout, ShardConfig
from training import assert_ranks_equal, raised

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
    pytest.mark.filterwarnings("ignore:gather="),
]


def on_the_gpu(body: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.device("cuda"):
        return body(*args, **options)


# Those that make tensors without a device for a CPU function, or look at how Gloo sends, stay there.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    **{
        f"after step: {name}": (test_overlapped_gather.finds_finished_weights, (name, False))
        for name in ("reads", "data", "state_dict", "load_state_dict", "torch.save", "deepcopy", "parameters_to_vector",
                     "vector_to_parameters", "in place", "foreach", "a submodule alone", "repr", "AveragedModel")
    },
    **{
        f"computes weights: {name}": (test_overlapped_gather.computes_its_weights_from_finished_ones, (name,))
        for name in test_overlapped_gather.MADE
    },
    "compiled, eager": (test_overlapped_gather.compiled_after_shard, ("eager",)),
    "compiled, inductor": (test_overlapped_gather.compiled_after_shard, ("inductor",)),
    "compiled before": (test_overlapped_gather.compiled_before_shard, (True,)),
    "traced": (test_overlapped_gather.traced, ()),
    "builds differ": (preconditions.shards_differently, (False,)),
    **{
        f"replaced: {how}, {everywhere}": (preconditions.replaces_a_parameter, (False, how, everywhere))
        for how, everywhere in (("assignment", False), ("module", True), ("assign=True", True))
    },
    "rearranged": (preconditions.rearranges_the_model, ()),
    **{f"cast alone: {what}": (preconditions.casts_alone, (False, what)) for what in ("model", "parameter", "buffer")},
    "grown on one": (preconditions.grows_a_parameter, (False, False)),
    "grown on all": (preconditions.grows_a_parameter, (False, True)),
    "other state": (preconditions.loads_what_is_not_its_own, (True,)),
    **{f"reads gradients: {name}": (guard.reads_gradients, (name,)) for name in guard.READERS},
    "scales in a hook": (guard.scales_in_a_step_hook, ()),
    "zeroes the model": (guard.zeroes_the_model, (False,)),
    "again and again, closed": (guard.shards_again_and_again, ("overlap", True)),
    "again and again, dropped": (guard.shards_again_and_again, ("overlap", False)),
    "copied": (guard.is_copied, ("overlap",)),
    "accumulates, compiled": (guard.accumulates_under_the_compiler, ()),
    "parts with weights on their way": (guard.goes_apart_with_weights_on_their_way, ()),
    "no state on one rank": (guard.loads_nothing_on_one_rank, ()),
    "one head": (test_one_owner.shards_two_with_one_head, (False,)),
    "a part again": (test_one_owner.shards_a_part_again, ()),
    "unfreezes a shared backbone": (test_one_owner.unfreezes_what_two_models_share, (False,)),
    "in DDP": (test_fast_lane_bad_input.wraps_in_ddp, (False,)),
    "meta, LBFGS": (test_fast_lane_bad_input.passes_something_else, ()),
    "modes": (test_optimizer_surface.switches, ("overlap", False)),
    **{f"uneven inputs, {how}": (uneven.clips_like_ddp, ("as it is", how)) for how in ("norm", "highest", "value")},
    "uneven inputs, two passes": (uneven.leaves_between_two_passes, ("as it is", (3, 4))),
    "uneven inputs, no step": (uneven.drops_a_batch, ("as it is",)),
    "saves, flat": (test_saved_size.saves_what_it_has, (Layout.FLAT,)),
    "saves, whole": (test_saved_size.saves_what_it_has, (Layout.WHOLE,)),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_on_two_ranks(workers, name):
    body, args = PROGRAMS[name]
    workers(2, backend="nccl").run(on_the_gpu, body, *args, timeout=60)


@pytest.mark.parametrize("gather", ["wait", "overlap"])
def test_a_bit_that_flips_on_one_rank_is_found(workers, gather):
    for told in workers(3, backend="nccl").run(on_the_gpu, test_audit.goes_its_own_way, "2.weight", gather, False):
        assert "First in: 2.weight; ranks that differ from the others: [2]" in told[2]


@pytest.mark.parametrize(
    "program",
    [(preconditions.plateaus_alone, False), (preconditions.drops_alone, False, True, True)],
)
def test_a_program_on_three_ranks(workers, program):
    workers(3, backend="nccl").run(on_the_gpu, *program, timeout=60)


def has_a_rate_of_its_own(at_once: bool) -> str:
    """In a tensor on the device: to read it in every step, the host would wait. At shard, and in an audit, it does."""
    model, odd = nn.Linear(7, 3).cuda(), dist.get_rank() == 1
    rate = torch.tensor(0.3 if odd and at_once else 0.2, device="cuda")

    def trains() -> None:
        opt = shardstep.shard(model, optim.AdamW, lr=rate, capturable=True, config=ShardConfig(audit=2))
        for step in range(2):
            loss_of(model, batch(step)).backward()
            opt.step()
            opt.zero_grad()
            opt.param_groups[0]["lr"].fill_(0.1 if odd else 0.2)

    return raised(trains)[1]


def test_a_rate_on_the_device_that_differs_is_found(workers):
    (text,) = set(workers(2, backend="nccl").run(has_a_rate_of_its_own, True, timeout=60))
    assert "param_groups[0]['lr'] = tensor(0.3" in text
    (text,) = set(workers(2, backend="nccl").run(has_a_rate_of_its_own, False, timeout=60))
    assert "the options in param_groups" in text


def is_captured() -> None:
    """A CUDA graph of the forward: not of weights on their way, which a replay would wait for; and then of finished."""
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)]).cuda()
    config = ShardConfig(gather="overlap", bucket_mb=0.02)
    opt = shardstep.shard(model, optim.SGD, lr=0.1, config=config)
    x = torch.ones(4, 64, device="cuda")
    graph = torch.cuda.CUDAGraph()

    def capture() -> torch.Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that nothing was captured, where an error ends it
            with torch.cuda.graph(graph):
                return model(x)

    out = x
    for step in range(5):
        loss_of(model, batch(step, 64)).backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            if step == 1:
                assert "call synchronize() of the optimizer before" in raised(capture)[1]
                graph = torch.cuda.CUDAGraph()
                opt.synchronize()
                out = capture()
            elif step > 1:
                opt.synchronize()
                graph.replay()
                assert torch.allclose(out, model(x), rtol=1e-4, atol=1e-5), (out - model(x)).abs().max()
    assert_ranks_equal(list(model.parameters()))


def test_a_graph_of_the_forward_may_be_captured(workers):
    workers(2, backend="nccl").run(is_captured, timeout=60)
