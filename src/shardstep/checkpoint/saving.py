"""Save a checkpoint: all ranks write what they hold at the same time, and then rank 0 makes the checkpoint complete."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardstep.checkpoint.background import Agree, Saving, finish_previous_save, stage, start_save
from shardstep.checkpoint.contents import (
    MODEL,
    ModelEntry,
    StateToSave,
    model_entries,
    model_parts,
    numbered_parts,
    unwrapped,
)
from shardstep.checkpoint.folder import (
    PARTIAL,
    PartialFolder,
    commit,
    create_partial,
    next_sequence,
    prune,
    temporary_path,
    to_absolute,
    write_durably,
)
from shardstep.checkpoint.manifest import (
    Contents,
    Parameter,
    StoredTensor,
    WrittenFile,
    contents_problems,
    stored_tensor,
)
from shardstep.checkpoint.optimizer_adapters import adapter_for
from shardstep.checkpoint.ranks import Ranks, ranks_of
from shardstep.checkpoint.storage import Part, join_chunks, metadata_bytes, write_manifest, write_parts
from shardstep.planning import ParamSpec
from shardstep.state.serialization import encode


@dataclass
class Job:
    """What one rank writes. Texts are encoded at once, because lists may change while a thread writes."""

    parts: list[Part]
    state: Mapping[str, set[str]]
    values: Mapping[str, str]
    parameters: Mapping[str, ParamSpec]
    groups: str
    model: Sequence[ModelEntry]
    extra: str
    extra_of_rank: str
    facts: Sequence[str]  # what must be equal on all ranks

    def write(self, folder: Path, rank: int) -> None:
        """Write this rank's file, and a JSON text that describes it."""
        tensors, files = write_parts(folder, rank, self.parts)
        text = {
            "tensors": {key: asdict(tensor) for key, tensor in tensors.items()},
            "files": {name: asdict(file) for name, file in files.items()},
            "state": {name: sorted(keys) for name, keys in self.state.items()},
            "values": dict(self.values),
            "own": self.extra_of_rank,
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

    `optimizer` is a sharded one, the drop-in, any other of torch's, or None; or a list of them, each with its own
    parameters, as for a GAN in one module. `extra` must be equal on all ranks; `extra_of_rank` may differ (the state of
    a rank's random number generators). Both can have numbers, strings, lists, dicts and tensors. `keep`: only so many
    of the newest checkpoints in the folder of `path` are kept, including this one. With `asynchronous`, `save` returns
    as soon as this rank's part is copied; later changes of the model are not saved. The next save waits for this one
    and raises if it failed, as does `wait()` of the returned object.

    If a rank fails, all ranks raise, and earlier checkpoints are unchanged. A checkpoint at `path` is replaced only by
    a complete one, and only if its folder has no other files. Nothing is saved inside a checkpoint.
    """
    ranks = ranks_of(optimizer, model)
    finish_previous_save(ranks)
    target, job, failure = Path(), None, None
    try:
        target = to_absolute(path)
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise ValueError(f"keep must be None or a number of checkpoints, at least 1, got {keep!r}")
        job = _collect(unwrapped(model), optimizer, ranks, extra or {}, extra_of_rank or {})
    except Exception as error:
        failure = error
    facts = [] if job is None else job.facts
    ranks.agree("save", failure, f"path={target}", f"keep={keep}", f"asynchronous={asynchronous}", *facts)
    assert job is not None, "agree() has raised if collecting failed"
    token = ranks.broadcast_text(secrets.token_hex(4))
    partial_folder, memory, failure = None, None, None
    try:
        if ranks.rank == 0:
            partial_folder = create_partial(target, token)
        if asynchronous:
            job.parts, memory = stage(job.parts)
    except Exception as error:
        failure = error
    with _removed_on_failure(partial_folder):
        ranks.agree("save", failure)
    save_target = SaveTarget(target, token, keep, partial_folder)
    if memory is not None:
        with _removed_on_failure(partial_folder):
            return start_save(ranks, lambda agree: _write(job, save_target, ranks, agree), memory)
    _write(job, save_target, ranks, lambda error: ranks.agree("save", error))
    return None


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """The path of a checkpoint that is being saved, and the folder to which it is written first."""

    path: Path
    token: str
    keep: int | None
    partial_folder: PartialFolder | None  # only rank 0 has it

    @property
    def partial(self) -> Path:
        return temporary_path(self.path, PARTIAL, self.token)


@contextmanager
def _removed_on_failure(partial_folder: PartialFolder | None) -> Iterator[None]:
    """Remove the folder if the code inside the with block raises."""
    try:
        yield
    except BaseException:
        if partial_folder is not None:
            partial_folder.close(remove=True)
        raise


def _collect(model: nn.Module, optimizer: Any, ranks: Ranks, extra: Mapping[str, Any], own: Mapping[str, Any]) -> Job:
    adapter: Any = None if optimizer is None else adapter_for(optimizer, model, ranks.rank, ranks.world_size)
    entries, others = model_entries(model)
    held = StateToSave() if adapter is None else adapter.state_to_save()
    groups, among_groups = encode({"groups": [] if adapter is None else adapter.groups()})
    text, among_extra = encode({"extra": dict(extra), "model": others})
    own_text, among_own = encode(dict(own))
    parts = [*model_parts(entries, adapter, ranks.rank, ranks.world_size), *held.parts]
    if ranks.rank == 0:
        parts += numbered_parts("optim.options", among_groups) + numbered_parts("extra", among_extra)
    parts += numbered_parts(f"extra_of_rank.{ranks.rank}", among_own)
    facts = [*map(str, entries), _digest(groups, among_groups, extra), *([] if adapter is None else adapter.facts())]
    parameters = {} if adapter is None else adapter.parameters
    return Job(parts, held.state, _encoded(held.values), parameters, groups, entries, text, own_text, facts)


def _digest(groups: str, among_groups: Sequence[torch.Tensor], extra: Mapping[str, Any]) -> str:
    """Return a line that is equal on ranks with equal options and extra; the model's values are rank 0's, and may
    differ as its buffers may."""
    text, among_extra = encode(dict(extra))
    digest = hashlib.sha256(f"{groups}\n{text}".encode())
    for tensor in [*among_groups, *among_extra]:
        digest.update(tensor.cpu().view(torch.uint8).numpy().tobytes())
    return f"options and extra (what differs between ranks goes into extra_of_rank): {digest.hexdigest()[:16]}"


def _encoded(values: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    found = {}
    for name, entry in values.items():
        found[name], tensors = encode(entry)
        if tensors:
            raise TypeError(
                f"the optimizer's state of {name} has tensors in lists or dicts, which cannot be saved: keep each "
                "tensor under a key of its own"
            )
    return found


def _part_name(rank: int) -> str:
    return f"__{rank}.part.json"


# -- run by this thread, or by a background thread if asynchronous -----------------------------------------------------


def _write(job: Job, target: SaveTarget, ranks: Ranks, agree: Agree) -> None:
    with _removed_on_failure(target.partial_folder):
        _attempt(agree, lambda: job.write(target.partial, ranks.rank))
        _attempt(agree, lambda: _finish(job, target, ranks))
    if target.partial_folder is not None:
        target.partial_folder.close(remove=False)


def _attempt(agree: Agree, action: Callable[[], None]) -> None:
    """Run `action`; if it fails on any rank, raise on all ranks."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    agree(failure)


def _finish(job: Job, target: SaveTarget, ranks: Ranks) -> None:
    """On rank 0, make a checkpoint of what all ranks have written."""
    if ranks.rank != 0:
        return
    partial, path = target.partial, target.path
    written = _read_parts(partial, ranks.world_size)
    for entry in job.model:
        if entry.same_as is not None:  # a tied tensor is stored once, and listed under all its names
            written.tensors[MODEL + entry.key] = written.tensors[MODEL + entry.same_as]
    parameters = {
        name: Parameter(
            spec.shape, spec.dtype, tuple(sorted(written.state.get(name, ()))), written.values.get(name, "")
        )
        for name, spec in job.parameters.items()
    }
    model = tuple(entry.key for entry in job.model)
    own = tuple(written.extra_of_ranks)
    contents = Contents(ranks.world_size, parameters, job.groups, written.tensors, model, job.extra, own)
    for problem in contents_problems(contents, written.files):  # checked before an older checkpoint is replaced
        raise RuntimeError(f"the ranks wrote parts that do not fit together: {problem}")
    write_manifest(partial, contents, written.files, metadata_bytes(written.tensors), next_sequence(path.parent))
    commit(partial, path, target.token)
    if target.keep is not None:
        prune(path.parent, target.keep)


@dataclass
class _WrittenByRanks:
    """What all ranks have written, from the JSON texts that they left in the folder."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, WrittenFile] = field(default_factory=dict)
    state: dict[str, set[str]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    extra_of_ranks: list[str] = field(default_factory=list)


def _read_parts(partial: Path, world_size: int) -> _WrittenByRanks:
    """Read and remove the ranks' texts."""
    written = _WrittenByRanks()
    for rank in range(world_size):
        path = partial / _part_name(rank)
        text = json.loads(path.read_text())
        for key, raw in text["tensors"].items():
            written.tensors[key] = join_chunks(written.tensors.get(key), stored_tensor(raw))
        written.files |= {name: WrittenFile(**raw) for name, raw in text["files"].items()}
        for name, keys in text["state"].items():
            written.state.setdefault(name, set()).update(keys)
        written.values |= text["values"]
        written.extra_of_ranks.append(text["own"])
        path.unlink()
    return written
