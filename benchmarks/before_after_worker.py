"""One rank of `before_after.py`: the present code and an earlier one in the same process, in turn."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from contenders import FULL, LEARNING_RATE, TOY
from drop_in_worker import in_turn, refuse, say
from fast_lane_worker import Unwrapped
from host_work_worker import Contender, Many
from rounds import leave, measure_steps

from shardstep.cli.demo.gpt import GPTConfig

PACKAGES = {"before": "shardstep_before", "now": "shardstep"}
SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"fused": None, "gather": "wait"},
    "AdamW fused": {"fused": True, "gather": "wait"},
    "AdamW fused, overlap": {"fused": True, "gather": "overlap"},
}
WARM_UP_STEPS = 3
STEPS = 2  # of a turn
PARAMETERS, FEW_PARAMETERS = 2_000, 200
Seconds = dict[str, dict[str, list[float]]]  # by setting, and by package


def shard(package: Any, model: torch.nn.Module, config: Any, **options: Any) -> Any:
    """In a group of its own: each package counts its own messages, and those of one must not be taken for another's."""
    return package.shard(model, torch.optim.AdamW, process_group=dist.new_group(), config=config, **options)


class Fast(Unwrapped):
    def __init__(self, name: str, config: GPTConfig, package: Any, *, fused: bool | None, gather: str) -> None:
        super().__init__(name, config)
        options = {"lr": LEARNING_RATE, "fused": fused}
        self.optimizer = shard(package, self.model, package.ShardConfig(gather=gather), **options)

    def params(self) -> list[torch.Tensor]:
        self.optimizer.synchronize()  # type: ignore[attr-defined]
        return super().params()


def train(packages: dict[str, Any], arguments: argparse.Namespace) -> Seconds:
    config = TOY if arguments.toy else FULL
    found: Seconds = {}
    for setting, options in SETTINGS.items():
        contenders = [Fast(name, config, package, **options) for name, package in packages.items()]
        for contender in contenders:
            contender.train(WARM_UP_STEPS)
        say(setting)
        found[setting] = measure_steps(list(contenders), arguments.rounds, STEPS)
        compare(setting, contenders[0].params(), contenders[1].params())
        for contender in contenders:
            contender.optimizer.close()  # type: ignore[attr-defined]
    return found


def work(packages: dict[str, Any], arguments: argparse.Namespace) -> Seconds:
    """What the host does for many small parameters; three steps to a turn, because one is short."""
    contenders = []
    for name, package in packages.items():
        model = Many(FEW_PARAMETERS if arguments.toy else PARAMETERS)
        contenders.append(Contender(name, model, shard(package, model, None)))
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for turn in range(3 * arguments.rounds + 1):
        for contender in in_turn(contenders, turn):
            dist.barrier()
            taken = [sum(contender.train().values()) for _ in range(3)]
            if turn:  # the first makes the state
                seconds[contender.name].append(min(taken))
    compare("host", *(list(contender.model.parameters()) for contender in contenders))
    return {"host work, many parameters": seconds}


def compare(setting: str, ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    equal = all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))
    refuse(None if equal else "bits differ", setting)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=("training", "host"), required=True)
    parser.add_argument("--before", required=True, help="the folder in which the earlier package lies")
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--out", type=Path, required=True, help="where rank 0 writes its JSON")
    arguments = parser.parse_args()
    sys.path.append(arguments.before)
    dist.init_process_group("gloo")
    packages = {name: importlib.import_module(package) for name, package in PACKAGES.items()}
    seconds = (train if arguments.part == "training" else work)(packages, arguments)
    if dist.get_rank() == 0:
        arguments.out.write_text(json.dumps({"part": arguments.part, "seconds": seconds}))
    leave()


if __name__ == "__main__":
    main()
