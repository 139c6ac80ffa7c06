"""A GPT trained as people train one: autocast, clipping, two groups, eager and compiled; against DDP and FSDP2."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from gpu_gpt_contenders import DDP, MODES, PEAKS, RATIOS, Ratio
from gpu_ranks import Launch, Result, start_all, stop
from gpu_tables import megabytes, ratio
from gpu_trace import PHASES, STEPS
from report import RESULTS, SPREAD_COLUMNS, Grid, Report, Target, environment, make_console

EPILOG = """\
It starts its own ranks and the multi-process service; as root, from the root of the repository:

  PYTHONPATH=src python benchmarks/gpu_gpt.py                            everything: about twelve minutes
  PYTHONPATH=src python benchmarks/gpu_gpt.py --ranks 2 --mode whole     one part
  PYTHONPATH=src python benchmarks/gpu_gpt.py --ranks 2 --fewer          three minutes: what the first limits are about
  python benchmarks/gpu_gpt.py --device cpu --quick                      toy models without a GPU: shows that all runs

Results go to benchmarks/results/gpu_gpt.md and .json, those of one number of ranks to gpu_gpt_<ranks>_ranks.md.
Exit status: 0 if every target is met, 1 if one is not, 2 if a rank or a contender failed.
"""

METHOD = """\
{device}. {ended}

{task}, {sequences} sequences of {length} random tokens a rank; the output layer is the embedding. A step is forward and
loss under autocast to bf16, backward, clipping by the norm, step() and zero_grad(); fused AdamW with two groups, of
which one decays. Parameters are in fp32 but for "model in bf16", where shard() has fp32 masters; FSDP2 has fp32 shards
and bf16 weights, and keeps weights whole between forward and backward. "the whole model compiled" is
torch.compile(model), and for shard() opt.compile(); "compiled block by block" is block.compile() for every block.
"no exchange" is what all ranks compute side by side on the one GPU they share; "the wire alone" is one reduce-scatter
and one all-gather of all parameters in six calls each.

