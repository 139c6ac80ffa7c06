"""What a demo run found out, and the folder in which rank 0 writes it for the command that started the ranks.

Files, not pipes: torchrun stands between the two and hands no open pipe on to the ranks it starts. Values only, no
tensors: the command need not wait for torch.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple


class Tick(NamedTuple):
    """Rank 0 finished a step."""

    run: str
    step: int  # the first is 1
    loss: float


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the tensors that one rank holds between backward and step."""

    parameters: int
    gradients: int
    optimizer_state: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer_state


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    losses: tuple[float, ...]  # one per step, the mean over the ranks
    memory: tuple[RankMemory, ...]  # one per rank
    sent_per_rank_and_step: float | None  # bytes, the mean over the ranks; None where the system does not count them
    seconds_per_step: float  # the median
    # By rank: how far its final parameters are from the first run's, in units of the largest; 0 if no bit differs.
    differs_by: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Result:
    numel: int  # the model's parameters
    device: str  # "cpu" or "cuda"
    runs: tuple[Run, ...]  # without shardstep, with the drop-in, with the fast lane

    @property
    def ranks(self) -> int:
        return len(self.runs[0].memory)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields = json.loads(text)
        for run in fields["runs"]:
            run |= {key: tuple(run[key]) for key in ("losses", "differs_by")}
            run["memory"] = tuple(RankMemory(**rank) for rank in run["memory"])
        return cls(fields["numel"], fields["device"], tuple(Run(**run) for run in fields["runs"]))


class Exchange:
    """The folder: `result` and `ticks` are written by rank 0, `logs` and `launcher_log` by torchrun."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"  # what each rank writes to stdout and stderr
        self.launcher_log = folder / "torchrun.log"
        self.result = folder / "result.json"
        self.ticks = folder / "ticks.jsonl"

    def write_tick(self, tick: Tick) -> None:
        with self.ticks.open("a", encoding="utf-8") as file:
            file.write(json.dumps(tick) + "\n")

    def read_ticks(self, start: int) -> tuple[list[Tick], int]:
        """The ticks written after byte `start`, and the byte where the next call goes on."""
        if not self.ticks.exists():
            return [], start
        with self.ticks.open("rb") as file:
            file.seek(start)
            # The last line may be half written; it is read whole the next time.
            lines, newline, _ = file.read().rpartition(b"\n")
        return [Tick(*json.loads(line)) for line in lines.splitlines()], start + len(lines) + len(newline)
