"""bf16 and fp16 parameters with fp32 masters, against masters that are kept by hand on every rank."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, Net, batch
from shardstep import Layout, ShardConfig
from shardstep.stepping.element_state import COUNT
from shardstep.stepping.masters import MASTER
from test_optimizer_surface import TwoFaced
from training import assert_ranks_equal, raised

BOTH_WAYS = pytest.mark.parametrize("collectives", [False, True], ids=["messages", "collectives"])
SMALL = ShardConfig(bucket_mb=SMALL_BUCKETS)
ROUNDED = ShardConfig(bucket_mb=SMALL_BUCKETS, master="stochastic")


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    param = next(model.parameters())
    return model(batch(step).to(param.device, param.dtype)).float().square().mean()


class ByHand:
    """Every rank keeps all masters, and steps them with the mean of all gradients, summed in fp32 by rank."""

    def __init__(self, model: nn.Module, optimizer_class: Any, wide: bool = True, **options: Any) -> None:
        self._wide = wide  # fp16 gradients are kept in fp32
        self.divide_by = 1.0
        self.params = list(model.parameters())
        self.masters = [nn.Parameter(param.detach().float()) for param in self.params]
        self.optimizer = optimizer_class(self.masters, **options)

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is None:
                master.grad = None
                continue
            rows = [torch.empty_like(param.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(rows, param.grad)
            total = torch.zeros_like(master)
            for row in rows:
                total += row.float()
            mean = total / dist.get_world_size() / self.divide_by
            master.grad = mean if self._wide and param.dtype is torch.float16 else mean.to(param.dtype).float()
        self.optimizer.step()
        with torch.no_grad():
            for param, master in zip(self.params, self.masters, strict=True):
                param.copy_(master)
                param.grad = None


def assert_equal(model: nn.Module, twin: nn.Module, context: str, exact: bool = True) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        # The kernel rounds a few bits of fp32 otherwise: then now and then the next 16-bit number is the nearest.
        digit = 2 * torch.finfo(ours.dtype).eps
        same = torch.equal(ours, theirs) if exact else torch.allclose(ours, theirs, rtol=digit, atol=digit / 10)
        assert same, f"{context}: {name} differs by {(ours - theirs).abs().max()}"


def trains_like_masters_by_hand(
    dtype: torch.dtype, optimizer_class: Any, options: dict[str, Any], config: ShardConfig, collectives: bool
) -> None:
    model = Net().to(dtype)
    twin = copy.deepcopy(model)
    by_hand = ByHand(twin, optimizer_class, wide=config.gradients == "shard", **options)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optimizer_class, config=config, **options)
    for step in range(5):
        for net in (model, twin):
            net.second.requires_grad_(step != 2)  # a new plan, and back
            loss_of(net, step).backward()
        opt.step()
        opt.zero_grad()
        by_hand.step()
    opt.synchronize()
    assert_equal(model, twin, f"{config}", exact=not opt._engine.runtime.local_step.steppers)
    assert_ranks_equal(list(model.parameters()))


CONFIGS = {
    "default": SMALL,
    "whole": ShardConfig(bucket_mb=SMALL_BUCKETS, layout=Layout.WHOLE),
    "overlap": ShardConfig(bucket_mb=SMALL_BUCKETS, gather="overlap"),
    "keep": ShardConfig(bucket_mb=SMALL_BUCKETS, gradients="keep"),
}


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_masters_are_stepped_and_parameters_are_their_rounding(workers, ranks, config):
    options = {"lr": 1e-3, "weight_decay": 0.1}
    workers(ranks).run(trains_like_masters_by_hand, torch.bfloat16, optim.AdamW, options, config, False)


@pytest.mark.parametrize(("optimizer_class", "options"), [
    (optim.SGD, {"lr": 0.01, "momentum": 0.9}), (optim.AdamW, {"lr": 1e-3, "fused": True}),
    (optim.Adagrad, {"lr": 0.01}), (optim.AdamW, {"lr": 1e-3, "amsgrad": True, "foreach": True}),
])  # fmt: skip
def test_masters_of_other_optimizers(workers, optimizer_class, options):
    workers(2).run(trains_like_masters_by_hand, torch.bfloat16, optimizer_class, options, SMALL, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_masters_with_collectives(workers, ranks, dtype):
    """Ordered: the sum of the backend's own is in 16 bits."""
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=True)
    workers(ranks).run(trains_like_masters_by_hand, dtype, optim.AdamW, {"lr": 1e-3}, config, True)


