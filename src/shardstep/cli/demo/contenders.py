"""The three ways in which the demo trains the same model: without shardstep, with the drop-in, with the fast lane."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Muon, Optimizer

import shardstep
from shardstep.cli.demo.result import RankMemory
from shardstep.cli.demo.settings import OPTIMIZERS

LEARNING_RATE = 2e-3
MUON: dict[str, Any] = {"lr": 0.02}
MATRICES = ["blocks.*.attention.*", "blocks.*.feed_forward.*"]  # what Muon gets; AdamW gets the rest


@dataclass(frozen=True, slots=True)
class Contender:
    name: str
    model: nn.Module  # what is called
    bare: nn.Module
    optimizers: list[Optimizer]  # to step, one after the other
    measure: Callable[[], RankMemory]  # on all ranks, after a step


def make_contenders(make_model: Callable[[], nn.Module], optimizer: str) -> list[Contender]:
    makers = (_plain, _drop_in, _fast_lane)
    names = OPTIMIZERS[optimizer]
    return [make(name, make_model(), optimizer) for make, name in zip(makers, names, strict=True)]


def _plain(name: str, model: nn.Module, optimizer: str) -> Contender:
    if optimizer == "muon":
        matrices, rest = _parts(model)
        optimizers = [Muon(matrices, **MUON), AdamW(rest, lr=LEARNING_RATE)]
    else:
        optimizers = [AdamW(model.parameters(), lr=LEARNING_RATE)]
    return _with_ddp(name, model, optimizers, optimizers)


def _drop_in(name: str, model: nn.Module, optimizer: str) -> Contender:
    def sharded(params: Any, kind: type[Optimizer], **options: Any) -> shardstep.ZeroRedundancyOptimizer:
        return shardstep.ZeroRedundancyOptimizer(params, kind, parameters_as_bucket_view=True, **options)

    if optimizer == "muon":
        matrices, rest = _parts(model)
        optimizers = [sharded(matrices, Muon, **MUON), sharded(rest, AdamW, lr=LEARNING_RATE)]
    else:
        optimizers = [sharded(model.parameters(), AdamW, lr=LEARNING_RATE)]
    return _with_ddp(name, model, optimizers, [one.optim for one in optimizers])


def _fast_lane(name: str, model: nn.Module, optimizer: str) -> Contender:
    if optimizer == "muon":
        muon = {"params": MATRICES, "optimizer": Muon, **MUON}
        adamw = {"params": "rest", "optimizer": AdamW, "lr": LEARNING_RATE}
        opt = shardstep.shard(model, groups=[muon, adamw])
    else:
        opt = shardstep.shard(model, AdamW, lr=LEARNING_RATE)

    def measure() -> RankMemory:
        held = opt.report().ranks[dist.get_rank()]
        return RankMemory(held.parameters, held.gradients, held.state)

    return Contender(name, model, model, [opt], measure)


def _with_ddp(name: str, model: nn.Module, optimizers: list[Any], local: list[Optimizer]) -> Contender:
    """`local` are those that hold this rank's state."""
    # Gradients as views of DDP's buckets: otherwise DDP holds them twice, and the picture would show one of the two.
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)

    def measure() -> RankMemory:
        params = list(model.parameters())
        gradients = sum(param.grad.nbytes for param in params if param.grad is not None)
        return RankMemory(sum(param.nbytes for param in params), gradients, sum(map(_state_nbytes, local)))

    return Contender(name, ddp, model, optimizers, measure)


def _parts(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """What Muon gets, and the rest."""
    named = dict(model.named_parameters())
    matrices = [name for name in named if ".attention." in name or ".feed_forward." in name]
    return [named[name] for name in matrices], [param for name, param in named.items() if name not in matrices]


def _state_nbytes(optimizer: Optimizer) -> int:
    tensors = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return sum(tensor.nbytes for tensor in tensors)
