"""The programs of test_report once more, on a GPU with NCCL."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import test_report
from shardstep import ShardConfig
from test_nothing_silent_gpu import on_the_gpu
from training import all_same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="needs a CUDA device and NCCL"
    ),
]


@pytest.mark.parametrize("name", test_report.CONFIGS)
def test_a_report(workers, name):
    report = all_same(
        workers(2, backend="nccl").run(on_the_gpu, test_report.reports, *test_report.CONFIGS[name], False)
    )
    test_report.check_traffic(report, name, 2)


@pytest.mark.parametrize("name", ["flat", "whole", "keep", "overlap"])
def test_measured_steps(workers, name):
    config = test_report.CONFIGS[name][1]
    report = all_same(workers(2, backend="nccl").run(on_the_gpu, test_report.measures, config, False))
    assert report.steps == 3
    for times in report.times:
        for covered in (times.reducing, times.gathering):
            assert 0 < covered.waited <= covered.under_way < times.seconds


def test_a_profile_names_buckets(workers):
    for found in workers(2, backend="nccl").run(on_the_gpu, test_report.profiles, ShardConfig(), False):
        assert "shardstep: reduce bucket 0 (second.bias ... scale)" in found
