"""The parts of the demo. Only the tests of `run_workers` start processes, with workers too small to need torch."""

from __future__ import annotations

import hashlib
import io
import os
import re
import signal
import textwrap
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from shardstep.cli.demo.corpus import draw_batches, load_corpus, make_text
from shardstep.cli.demo.exchange import Exchange, RankMemory, Result, Run, Tick
from shardstep.cli.demo.gpt import GPT, GPTConfig, next_token_loss
from shardstep.cli.demo.launch import WorkerError, describe_failure, run_workers
from shardstep.cli.demo.picture import draw_memory, draw_step, write_pictures
from shardstep.cli.demo.report import make_table, show_progress, summarise
from shardstep.cli.demo.settings import OPTIMIZERS, Settings
from shardstep.cli.demo.worker import difference, read_loopback_counter
from shardstep.format import format_nbytes

TINY = GPTConfig(vocab=11, block=8, layers=2, heads=2, width=16)


NAMES = OPTIMIZERS["adamw"]
PLAIN = NAMES[0]


def make_result(ranks: int = 2, sent: float | None = 4e6, differs_by: float = 0.0) -> Result:
    """A model of 1 M parameters whose state divides evenly."""
    memory = (
        RankMemory(4_000_000, 4_000_000, 8_000_000),
        RankMemory(4_000_000, 4_000_000, 8_000_000 // ranks),
        RankMemory(4_000_000, 4_000_000 // ranks, 8_000_000 // ranks),
    )
    runs = tuple(
        Run(name, (4.0, 2.0), (held,) * ranks, sent and factor * sent, seconds, (apart,) * ranks)
        for name, held, factor, seconds, apart in zip(
            NAMES, memory, (1, 1.5, 1), (0.1, 0.11, 0.09), (0.0, 0.0, differs_by), strict=True
        )
    )
    return Result(1_000_000, "cpu", runs)


# The text


def test_the_text_is_always_the_same():
    """Losses in docs and benchmarks were measured with this text."""
    checksum = hashlib.sha256(make_text().encode()).hexdigest()
    assert checksum == "e170bcf91fb55a9c40a2d161d3a2edc51e94ea27c362ba74e8b4af52beea6628"


def test_batches_repeat_for_the_same_seed_and_targets_follow_tokens():
    corpus = load_corpus()
    tokens, targets = next(draw_batches(corpus, batch=3, block=8, seed=1))
    assert tokens.shape == targets.shape == (3, 8)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, next(draw_batches(corpus, batch=3, block=8, seed=1))[0])
    assert not torch.equal(tokens, next(draw_batches(corpus, batch=3, block=8, seed=2))[0])


# The model


def test_gpt_does_not_look_ahead():
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(TINY.vocab, (2, TINY.block))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % TINY.vocab
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_an_untrained_gpt_knows_nothing():
    torch.manual_seed(0)
    tokens = torch.randint(TINY.vocab, (64, TINY.block))
    loss = next_token_loss(GPT(TINY)(tokens), tokens.roll(1, 1))
    # A uniform guess costs log(vocab); small random weights stay within a few percent of it.
    assert loss.item() == pytest.approx(torch.tensor(float(TINY.vocab)).log().item(), rel=0.05)


def test_the_size_the_benchmarks_use_has_30_million_parameters():
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=50257, block=64, layers=6, heads=6, width=384))
    embeddings, blocks, norms = (50257 + 64) * 384, 6 * 12 * 384**2, (2 * 6 + 1) * 2 * 384
    assert sum(parameter.numel() for parameter in model.parameters()) == embeddings + blocks + norms


def test_width_must_divide_into_heads():
    with pytest.raises(ValueError, match="width 16 is not a multiple of heads 3"):
        replace(TINY, heads=3)


# What the worker measures


def test_loopback_counter_reads_the_bytes_sent(tmp_path):
    counters = tmp_path / "dev"
    counters.write_text(
        "Inter-|   Receive                      |  Transmit\n"
        " face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n"
        "  eth0:  1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n"
        "    lo: 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36\n"
    )
    assert read_loopback_counter(counters) == 29
    counters.write_text("  eth0:  1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16\n")
    assert read_loopback_counter(counters) is None
    assert read_loopback_counter(tmp_path / "missing") is None