Contenders train in the same processes, in turn; a ratio is that of two blocks of one round. A block is five steps after
one that is not timed, begun together and ended by waiting for the device; a time is that of the slowest rank. Ranks
talk by NCCL over loopback, which carries about 4 GB/s: it stands for a slow network. Every contender has code of
its own, so that none meets what the compiler knows of another."""

RANKS = (2, 4)
SHARES = ("any", *PHASES)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, choices=RANKS, help="with so many and no others")
    parser.add_argument("--mode", choices=MODES, help="this one and no other")
    parser.add_argument("--fewer", action="store_true", help="fewer contenders")
    parser.add_argument("--rounds", type=int, help="of every contender (default: 6 with two ranks, 3 with four)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="toy models, 2 rounds; numbers mean nothing")
    return parser.parse_args()


def launches(arguments: argparse.Namespace) -> Iterator[Launch]:
    flags = [flag for flag, given in (("--toy", arguments.quick), ("--fewer", arguments.fewer)) if given]
    common = ("--device", arguments.device, *flags)
    for ranks in [arguments.ranks] if arguments.ranks else RANKS:
        rounds = arguments.rounds or (2 if arguments.quick else 6 if ranks == 2 else 3)
        for mode in [arguments.mode] if arguments.mode else MODES:
            folder = RESULTS / "quick" if arguments.quick else RESULTS
            trace = ("--trace", str(folder / f"gpu_gpt_trace_{mode}.json.gz")) if ranks == 2 else ()
            yield Launch(
                f"{ranks} ranks, {MODES[mode]}",
                ranks,
                (*common, "--mode", mode, "--rounds", str(rounds), *trace),
                seconds=300,
                worker="gpu_gpt_worker.py",
            )


def ratios_in(result: Result) -> list[Ratio]:
    """Those of which both have been measured."""
    return [one for one in RATIOS if {one.ours, one.base} <= result["step_seconds"].keys()]


def steps_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        for name, seconds in result["step_seconds"].items():
            known = result["contenders"][name]
            rows.append(
                (
                    result["title"],
                    name,
                    f"{1e3 * median(seconds):.1f}",
                    ratio(result, name, DDP).cells()[0] if DDP in result["step_seconds"] else "-",
                    f"{1e3 * median(result['host_seconds'][name]):.1f}",
                    megabytes(known["peak"]),
                    f"{known['loss']:.3f}" if "loss" in known else "-",
                )
            )
    note = (
        "Medians; the ratio to DDP is that within a round. Host ms: how long the host of the slowest rank is busy with "
        "one step. Peak: allocated memory of the rank with most in a step, parameters, state and activations included. "
        "Loss: the mean of all ranks after the last step."
    )
    return Grid("Steps", note, ("", "contender", "ms", "/ DDP", "host ms", "peak MB", "loss"), tuple(rows), labels=2)


def hidden_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (
            result["title"],
            name,
            kind,
            f"{found['count'] / STEPS:.0f}",
            f"{1e3 * found['seconds'] / STEPS:.1f}",
            *(f"{found[share]:.0%}" for share in SHARES),
        )
        for result in results
        for name, kinds in result["hidden"].items()
        for kind, found in kinds.items()
    ]
    note = (
        "NCCL's kernels of rank 0 in the profiler's trace of three steps without clipping, and the share of their time "
        "in which another kernel ran, of any phase and of each. The traces are gpu_gpt_trace_*.json.gz."
    )
    columns = ("", "contender", "kernel", "per step", "ms per step", *(f"under {share}" for share in SHARES))
    return Grid("What is hidden", note, columns, tuple(rows), labels=3)


def ratios_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        for one in ratios_in(result):
            wanted = "for information" if one.limit is None else f"at most {one.limit:.2f}"
            rows.append(
                (result["title"], f"{one.ours} / {one.base}", *ratio(result, one.ours, one.base).cells(), wanted)
            )
    columns = ("", "time of a step", *SPREAD_COLUMNS, "wanted")
    return Grid("Ratios", "Within a round; below 1 the first is faster.", columns, tuple(rows), labels=2)


def targets(results: Sequence[Result]) -> Iterator[Target]:
    for result in results:
        for one in ratios_in(result):
            if one.limit is not None:
                yield Target(
                    f"{one.ours} / {one.base}, {result['title']}", one.limit, ratio(result, one.ours, one.base).median
                )
        yield from peaks(result)
        yield Target(f"graphs compiled after the first steps, {result['title']}", 0, result["compiled_late"])


def peaks(result: Result) -> Iterator[Target]:
    """Of memory: ours over that of the least of those that send as many bytes."""
    known = result["contenders"]
    for ours, others in PEAKS:
        found = [known[other]["peak"] for other in others if other in known]
        if ours in known and found:
            yield Target(
                f"peak memory, {ours} / the least of its peers, {result['title']}",
                1.0,
                known[ours]["peak"] / max(1, min(found)),
            )


def main() -> int:
    arguments = parse_arguments()
    console = make_console()
    environment()  # what would fail in it should fail now, not when the GPU's time is spent
    signal.signal(signal.SIGTERM, stop)  # or a terminated run would lose its results, and leave the service behind
    results, failures = start_all(list(launches(arguments)), console)
    if not results:
        return 2
    failures += [text for result in results for text in result["left_out"]]
    facts: dict[str, Any] = {
        "device": ", ".join(f"{key} {value}" for key, value in results[0]["device"].items()),
        "ended": "Failed: " + "; ".join(failures) + "." if failures else "All launches ended well.",
        **{key: results[0][key] for key in ("task", "sequences", "length")},
    }
    name = "_".join(
        [
            "gpu_gpt",
            *([arguments.mode] if arguments.mode else []),
            *([f"{arguments.ranks}_ranks"] if arguments.ranks else []),
        ]
    )
    report = Report(
        name=name,
        title="A GPT trained with autocast and torch.compile on a GPU",
        method=METHOD.format(**facts),
        grids=(steps_grid(results), ratios_grid(results), hidden_grid(results)),
        targets=tuple(targets(results)),
        raw={"launches": results, "failures": failures},
    )
    status = report.publish(console, quick=arguments.quick)
    return 2 if failures else status


if __name__ == "__main__":
    sys.exit(main())
