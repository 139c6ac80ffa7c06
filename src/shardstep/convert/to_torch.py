"""Write a file of torch.save that plain torch reads: {"model", "optimizer", "extra", "shardstep"}.

torch.save needs all tensors at once. So they are first written to a temporary file that is mapped into memory, whose
pages the system can write to disk; the program itself needs memory for one block. It takes twice the space on disk.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.folder import sync
from shardstep.convert.from_torch import CLASSES, OF_RANKS, OUR_KEY, OUR_STATE
from shardstep.convert.source import LazyTensor, OnBytes, Source
from shardstep.convert.target import Target

_ALIGNMENT = 64


def write(source: Source, target: Target, on_bytes: OnBytes) -> None:
    spool = target.partial.with_name(target.partial.name + ".tensors")
    try:
        with _mapped_file(spool, source) as memory:
            state_dicts = _arrange(source, memory)
            memory.fill(on_bytes)
            torch.save(state_dicts, target.partial)
    finally:
        spool.unlink(missing_ok=True)
    sync(target.partial)


def _arrange(source: Source, memory: _MappedTensors) -> dict[str, Any]:
    """Return the dict to be saved, with tensors that are not filled yet."""
    model: dict[str, Any] = {}
    for key, tensor in source.model.items():
        model[key] = model[source.tied[key]] if key in source.tied else memory.allocate(tensor)
    model |= source.others
    ours: dict[str, Any] = {CLASSES: [group.kind for group in source.groups], OF_RANKS: list(source.extra_of_ranks)}
    arranged: dict[str, Any] = {"model": model}
    if source.groups:
        arranged["optimizer"] = _optimizer(source, memory, ours)
    return {**arranged, "extra": source.extra, OUR_KEY: ours}


def _optimizer(source: Source, memory: _MappedTensors, ours: dict[str, Any]) -> dict[str, Any]:
    """Return the state_dict of torch's optimizer, with numbered parameters.

    fp32 master weights, averages and rounding counters go into `ours`, by name: plain optimizers would round the first
    and keep the others unused.
    """
    numbers = {name: number for number, name in enumerate(name for group in source.groups for name in group.params)}
    state: dict[int, dict[str, Any]] = {}
    for name, number in numbers.items():
        trained = source.trained[name]
        entry = dict(trained.values)
        for key, tensor in trained.state.items():
            if key in OUR_STATE:
                # Under all names of a tied parameter: a model loads each, and the last one remains.
                names = [name, *(other for other, first in source.tied.items() if first == name)]
                ours.setdefault(OUR_STATE[key], {}).update(dict.fromkeys(names, memory.allocate(tensor)))
            else:
                entry[key] = memory.allocate(tensor)
        if entry:
            state[number] = entry
    groups = [
        {**group.options, "param_names": list(group.params), "params": [numbers[name] for name in group.params]}
        for group in source.groups
    ]
    return {"state": state, "param_groups": groups}


class _MappedTensors:
    """Allocates tensors in the memory of a mapped file; each has a storage of its own, as after training."""

    def __init__(self, memory: Any) -> None:
        self._memory, self._next = memory, 0
        self._tensors: list[tuple[LazyTensor, torch.Tensor]] = []

    def fill(self, on_bytes: OnBytes) -> None:
        """Read all tensors into their memory, after all have been allocated.

        Otherwise small objects that stay in memory would be made between large blocks that are freed: no later block
        would fit into the gaps between them, and memory would grow (test_convert_memory.py).
        """
        for tensor, made in self._tensors:
            tensor.copy_to(made, on_bytes)

    def allocate(self, tensor: LazyTensor) -> torch.Tensor:
        """Return memory for a tensor, which `fill` fills."""
        if not tensor.numel:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        made = torch.frombuffer(self._memory, dtype=tensor.dtype, count=tensor.numel, offset=self._next)
        made = made.view(tensor.shape)
        self._tensors.append((tensor, made))
        self._next += _aligned(tensor.nbytes)
        return made


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@contextmanager
def _mapped_file(path: Path, source: Source) -> Iterator[_MappedTensors]:
    sizes = [one.nbytes for _, one in source.weights()] + [one.nbytes for _, _, one in source.state()]
    with path.open("w+b") as file:
        file.truncate(max(_ALIGNMENT, sum(map(_aligned, sizes))))
        # The mapping is not closed here: it is freed with the last tensor that refers to it.
        yield _MappedTensors(mmap.mmap(file.fileno(), 0))