def sends_and_holds() -> tuple[float, float]:
    """Bytes that this rank sends in a step, and holds before it, each over what it should be."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(301, 700), nn.Tanh(), nn.Linear(700, 300)).bfloat16()
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=ShardConfig(bucket_mb=0.2))
    sent, isend = 0, dist.isend

    def counting(tensor: torch.Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += tensor.nbytes
        return isend(tensor, **options)

    for step in range(2):
        sent = 0
        with mock.patch.object(dist, "isend", counting):
            model(torch.full((2, 301), 0.1 * step, dtype=torch.bfloat16)).float().square().mean().backward()
            held = opt.report().ranks[dist.get_rank()].held
            opt.step()
            opt.synchronize()
        opt.zero_grad()
    numel, ranks = sum(param.numel() for param in model.parameters()), dist.get_world_size()
    return sent / (4 * numel * (ranks - 1) / ranks), held / (numel * (2 + (2 + 12) / ranks))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_sixteen_bits_are_sent_as_such_and_masters_are_held_once(workers, ranks):
    for sent, held in workers(ranks).run(sends_and_holds):
        assert 0.98 <= sent <= 1.02, "of (N-1)/N of the parameters in fp32: gradients and weights, 2 bytes each"
        assert 0.97 <= held <= 1.03, "of 2 + (2 + 12)/N bytes per parameter"


# -- what 16 bits lose -------------------------------------------------------------------------------------------------


def goes_a_long_way(master: Any) -> float:
    """Four hundred steps, each a tenth of what 16 bits can tell apart at 1.0."""
    model = nn.Linear(8, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    opt = shardstep.shard(model, optim.SGD, lr=1.0, config=ShardConfig(master=master))
    for _ in range(400):
        (model.weight.float().sum() * 0.0004).backward()
        opt.step()
        opt.zero_grad()
    return model.weight.detach().float().mean().item()


@pytest.mark.filterwarnings("ignore:master=")
def test_small_steps_are_lost_without_masters_and_not_with_them(workers):
    for way in workers(2).run(goes_a_long_way, "none"):
        assert way == 1.0
    for way in workers(2).run(goes_a_long_way, "fp32"):
        assert abs(way - (1 - 400 * 0.0004)) < 0.005
    for way in workers(2).run(goes_a_long_way, "stochastic"):
        assert abs(way - (1 - 400 * 0.0004)) < 0.03  # three deviations of the mean of eight such walks


def rounds_by_chance(layout: Layout, gather: Any) -> list[torch.Tensor]:
    """The same gradients on all ranks: then their mean does not depend on how many there are."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 33), nn.Tanh(), nn.Linear(33, 5)).bfloat16()
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, master="stochastic", layout=layout, gather=gather)
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=config)
    x = torch.linspace(-1, 1, 28).view(4, 7).bfloat16()
    for step in range(5):
        model[2].requires_grad_(step != 2)
        model(x + step).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
    opt.synchronize()
    state = [value for entry in opt.state.values() for value in entry.values() if value.dim()]
    assert all(value.dtype is torch.float32 for value in state)
    return [param.detach().clone() for param in model.parameters()]


def test_rounding_by_chance_does_not_depend_on_ranks_or_layout(workers):
    found = [
        values
        for ranks in (1, 2, 4)
        for layout in (Layout.FLAT, Layout.WHOLE)
        for values in workers(ranks).run(rounds_by_chance, layout, "overlap" if ranks == 2 else "wait")
    ]
    assert all(all(map(torch.equal, found[0], other)) for other in found)


def rounded_model(optimizer_class: Any, options: dict[str, Any], config: ShardConfig = ROUNDED) -> tuple[Any, Any]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 33, bias=False), nn.Tanh(), nn.Linear(33, 5, bias=False)).bfloat16()
    return model, shardstep.shard(model, optimizer_class, lr=1e-3, config=config, **options)


def train_rounded(model: nn.Module, opt: Any, steps: range) -> None:
    x = torch.linspace(-1, 1, 28).view(4, 7).bfloat16()
    for step in steps:
        model(x + step).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


