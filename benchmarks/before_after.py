"""Whether shardstep.shard has become slower on CPUs since an earlier commit: both in the same processes, in turn.

The earlier code is taken from git, under another name. Both train the model of `fast_lane.py` and the many parameters
of `host_work.py`, and must end with the same bits.
"""

from __future__ import annotations

import argparse
import io
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launching import start_all
from report import SPREAD_COLUMNS, Grid, Report, Spread, Target, make_console

EPILOG = """\
It starts its own ranks; run it from the root of a clone on an otherwise idle machine:

  python benchmarks/before_after.py --before COMMIT       about six minutes on two cores
  python benchmarks/before_after.py --before COMMIT --quick    toy sizes, seconds

Results go to benchmarks/results/before_after_COMMIT.md and .json (--quick: the same names in benchmarks/results/quick/,
which git ignores). Exit status: 0 if nothing is slower than the limit, 1 if something is, 2 if a rank failed or bits
differ.
"""

METHOD = """\
{ranks} ranks, Gloo over loopback, one thread each. "Before" is commit {commit}. A ratio is that of two turns of one
round. Training: seconds of a full step, the slowest rank, from the second step of a turn on. Host: processor time of
rank 0's thread in backward, step and zero_grad with 2,000 parameters of 64 elements. All parameters are equal to the
bit at the end."""

ROOT = Path(__file__).parents[1]
OLD_NAME = "shardstep_before"
RANKS = 2
MOST = 1.03


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", required=True, help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--most", type=float, default=MOST, help=f"the highest ratio that is wanted (default: {MOST})")
    parser.add_argument("--quick", action="store_true", help="toy sizes, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def take_from_git(commit: str, folder: Path) -> None:
    """The package as it was at `commit`, under a name of its own."""
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "src/shardstep"], check=True, capture_output=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    package = (folder / "src" / "shardstep").rename(folder / OLD_NAME)
    for path in package.rglob("*.py"):
        # Where it is imported, also by a name in a string.
        path.write_text(re.sub(r"\bshardstep(?=\.| import\b)", OLD_NAME, path.read_text()))


@dataclass(frozen=True, slots=True)
class Launch:
    part: str
    before: Path
    rounds: int
    quick: bool
    ranks: int = RANKS
    rate: None = None

    @property
    def title(self) -> str:
        return self.part

    def command(self, out: Path) -> list[str]:
        worker = str(Path(__file__).with_name("before_after_worker.py"))
        sizes = ["--toy"] if self.quick else []
        rounds = ["--rounds", str(self.rounds)]
        return [worker, "--part", self.part, "--before", str(self.before), *rounds, *sizes, "--out", str(out)]


def ratios(found: dict[str, dict[str, list[float]]]) -> Iterator[tuple[str, Spread, Spread]]:
    """Of every setting: seconds now, and now over before."""
    for setting, seconds in found.items():
        pairs = zip(seconds["now"], seconds["before"], strict=True)
        yield setting, Spread.of(seconds["now"]), Spread.of([now / before for now, before in pairs])


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    rounds = 2 if arguments.quick else arguments.rounds
    with tempfile.TemporaryDirectory() as folder:
        take_from_git(arguments.before, Path(folder))
        planned = [Launch(part, Path(folder), rounds, arguments.quick) for part in ("training", "host")]
        results: list[Any] | None = start_all(planned, console)
    if results is None:
        return 2
    rows = [row for result in results for row in ratios(result["seconds"])]
    grid = Grid(
        "Now over before",
        "Milliseconds are of the present code.",
        ("setting", "ms", *SPREAD_COLUMNS),
        tuple((setting, f"{1e3 * now.median:.1f}", *ratio.cells()) for setting, now, ratio in rows),
    )
    report = Report(
        name=f"before_after_{arguments.before}",
        title="Now and before, on CPUs",
        method=METHOD.format(ranks=RANKS, commit=arguments.before),
        grids=(grid,),
        targets=tuple(Target(f"{setting}: now / before", arguments.most, ratio.median) for setting, _, ratio in rows),
        raw={"launches": results},
    )
    return report.publish(console, quick=arguments.quick)


if __name__ == "__main__":
    sys.exit(main())
