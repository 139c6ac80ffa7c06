"""Compare shardstep's ZeroRedundancyOptimizer with torch's, under DDP, on one machine with Gloo.

Both contenders train a GPT of 30 M parameters in the same processes: same seed, same batches, each with its own copy
of the model. They run in turn, a few steps each per round, so that whatever else the machine does hits both; what
counts is the ratio within a round. At the end their parameters and consolidated states must be bitwise equal, or the
run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drop_in_tables import all_grids, all_targets
from report import Report, make_console

EPILOG = """\
It starts its own ranks; run it from the root of the repository on an otherwise idle machine:

  python benchmarks/drop_in.py            everything, 2 and 4 ranks: about a quarter of an hour on two cores, 8 GB
  python benchmarks/drop_in.py --quick    a toy model on 2 ranks, a minute: shows that everything runs
  python benchmarks/drop_in.py --control  torch's class against itself: how far from 1 a ratio is by chance
  python benchmarks/drop_in.py --ranks 2 --rounds 30    2 ranks only, with a narrower spread

Results go to benchmarks/results/drop_in.md and .json (--control: drop_in_control.md and .json; --quick: the same names
in benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed or the contenders disagree.
"""

TITLE = "The drop-in ZeroRedundancyOptimizer against torch's"
CONTROL_TITLE = "Control: torch's ZeroRedundancyOptimizer against itself"

METHOD = """\
DDP with `ZeroRedundancyOptimizer(AdamW)` on both sides; Gloo over loopback, one thread per rank, batch 2 per rank. Both
train in the same processes in alternating blocks; a ratio is that of the two blocks of one round, the second contender
over the first. A time is that of the slowest rank, from a barrier on. After every launch the parameters of both were
compared on every rank, and the states wherever they were consolidated: they are bitwise equal."""


@dataclass(frozen=True, slots=True)
class Launch:
    """One process group: one world size in one setting."""

    ranks: int
    bucket_view: bool
    frozen: bool
    rounds: int
    steps: int
    consolidations: int
    toy: bool
    control: bool

    @property
    def title(self) -> str:
        view = "bucket view" if self.bucket_view else "default settings"
        return f"{self.ranks} ranks, {view}{', a sixth frozen' if self.frozen else ''}"

    def arguments(self) -> list[str]:
        flags = {
            "--bucket-view": self.bucket_view,
            "--frozen": self.frozen,
            "--toy": self.toy,
            "--control": self.control,
        }
        counts = {"--rounds": self.rounds, "--steps": self.steps, "--consolidations": self.consolidations}
        chosen = [flag for flag, on in flags.items() if on]
        return chosen + [word for option, count in counts.items() for word in (option, str(count))]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=None, help="world sizes to run (default: 2 4)")
    parser.add_argument("--rounds", type=int, default=None, help="rounds per launch (default: 12)")
    parser.add_argument("--steps", type=int, default=3, help="steps of each contender in a round (default: 3)")
    parser.add_argument("--control", action="store_true", help="torch's class on both sides: the ratio should be 1")
    parser.add_argument("--quick", action="store_true", help="toy model, 2 ranks, 3 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace) -> list[Launch]:
    """Times are taken with everything trainable, consolidation in default settings, and bytes in every setting."""
    quick = arguments.quick
    rounds = arguments.rounds or (3 if quick else 12)
    return [
        Launch(
            ranks=ranks,
            bucket_view=bucket_view,
            frozen=frozen,
            rounds=0 if frozen else rounds,
            steps=arguments.steps,
            consolidations=0 if frozen or bucket_view or arguments.control else 3,
            toy=quick,
            control=arguments.control,
        )
        for ranks in arguments.ranks or ([2] if quick else [2, 4])
        for bucket_view in (False, True)
        for frozen in ((False,) if arguments.control else (False, True))
    ]


def run(launch: Launch, out: Path) -> dict[str, Any]:
    """Start the ranks, wait, and read what rank 0 wrote."""
    worker = Path(__file__).with_name("drop_in_worker.py")
    starter = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(launch.ranks)]
    # One thread per rank, as with one rank per core. Gloo would otherwise pick the interface the host name resolves to.
    settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(
        [*starter, str(worker), *launch.arguments(), "--out", str(out)], env=os.environ | settings, check=True
    )
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    planned = launches(arguments)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, launch in enumerate(planned, start=1):
            console.print(f"[bold]launch {number} of {len(planned)}: {launch.title}")
            try:
                results.append(run(launch, Path(folder) / f"{number}.json"))
            except subprocess.CalledProcessError as error:
                console.print(f"[red]{launch.title}: the ranks ended with status {error.returncode}; see above")
                return 2
    report = Report(
        name="drop_in_control" if arguments.control else "drop_in",
        title=CONTROL_TITLE if arguments.control else TITLE,
        method=METHOD,
        grids=tuple(all_grids(results)),
        targets=tuple(all_targets(results)),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
