"""What the tests of conversions share: programs that write each format, and what they had."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn, optim

import shardstep
from checkpointing import ADAMW, Odd
from shardstep.convert.run import ConvertRequest, ConvertResult, convert


def trained(seed: int = 3, model: nn.Module | None = None, groups: Any = None) -> tuple[nn.Module, optim.Optimizer]:
    """In one process, without a process group."""
    model = model or Odd(seed)
    opt = optim.AdamW(model.parameters() if groups is None else groups(model), **ADAMW)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(4, 7)).square().mean().backward()
        opt.step()
        opt.zero_grad()
    return model, opt


def state_by_name(model: nn.Module, opt: optim.Optimizer) -> dict[str, dict[str, Any]]:
    return {name: dict(opt.state[param]) for name, param in model.named_parameters() if param in opt.state}


def same(one: Any, other: Any, where: str = "") -> None:
    """Bitwise."""
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor), where
        assert (one.dtype, one.shape) == (other.dtype, other.shape), where
        assert torch.equal(one.detach(), other.detach()), f"{where} differs"
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), f"{where}: {sorted(one)} and {sorted(other)}"
        for key in one:
            same(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list | tuple):
        assert (type(one), len(one)) == (type(other), len(other)), where
        for number, (a, b) in enumerate(zip(one, other, strict=True)):
            same(a, b, f"{where}.{number}")
    else:
        assert (type(one), one) == (type(other), other), where


def to(kind: str, src: Path, dst: Path, **options: Any) -> ConvertResult:
    return convert(ConvertRequest(src, dst, kind, **options))


def loaded(path: Path, seed: int = 9, model: nn.Module | None = None) -> tuple[nn.Module, optim.Optimizer, Any]:
    """By shardstep.load, into a fresh model and the plain optimizer."""
    model = model or Odd(seed)
    opt = optim.AdamW(model.parameters(), lr=1.0)
    return model, opt, shardstep.load(path, model, opt)
