"""What a demo run found out. Rank 0 writes it as JSON, the command reads it: values only, no tensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


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
    """`runs`: without shardstep, with the drop-in, with the fast lane."""

    numel: int  # the model's parameters
    device: str  # "cpu" or "cuda"
    runs: tuple[Run, ...]

    @property
    def plain(self) -> Run:
        return self.runs[0]

    @property
    def ranks(self) -> int:
        return len(self.plain.memory)

    @property
    def steps(self) -> int:
        return len(self.plain.losses)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields = json.loads(text)
        return cls(fields["numel"], fields["device"], tuple(_read_run(run) for run in fields["runs"]))


def _read_run(fields: dict[str, Any]) -> Run:
    tuples = {key: tuple(fields[key]) for key in ("losses", "differs_by")}
    return Run(**{**fields, **tuples, "memory": tuple(RankMemory(**rank) for rank in fields["memory"])})
