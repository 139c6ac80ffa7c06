"""A failure at every call of a new plan, a load and a switch of mode: all is as it was, or closed on all ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

import shardstep
from as_collectives import by_collectives
from fast_lane_training import SMALL_BUCKETS, batch, loss_of
from shardstep import ShardConfig
from shardstep.engine.context import trainable_of
from shardstep.engine.step import Engine
from shardstep.stepping.local_step import LocalStep
from test_replan_refused import WAYS, Biased, everything, is_same
from training import assert_ranks_equal, raised

SOURCE = str(Path(shardstep.__file__).parent)


class Switched(optim.SGD):
    """Weights are something else in an evaluation."""

    def train(self) -> None:
        self.scale(2.0)

    def eval(self) -> None:
        self.scale(0.5)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.mul_(factor)


P2P = ("tensors.py", "consolidation.py")  # what only one of two ranks calls, while the other waits for it


class Faults:
    """Calls of our files while `act` runs: all of them, or one that raises, the first of its function."""

    def __init__(self) -> None:
        self.seen: dict[Key, bool] = {}  # whether a rank may fail there alone
        self.target: Key | None = None
        self.error: type[BaseException] = MemoryError
        self.hit = self.closing = False

    @contextmanager
    def patched(self) -> Iterator[None]:
        whole = Engine.closing

        @contextmanager
        def closing(engine: Any, *args: Any) -> Iterator[None]:
            with whole(engine, *args):
                self.closing = True
                try:
                    yield
                finally:
                    self.closing = False

        with mock.patch.object(Engine, "closing", closing):
            yield

    def watch(self, frame: Any, event: str, argument: Any) -> None:
        del argument
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE) or code.co_name in ("__getattr__", "__del__"):
            return
        key = (code.co_filename, code.co_firstlineno, code.co_name)
        if self.target is None:
            self.seen[key] = self.seen.get(key, True) and self.is_local(frame)
        elif key == self.target and not self.hit:
            self.hit = True
            raise self.error("in a test")

    def is_local(self, frame: Any) -> bool:
        """Whether all that this call does is its rank's own affair, and the others are told when it fails."""
        names: list[str] = []
        changes = False
        while frame is not None and frame.f_code.co_name != "run":
            names.append(frame.f_code.co_name)
            changes |= frame.f_code is LocalStep.switch.__code__
            frame = frame.f_back
        if self.closing:
            return not {"agree", "lose"} & set(names)
        return "agree" not in names and ("attempt" in names[1:] or changes)

    def run(self, act: Callable[[], Any]) -> BaseException | None:
        self.hit = self.closing = False
        sys.setprofile(self.watch)
        try:
            act()
        except BaseException as error:
            return error
        finally:
            sys.setprofile(None)
        return None


Key = tuple[str, int, str]


class Program:
    """A model that was stepped once, with gradients for the next step, and what is to be done to its optimizer."""

    def __init__(self, action: str, collectives: bool, gather: str) -> None:
        self.action = action
        torch.manual_seed(1)
        self.model = Biased()
        config = ShardConfig(bucket_mb=SMALL_BUCKETS, gather=gather)
        kind = Switched if action == "switch" else optim.AdamW
        with by_collectives() if collectives else nullcontext():
            self.opt = shardstep.shard(self.model, kind, lr=0.1, config=config)
        loss_of(self.model, batch(0)).backward()
        self.opt.step()
        self.opt.zero_grad()
        self.saved = self.opt.state_dict()
        if action == "load":  # into another plan than it was saved under
            self.model.first.weight.requires_grad_(False)
            self.opt.step()
        loss_of(self.model, batch(1)).backward()
        self.opt.grad_norms()

    def act(self) -> None:
        opt = self.opt
        if self.action == "group":
            opt.add_param_group({"params": [nn.Parameter(torch.ones(30))]})
        elif self.action == "plan":
            self.model.second.bias.requires_grad_(True)
            groups, engine = opt.param_groups, opt._engine
            try:
                engine.replan(groups, engine.try_plan(groups, trainable_of(groups)))
            except BaseException:
                self.model.second.bias.requires_grad_(False)
                raise
        elif self.action == "load":
            opt.load_state_dict(self.saved)
        else:
            opt.eval()

    def check_closed(self, folder: Path) -> None:
        """Every call says so, the model has weights, and can be sharded again."""
        opt = self.opt
        calls: list[Callable[[], Any]] = [
            opt.step,
            opt.zero_grad,
            opt.state_dict,
            opt.grad_norms,
            opt.bucket_nbytes,
            opt.report,
            lambda: opt.state,
            lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
            lambda: opt.load_state_dict(self.saved),
            lambda: shardstep.save(folder / "closed", self.model, opt),
            lambda: shardstep.load(folder / "closed", self.model, opt),
        ]
        for call in calls:
            kind, text = raised(call)
            assert (kind, "closed" in text) == ("RuntimeError", True), (call, kind, text)
        self.model.zero_grad()
        assert all(param.isfinite().all() for param in self.model.parameters())
        opt.close()
        with by_collectives() if opt._channel.hosts is not None else nullcontext():
            again = shardstep.shard(self.model, optim.SGD, lr=0.1, config=ShardConfig(bucket_mb=SMALL_BUCKETS))
        loss_of(self.model, batch(2)).backward()
        again.step()
        assert_ranks_equal(list(self.model.parameters()))
        again.close()


