"""Saving: every rank writes what it holds, all at once; then the first makes a checkpoint of it, or nobody does."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardstep.checkpoint.background import Saving, finish_last, stage, start
from shardstep.checkpoint.contents import MODEL, Entry, Holding, model_entries, model_parts, unwrapped
from shardstep.checkpoint.folder import Begun, absolute, begin, commit, next_sequence, partial_of, prune, write_durably
from shardstep.checkpoint.manifest import (
    Contents,
    Parameter,
    StoredTensor,
    WrittenFile,
    contents_problems,
    stored_tensor,
)
from shardstep.checkpoint.optimizer_adapters import trainer_of
from shardstep.checkpoint.ranks import Ranks
from shardstep.checkpoint.sealing import seal
from shardstep.checkpoint.storage import Part, join_chunks, metadata_bytes, write_parts
from shardstep.checkpoint.together import ranks_of
from shardstep.planning import ParamSpec
from shardstep.state.serialization import encode

Verdict = Callable[[Exception | None], None]  # raises on every rank if one failed


@dataclass
class Job:
    """What one rank has to write."""

    parts: list[Part]
    state: Mapping[str, set[str]]
    values: Mapping[str, str]  # of this moment: a list in the state may grow while a thread writes
    parameters: Mapping[str, ParamSpec]
    groups: str
    model: Sequence[Entry]
    extra: str
    own: str  # what is this rank's alone
    facts: Sequence[str]  # what must be the same on every rank

    def write(self, folder: Path, rank: int) -> None:
        """This rank's file, and a text that says what is in it."""
        tensors, files = write_parts(folder, rank, self.parts)
        text = {
            "tensors": {key: asdict(tensor) for key, tensor in tensors.items()},
            "files": {name: asdict(file) for name, file in files.items()},
            "state": {name: sorted(keys) for name, keys in self.state.items()},
            "values": dict(self.values),
            "own": self.own,
        }
        write_durably(folder / _part_name(rank), json.dumps(text, separators=(",", ":")))


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Any = None,
    *,
    extra: Mapping[str, Any] | None = None,
    extra_of_rank: Mapping[str, Any] | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
) -> Saving | None:
    """Save a model and its optimizer as the checkpoint `path`. Called on all ranks; each writes its part.

        shardstep.save("run/step-1000", model, opt, extra={"step": 1000, "scheduler": scheduler.state_dict()}, keep=3)

    `optimizer` is a sharded one, the drop-in, any other of torch's, or None; or a list of them, each with parameters of
    its own, as for a GAN in one module. `extra` is the same on all ranks, `extra_of_rank` is a rank's own (the state of
    its random numbers): numbers, texts, lists, dicts and tensors. `keep`: of the checkpoints beside `path`, its own
    included, so many newest ones stay. `asynchronous` returns as soon as this rank's part is copied, and what is saved
    is the model of this moment; the next save waits for this one and raises if it failed, as does `wait()` of what is
    returned.

    If a rank fails, all raise, and what was there before is there still. A checkpoint at `path` is replaced only by a
    complete one, and only if nothing else is in its folder; nothing is saved inside a checkpoint.
    """
    ranks = ranks_of(optimizer, model)
    finish_last(ranks)
    target, job, failure = Path(), None, None
    try:
        target = absolute(path)
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be a number of checkpoints, at least 1, got {keep!r}")
        job = _collect(unwrapped(model), optimizer, ranks, extra or {}, extra_of_rank or {})
    except Exception as error:
        failure = error
    facts = [] if job is None else job.facts
    ranks.agree("save", failure, f"path={target}", f"keep={keep}", f"asynchronous={asynchronous}", *facts)
    assert job is not None, "agreed"
    token = ranks.told(secrets.token_hex(4))
    begun, memory, failure = None, None, None
    try:
        if ranks.rank == 0:
            begun = begin(target, token)
        if asynchronous:
            job.parts, memory = stage(job.parts)
    except Exception as error:
        failure = error
    with _removing(begun):
        ranks.agree("save", failure)
    place = Place(target, token, keep, begun)
    if memory is not None:
        with _removing(begun):
            return start(ranks, lambda verdict: _write(job, place, ranks, verdict), memory)
    _write(job, place, ranks, lambda error: ranks.agree("save", error))
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a checkpoint is being written, and what becomes of it."""

    path: Path
    token: str
    keep: int | None
    begun: Begun | None  # on the first rank

    @property
    def partial(self) -> Path:
        return partial_of(self.path, self.token)


@contextmanager
def _removing(begun: Begun | None) -> Iterator[None]:
    """What was begun is removed if it comes to nothing."""
    try:
        yield
    except BaseException:
        if begun is not None:
            begun.end(remove=True)
        raise


def _collect(model: nn.Module, optimizer: Any, ranks: Ranks, extra: Mapping[str, Any], own: Mapping[str, Any]) -> Job:
    trainer: Any = None if optimizer is None else trainer_of(optimizer, model, ranks.rank, ranks.world_size)
    entries, others = model_entries(model)
    held = Holding() if trainer is None else trainer.hold()
    groups, among_groups = encode({"groups": [] if trainer is None else trainer.groups()})
    text, among_extra = encode({"extra": dict(extra), "model": others})
    own_text, among_own = encode(dict(own))
    parts = [*model_parts(entries, trainer, ranks.rank, ranks.world_size), *held.parts]
    if ranks.rank == 0:
        parts += _numbered("optim.options", among_groups) + _numbered("extra", among_extra)
    parts += _numbered(f"extra_of_rank.{ranks.rank}", among_own)
    facts = [*map(str, entries), _digest(groups, among_groups, extra), *([] if trainer is None else trainer.facts())]
    parameters = {} if trainer is None else trainer.parameters
    return Job(parts, held.state, _encoded(held.values), parameters, groups, entries, text, own_text, facts)


def _digest(groups: str, among_groups: Sequence[torch.Tensor], extra: Mapping[str, Any]) -> str:
    """What the model has beside tensors is the first rank's, as its buffers are."""
    text, among_extra = encode(dict(extra))
    digest = hashlib.sha256(f"{groups}\n{text}".encode())
    for tensor in [*among_groups, *among_extra]:
        digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return f"options and extra (what differs between ranks goes into extra_of_rank): {digest.hexdigest()[:16]}"


