"""From the ranks' raw numbers to the tables and targets of `drop_in.py`. Values in, values out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

from report import SPREAD_COLUMNS, Grid, Spread, Target

Result = dict[str, Any]  # what one launch of drop_in_worker.py wrote

TARGET_RANK = 0
AGREEMENT_BYTES = 4096  # messages in which ranks agree on something; state is megabytes


def label(result: Result) -> tuple[str, str]:
    return (str(result["ranks"]), result["setting"])


def ratios(times: dict[str, list[float]]) -> list[float]:
    """Second contender over first, per round."""
    base, other = times.values()
    return [ours / theirs for ours, theirs in zip(other, base, strict=True)]


def megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}"


def time_grid(results: Sequence[Result], key: str, title: str) -> Grid:
    rows = []
    base, other = results[0][key]
    for result in results:
        times = result[key]
        if not times[base]:
            continue
        seconds = [f"{Spread.of(times[name]).median:.3f}" for name in (base, other)]
        of_minima = f"{min(times[other]) / min(times[base]):.3f}"
        rows.append((*label(result), *seconds, *Spread.of(ratios(times)).cells(), of_minima))
    columns = ("ranks", "setting", f"{base} s", f"{other} s", *SPREAD_COLUMNS, "of minima")
    note = f"Seconds are medians over the rounds; the four columns on the right are the ratio {other} / {base}."
    return Grid(title, note, columns, tuple(rows), labels=2)


def traffic_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result in results:
        for name, seen in result["traffic"].items():
            gradients, parameters, calls = seen["forward_backward"], seen["optimizer_step"], seen["calls"]
            sent = [rank["sent"] for rank in parameters]
            rows.append(
                (
                    *label(result),
                    name,
                    str(max(rank["collectives"] for rank in calls)),
                    str(max(rank["messages"] for rank in calls)),
                    megabytes(fmean(rank["sent"] for rank in gradients)),
                    megabytes(fmean(sent)),
                    megabytes(max(sent)),
                    megabytes(parameters[0]["loopback"] / result["ranks"]),
                )
            )
    columns = ("ranks", "setting", "", "collectives", "messages", "DDP MB", "step MB", "step MB, max", "step MB by lo")
    note = (
        "One optimizer.step(): calls of the process group (c10d operators in the profiler; messages are point-to-point "
        "sends and receives; the rank with most), and MB sent per rank (TCP payload by TCP_INFO: mean, and the rank "
        "that sends most). 'DDP MB' is forward and backward, the mean. 'by lo' is the loopback counter divided by the "
        "ranks: with TCP/IP headers, and with whatever else ran on the machine."
    )
    return Grid("Calls and bytes per optimizer step", note, columns, tuple(rows), labels=3)


def consolidation_results(results: Sequence[Result]) -> Iterator[tuple[Result, dict[str, list[float]]]]:
    """The launches that consolidated, each with the slowest rank's seconds per repetition."""
    for result in results:
        repeated = result["consolidation"]
        if repeated["torch"]:
            yield (
                result,
                {name: [max(r["seconds"] for r in rep["ranks"]) for rep in repeated[name]] for name in repeated},
            )


def highest(repetitions: Sequence[dict[str, Any]], key: str, *, of_target: bool) -> int:
    """The largest number any repetition shows for the target, or for any rank that is not the target."""
    return max(
        int(rank[key])
        for repetition in repetitions
        for number, rank in enumerate(repetition["ranks"])
        if (number == TARGET_RANK) is of_target
    )


