"""What a demo run found out. Rank 0 writes it as JSON, the command reads it: values only, no tensor."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

# The two runs, as the table, the picture and the bars call them.
PLAIN = "DDP + AdamW"
SHARDED = "DDP + shardstep"


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes of the tensors that one rank holds between two steps."""

    parameters: int
    gradients: int
    optimizer_state: int


@dataclass(frozen=True, slots=True)
class Run:
    name: str
    losses: tuple[float, ...]  # one per step, the mean over the ranks
    memory: tuple[RankMemory, ...]  # one per rank
    sent_per_rank_and_step: float | None  # bytes, the mean over the ranks; None where the system does not count them
    seconds_per_step: float  # the median


@dataclass(frozen=True, slots=True)
class Result:
    numel: int  # the model's parameters
    plain: Run
    sharded: Run
    equal_on_rank: tuple[bool, ...]  # whether both runs ended with the same parameters, bit for bit

    @property
    def ranks(self) -> int:
        return len(self.equal_on_rank)

    @property
    def steps(self) -> int:
        return len(self.plain.losses)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Result:
        fields = json.loads(text)
        return cls(
            numel=fields["numel"],
            plain=_read_run(fields["plain"]),
            sharded=_read_run(fields["sharded"]),
            equal_on_rank=tuple(fields["equal_on_rank"]),
        )


def _read_run(fields: dict[str, Any]) -> Run:
    memory = tuple(RankMemory(**rank) for rank in fields["memory"])
    return Run(**{**fields, "losses": tuple(fields["losses"]), "memory": memory})