def weights_of(model: nn.Module) -> list[torch.Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def goes_on_rounding(folder: Path, optimizer_class: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    """The weights of a run of ten steps; interrupted after five and loaded in three ways, they are the same."""
    model, opt = rounded_model(optimizer_class, options)
    train_rounded(model, opt, range(5))
    shardstep.save(folder / f"at-{dist.get_world_size()}", model, opt)
    opt.consolidate_state_dict(to=0)
    whole = [copy.deepcopy((model.state_dict(), opt.state_dict()))] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(whole, src=0)
    part = copy.deepcopy((model.state_dict(), opt.state_dict()))
    train_rounded(model, opt, range(5, 10))
    wanted = weights_of(model)
    for weights, state in (whole[0], part):  # type: ignore[misc]
        model, opt = rounded_model(optimizer_class, options)
        model.load_state_dict(weights)
        opt.load_state_dict(state)
        train_rounded(model, opt, range(5, 10))
        assert all(map(torch.equal, weights_of(model), wanted))
    assert all(map(torch.equal, loads_rounded(folder, dist.get_world_size(), optimizer_class, options), wanted))
    return wanted


def loads_rounded(folder: Path, saved_at: int, optimizer_class: Any, options: dict[str, Any]) -> list[torch.Tensor]:
    model, opt = rounded_model(optimizer_class, options)
    shardstep.load(folder / f"at-{saved_at}", model, opt)
    train_rounded(model, opt, range(5, 10))
    return weights_of(model)


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [(optim.SGD, {}), (optim.SGD, {"momentum": 0.9}), (optim.Muon, {}), (optim.AdamW, {})],
    ids=["sgd", "momentum", "muon", "adamw"],
)
def test_noise_began_anew_when_a_run_was_resumed(workers, tmp_path, optimizer_class, options):
    given = (optimizer_class, options)
    found = [one for ranks in (1, 2) for one in workers(ranks).run(goes_on_rounding, tmp_path, *given, timeout=60)]
    for ranks, saved_at in ((1, 2), (2, 1)):
        found += workers(ranks).run(loads_rounded, tmp_path, saved_at, *given, timeout=60)
    assert all(all(map(torch.equal, found[0], other)) for other in found)


def rounds_on(with_new_plan: bool) -> list[torch.Tensor]:
    """Another group makes one, and everything is shared out anew."""
    model, opt = rounded_model(optim.SGD, {})
    train_rounded(model, opt, range(3))
    if with_new_plan:
        opt.add_param_group({"params": [nn.Parameter(torch.zeros(9).bfloat16())]})
    train_rounded(model, opt, range(3, 6))
    return weights_of(model)


def test_noise_began_anew_with_a_new_plan(workers):
    plain, replanned = (workers(2).run(rounds_on, new, timeout=30) for new in (False, True))
    assert all(map(torch.equal, plain[0], replanned[0]))


def loads_without_counts(folder: Path) -> None:
    """As a checkpoint from before they were saved: noise begins with the first step's."""
    model, opt = rounded_model(optim.SGD, {})
    train_rounded(model, opt, range(3))
    assert all(entry[COUNT].item() == 3 for entry in opt.state.values())
    state = opt.state_dict()
    for entry in state["state"].values():
        entry.pop(COUNT, None)
    fresh, other = rounded_model(optim.SGD, {})
    fresh.load_state_dict(model.state_dict())
    other.load_state_dict(state)
    assert not other.state
    train_rounded(fresh, other, range(1))
    assert all(entry[COUNT].item() == 1 for entry in other.state.values())
    # With masters, and to a plain optimizer, counts are nothing: they stay behind.
    shardstep.save(folder / "rounded", fresh, other)
    wide, with_masters = rounded_model(optim.SGD, {}, ShardConfig())
    shardstep.load(folder / "rounded", wide, with_masters)
    assert all(COUNT not in entry for entry in with_masters.state.values())
    with_masters.load_state_dict(other.state_dict())
    train_rounded(wide, with_masters, range(1))
    assert all(COUNT not in entry for entry in with_masters.state.values())
    plain = nn.Sequential(nn.Linear(7, 33, bias=False), nn.Tanh(), nn.Linear(33, 5, bias=False)).bfloat16()
    sgd = optim.SGD(plain.parameters(), lr=1e-3)
    shardstep.load(folder / "rounded", plain, sgd)
    assert not sgd.state


def test_a_checkpoint_without_counts_of_noise_is_loaded_and_counts_go_to_nobody_else(workers, tmp_path):
    workers(2).run(loads_without_counts, tmp_path, timeout=30)


def refuses_to_round_halves() -> str:
    config = ShardConfig(master="stochastic")
    return raised(lambda: shardstep.shard(nn.Linear(3, 3).half(), optim.SGD, config=config))[1]


def test_rounding_by_chance_is_for_bfloat16(workers):
    (text,) = workers(1).run(refuses_to_round_halves)
    assert "weight is float16" in text


# -- who writes a weight -----------------------------------------------------------------------------------------------


def halves(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)


def halves_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data.mul_(0.5)


def replaces_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.data * 0.5


def sets_data(model: nn.Module) -> None:
    for param in model.parameters():
        param.data = param.detach() * 0.5


def loads(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})


