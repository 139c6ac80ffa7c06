"""Whole training steps of GPTs in bf16 on a GPU: shardstep with fp32 masters against torch's fused AdamW and DDP.

One rank: against what one writes by hand around fused AdamW, and against AdamW without masters. Two NCCL ranks on the
same GPU: against DDP in fp32, and in bf16 with masters by hand.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from gpu_ranks import Launch, Result, start_all, stop
from gpu_tables import ratio
from gpu_training_contenders import RATIOS, Ratio
from report import SPREAD_COLUMNS, Grid, Report, Target, environment, make_console

EPILOG = """\
It starts its own ranks and the multi-process service; as root, from the root of the repository:

  PYTHONPATH=src python benchmarks/gpu_training.py                  three minutes
  PYTHONPATH=src python benchmarks/gpu_training.py --ranks 1        one part
  python benchmarks/gpu_training.py --device cpu --quick            toy models without a GPU: shows that everything runs

Results go to benchmarks/results/gpu_training.md and .json, those of one part to gpu_training_<ranks>_ranks.md.
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank or a contender failed.
"""

METHOD = """\
{device}. {ended}

A step is forward, backward, step() and zero_grad(), eager, on random tokens: {tasks}. The output layer is the
embedding; attention is torch's scaled_dot_product_attention. Models are in bf16, activations and gradients too, but
for "DDP, fp32" (fp32 with TF32 products) and "autocast" (fp32 parameters, bf16 products). AdamW has fused=True
everywhere; shard() has fp32 masters, but for "stochastic", which has none. "By hand": gradients copied to fp32 by one
foreach call, fused AdamW on the masters, one foreach copy back. DDP has gradients as views of its buckets. All ranks
share the GPU, side by side under the multi-process service, and talk by NCCL over loopback.

Contenders train in the same processes, in turn; a ratio is that of two blocks of one round. A block is five steps after
one that is not timed, begun together and ended by waiting for the device; a time is that of the slowest rank. The
target at one rank is against masters by hand, which train the same; without masters a step moves less memory, and small
steps are lost to rounding: that ratio is for information. With the small batch the device waits for the host: the
ratio is that of what hosts do."""

RANKS = (1, 2)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=RANKS, help="this part and no other")
    parser.add_argument("--rounds", type=int, default=8, help="of every contender (default: 8)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy models, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace) -> Iterator[Launch]:
    common = ("--device", arguments.device, *(["--toy"] if arguments.quick else []))
    rounds = 2 if arguments.quick else arguments.rounds
    for ranks in [arguments.ranks] if arguments.ranks else RANKS:
        yield Launch(
            f"{ranks} rank{'s' if ranks > 1 else ''}",
            ranks,
            (*common, "--rounds", str(rounds)),
            seconds=240,
            worker="gpu_training_worker.py",
        )


# -- tables ------------------------------------------------------------------------------------------------------------


def tasks_in(results: Sequence[Result]) -> Iterator[tuple[str, dict[str, Any]]]:
    for result in results:
        for task in result["tasks"]:
            yield f"{result['title']}, {task['task']}", task


def ratios_in(task: dict[str, Any], ratios: Sequence[Ratio] = RATIOS) -> list[Ratio]:
    """Those of which both have been measured."""
    return [one for one in ratios if {one.ours, one.base} <= task["step_seconds"].keys()]


def steps_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for title, task in tasks_in(results):
        for name, seconds in task["step_seconds"].items():
            known = task["contenders"][name]
            rows.append(
                (
                    title,
                    name,
                    f"{1e3 * median(seconds):.2f}",
                    f"{1e3 * median(task['host_seconds'][name]):.1f}",
                    f"{known['peak'] / 1e6:,.0f}",
                    f"{known['first_loss']:.2f} to {known['last_loss']:.2f}",
                )
            )
    note = (
        "Medians. Host ms: how long the host of the slowest rank is busy with one step. Peak: allocated memory of the "
        "rank with most, parameters and activations included, in the first steps, the other contenders at rest. Loss: "
        "before the first step and after the last, of rank 0."
    )
    return Grid("Steps", note, ("", "contender", "ms", "host ms", "peak MB", "loss"), tuple(rows), labels=2)


def ratios_grid(results: Sequence[Result], ratios: Sequence[Ratio] = RATIOS) -> Grid:
    rows = []
    for title, task in tasks_in(results):
        for one in ratios_in(task, ratios):
            peaks = [task["contenders"][name]["peak"] for name in (one.ours, one.base)]
            wanted = "for information" if one.limit is None else f"at most {one.limit:.2f}"
            spread = ratio(task, one.ours, one.base).cells()
            rows.append((title, f"{one.ours} / {one.base}", *spread, wanted, f"{peaks[0] / max(1, peaks[1]):.3f}"))
    columns = ("", "time of a step", *SPREAD_COLUMNS, "wanted", "peak memory")
    return Grid("Ratios", "Within a round; below 1 shardstep is faster.", columns, tuple(rows), labels=2)


def targets(results: Sequence[Result], ratios: Sequence[Ratio] = RATIOS) -> Iterator[Target]:
    for title, task in tasks_in(results):
        for one in ratios_in(task, ratios):
            if one.limit is not None:
                measured = ratio(task, one.ours, one.base).median
                yield Target(f"{one.ours} / {one.base}, {title}", one.limit, measured)


def in_words(results: Sequence[Result]) -> str:
    """Of the models, each once."""
    found = {task["task"]: task for _, task in tasks_in(results)}
    texts = [
        f"{name} ({task['parameters']:,} parameters, {task['sequences']} sequences of {task['length']} per rank)"
        for name, task in found.items()
    ]
    return "; ".join(texts)


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    environment()  # what would fail in it should fail now, not when the GPU's time is spent
    signal.signal(signal.SIGTERM, stop)  # or a terminated run would lose its results, and leave the service behind
    results, failures = start_all(list(launches(arguments)), console)
    if not results:
        return 2
    failures += [text for _, task in tasks_in(results) for text in task["left_out"]]
    device = ", ".join(f"{key} {value}" for key, value in results[0]["device"].items())
    ended = "Failed: " + "; ".join(failures) + "." if failures else "All launches ended well."
    report = Report(
        name="gpu_training" + (f"_{arguments.ranks}_ranks" if arguments.ranks else ""),
        title="Training steps in bf16 on a GPU",
        method=METHOD.format(device=device, ended=ended, tasks=in_words(results)),
        grids=(steps_grid(results), ratios_grid(results)),
        targets=tuple(targets(results)),
        raw={"launches": results, "failures": failures},
    )
    status = report.publish(console, quick=arguments.quick)
    return 2 if failures else status


if __name__ == "__main__":
    sys.exit(main())
