"""Treat several optimizers of one model as one. Each has its own parameters, so a name tells whose state it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from shardstep.checkpoint.contents import Loading, StateToSave
from shardstep.checkpoint.manifest import Contents
from shardstep.checkpoint.storage import Part
from shardstep.planning import ParamSpec


class CombinedAdapter:
    """The adapters of several optimizers as one. A checkpoint has one list of all groups, and does not record which
    optimizer had which."""

    def __init__(self, adapters: Sequence[Any]) -> None:
        self._adapters = adapters
        self.names: Mapping[torch.Tensor, str] = {p: name for one in adapters for p, name in one.names.items()}
        self.has_average = any(one.has_average for one in adapters)
        self._check_no_parameter_is_shared()

    def _check_no_parameter_is_shared(self) -> None:
        first: dict[str, int] = {}
        for number, one in enumerate(self._adapters):
            for name in one.parameters:
                if first.setdefault(name, number) != number:
                    raise ValueError(
                        f"optimizers {first[name]} and {number} both train a parameter called {name}: pass optimizers "
                        "of one model that have no parameter in common, and save several models by one call for each"
                    )

    @property
    def parameters(self) -> Mapping[str, ParamSpec]:
        return {name: spec for one in self._adapters for name, spec in one.parameters.items()}

    def keeps_master(self, name: str) -> bool:
        return any(one.keeps_master(name) for one in self._adapters if name in one.parameters)

    def groups(self) -> list[dict[str, Any]]:
        return [group for one in self._adapters for group in one.groups()]

    def lineages(self) -> list[list[str]]:
        return [names for one in self._adapters for names in one.lineages()]

    def facts(self) -> list[str]:
        return [line for one in self._adapters for line in one.facts()]

    def weights(self, key: str, param: torch.Tensor) -> Iterator[Part]:
        for one in self._adapters:
            if param in one.names:
                yield from one.weights(key, param)

    def state_to_save(self) -> StateToSave:
        combined = StateToSave()
        for one in self._adapters:
            own = one.state_to_save()
            combined.parts += own.parts
            combined.values |= own.values
            combined.state |= own.state
        return combined

    def load(self, contents: Contents, groups: list[dict[str, Any]], names: set[str]) -> Loading:
        each = [one.load(contents, groups, names & one.parameters.keys()) for one in self._adapters]
        # Collective commits first: a rank whose own commit fails would leave the others waiting in the next one.
        in_order = sorted(each, key=lambda loading: not loading.commit_is_collective)

        def all_of(steps: list[Callable[[], None]]) -> Callable[[], None]:
            def run() -> None:
                for step in steps:
                    step()

            return run

        return Loading(
            [request for loading in each for request in loading.requests],
            all_of([loading.check for loading in each]),
            all_of([loading.commit for loading in in_order]),
            all_of([loading.finish for loading in each]),
            any(loading.commit_is_collective for loading in each),
        )
