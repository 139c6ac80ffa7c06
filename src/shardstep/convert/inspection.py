"""Summarise what is in a checkpoint, to be printed as text or as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from shardstep.checkpoint.folder import Checkpoint, checkpoints_in, checksum_problems, find_checkpoints, size_problems
from shardstep.convert import from_shardstep
from shardstep.convert.detect import Kind
from shardstep.convert.from_torch import OUR_STATE
from shardstep.convert.source import OnBytes, Source
from shardstep.state.serialization import encode


@dataclass(frozen=True, slots=True)
class GroupSummary:
    """A param group in numbers."""

    optimizer: str  # the name of its class, or "" if the format does not have it
    parameters: int
    elements: int
    options: Mapping[str, Any]


@dataclass(slots=True)
class Summary:
    """A checkpoint in numbers; the names of the fields are keys of the JSON output."""

    path: str
    kind: str
    saved: str = ""  # the time in UTC
    writer: Mapping[str, str] = field(default_factory=dict)  # versions, and the number of ranks
    step: Any = None
    tensors: int = 0  # of the model: parameters and buffers, without further names of tied ones
    parameters: int = 0  # of the optimizer
    elements: int = 0  # of the model
    dtypes: dict[str, int] = field(default_factory=dict)  # elements of the model by dtype
    nbytes: dict[str, int] = field(default_factory=dict)  # bytes of the model, each key of the state, masters, extra
    extra: list[str] = field(default_factory=list)  # keys of extra
    groups: list[GroupSummary] = field(default_factory=list)
    files: int = 0
    checked: str = "nothing"
    problems: list[str] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return not self.problems


def inspect_checkpoint(
    checkpoint: Checkpoint, on_bytes: OnBytes = lambda nbytes: None, *, quick: bool = False
) -> Summary:
    """Summarise a checkpoint of shardstep, and check sizes and, unless `quick`, checksums of its files."""
    manifest = checkpoint.manifest
    summary = Summary(str(checkpoint.path), Kind.SHARDSTEP.value, manifest.saved, dict(manifest.writer))
    summary.files, summary.checked = len(manifest.files), "sizes" if quick else "sizes and checksums"
    summary.problems = list(size_problems(checkpoint))
    if not summary.problems and not quick:
        summary.problems = list(checksum_problems(checkpoint, sorted(manifest.files), on_bytes))
    try:
        _count(summary, from_shardstep.describe_checkpoint(checkpoint))
    except (ValueError, RuntimeError, OSError, KeyError) as error:  # errors of a damaged description
        if not summary.problems:
            summary.problems = [f"{checkpoint.path} cannot be read: {error}"]
    return summary


def inspect_folder(path: Path, on_bytes: OnBytes = lambda nbytes: None, *, quick: bool = False) -> list[Summary]:
    """Summarise all checkpoints in a folder: the newest first, those with a damaged manifest last."""
    found, problems = checkpoints_in(path)
    summaries = [inspect_checkpoint(one, on_bytes, quick=quick) for one in found]
    return summaries + [Summary(str(path), Kind.SHARDSTEP.value, problems=[problem]) for problem in problems]


def inspect_foreign(source: Source) -> Summary:
    """Summarise a source of another format."""
    summary = Summary(str(source.path), source.kind)
    _count(summary, source)
    return summary


def nbytes_at(path: Path) -> int:
    """Return how many bytes are read to check the checkpoints at `path`."""
    return sum(file.nbytes for one in find_checkpoints(path)[0] for file in one.manifest.files.values())


def _count(summary: Summary, source: Source) -> None:
    step = source.extra.get("step")
    summary.step = step if isinstance(step, int | float) else None
    weights = dict(source.weights())
    summary.tensors, summary.elements = len(weights), sum(one.numel for one in weights.values())
    for one in weights.values():
        name = str(one.dtype).removeprefix("torch.")
        summary.dtypes[name] = summary.dtypes.get(name, 0) + one.numel
    summary.nbytes["model"] = sum(one.nbytes for one in weights.values())
    for _, key, tensor in source.state():
        kind = OUR_STATE.get(key, f"state {key}")
        summary.nbytes[kind] = summary.nbytes.get(kind, 0) + tensor.nbytes
    if source.extra or source.extra_of_ranks:
        summary.nbytes["extra"] = sum(_encoded_nbytes(one) for one in (source.extra, *source.extra_of_ranks))
    summary.extra = [str(key) for key in source.extra]
    summary.parameters = len(source.trained)
    summary.groups = [
        GroupSummary(
            group.kind,
            len(group.params),
            sum(torch.Size(source.trained[name].shape).numel() for name in group.params),
            {key: plain(value) for key, value in group.options.items()},
        )
        for group in source.groups
    ]


def _encoded_nbytes(extra: Mapping[str, Any]) -> int:
    try:
        text, tensors = encode(extra)
    except TypeError:  # values of another format that a checkpoint cannot contain; `convert` raises an error for them
        return 0
    return len(text) + sum(one.nbytes for one in tensors)


def plain(value: Any) -> Any:
    """Return a value that JSON can write."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