def _numbered(prefix: str, tensors: Sequence[torch.Tensor]) -> list[Part]:
    return [Part(f"{prefix}.{number}", tuple(one.shape), (0,), one) for number, one in enumerate(tensors)]


def _encoded(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    for name, entry in values.items():
        found[name], tensors = encode(entry)
        if tensors:
            raise TypeError(f"the state of {name} has tensors within lists or dicts, which cannot be saved")
    return found


def _part_name(rank: int) -> str:
    return f"__{rank}.part.json"


# -- in this thread, or in one of its own ------------------------------------------------------------------------------


def _write(job: Job, place: Place, ranks: Ranks, verdict: Verdict) -> None:
    with _removing(place.begun):
        _attempt(verdict, lambda: job.write(place.partial, ranks.rank))
        _attempt(verdict, lambda: _finish(job, place, ranks))
    if place.begun is not None:
        place.begun.end(remove=False)


def _attempt(verdict: Verdict, action: Callable[[], None]) -> None:
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    verdict(failure)


def _finish(job: Job, place: Place, ranks: Ranks) -> None:
    """On the first rank: what all have written becomes a checkpoint."""
    if ranks.rank != 0:
        return
    partial, path = place.partial, place.path
    tensors, files, state, values, own = _read_parts(partial, ranks.world_size)
    for entry in job.model:
        if entry.same_as is not None:  # tied: both names, and the same bytes
            tensors[MODEL + entry.key] = tensors[MODEL + entry.same_as]
    parameters = {
        name: Parameter(spec.shape, spec.dtype, tuple(sorted(state.get(name, ()))), values.get(name, ""))
        for name, spec in job.parameters.items()
    }
    model = tuple(entry.key for entry in job.model)
    contents = Contents(ranks.world_size, parameters, job.groups, tensors, model, job.extra, own)
    for problem in contents_problems(contents, files):  # now, when those that are there are still there
        raise RuntimeError(f"what the ranks have written does not fit together: {problem}")
    seal(partial, contents, files, metadata_bytes(tensors), next_sequence(path.parent))
    commit(partial, path, place.token)
    if place.keep is not None:
        prune(path.parent, place.keep)


def _read_parts(partial: Path, world_size: int) -> tuple[Any, Any, Any, Any, Any]:
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, WrittenFile] = {}
    state: dict[str, set[str]] = {}
    values: dict[str, str] = {}
    own: list[str] = []
    for rank in range(world_size):
        place = partial / _part_name(rank)
        text = json.loads(place.read_text())
        for key, raw in text["tensors"].items():
            tensors[key] = join_chunks(tensors.get(key), stored_tensor(raw))
        files |= {name: WrittenFile(**raw) for name, raw in text["files"].items()}
        for name, keys in text["state"].items():
            state.setdefault(name, set()).update(keys)
        values |= text["values"]
        own.append(text["own"])
        place.unlink()
    return tensors, files, state, values, tuple(own)
