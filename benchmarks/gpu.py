"""Time, memory and overlap of shardstep on a GPU, against DDP, torch's ZeroRedundancyOptimizer and FSDP2.

All ranks share one GPU, side by side under NVIDIA's multi-process service, and talk by NCCL over loopback. All use
fused AdamW; the ZeroRedundancyOptimizers have bucket views.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from gpu_contenders import WAIT, WEIGHED
from gpu_ranks import Launch, start_all, stop
from gpu_tables import all_grids, all_targets
from report import RESULTS, Report, environment, make_console

EPILOG = """\
It starts its own ranks and the multi-process service; as root, from the root of the repository:

  PYTHONPATH=src python benchmarks/gpu.py                    everything: ten minutes
  PYTHONPATH=src python benchmarks/gpu.py --only speed       one part; it can be given several times
  python benchmarks/gpu.py --device cpu --quick              toy models without a GPU: shows that everything runs

Results go to benchmarks/results/gpu.md and .json, those of single parts and of given ranks to gpu_<part>.md and
gpu_<part>_<ranks>_ranks.md, the profiler's trace to gpu_trace.json.gz (--quick: the same names in
benchmarks/results/quick/, which git ignores).
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank failed or the contenders disagree.
"""

METHOD = """\
{device}. {ended}

Speed: contenders train in the same processes, in turn; a ratio is that of two blocks of one round. A block is five
steps after one that is not timed, begun together and ended by waiting for the device; a time is that of the slowest
rank. At the end all but FSDP2 must hold the same parameters, to 3 % of the way they went.
Memory: each contender alone in its processes, after three steps; DDP with gradient_as_bucket_view. step(): gradients
are copies of ones that were there before."""

PARTS = ("speed", "memory", "one-rank", "trace")
SHARD_STEPS, OTHER_STEPS = 200, 20  # of memory
ROUNDS_BETWEEN_RANKS = 4  # of one-rank with two: gigabytes cross loopback in every step


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, action="append", help="of speed and memory (default: 2 and 4)")
    parser.add_argument("--rounds", type=int, default=8, help="of speed and one-rank (default: 8)")
    parser.add_argument("--only", choices=PARTS, action="append", help="this part and no other")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy models, 2 ranks, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace, trace: Path) -> Iterator[Launch]:
    """The shortest part last: nothing else depends on the profiler."""
    common = ("--device", arguments.device, *(["--toy"] if arguments.quick else []))
    rounds = 2 if arguments.quick else arguments.rounds
    chosen = arguments.only or PARTS
    counts = arguments.ranks or ([2] if arguments.quick else [2, 4])
    if "speed" in chosen:
        for ranks in counts:
            yield Launch(f"speed, {ranks} ranks", ranks, ("--part", "speed", "--rounds", str(rounds), *common), 300)
    if "memory" in chosen:
        for ranks in counts:
            yield from weighings(ranks, common)
    if "one-rank" in chosen:
        for ranks, count in ((1, rounds), (2, min(rounds, ROUNDS_BETWEEN_RANKS))):
            part = ("--part", "one-rank", "--rounds", str(count), *common)
            yield Launch(f"step() alone, ranks: {ranks}", ranks, part, 240)
    if "trace" in chosen:
        yield Launch("trace, 2 ranks", 2, ("--part", "trace", "--trace", str(trace), *common), 180)


def weighings(ranks: int, common: tuple[str, ...]) -> Iterator[Launch]:
    for name in WEIGHED:
        steps = SHARD_STEPS if name == WAIT else OTHER_STEPS
        part = ("--part", "memory", "--contender", name, "--steps", str(steps), *common)
        yield Launch(f"memory of {name}, {ranks} ranks", ranks, part, 120)


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    environment()  # what would fail in it should fail now, not when the GPU's time is spent
    signal.signal(signal.SIGTERM, stop)  # or a terminated run would lose its results, and leave the service behind
    ranks = [f"{ranks}_ranks" for ranks in arguments.ranks or ()]
    name = "_".join(["gpu", *dict.fromkeys(arguments.only or []), *ranks])
    folder = RESULTS / "quick" if arguments.quick else RESULTS
    results, failures = start_all(list(launches(arguments, folder / "gpu_trace.json.gz")), console)
    if not results:
        return 2
    device = ", ".join(f"{key} {value}" for key, value in results[0]["device"].items())
    ended = "Failed: " + "; ".join(failures) + "." if failures else "All launches ended well."
    report = Report(
        name=name,
        title="shardstep on a GPU",
        method=METHOD.format(device=device, ended=ended),
        grids=tuple(all_grids(results)),
        targets=tuple(all_targets(results)),
        raw={"launches": results, "failures": failures},
    )
    status = report.publish(console, quick=arguments.quick)
    return 2 if failures else status


if __name__ == "__main__":
    sys.exit(main())