def writes_state(model: nn.Module) -> None:
    for value in model.state_dict().values():
        value.mul_(0.5)


WRITES = {write.__name__: write for write in (halves, halves_data, replaces_data, sets_data, loads, writes_state)}


def writes_between_steps(name: str, gather: Any, ordered: bool = False) -> None:
    model = Net().bfloat16()
    twin = copy.deepcopy(model)
    by_hand = ByHand(twin, optim.AdamW, lr=1e-3)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, gather=gather, ordered_sums=ordered)
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=config)
    for step in range(4):
        if step in (1, 2):
            WRITES[name](model)
            halves(twin)
            with torch.no_grad():
                for param, master in zip(by_hand.params, by_hand.masters, strict=True):
                    # What the program did not change keeps its master: zeros, and what half of is itself.
                    master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        for net in (model, twin):
            loss_of(net, step).backward()
        opt.step()
        opt.zero_grad()
        by_hand.step()
    opt.synchronize()
    assert_equal(model, twin, name)


@pytest.mark.parametrize("gather", ["wait", "overlap"])
@pytest.mark.parametrize("name", WRITES)
def test_what_the_program_writes_to_a_weight_is_not_undone_by_its_master(workers, name, gather):
    workers(2).run(writes_between_steps, name, gather)


def switches_after_a_write() -> None:
    model = nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 3)).bfloat16()
    opt = shardstep.shard(model, TwoFaced, lr=0.1)
    halves(model)
    before = [param.detach().clone() for param in model.parameters()]
    opt.train()  # it is in that mode already
    assert all(map(torch.equal, before, model.parameters()))


def test_a_change_of_mode_does_not_bring_old_masters_back(workers):
    workers(2).run(switches_after_a_write)


# -- state -------------------------------------------------------------------------------------------------------------


def resumes(model_first: bool) -> None:
    def trained(model: nn.Module, opt: Any, steps: range) -> None:
        for step in steps:
            loss_of(model, step).backward()
            opt.step()
            opt.zero_grad()

    model = Net().bfloat16()
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=SMALL)
    trained(model, opt, range(3))
    saved = copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()})
    trained(model, opt, range(3, 6))
    other = Net().bfloat16()
    with torch.no_grad():
        for param in other.parameters():
            param.add_(0.1)
    resumed = shardstep.shard(other, optim.AdamW, lr=1e-3, config=SMALL)
    if model_first:
        other.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["opt"])
    else:
        resumed.load_state_dict(saved["opt"])
        other.load_state_dict(saved["model"])
    trained(other, resumed, range(3, 6))
    assert_equal(other, model, f"model first: {model_first}")
    assert all(MASTER in entry for entry in resumed.state.values())


@pytest.mark.parametrize("model_first", [True, False])
def test_masters_are_saved_and_loaded(workers, model_first):
    workers(2).run(resumes, model_first)


