"""What every benchmark prints and keeps: spreads, tables, targets, and what a number means nothing without."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
LEAST_WIDTH = 130  # columns; narrower, the tables wrap and cannot be read


@dataclass(frozen=True, slots=True)
class Spread:
    """One quantity over the rounds in which it was taken."""

    minimum: float
    lower_quartile: float
    median: float
    upper_quartile: float
    maximum: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) == 1:
            return cls(*[values[0]] * 5)
        lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(min(values), lower, middle, upper, max(values))

    def cells(self, digits: int = 3) -> tuple[str, str, str]:
        """Median; quartiles; extremes: three columns of a table (`SPREAD_COLUMNS`)."""
        return (
            f"{self.median:.{digits}f}",
            f"{self.lower_quartile:.{digits}f} to {self.upper_quartile:.{digits}f}",
            f"{self.minimum:.{digits}f} to {self.maximum:.{digits}f}",
        )


SPREAD_COLUMNS = ("median", "quartiles", "extremes")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table that prints on a terminal and in Markdown alike. Numbers are right-aligned from column `labels` on."""

    title: str
    note: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1

    def rich(self) -> Table:
        table = Table(title=self.title, caption=self.note, title_justify="left", caption_justify="left")
        for index, column in enumerate(self.columns):
            table.add_column(column, justify="left" if index < self.labels else "right")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rule = ["---" if index < self.labels else "---:" for index in range(len(self.columns))]
        lines = [f"| {' | '.join(row)} |" for row in (self.columns, rule, *self.rows)]
        return "\n".join([f"## {self.title}", "", self.note, "", *lines, ""])


@dataclass(frozen=True, slots=True)
class Target:
    """A number that was promised, and the number that was measured."""

    what: str
    limit: float
    measured: float
    unit: str = ""
    strict: bool = False  # the limit itself does not meet the target

    @property
    def met(self) -> bool:
        return self.measured < self.limit if self.strict else self.measured <= self.limit

    def row(self) -> tuple[str, ...]:
        wanted = f"{'below' if self.strict else 'at most'} {self.limit:g}{self.unit}"
        measured = f"{self.measured:.3f}" if isinstance(self.measured, float) else f"{self.measured:,}"
        return (self.what, wanted, f"{measured}{self.unit}", "met" if self.met else "NOT MET")


def targets_grid(targets: Sequence[Target]) -> Grid:
    rows = tuple(target.row() for target in targets)
    return Grid("Targets", "Medians over the rounds.", ("target", "wanted", "measured", ""), rows)


def environment() -> dict[str, str]:
    """Versions and hardware; nothing that names a machine or a person."""
    release = platform.freedesktop_os_release().get("PRETTY_NAME", "unknown distribution")
    kernel = ".".join(platform.release().split(".")[:2])
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "python": platform.python_version(),
        "torch": version("torch"),
        "shardstep": _own_version(),
        "os": f"{release}, {platform.system()} {kernel}",
        "cpu": f"{os.cpu_count()} cores, {_cpu_model()}",
        "memory": f"{memory:.0f} GiB",
    }


def _own_version() -> str:
    """A machine that nothing can be installed on runs the source tree, by PYTHONPATH."""
    try:
        return version("shardstep")
    except PackageNotFoundError:
        return "the source tree"


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def make_console() -> Console:
    """A terminal as wide as it is; a file or a pipe as wide as the tables."""
    console = Console()
    return console if console.is_terminal else Console(width=LEAST_WIDTH)


def command_line() -> str:
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])


@dataclass(frozen=True, slots=True)
class Report:
    """Everything one run of a benchmark has to say."""

    name: str  # of the files it writes
    title: str
    method: str
    grids: tuple[Grid, ...]
    targets: tuple[Target, ...]
    raw: Mapping[str, Any]  # every number behind the tables

    def publish(self, console: Console, *, quick: bool) -> int:
        """Print the tables; write <name>.json and <name>.md; return the exit status.

        A quick run never replaces a result, and misses no target: its numbers mean nothing.
        """
        folder = RESULTS / "quick" if quick else RESULTS
        folder.mkdir(parents=True, exist_ok=True)
        facts = environment()
        targets = [asdict(target) | {"met": target.met} for target in self.targets]
        kept = {"command": command_line(), "environment": facts, "targets": targets, **self.raw}
        (folder / f"{self.name}.json").write_text(json.dumps(kept, indent=1) + "\n")
        grids = (*self.grids, targets_grid(self.targets)) if self.targets else self.grids
        (folder / f"{self.name}.md").write_text(self._markdown(facts, grids))
        for grid in grids:
            console.print(grid.rich())
            console.print()
        if quick:
            console.print("A quick run on a toy problem: it shows that the benchmark works, its numbers mean nothing.")
        console.print(
            f"Written: {self.name}.md and {self.name}.json in benchmarks/{folder.relative_to(RESULTS.parent)}"
        )
        return 0 if quick or all(target.met for target in self.targets) else 1

    def _markdown(self, facts: Mapping[str, str], grids: Sequence[Grid]) -> str:
        head = [f"# {self.title}", "", f"    {command_line()}", ""]
        made_with = [f"- {key}: {value}" for key, value in facts.items()]
        return "\n".join([*head, *made_with, "", self.method, "", *(grid.markdown() for grid in grids)]).rstrip() + "\n"
