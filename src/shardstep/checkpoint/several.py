"""Several optimizers of one model, as one: each has parameters of its own, so their names tell whose a state is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardstep.checkpoint.contents import Holding, Loading
from shardstep.checkpoint.manifest import Contents
from shardstep.checkpoint.storage import Part
from shardstep.planning import ParamSpec


class Several:
    """What they hold together. A checkpoint of it has one list of groups, and does not know who had which."""

    def __init__(self, trainers: Sequence[Any]) -> None:
        self._trainers = trainers
        self.names: Mapping[torch.Tensor, str] = {p: name for one in trainers for p, name in one.names.items()}
        self.has_average = any(one.has_average for one in trainers)
        self._check_apart()

    def _check_apart(self) -> None:
        first: dict[str, int] = {}
        for number, one in enumerate(self._trainers):
            for name in one.parameters:
                if first.setdefault(name, number) != number:
                    raise ValueError(
                        f"optimizers {first[name]} and {number} both train a parameter called {name}: give optimizers "
                        "of one model, each with parameters of its own; of several models, save each by itself"
                    )

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        return {name: spec for one in self._trainers for name, spec in one.parameters.items()}

    def keeps_master(self, name: str) -> bool:
        return any(one.keeps_master(name) for one in self._trainers if name in one.parameters)

    def groups(self) -> list[dict[str, Any]]:
        return [group for one in self._trainers for group in one.groups()]

    def lineages(self) -> list[list[str]]:
        return [names for one in self._trainers for names in one.lineages()]

    def facts(self) -> list[str]:
        return [line for one in self._trainers for line in one.facts()]

    def weights(self, key: str, param: torch.Tensor) -> Iterator[Part]:
        for one in self._trainers:
            if param in one.names:
                yield from one.weights(key, param)

    def hold(self) -> Holding:
        together = Holding()
        for one in self._trainers:
            held = one.hold()
            together.parts += held.parts
            together.values |= held.values
            together.state |= held.state
        return together

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        each = [one.load(contents, groups, names & one.parameters.keys()) for one in self._trainers]
        # Collective commits first: a rank whose own commit fails would leave the others waiting in the next one.
        in_order = sorted(each, key=lambda loading: not loading.commit_is_collective)

        def all_of(steps: list[Callable[[], None]]) -> Callable[[], None]:
            def run() -> None:
                for step in steps:
                    step()

            return run

        return Loading(
            [wish for loading in each for wish in loading.wishes],
            all_of([loading.check for loading in each]),
            all_of([loading.commit for loading in in_order]),
            all_of([loading.finish for loading in each]),
            any(loading.commit_is_collective for loading in each),
        )
