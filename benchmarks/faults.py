"""What checkpoints survive: kills at random moments and at every file operation, full disks, damage and malice.

A job that resumes from a folder of checkpoints, trains and saves is killed again and again; what the next start finds
must be the newest checkpoint whose save had returned, or a later one, and bit for bit what the plain optimizer has
after as many steps. Then checkpoints are damaged, or made to do harm, in every way of damage.py.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from damage import FAULTS
from launching import Result, start_all
from report import Grid, Report, Target, make_console
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

EPILOG = """\
Run it from the root of the repository:

  python benchmarks/faults.py                four minutes on two cores: 500 kills at random moments, and one at every
                                             file operation of a save
  python benchmarks/faults.py --kills 20     a minute, without most of the latter
  python benchmarks/faults.py --folder /data on another disk

Disk full and read-only folder need the right to mount. Results go to benchmarks/results/faults.md and .json. Exit
status: 0 if nothing was lost, 1 if something was.
"""
METHOD = """\
AdamW through shardstep.shard at one and two ranks, Gloo, in processes forked from one that has torch imported; saves
every three steps, synchronous and asynchronous in turn, under names of their own with keep=2 and 3, or all under one
name. Kills at random moments: within 0.4 s after a start has loaded, 12 starts to a folder, each with another number
of ranks. Kills at file operations: before each open, mkdir, fsync, rename and remove of a save that prunes or
replaces, after each file is made, and at every 150th write. *Lost*: a checkpoint whose save had returned on any rank
is not what the next start finds. *Incomplete*: what it finds is not bit for bit that of the plain optimizer, or a
damaged checkpoint had to be passed over. *Hangs*: a rank that was not killed, or the next start, does not end in 30
s. *Left over*: what the killed left is still there after the next save. Faults: at one and at two ranks; the load,
or the save, that meets one raises on all ranks and changes nothing, and the checkpoint before loads bit for bit, by
its name and by the folder."""

FULL, QUICK_SWEEPS = 500, (0, 6)
RUNNERS = 2


@dataclass(frozen=True, slots=True)
class Facing:
    """One launch of facing.py."""

    ranks: int
    folder: Path
    rate: str | None = None

    @property
    def title(self) -> str:
        return f"faults at {self.ranks} rank{'s' if self.ranks > 1 else ''}"

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("facing.py"))
        return [worker, "--folder", str(self.folder / f"facing{self.ranks}"), "--out", str(out)]


# -- kills -------------------------------------------------------------------------------------------------------------


def start_runners(kills: int, sweeps: Sequence[int], folder: Path) -> list[subprocess.Popen[str]]:
    """They share the work; each has a core."""
    started = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    for number in range(RUNNERS):
        share = kills // RUNNERS + (number < kills % RUNNERS)
        command = [sys.executable, str(Path(__file__).with_name("faults_runner.py"))]
        command += ["--folder", str(folder / f"runner{number}"), "--seed", str(number), "--kills", str(share)]
        command += ["--sweeps", *(str(one) for one in sweeps[number::RUNNERS])]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    return started


def verdicts_of(runners: Sequence[subprocess.Popen[str]]) -> Iterator[dict[str, Any]]:
    """As they come, from all."""
    selector = selectors.DefaultSelector()
    for runner in runners:
        selector.register(runner.stdout, selectors.EVENT_READ)
    while selector.get_map():
        for key, _ in selector.select():
            line = key.fileobj.readline()  # type: ignore[union-attr]
            if line:
                yield json.loads(line)
            else:
                selector.unregister(key.fileobj)
    if any(runner.wait() for runner in runners):
        raise RuntimeError("a runner failed; see above")


def kill_many(kills: int, sweeps: Sequence[int], folder: Path, console: Console) -> list[dict[str, Any]]:
    bar = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    verdicts = []
    runners = start_runners(kills, sweeps, folder)
    try:
        with Progress(*bar, console=console) as progress:
            at_random = progress.add_task("kills at random moments", total=kills)
            swept = progress.add_task("kills at file operations", total=None)
            for verdict in verdicts_of(runners):
                verdicts.append(verdict)
                progress.advance(swept if verdict["kind"].startswith("at every") else at_random)
                if verdict["problem"]:
                    console.print(verdict, style="red", markup=False)
    finally:
        for runner in runners:
            runner.kill()
    return verdicts


COUNTED = ("lost", "incomplete", "hung", "left")


def kills_grid(verdicts: Sequence[dict[str, Any]]) -> Grid:
    rows = []
    kinds = Counter(verdict["kind"] for verdict in verdicts)
    for kind in sorted(kinds, key=lambda one: (one.startswith("at every"), one)):
        ours = [verdict for verdict in verdicts if verdict["kind"] == kind]
        saving = sum(verdict["moment"] != "training" for verdict in ours)
        rows.append(_row(kind, ours, saving))
    rows.append(_row("all", verdicts, sum(verdict["moment"] != "training" for verdict in verdicts)))
    columns = ("kill", "kills", "while saving", "lost", "incomplete loaded", "hangs", "left over", "survivors raised")
    note = (
        "Each followed by a start that loads and compares. The last column: seconds until all ranks had ended, at most."
    )
    return Grid("Kills", note, (*columns, "slowest end"), tuple(rows))


def _row(kind: str, ours: Sequence[dict[str, Any]], saving: int) -> tuple[str, ...]:
    counts = [sum(verdict[word] for verdict in ours) for word in COUNTED]
    slowest = max(verdict["seconds"] for verdict in ours)
    raised = sum(verdict["survivors"] for verdict in ours)
    return (kind, *(f"{one:,}" for one in (len(ours), saving, *counts, raised)), f"{slowest:.1f}" if slowest else "-")


# -- faults ------------------------------------------------------------------------------------------------------------


def faults_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for number, first in enumerate(results[0]["faults"]):
        title = first["title"]
        faced = [row for result in results for row in result["faults"][number]["ranks"]]
        if any(one is None for one in faced):
            rows.append((title, "not tried: mount is not permitted here", ""))
            continue
        told = faced[0]["error"].replace(first["folder"], "").replace("\n", " ") or "none: nobody reads it"
        told = told if len(told) < 150 else told[:147] + "..."
        rows.append((title, told.replace("|", "/"), "yes" if all(is_met(title, one) for one in faced) else "NO"))
    note = "At one and two ranks. The error is that of one rank. Yes: on every rank all is as it should be."
    return Grid("Faults", note, ("fault", "error", "the one before loads"), tuple(rows), labels=3)


def is_met(title: str, faced: dict[str, Any]) -> bool:
    """An error that names the file; nothing changed, nothing run, and the one before loads."""
    fault = FAULTS.get(title)
    if fault is not None and not fault.file:
        return not faced["error"] and not faced["ran"] and faced["loads_by_name"]
    name = "second" if fault is None else fault.file.removeprefix("*")
    good = faced["unchanged"] and faced["loads_by_name"] and faced["loads_by_folder"] and not faced["ran"]
    return good and name in faced["error"]


# -- all ---------------------------------------------------------------------------------------------------------------


def targets(verdicts: Sequence[dict[str, Any]], results: Sequence[Result]) -> Iterator[Target]:
    words = ("complete checkpoints lost", "incomplete ones loaded", "hangs", "leftovers after the next save")
    for word, what in zip(COUNTED, words, strict=True):
        yield Target(f"{what}, in {len(verdicts):,} kills", 0, sum(verdict[word] for verdict in verdicts))
    rows = [(row["title"], one) for result in results for row in result["faults"] for one in row["ranks"]]
    tried = [(title, one) for title, one in rows if one is not None]
    yield Target(f"faults not met, of {len(tried)}", 0, sum(not is_met(*row) for row in tried))
    yield Target("faults not tried", 0, len(rows) - len(tried))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=FULL, help=f"at random moments (default: {FULL})")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    arguments = parser.parse_args()
    quick = arguments.kills < FULL
    console = make_console()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name)
        results: Any = start_all([Facing(ranks, folder) for ranks in (1, 2)], console)
        if results is None:
            return 2
        verdicts = kill_many(arguments.kills, QUICK_SWEEPS if quick else range(12), folder, console)
    report = Report(
        "faults",
        "What checkpoints survive",
        METHOD,
        (kills_grid(verdicts), faults_grid(results)),
        tuple(targets(verdicts, results)),
        {"kills": verdicts, "faults": results},
    )
    return report.publish(console, quick=quick)


if __name__ == "__main__":
    sys.exit(main())