def consolidation_grid(results: Sequence[Result]) -> Grid:
    rows = []
    for result, seconds in consolidation_results(results):
        for name, repetitions in result["consolidation"].items():
            rows.append(
                (
                    *label(result),
                    name,
                    f"{Spread.of(seconds[name]).median:.3f}",
                    f"{Spread.of([repetition['state_dict_seconds'] for repetition in repetitions]).median:.3f}",
                    megabytes(max(sum(rank["sent"] for rank in repetition["ranks"]) for repetition in repetitions)),
                    f"{highest(repetitions, 'received', of_target=False):,}",
                    megabytes(highest(repetitions, "extra_memory", of_target=True)),
                    megabytes(highest(repetitions, "extra_memory", of_target=False)),
                )
            )
    columns = (
        *("ranks", "setting", "", "seconds", "state_dict() s", "MB in all", "bytes to others"),
        *("extra MB, target", "extra MB, others"),
    )
    note = (
        "consolidate_state_dict(to=0), and the state_dict() that follows it on rank 0. 'MB in all' is what all ranks "
        "sent, 'bytes to others' the most that any rank other than the target received (TCP payload by TCP_INFO). "
        "'Extra MB' is the peak of resident memory over that before the call, the most of all "
        "repetitions; the target's holds the result."
    )
    return Grid("Consolidation", note, columns, tuple(rows), labels=3)


def consolidation_ratio_grid(results: Sequence[Result]) -> Grid:
    rows = [
        (*label(result), *Spread.of(ratios(seconds)).cells(4)) for result, seconds in consolidation_results(results)
    ]
    note = "Ratio shardstep / torch of the slowest rank's time, one per repetition."
    return Grid("Consolidation time", note, ("ranks", "setting", *SPREAD_COLUMNS), tuple(rows), labels=2)


def frozen_grid(results: Sequence[Result]) -> Grid:
    """How much the optimizer's bytes fall when a sixth of the elements is frozen."""
    whole = {label(result): result for result in results if not result["frozen_share"]}
    rows = []
    for result in results:
        if not result["frozen_share"]:
            continue
        ranks, setting = label(result)
        base = whole[(ranks, setting.partition(",")[0])]
        for name in result["traffic"]:
            with_all, without = (total_sent(run, name) for run in (base, result))
            fall = f"{1 - without / with_all:.1%}"
            cells = (ranks, setting.partition(",")[0], name, f"{result['frozen_share']:.1%}")
            rows.append((*cells, megabytes(with_all), megabytes(without), fall))
    columns = ("ranks", "setting", "", "frozen elements", "MB, all train", "MB, some frozen", "fewer bytes")
    note = "MB sent in one optimizer.step() by all ranks together. A frozen parameter did not change: nothing to send."
    return Grid("Frozen parameters", note, columns, tuple(rows), labels=3)


def total_sent(result: Result, name: str) -> int:
    return sum(rank["sent"] for rank in result["traffic"][name]["optimizer_step"])


def is_control(results: Sequence[Result]) -> bool:
    return "shardstep" not in results[0]["step_seconds"]


def all_grids(results: Sequence[Result]) -> Iterator[Grid]:
    yield time_grid(results, "step_seconds", "A full training step")
    yield time_grid(results, "optimizer_seconds", "optimizer.step() alone")
    if is_control(results):
        return
    yield traffic_grid(results)
    yield frozen_grid(results)
    yield consolidation_grid(results)
    yield consolidation_ratio_grid(results)


def all_targets(results: Sequence[Result]) -> list[Target]:
    if is_control(results):
        return []
    targets = []
    for result in results:
        if result["step_seconds"]["torch"]:
            ratio = Spread.of(ratios(result["step_seconds"])).median
            what = f"step time, shardstep / torch, {result['ranks']} ranks, {result['setting']}"
            targets.append(Target(what, 1.00, ratio))
            if result["setting"] == "default":
                targets.append(Target(what, 0.95, ratio, strict=True))
    for result, seconds in consolidation_results(results):
        where = f"{result['ranks']} ranks"
        targets.append(
            Target(f"consolidation time, shardstep / torch, {where}", 0.05, Spread.of(ratios(seconds)).median)
        )
        received = highest(result["consolidation"]["shardstep"], "received", of_target=False)
        what = f"bytes a rank other than the target receives, {where} (less is agreement, not state)"
        targets.append(Target(what, AGREEMENT_BYTES, received, " B", strict=True))
    return targets
