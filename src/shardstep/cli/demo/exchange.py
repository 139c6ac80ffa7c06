"""The folder through which the workers talk to the command that started them.

Files, not pipes: torchrun stands between the two and hands no open pipe on to the ranks it starts.
"""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from pathlib import Path

from shardstep.cli.demo.result import Result


@dataclass(frozen=True, slots=True)
class Tick:
    """Rank 0 finished a step."""

    run: str
    step: int  # the first is 1
    loss: float


@dataclass(frozen=True, slots=True)
class Exchange:
    folder: Path

    @property
    def logs(self) -> Path:
        """Where torchrun puts what each rank writes to stdout and stderr."""
        return self.folder / "logs"

    @property
    def launcher_log(self) -> Path:
        return self.folder / "torchrun.log"

    @property
    def _ticks(self) -> Path:
        return self.folder / "ticks.jsonl"

    @property
    def _result(self) -> Path:
        return self.folder / "result.json"

    def write_tick(self, tick: Tick) -> None:
        with self._ticks.open("a", encoding="utf-8") as file:
            file.write(json.dumps(astuple(tick)) + "\n")

    def read_ticks(self, start: int) -> tuple[list[Tick], int]:
        """The ticks written after byte `start`, and the byte where the next call goes on."""
        if not self._ticks.exists():
            return [], start
        with self._ticks.open("rb") as file:
            file.seek(start)
            # The last line may be half written; it is read whole the next time.
            lines, newline, _ = file.read().rpartition(b"\n")
        ticks = [Tick(*json.loads(line)) for line in lines.splitlines()]
        return ticks, start + len(lines) + len(newline)

    def write_result(self, result: Result) -> None:
        self._result.write_text(result.to_json(), encoding="utf-8")

    def read_result(self) -> Result:
        return Result.from_json(self._result.read_text(encoding="utf-8"))