def test_the_difference_tells_zeros_apart_and_takes_nan_for_itself():
    nan, zero, two = torch.tensor([float("nan")]), torch.tensor([0.0]), torch.tensor([2.0])
    assert difference([nan, zero], [nan.clone(), zero.clone()]) == 0.0
    assert difference([two], [torch.tensor([1.5])]) == 0.25


# What travels to the command


def test_result_survives_json():
    for result in (make_result(), make_result(ranks=3, sent=None)):
        assert Result.from_json(result.to_json()) == result


def test_ticks_are_read_once_and_never_half(tmp_path):
    exchange = Exchange(tmp_path)
    assert exchange.read_ticks(0) == ([], 0)
    exchange.write_tick(Tick(PLAIN, 1, 4.0))
    exchange.write_tick(Tick(PLAIN, 2, 3.5))
    ticks, position = exchange.read_ticks(0)
    assert ticks == [Tick(PLAIN, 1, 4.0), Tick(PLAIN, 2, 3.5)]
    with (tmp_path / "ticks.jsonl").open("a") as file:
        file.write('["DDP')
    assert exchange.read_ticks(position) == ([], position)


# What the reader sees


def printed(result: Result) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(make_table(result))
    return console.file.getvalue()


def test_table_shows_all_runs():
    rows = {row[0]: row[1:] for row in (re.split(r"  +", line.strip()) for line in printed(make_result()).splitlines())}
    assert rows["mean loss, last step"] == ["2.000000"] * 3
    assert rows["final parameters"] == ["equal bits"] * 2
    assert rows["optimizer state, rank 0"] == rows["optimizer state, rank 1"] == ["8.0 MB", "4.0 MB", "4.0 MB"]
    assert rows["gradients, rank 1"] == ["4.0 MB", "4.0 MB", "2.0 MB"]
    assert rows["sent per rank and step"] == ["4.0 MB", "6.0 MB", "4.0 MB"]
    assert rows["time per step"] == ["100 ms", "110 ms", "90 ms"]


def test_table_says_how_far_parameters_differ_and_what_is_not_known():
    result = make_result(ranks=3, sent=None, differs_by=3e-7)
    assert "within 3e-07" in printed(result)
    assert "n/a" in printed(result)
    assert "depend on their order" in summarise(result)[0]


def test_table_of_many_ranks_stays_short():
    assert "optimizer state, largest of 16 ranks" in printed(make_result(ranks=16))
    assert len(printed(make_result(ranks=16)).splitlines()) < 20


def test_summary_names_the_saving():
    assert summarise(make_result())[1] == (
        "Optimizer state per rank: 8.0 MB without shardstep, at most 4.0 MB with shard(). Gradients: 4.0 MB, 2.0 MB."
    )


