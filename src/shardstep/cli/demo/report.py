"""What a run found out, as a table and two sentences; and how numbers are written here and in the picture."""

from __future__ import annotations

from rich import box
from rich.table import Table

from shardstep.cli.demo.result import Result, Run

# Beyond this many ranks the table shows the largest only: one line per rank would fill the screen.
MAX_RANKS_LISTED = 4
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def make_table(result: Result) -> Table:
    plain, sharded = result.plain, result.sharded
    table = Table(box=box.SIMPLE_HEAD, caption=_describe_counter(result), caption_justify="left")
    table.add_column("")
    table.add_column(plain.name, justify="right")
    table.add_column(sharded.name, justify="right")
    table.add_row("loss, first step", f"{plain.losses[0]:.6f}", f"{sharded.losses[0]:.6f}")
    table.add_row("loss, last step", f"{plain.losses[-1]:.6f}", f"{sharded.losses[-1]:.6f}")
    table.add_row("final parameters", "", describe_equality(result), end_section=True)
    for label, plain_nbytes, sharded_nbytes in _state_rows(result):
        table.add_row(f"optimizer state, {label}", format_nbytes(plain_nbytes), format_nbytes(sharded_nbytes))
    table.add_row("sent per rank and step", _format_sent(plain), _format_sent(sharded))
    table.add_row("time per step", _format_seconds(plain), _format_seconds(sharded))
    return table


def describe_equality(result: Result) -> str:
    different = [str(rank) for rank, equal in enumerate(result.equal_on_rank) if not equal]
    return f"different on rank {', '.join(different)}" if different else "equal on every rank"


def summarise(result: Result) -> list[str]:
    """The finding as sentences, with the numbers it rests on."""
    steps = format_count(result.steps, "step")
    plain, sharded = format_nbytes(largest_state(result.plain)), format_nbytes(largest_state(result.sharded))
    return [
        f"After {steps} the parameters of both runs, compared bit for bit, are {describe_equality(result)}.",
        f"Optimizer state per rank: {plain} without shardstep, at most {sharded} with it.",
    ]


def largest_state(run: Run) -> int:
    return max(memory.optimizer_state for memory in run.memory)


def format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_nbytes(nbytes: float) -> str:
    for factor, unit in UNITS:
        if nbytes >= factor:
            return f"{nbytes / factor:.1f} {unit}"
    return f"{nbytes:.0f} B"


def _state_rows(result: Result) -> list[tuple[str, int, int]]:
    if result.ranks > MAX_RANKS_LISTED:
        return [(f"largest of {result.ranks} ranks", largest_state(result.plain), largest_state(result.sharded))]
    pairs = zip(result.plain.memory, result.sharded.memory, strict=True)
    return [
        (f"rank {rank}", plain.optimizer_state, sharded.optimizer_state) for rank, (plain, sharded) in enumerate(pairs)
    ]


def _describe_counter(result: Result) -> str:
    if result.plain.sent_per_rank_and_step is None:
        return "sent: this system has no loopback counter to read"
    return "sent: the loopback counter, so all programs' bytes"


def _format_sent(run: Run) -> str:
    return "n/a" if run.sent_per_rank_and_step is None else format_nbytes(run.sent_per_rank_and_step)


def _format_seconds(run: Run) -> str:
    return f"{run.seconds_per_step * 1e3:.0f} ms"