def begins_with_given_values() -> None:
    """The ranks' own seeds differ: all take the first rank's, rounded and not."""
    torch.manual_seed(10 + dist.get_rank())
    source = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.Linear(5, 4), nn.LayerNorm(4))
    values = copy.deepcopy(source.state_dict())
    model = copy.deepcopy(source)
    model[:2].bfloat16()
    kept = copy.deepcopy(values)
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=SMALL, masters_from=values)
    assert all(torch.equal(value, kept[name]) for name, value in values.items())
    for value in values.values():
        dist.broadcast(value, 0)
    whole = {spec.name: [] for spec in opt._engine.runtime.plan.params}
    for piece, entry in opt._engine.runtime.local_step.entries().items():
        whole[opt._engine.runtime.plan.params[piece.param].name].append((piece.start, entry[MASTER]))
    for name, param in model.named_parameters():
        for start, master in whole[name]:
            order = (0, 2, 3, 1) if param.dim() == 4 else tuple(range(param.dim()))
            assert torch.equal(master, values[name].permute(order).reshape(-1)[start : start + len(master)]), name
    del values["1.bias"]
    assert "masters_from has no 1.bias" in raised(lambda: shardstep.shard(model, optim.SGD, masters_from=values))[1]
    text = raised(lambda: shardstep.shard(model, optim.SGD, masters_from=values, config=ShardConfig(master="none")))[1]
    assert "masters_from is for" in text
    values["1.bias"] = torch.ones(4)
    text = raised(lambda: shardstep.shard(model, optim.SGD, masters_from=values))[1]
    assert "masters_from['1.bias'] is not what 1.bias was rounded from" in text
    if dist.get_world_size() > 1:
        halves = nn.Linear(3, 3).bfloat16()
        one: Any = halves.state_dict() if dist.get_rank() == 0 else None
        text = raised(lambda: shardstep.shard(halves, optim.SGD, masters_from=one))[1]
        assert "<masters_from given: False> where rank 0 has <masters_from given: True>" in text


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_masters_begin_with_the_values_that_the_caller_kept(workers, ranks):
    workers(ranks).run(begins_with_given_values)


def warns_that_it_stalls(lr: float) -> list[str]:
    model = nn.Linear(30, 30).bfloat16()
    with torch.no_grad():
        model.weight.fill_(0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shardstep.shard(model, optim.AdamW, lr=lr, config=ShardConfig(master="none"))
    return [str(warning.message) for warning in caught]


def test_steps_that_vanish_in_rounding_are_said_once(workers):
    (text,), nothing = workers(2).run(warns_that_it_stalls, 1e-4)
    assert 'With lr=0.0001 most steps change nothing: use ShardConfig(master="fp32") or' in text
    assert not nothing
    assert workers(2).run(warns_that_it_stalls, 0.1) == [[], []]


# -- what it takes -----------------------------------------------------------------------------------------------------


def holds() -> tuple[int, int, int]:
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).bfloat16()
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=ShardConfig(bucket_mb=0.1))
    model(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
    opt.step()
    state = sum(
        value.nbytes
        for entry in opt.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    shards = sum(shard.nbytes for shard in opt._engine.runtime.gradients.shards())
    return state, shards, sum(param.numel() for param in model.parameters())


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_masters_moments_and_gradients_take_fourteen_bytes_over_the_ranks(workers, ranks):
    for state, shards, numel in workers(ranks).run(holds):
        assert abs(state / (12 * numel / ranks) - 1) < 0.03
        assert abs(shards / (2 * numel / ranks) - 1) < 0.03


def scales_halves() -> None:
    """fp16 with a GradScaler, which refuses gradients in fp16: divided by its scale most of them would vanish."""
    model = Net().half()
    twin = copy.deepcopy(model)
    by_hand = ByHand(twin, optim.AdamW, lr=1e-3)
    opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=SMALL)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000)
    for step in range(5):
        for net in (model, twin):
            scaler.scale(loss_of(net, step)).backward()
        if step % 2:
            scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        by_hand.divide_by = 1024.0
        by_hand.step()
    assert scaler.get_scale() == 1024.0
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours.float(), theirs.float(), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_fp16_parameters_train_with_a_grad_scaler(workers, ranks):
    workers(ranks).run(scales_halves)


class Mixed(nn.Module):
    """bf16 matrices, and norms in fp32 as many models keep them; an fp16 one for good measure."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(7, 9).bfloat16()
        self.norm = nn.LayerNorm(9)
        self.last = nn.Linear(9, 3).half()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x.bfloat16()).float()).half())


def trains_mixed(collectives: bool) -> None:
    model = Mixed()
    twin = copy.deepcopy(model)
    by_hand = ByHand(twin, optim.AdamW, lr=1e-3)
    config = ShardConfig(bucket_mb=SMALL_BUCKETS, ordered_sums=collectives)
    with by_collectives() if collectives else nullcontext():
        opt = shardstep.shard(model, optim.AdamW, lr=1e-3, config=config)
    for step in range(4):
        for net in (model, twin):
            net(batch(step)).float().square().mean().backward()
        opt.step()
        opt.zero_grad()
        by_hand.step()
    assert_equal(model, twin, "mixed")


@BOTH_WAYS
@pytest.mark.parametrize("ranks", [1, 2])
def test_dtypes_may_be_mixed(workers, ranks, collectives):
    workers(ranks).run(trains_mixed, collectives)
