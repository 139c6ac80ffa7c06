"""Writes a file of torch.save that plain torch reads: {"model", "optimizer", "extra"}, and what has no place in these.

torch.save wants every tensor at once. So they are laid into a file beside, mapped into memory, from which torch.save
takes them: the system writes pages out as it likes, and the program holds one block. It takes twice the space on disk.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.folder import sync
from shardstep.convert.from_torch import BESIDE, CLASSES, OF_RANKS, OURS
from shardstep.convert.source import Lazy, Source
from shardstep.convert.target import Target

Told = Callable[[int], None]
_ALIGNMENT = 64


def write(source: Source, target: Target, told: Told) -> None:
    spool = target.partial.with_name(target.partial.name + ".tensors")
    try:
        with _mapped(spool, source) as place:
            arranged = _arranged(source, place)
            place.fill(told)
            torch.save(arranged, target.partial)
    finally:
        spool.unlink(missing_ok=True)
    sync(target.partial)


def _arranged(source: Source, place: _Places) -> dict[str, Any]:
    model: dict[str, Any] = {}
    for key, tensor in source.model.items():
        model[key] = model[source.tied[key]] if key in source.tied else place(tensor)
    model |= source.others
    ours: dict[str, Any] = {CLASSES: [group.kind for group in source.groups], OF_RANKS: list(source.extra_of_ranks)}
    arranged: dict[str, Any] = {"model": model}
    if source.groups:
        arranged["optimizer"] = _optimizer(source, place, ours)
    return {**arranged, "extra": source.extra, OURS: ours}


def _optimizer(source: Source, place: _Places, ours: dict[str, Any]) -> dict[str, Any]:
    """The state_dict of torch's optimizer, with numbers. Masters, averages and counts of noise are none of its state:
    plain optimizers would round the first and carry the others along, so they are beside it, by name."""
    numbers = {name: number for number, name in enumerate(name for group in source.groups for name in group.params)}
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        trained = source.trained[name]
        entry = dict(trained.values)
        for key, tensor in trained.state.items():
            if key in BESIDE:
                # By its other names too: a model loads both, and the last one stays.
                names = [name, *(other for other, first in source.tied.items() if first == name)]
                ours.setdefault(BESIDE[key], {}).update(dict.fromkeys(names, place(tensor)))
            else:
                entry[key] = place(tensor)
        if entry:
            state[number] = entry
    groups = [
        {**group.options, "param_names": list(group.params), "params": [numbers[name] for name in group.params]}
        for group in source.groups
    ]
    return {"state": state, "param_groups": groups}


class _Places:
    """Memory of a mapped file, dealt out; each tensor has a storage of its own, as after training."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._next = memory, 0
        self._open: list[tuple[Lazy, torch.Tensor]] = []

    def fill(self, told: Told) -> None:
        """When all have their places: small things that stay, made between large ones that go, would leave holes in
        memory into which the next large one does not fit, and so take it all (test_convert_memory.py)."""
        for tensor, made in self._open:
            tensor.copy_to(made, told)

    def __call__(self, tensor: Lazy) -> torch.Tensor:
        if not tensor.numel:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        made = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel, offset=self._next)
        made = made.view(tensor.shape)
        self._open.append((tensor, made))
        self._next += _aligned(tensor.nbytes)
        return made


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def _mapped(path: Path, source: Source) -> Iterator[_Places]:
    sizes = [one.nbytes for _, one in source.weights()] + [one.nbytes for _, _, one in source.state()]
    with path.open("w+b") as file:
        file.truncate(max(_ALIGNMENT, sum(map(_aligned, sizes))))
        # Not closed by hand: tensors look into it until they are gone, and with them it goes.
        yield _Places(mmap.mmap(file.fileno(), 0))
