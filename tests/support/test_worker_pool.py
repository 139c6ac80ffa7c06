"""The pool of ranks itself: what it returns, and what it says when a rank raises, hangs or dies."""

from __future__ import annotations

import os
import pickle
import signal
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

from worker_pool import WorkerFailure, WorkerPool, WorkerTimeout

Workers = Callable[[int], WorkerPool]


@pytest.fixture
def pair(workers: Workers) -> Iterator[WorkerPool]:
    """Two running ranks, which must be usable again after whatever the test did to them."""
    workers(2).run(sum_of_ranks)  # their start, and the import of this module there, are not part of any time limit
    yield workers(2)
    assert workers(2).run(sum_of_ranks) == [1.0, 1.0]


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def describe(word: str, *, times: int) -> tuple[int, str]:
    return dist.get_rank(), word * times


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_results_come_in_rank_order(workers: Workers, world_size: int) -> None:
    results = workers(world_size).run(describe, "ab", times=2)
    assert results == [(rank, "abab") for rank in range(world_size)]
    assert workers(world_size).run(sum_of_ranks) == [sum(range(world_size))] * world_size


def pid_and_threads() -> tuple[int, int, str]:
    return os.getpid(), torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def test_processes_are_reused_and_single_threaded(workers: Workers) -> None:
    first, second = workers(2).run(pid_and_threads), workers(2).run(pid_and_threads)
    assert first == second
    assert first[0][0] != first[1][0] != os.getpid()
    assert {facts[1:] for facts in first} == {(1, "1")}


def test_every_job_starts_from_the_same_seed(workers: Workers) -> None:
    first, second = workers(2).run(torch.rand, 3), workers(2).run(torch.rand, 3)
    for drawn in (*first, *second):
        assert torch.equal(drawn, first[0])


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def many_tensors(of: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor + dist.get_rank() for tensor in of]


def test_thousands_of_tensors_hold_no_descriptors(workers: Workers) -> None:
    workers(2).run(open_descriptors)  # so that the pool is running when we count
    ours, theirs = open_descriptors(), workers(2).run(open_descriptors)
    sent = [torch.full((2,), float(i)) for i in range(3000)]
    results = workers(2).run(many_tensors, sent)
    assert [result[2999].tolist() for result in results] == [[2999.0, 2999.0], [3000.0, 3000.0]]
    assert (open_descriptors(), workers(2).run(open_descriptors)) == (ours, theirs)


def raise_rank_1_first() -> None:
    print("last words of rank", dist.get_rank())
    dist.barrier()
    time.sleep(0.0 if dist.get_rank() == 1 else 1.0)
    raise ValueError(f"no luck on rank {dist.get_rank()}")


def test_the_rank_that_failed_first_is_shown_in_full(pair: WorkerPool) -> None:
    with pytest.raises(WorkerFailure) as caught:
        pair.run(raise_rank_1_first)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1 of 2 failed first:"
    assert any("in raise_rank_1_first" in line for line in lines)
    assert lines[-4:] == [
        "ValueError: no luck on rank 1",
        "rank 0 also failed: ValueError: no luck on rank 0",
        "--- output of rank 1:",
        "last words of rank 1",
    ]


def leave_rank_0_waiting() -> None:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 does not join in")
    dist.barrier()


def test_a_failure_does_not_wait_for_ranks_that_hang(pair: WorkerPool) -> None:
    before = pair.run(os.getpid)
    started = time.monotonic()
    with pytest.raises(WorkerFailure, match=r"rank 1 does not join in(.|\n)*rank 0 was still running"):
        pair.run(leave_rank_0_waiting, timeout=60)
    assert time.monotonic() - started < 20  # about 3 s; far from 60 even on a busy machine
    assert not set(before) & set(pair.run(os.getpid))


def compare(left: int, right: int) -> None:
    assert left == right


def test_a_failing_assert_shows_its_values(workers: Workers) -> None:
    with pytest.raises(WorkerFailure, match="assert 41 == 42"):
        workers(1).run(compare, 41, 42)


def hang_on_rank_1() -> None:
    if dist.get_rank() == 1:
        print("waiting for rank 0")
        dist.barrier()


def test_a_timeout_says_who_hangs_and_where(pair: WorkerPool) -> None:
    with pytest.raises(WorkerTimeout) as caught:
        pair.run(hang_on_rank_1, timeout=2)
    report = str(caught.value)
    assert report.startswith("not finished after 2 s: ranks [1]; finished: ranks [0]\nrank 1 is here")
    assert "in barrier\n" in report
    assert "in hang_on_rank_1\n" in report
    assert report.endswith("--- output of rank 1:\nwaiting for rank 0")


def die_on_rank_1(signal_number: int | None) -> None:
    if dist.get_rank() == 1:
        if signal_number is None:
            os._exit(7)
        os.kill(os.getpid(), signal_number)
    dist.barrier()


@pytest.mark.parametrize(("signal_number", "code"), [(None, "7"), (signal.SIGKILL, "-9 (SIGKILL)")])
def test_a_dead_rank_is_reported_at_once(pair: WorkerPool, signal_number: int | None, code: str) -> None:
    started = time.monotonic()
    with pytest.raises(WorkerFailure) as caught:
        pair.run(die_on_rank_1, signal_number, timeout=60)
    assert time.monotonic() - started < 20  # a few ms; far from 60 even on a busy machine
    assert str(caught.value).startswith(f"rank 1 of 2 failed first:\ndied with exit code {code}\n")


def unpicklable() -> Callable[[], None]:
    return lambda: None


def test_a_result_that_cannot_travel_is_a_failure_of_its_rank(workers: Workers) -> None:
    with pytest.raises(WorkerFailure, match="unpicklable"):
        workers(1).run(unpicklable)


def test_a_function_that_cannot_travel_is_refused_and_costs_nothing(workers: Workers) -> None:
    before = workers(1).run(os.getpid)
    with pytest.raises((AttributeError, pickle.PicklingError)):
        workers(1).run(lambda: None)
    assert workers(1).run(os.getpid) == before


def warn_deprecated() -> str:
    warnings.warn("the old way", DeprecationWarning, stacklevel=1)
    return "warned"


def test_a_warning_in_a_rank_is_an_error(workers: Workers) -> None:
    with pytest.raises(WorkerFailure, match="DeprecationWarning: the old way"):
        workers(1).run(warn_deprecated)


@pytest.mark.filterwarnings("ignore:the old way:DeprecationWarning")
def test_marks_for_warnings_hold_in_the_ranks(workers: Workers) -> None:
    assert workers(1).run(warn_deprecated) == ["warned"]


def test_closing_ends_the_processes_and_a_run_starts_new_ones(workers: Workers) -> None:
    before = workers(1).run(os.getpid)
    workers(1).close()
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not set(before) & set(workers(1).run(os.getpid))
