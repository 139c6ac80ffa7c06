"""Checkpoints with NCCL on a GPU: the reshard matrix, stock DCP, and state that came from the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import test_save_and_load
import test_state_dict
from checkpointing import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]
RANKS = [1, 2, 3, 4]


def on_cuda(body: Callable[..., Any], *arguments: Any) -> Any:
    with warnings.catch_warnings(), torch.device("cuda"):
        warnings.filterwarnings("ignore", message=".*pin.*")
        return body(*arguments)


@pytest.mark.parametrize("saved_on", RANKS)
@pytest.mark.parametrize("name", KINDS)
def test_what_any_number_of_ranks_saved_is_loaded_by_any_other_bitwise(workers, tmp_path, name, saved_on):
    workers(saved_on, "nccl").run(on_cuda, test_save_and_load.saves, name, str(tmp_path), timeout=110)
    for ranks in RANKS:
        workers(ranks, "nccl").run(on_cuda, test_save_and_load.loads, name, str(tmp_path), saved_on, timeout=110)


@pytest.mark.parametrize("name", ["flat", "bf16", "muon and adamw"])
def test_an_asynchronous_save_is_of_the_moment_of_the_call(workers, tmp_path, name):
    workers(2, "nccl").run(on_cuda, test_save_and_load.saves, name, str(tmp_path), True, timeout=110)
    workers(3, "nccl").run(on_cuda, test_save_and_load.loads, name, str(tmp_path), 2, timeout=110)


@pytest.mark.parametrize("name", ["flat", "whole", "bf16"])
def test_what_a_gpu_saved_loads_on_a_cpu_and_the_other_way_round(workers, tmp_path, name):
    for folder, backends in (("there", ("nccl", "gloo")), ("back", ("gloo", "nccl"))):
        (tmp_path / folder).mkdir()
        for backend, body, more in (
            (backends[0], test_save_and_load.saves, ()),
            (backends[1], test_save_and_load.loads, (2,)),
        ):
            arguments = (name, str(tmp_path / folder), *more)
            if backend == "nccl":
                workers(2, backend).run(on_cuda, body, *arguments, timeout=110)
            else:
                workers(2).run(body, *arguments, timeout=110)


@pytest.mark.parametrize("name", ["flat", "whole", "muon and adamw"])
def test_training_goes_on_as_if_nothing_had_happened(workers, tmp_path, name):
    workers(3, "nccl").run(on_cuda, test_save_and_load.saves, name, str(tmp_path), timeout=110)
    workers(2, "nccl").run(on_cuda, test_save_and_load.goes_on, name, str(tmp_path), timeout=110)


@pytest.mark.parametrize("how", ["plain", "by name"])
@pytest.mark.parametrize("name", ["flat", "whole"])
def test_stock_dcp_saves_and_loads_it(workers, tmp_path, name, how):
    workers(2, "nccl").run(on_cuda, test_state_dict.writes_by_dcp, name, str(tmp_path), how, timeout=110)
    for ranks in (1, 2, 3):
        workers(ranks, "nccl").run(on_cuda, test_state_dict.reads_by_dcp, name, str(tmp_path), how, timeout=110)


@pytest.mark.parametrize("name", ["flat", "whole", "bf16"])
def test_the_consolidated_state_is_on_the_cpu_and_loads(workers, name):
    saved = workers(2, "nccl").run(on_cuda, test_state_dict.consolidates, name, 0, timeout=110)[0]
    for ranks in (1, 3):
        workers(ranks, "nccl").run(on_cuda, test_state_dict.loads_consolidated, name, saved, timeout=110)