def targets_of(action: str, collectives: bool, gather: str) -> tuple[list[Key], list[Key]]:
    """Where one rank may fail alone, and where all may; the same on all ranks."""
    faults, program = Faults(), Program(action, collectives, gather)
    with faults.patched():
        error = faults.run(program.act)
    assert error is None, error
    everyone: list[dict[Key, bool]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, faults.seen)
    seen = [key for key in everyone[0] if all(key in one for one in everyone)]
    alone = [key for key in seen if all(one[key] for one in everyone)]
    return alone, [key for key in seen if key in alone or not key[0].endswith(P2P)]


def fails_everywhere(
    action: str, collectives: bool, gather: str, odd: bool, every: int, folder: Path
) -> dict[str, list[str]]:
    """At every so manieth of the targets; `odd`: on the last rank only. Returns how each has ended."""
    alone, together = (keys[::every] for keys in targets_of(action, collectives, gather))
    found: dict[str, list[str]] = {"as before": [], "closed": []}
    program, before = None, None
    faults = Faults()
    for number, key in enumerate(alone if odd else together):
        faults.error = KeyboardInterrupt if number % 2 else MemoryError
        if program is None:
            program = Program(action, collectives, gather)
            before = everything(program.model, program.opt)
        faults.target = key if not odd or dist.get_rank() == dist.get_world_size() - 1 else ("", 0, "")
        with faults.patched():
            error = faults.run(program.act)
        name = f"{Path(key[0]).name}: {key[2]}"
        if error is None:  # not called this time, or in a trial of the class, which has another way
            program = None
        elif program.opt.is_closed:
            found["closed"].append(name)
            assert "in a test" in str(error), f"{name}: {error}"
            program.check_closed(folder)
            program = None
        else:
            found["as before"].append(name)
            assert is_same(everything(program.model, program.opt), before), name
    if program is None:
        return found
    twin = Program(action, collectives, gather)
    for one in (program, twin):
        one.opt.step()
        one.opt.synchronize()
    assert all(map(torch.equal, program.model.parameters(), twin.model.parameters()))
    return found


def fails(workers: Any, ranks: int, *args: Any) -> None:
    for odd in (False, True) if ranks > 1 else (False,):
        for found in workers(ranks).run(fails_everywhere, *args[:3], odd, *args[3:], timeout=550):
            assert found["closed"], found
            assert found["as before"], found


ACTIONS = pytest.mark.parametrize("action", ["plan", "group", "load", "switch"])


@ACTIONS
@WAYS
def test_a_failure_at_any_call_leaves_all_as_it_was_or_closes_the_optimizer(
    workers, ranks, collectives, action, tmp_path
):
    fails(workers, ranks, action, collectives, "wait", 6 if action in ("load", "switch") else 25, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@ACTIONS
@WAYS
def test_a_failure_at_every_call(workers, ranks, collectives, action, tmp_path):
    """At every eighth of many, every second of few; with SHARDSTEP_EVERY_CALL=1 at every one: a quarter of an hour."""
    every = int(os.environ.get("SHARDSTEP_EVERY_CALL", "2" if action in ("load", "switch") else "8"))
    fails(workers, ranks, action, collectives, "overlap", every, tmp_path)
