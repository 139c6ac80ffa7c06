"""What the runs found out, as a table and two sentences; and how numbers are written here and in the picture."""

from __future__ import annotations

from rich import box
from rich.table import Table

from shardstep.cli.demo.result import Result, Run
from shardstep.format import format_nbytes

# Beyond this many ranks the table shows the largest only: one line per rank would fill the screen.
MAX_RANKS_LISTED = 4
_WHY_NOT_EQUAL = "(Sums of three or more ranks' gradients depend on their order, and on a GPU a step rounds otherwise.)"


def make_table(result: Result) -> Table:
    runs = result.runs
    table = Table(box=box.SIMPLE_HEAD, caption=_describe_counter(result), caption_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.name, justify="right")
    table.add_row("mean loss, first step", *(f"{run.losses[0]:.6f}" for run in runs))
    table.add_row("mean loss, last step", *(f"{run.losses[-1]:.6f}" for run in runs))
    table.add_row("final parameters", "", *(describe_equality(run) for run in runs[1:]), end_section=True)
    for what in ("optimizer_state", "gradients"):
        for label, ranks in _ranks_listed(result):
            held = [format_nbytes(max(getattr(run.memory[rank], what) for rank in ranks)) for run in runs]
            table.add_row(f"{what.replace('_', ' ')}, {label}", *held)
    table.add_row("sent per rank and step", *map(_format_sent, runs))
    table.add_row("time per step", *map(_format_seconds, runs))
    return table


def describe_equality(run: Run) -> str:
    """With the first run's."""
    worst = max(run.differs_by)
    return "equal bits" if worst == 0 else f"within {worst:.0e}"


def summarise(result: Result) -> list[str]:
    """The finding as sentences, with the numbers it rests on."""
    plain, fast = result.runs[0], result.runs[-1]
    same = ", ".join(f"{run.name} {describe_equality(run)}" for run in result.runs[1:])
    state = [format_nbytes(largest(run, "optimizer_state")) for run in (plain, fast)]
    gradients = [format_nbytes(largest(run, "gradients")) for run in (plain, fast)]
    return [
        f"After {format_count(result.steps, 'step')} the parameters are those of {plain.name}: {same}."
        + ("" if all(max(run.differs_by) == 0 for run in result.runs) else f" {_WHY_NOT_EQUAL}"),
        f"Optimizer state per rank: {state[0]} without shardstep, at most {state[1]} with shard(). "
        f"Gradients: {gradients[0]}, {gradients[1]}.",
    ]


def largest(run: Run, what: str) -> int:
    return max(int(getattr(memory, what)) for memory in run.memory)


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _ranks_listed(result: Result) -> list[tuple[str, range]]:
    if result.ranks > MAX_RANKS_LISTED:
        return [(f"largest of {result.ranks} ranks", range(result.ranks))]
    return [(f"rank {rank}", range(rank, rank + 1)) for rank in range(result.ranks)]


def _describe_counter(result: Result) -> str:
    if result.plain.sent_per_rank_and_step is None:
        return "sent: this system has no loopback counter to read"
    return "sent: counted on the loopback interface, with what other programs send"


def _format_sent(run: Run) -> str:
    return "n/a" if run.sent_per_rank_and_step is None else format_nbytes(run.sent_per_rank_and_step)


def _format_seconds(run: Run) -> str:
    return f"{run.seconds_per_step * 1e3:.0f} ms"