def test_bytes_are_written_with_their_unit():
    assert [format_nbytes(n) for n in (0, 999, 1_000, 2_500_000, 3e9)] == ["0 B", "999 B", "1.0 kB", "2.5 MB", "3.0 GB"]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_picture_has_a_bar_of_three_layers_for_each_rank_and_run(ranks, tmp_path):
    result = make_result(ranks)
    axes = draw_memory(result).axes[0]
    assert len(axes.patches) == 3 * 3 * ranks
    parameters, gradients, state = ([patch.get_height() for patch in layer] for layer in axes.containers)
    assert parameters == [4, 4, 4] * ranks
    assert gradients == [4, 4, 4 / ranks] * ranks
    assert state == [8, 8 / ranks, 8 / ranks] * ranks
    for layer, below in ((1, parameters), (2, [4 + height for height in gradients])):
        assert [patch.get_y() for patch in axes.containers[layer]] == below, "layers are stacked"
    assert axes.get_ylabel() == "memory per rank (MB)"
    for path in write_pictures(result, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")


def test_the_second_picture_has_time_and_bytes_where_they_are_known():
    panels = [[patch.get_height() for patch in axes.patches] for axes in draw_step(make_result()).axes]
    assert panels == [pytest.approx([100, 110, 90]), [4, 6, 4]]
    assert len(draw_step(make_result(sent=None)).axes) == 1


def test_progress_without_a_terminal_is_four_lines_per_run():
    console = Console(file=io.StringIO())
    with show_progress(NAMES, 200, console) as on_tick:
        for run in NAMES:
            for step in range(1, 201):
                on_tick(Tick(run, step, 1.0))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 12
    assert lines[-1] == "shard(): step 200 of 200, loss of rank 0: 1.000"


def test_progress_on_a_terminal_is_a_bar():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with show_progress(NAMES, 2, console) as on_tick:
        on_tick(Tick(PLAIN, 1, 4.0))
        on_tick(Tick(PLAIN, 2, 3.0))
    assert "2/2" in console.file.getvalue()
    assert "loss of rank 0: 3.000" in console.file.getvalue()


# When a rank fails, or the reader has seen enough


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Runs two ranks of a worker given as source, which finds its rank in `rank` and its folder in `exchange`."""
    head = (
        "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\nexchange = pathlib.Path(sys.argv[2])\n"
    )
    exchange = Exchange(tmp_path)
    settings = Settings(ranks=2, steps=1, model="tiny", optimizer="adamw", out=tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(source: str, on_tick=lambda tick: None) -> Result:
        (tmp_path / "stub_worker.py").write_text(head + textwrap.dedent(source))
        return run_workers(settings, exchange, on_tick, worker="stub_worker")

    return run


def test_a_rank_that_fails_is_named_with_its_last_words(start):
    with pytest.raises(WorkerError, match=r"^rank 1 failed:\n(.*\n)*ValueError: no wind$"):
        start("""
            if rank == 1:
                raise ValueError("no wind")
            time.sleep(100)
        """)


def test_a_rank_that_is_killed_is_named_with_its_signal(start):
    with pytest.raises(WorkerError, match=r"^rank 1 was killed by signal 9 \(SIGKILL\)\.$"):
        start("""
            if rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(100)
        """)


def ctrl_c(tick: Tick) -> None:
    raise KeyboardInterrupt


def terminate(tick: Tick) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(("stop", "raised"), [(ctrl_c, KeyboardInterrupt), (terminate, SystemExit)])
def test_stopping_the_command_stops_the_ranks(start, stop, raised, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(raised):
        start(
            """
            (exchange / f"pid{rank}").write_text(str(os.getpid()))
            while rank == 0 and not (exchange / "pid1").exists():
                time.sleep(0.01)
            if rank == 0:
                (exchange / "ticks.jsonl").write_text('["DDP + AdamW", 1, 4.0]\\n')
            time.sleep(100)
            """,
            stop,
        )
    for rank in range(2):
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / f"pid{rank}").read_text()), 0)
    assert signal.getsignal(signal.SIGTERM) is handler


def leave_traces(exchange: Exchange, *, raised_at: dict[int, int], summary: str) -> None:
    """The files of a failed run: for each rank that raised, in which second, and torchrun's own summary."""
    exchange.launcher_log.write_text(summary)
    words = {0: "RuntimeError: Connection closed by peer", 1: "ValueError: no wind"}
    for rank in range(2):
        folder = exchange.logs / "run" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        if rank in raised_at:
            (folder / "error.json").touch()
            os.utime(folder / "error.json", (raised_at[rank], raised_at[rank]))
        (folder / "stderr.log").write_text("many lines\n" * 100 + words[rank] if rank in raised_at else "")


def summary_line(rank: int, status: int) -> str:
    return f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {status} (pid: 1)\n  error_file: <N/A>\n"


def test_the_first_failure_is_shown_not_the_broken_connection_after_it(tmp_path):
    # Rank 1 also aborts on its way out, which must not hide what it raised.
    leave_traces(Exchange(tmp_path), raised_at={0: 20, 1: 10}, summary=summary_line(0, 1) + summary_line(1, -6))
    described = describe_failure(Exchange(tmp_path))
    assert described.startswith("rank 1 failed:\n")
    assert described.endswith("ValueError: no wind")
    assert len(described.splitlines()) < 20


def test_a_killed_rank_is_shown_not_the_broken_connection_after_it(tmp_path):
    leave_traces(Exchange(tmp_path), raised_at={0: 20}, summary=summary_line(0, 1) + summary_line(1, -9))
    assert describe_failure(Exchange(tmp_path)) == "rank 1 was killed by signal 9 (SIGKILL)."


def test_a_launcher_that_fails_alone_is_quoted(tmp_path):
    exchange = Exchange(tmp_path)
    exchange.launcher_log.write_text("OSError: no port left")
    assert describe_failure(exchange) == "torchrun could not start the ranks:\nOSError: no port left"
