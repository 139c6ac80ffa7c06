"""Every block of Python and of commands in README and docs runs, on several ranks; commands on the first.

The blocks of a page share their names, and follow each other. What a page takes for granted (`model`, `loader`) is made
here; what a single block needs, in a comment before it that no reader sees: <!-- setup: opt = drop_in() -->.
A block that cannot be run here says why in such a comment, too: <!-- not run: needs Slurm -->; each is counted.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import shardstep
from repository import ROOT

pytestmark = pytest.mark.slow  # make test-slow

PAGES = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md"))]
RANKS = {"docs/how-to.md": 4}  # it makes a group of ranks 1 and 3
NOT_RUN = 1  # blocks that say so
_BLOCK = re.compile(r"(?:<!-- (setup|not run): (.*?) -->\n+)?```(python|bash)\n(.*?)^```$", re.S | re.M)


class Block(NamedTuple):
    line: int
    setup: str
    language: str
    code: str
    is_run: bool


def blocks_of(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(
            line=text[: found.start(4)].count("\n"),
            setup=found[2] if found[1] == "setup" else "",
            language=found[3],
            code=found[4],
            is_run=found[1] != "not run",
        )
        for found in _BLOCK.finditer(text)
    ]


def names() -> dict[str, Any]:
    """What every page takes for granted."""
    torch.manual_seed(0)

    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    model, ddp = net(), DistributedDataParallel(net())
    opt = shardstep.shard(model, torch.optim.AdamW, lr=3e-4)

    def drop_in() -> shardstep.ZeroRedundancyOptimizer:
        return shardstep.ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=3e-4)

    return {
        "__name__": "a_page", "torch": torch, "nn": nn, "dist": dist, "dcp": dcp, "itertools": itertools, "Join": Join,
        "shardstep": shardstep, "ZeroRedundancyOptimizer": shardstep.ZeroRedundancyOptimizer,
        "DistributedDataParallel": DistributedDataParallel, "ddp": ddp, "model": model, "opt": opt, "drop_in": drop_in,
        "loader": [torch.randn(4, 8) for _ in range(3)], "loss_of": lambda output: output.square().mean(),
        "params": [nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(3, 2))],
        "scheduler": torch.optim.lr_scheduler.ConstantLR(opt),
    }  # fmt: skip


def run_page(page: str, folder: str) -> int:
    """In a folder of its own, which all ranks share. Returns how many blocks were run."""
    os.chdir(folder)
    known, count = names(), 0
    for block in blocks_of(page):
        if block.is_run:
            run_block(page, block, known)
            dist.barrier()
            count += 1
    return count


def run_block(page: str, block: Block, known: dict[str, Any]) -> None:
    with mock.patch.object(dist, "init_process_group"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
        exec(compile(block.setup, f"{page}, setup of line {block.line}", "exec"), known)
        if block.language == "python":
            code = block.code.replace("range(500)", "range(2)")  # Muon's ten lines train for minutes
            exec(compile("\n" * block.line + code, page, "exec"), known)
        elif dist.get_rank() == 0:
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            subprocess.run(["bash", "-ec", block.code], check=True, timeout=60, env={**os.environ, "PATH": path})


def pages_with_blocks() -> list[str]:
    return [page for page in PAGES if blocks_of(page) and page != "docs/integrations.md"]


@pytest.mark.parametrize("page", pages_with_blocks())
def test_every_block_of_a_page_runs(workers, tmp_path, page):
    (count, *_) = workers(RANKS.get(page, 2)).run(run_page, page, str(tmp_path), timeout=110)
    assert count == sum(block.is_run for block in blocks_of(page))


def test_blocks_that_are_not_run_are_known():
    assert sum(not block.is_run for page in PAGES for block in blocks_of(page)) == NOT_RUN


def test_every_link_between_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", (ROOT / page).read_text()):
            if "://" not in target:
                assert (ROOT / page).parent.joinpath(target).exists(), f"{page}: {target}"
