"""Load a checkpoint: each rank reads what it will hold into new memory, and applies it when all ranks have read."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardstep.checkpoint.background import finish_previous_save
from shardstep.checkpoint.contents import (
    MODEL,
    Loading,
    ModelEntry,
    assign_owners,
    model_entries,
    request_for_whole,
    shared_entries,
    unwrapped,
)
from shardstep.checkpoint.folder import (
    MISSING,
    Checkpoint,
    checksum_problems,
    find_checkpoints,
    size_problems,
    to_absolute,
)
from shardstep.checkpoint.manifest import CONTENTS, METADATA, Contents, read_contents, read_manifest
from shardstep.checkpoint.optimizer_adapters import adapter_for, weight_key
from shardstep.checkpoint.options import (
    find_other_classes,
    group_problems,
    remove_names,
    warn_of_classes,
    warn_of_options,
)
from shardstep.checkpoint.ranks import Ranks, ranks_of
from shardstep.checkpoint.storage import DamagedError, ReadRequest, is_damage, read_blocks
from shardstep.state.serialization import Decoder
from shardstep.stepping.masters import AVERAGE


class Extra(dict[str, Any]):
    """The `extra` that `save` was given. `own` is this rank's `extra_of_rank`; None if the number of ranks differs."""

    own: dict[str, Any] | None
    path: Path  # of the checkpoint that was loaded


def load(path: str | Path, model: nn.Module, optimizer: Any = None, *, strict: bool = True) -> Extra:
    """Load a checkpoint, or the newest complete one in a folder of them. Called on all ranks, of any number.

        extra = shardstep.load("run", model, opt)
        scheduler.load_state_dict(extra["scheduler"])

    Returns the `extra` that was saved. The optimizer may be of any kind and layout that `save` takes, or a list of
    them. If the checkpoint does not fit, an error lists all that is missing, unexpected or of another shape; with
    `strict=False` the rest is loaded. If a rank fails, all ranks raise, and the model and its optimizer are unchanged.

    All files' checksums are checked first. In a folder, damaged checkpoints are skipped with a warning.
    """
    ranks, bare = ranks_of(optimizer, model), unwrapped(model)
    finish_previous_save(ranks)
    candidates = _candidates(path, ranks)
    for name in candidates[:-1]:
        try:
            return _load(Path(name), bare, optimizer, ranks, strict=strict)
        except DamagedError as error:
            warnings.warn(f"skipped a damaged checkpoint: {error}", stacklevel=2)
    return _load(Path(candidates[-1]), bare, optimizer, ranks, strict=strict)


def _load(path: Path, model: nn.Module, optimizer: Any, ranks: Ranks, *, strict: bool) -> Extra:
    """Load the checkpoint at `path`. If it is damaged, raise DamagedError on all ranks before anything is changed."""
    checkpoint, contents = _check_files(path, ranks)
    read, failure = None, None
    try:
        read = _read(checkpoint, contents, model, optimizer, ranks, strict=strict)
    except Exception as error:
        failure = error
    facts = (
        [] if read is None else [str(one.entry) for one in read.shared]
    )  # broadcasts need the same list on all ranks
    ranks.agree("load", failure, f"path={checkpoint.path}", f"strict={strict}", *facts)
    assert read is not None, "agree() has raised if reading failed"
    with _loaded_others(model, read.others, ranks):
        _commit(ranks, read.shared, read.loading)
    try:
        read.loading.finish()
    except Exception as error:
        failure = error
    ranks.agree("a hook after load", failure)
    return read.extra


@contextmanager
def _loaded_others(model: nn.Module, others: Mapping[str, Any], ranks: Ranks) -> Iterator[None]:
    """Load the values that are not tensors by the model's own code, which may refuse them; if the rest of the load, in
    the with block, fails, load the previous values again."""
    if not others:
        yield
        return
    before: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        before = copy.deepcopy(model_entries(model)[1])  # copied, because a module may write to its values
        model.load_state_dict(dict(others), strict=False)
    except Exception as error:
        failure = error
    try:
        ranks.agree("load", failure)
        yield
    except BaseException:
        model.load_state_dict(before, strict=False)
        raise


@dataclass(frozen=True, slots=True)
class _Read:
    """What a rank has read, before the model and the optimizer are changed."""

    extra: Extra
    others: Mapping[str, Any]  # values of the model's state_dict that are not tensors
    shared: Sequence[_SharedTensor]
    loading: Loading


class _SharedTensor(NamedTuple):
    """A tensor that rank `owner` reads into `staged` and broadcasts; `staged` is None on the other ranks."""

    entry: ModelEntry
    owner: int
    staged: torch.Tensor | None


def _read(
    checkpoint: Checkpoint, contents: Contents, model: nn.Module, optimizer: Any, ranks: Ranks, *, strict: bool
) -> _Read:
    entries, others = model_entries(model)
    adapter: Any = None if optimizer is None else adapter_for(optimizer, model, ranks.rank, ranks.world_size)
    groups = list(_decode(checkpoint, contents, contents.groups, "optim.options", "groups")["groups"])
    extra_and_model = _decode(checkpoint, contents, contents.extra, "extra", "extra", "model")
    saved_others = extra_and_model["model"]
    problems = [*_model_problems(contents, entries), *_key_problems(saved_others, others)]
    names, groups = _check(checkpoint, contents, problems, adapter, groups, strict=strict)
    extra = Extra(extra_and_model["extra"])
    extra.path, extra.own = checkpoint.path, _extra_of_this_rank(checkpoint, contents, ranks)
    loading = Loading() if adapter is None else adapter.load(contents, groups, names)
    shared = _find_shared(contents, entries, adapter, ranks)
    kept = {} if adapter is None else {name: adapter.keeps_master(name) for name in names}
    staged = [
        request_for_whole(weight_key(contents, key, to.dtype, keeps_master=kept.get(key, False)), to)
        for key, to in ((one.entry.key, one.staged) for one in shared)
        if to is not None
    ]
    read_blocks(checkpoint.path, contents.tensors, [*loading.requests, *staged])
    loading.requests.clear()
    loading.check()
    return _Read(extra, saved_others, shared, loading)


def _find_shared(contents: Contents, entries: Sequence[ModelEntry], adapter: Any, ranks: Ranks) -> list[_SharedTensor]:
    """Return the tensors that one rank reads for all, with memory for those that this rank reads."""
    for entry in entries:
        if any(size > 1 and not step for size, step in zip(entry.tensor.shape, entry.tensor.stride(), strict=True)):
            raise ValueError(
                f"{entry.key} is expanded: several of its elements share memory, and cannot be loaded. Make it "
                "contiguous"
            )
    rows = zip(shared_entries(entries, adapter), assign_owners(entries, adapter, ranks.world_size), strict=True)
    return [
        _SharedTensor(
            entry, owner, torch.empty_like(entry.tensor, requires_grad=False) if owner == ranks.rank else None
        )
        for entry, owner in rows
        if MODEL + entry.key in contents.tensors and contents.tensors[MODEL + entry.key].shape == entry.tensor.shape
    ]


@torch.no_grad()
def _commit(ranks: Ranks, shared: Sequence[_SharedTensor], loading: Loading) -> None:
    """Change the optimizer and the model. All checks that may raise have been made."""
    failure = None
    try:
        loading.commit()
    except Exception as error:
        failure = error
    ranks.agree("load", failure)
    for entry, owner, staged in shared:
        tensor = entry.tensor.detach()
        if staged is not None:
            tensor.copy_(staged)
        ranks.broadcast(tensor, owner)


# -- find the checkpoint to load ---------------------------------------------------------------------------------------


def _candidates(path: str | Path, ranks: Ranks) -> list[str]:
    """Return the checkpoints that `path` may refer to, newest first, equal on all ranks; warn of damaged ones."""
    wanted, text, failure = Path(), "", None
    try:
        wanted = to_absolute(path)
    except Exception as error:
        failure = error
    ranks.agree("load", failure, f"path={wanted}")  # else an error about rank 0's path would be raised on all ranks
    try:
        if ranks.rank == 0:
            text = json.dumps(_list_candidates(wanted))
    except Exception as error:
        failure = error
    ranks.agree("load", failure)
    names, problems = json.loads(ranks.broadcast_text(text))
    for problem in problems:
        warnings.warn(f"skipped a damaged checkpoint: {problem}", stacklevel=3)
    return list(names)


def _list_candidates(path: Path) -> tuple[list[str], list[str]]:
    """Return the paths of at least one checkpoint, and the problems of damaged ones."""
    found, problems = find_checkpoints(path)
    if found:
        return [str(one.path) for one in found], problems
    if problems:
        raise ValueError("no checkpoint can be read:\n  " + "\n  ".join(problems))
    if (path / METADATA).is_file():
        raise ValueError(
            f"{path} was written by torch.distributed.checkpoint and not by shardstep.save: convert it with "
            f"`shardstep convert {path} DST --to dcp`, and load DST"
        )
    raise FileNotFoundError(f"there is no complete checkpoint at {path}" + _describe_nearby(path))


def _describe_nearby(path: Path) -> str:
    if path.is_dir():
        return ": neither it nor any folder in it has a manifest.json"
    there = sorted(one.name for one in path.parent.iterdir())[:8] if path.parent.is_dir() else []
    return f"; {path.parent} has {', '.join(there)}" if there else ""


def _check_files(path: Path, ranks: Ranks) -> tuple[Checkpoint, Contents]:
    """Return manifest and contents of a checkpoint, after checking all files; each rank reads some of them.

    Raises DamagedError on all ranks if a file is missing, truncated or damaged.
    """
    failure: Exception | None = None
    checked = None
    try:
        checkpoint = Checkpoint(path, read_manifest(path))
        problems = list(size_problems(checkpoint))
        if not problems:
            names = sorted(checkpoint.manifest.files)
            problems = list(checksum_problems(checkpoint, names[ranks.rank :: ranks.world_size]))
        if problems:
            raise DamagedError("; ".join(problems))
        checked = (checkpoint, read_contents(path, checkpoint.manifest))
    except (ValueError, *MISSING) as error:
        failure = DamagedError(str(error))
    except Exception as error:
        failure = error
    ranks.agree("load", failure)
    assert checked is not None, "agree() has raised if checking failed"
    return checked


# -- check that the checkpoint fits ------------------------------------------------------------------------------------


def _check(
    checkpoint: Checkpoint,
    contents: Contents,
    problems: list[str],
    adapter: Any,
    groups: list[dict[str, Any]],
    *,
    strict: bool,
) -> tuple[set[str], list[dict[str, Any]]]:
    """Return the parameters whose state is loaded, and the groups whose options are; `problems` are the model's.

    Raises ValueError with all problems if the checkpoint does not fit and `strict` is True.
    """
    known = set(contents.parameters)
    own = {} if adapter is None else dict(adapter.parameters)
    if adapter is not None:
        problems += _optimizer_problems(contents, own)
        problems += group_problems(groups, adapter.groups(), known)
    if problems and strict:
        raise ValueError(
            f"{checkpoint.path} does not fit:\n  " + "\n  ".join(problems) + "\nstrict=False loads what fits"
        )
    if adapter is not None:
        others = find_other_classes(groups, adapter.groups(), adapter.lineages())
        groups = remove_names(groups, others)
        known -= others.keys()
        warn_of_classes(others, lambda name: contents.parameters[name].state)
        warn_of_options(groups, adapter.groups())
        _warn_of_average(contents, adapter)
    return {name for name in own if name in known and own[name].shape == contents.parameters[name].shape}, groups


def _model_problems(contents: Contents, entries: Sequence[ModelEntry]) -> Iterator[str]:
    own = {entry.key: tuple(entry.tensor.shape) for entry in entries}
    yield from _key_problems(contents.model, own)
    for key in contents.model:
        if key in own and contents.tensors[MODEL + key].shape != own[key]:
            yield f"{key} has shape {contents.tensors[MODEL + key].shape} in the checkpoint, and {own[key]} here"


def _key_problems(saved: Collection[str], own: Collection[str]) -> Iterator[str]:
    known = set(saved)
    yield from _names("missing in the checkpoint", [key for key in own if key not in known])
    yield from _names("not in this model", [key for key in saved if key not in own])


def _optimizer_problems(contents: Contents, own: Mapping[str, Any]) -> Iterator[str]:
    if not contents.parameters:
        yield "it was saved without an optimizer"
        return
    yield from _names("trained here, and not when it was saved", [n for n in own if n not in contents.parameters])
    yield from _names("trained when it was saved, and not here", [n for n in contents.parameters if n not in own])


def _names(what: str, names: Sequence[str]) -> Iterator[str]:
    if names:
        more = f" and {len(names) - 12} more" if len(names) > 12 else ""
        yield f"{what}: {', '.join(names[:12])}{more}"


def _warn_of_average(contents: Contents, adapter: Any) -> None:
    saved = any(AVERAGE in parameter.state for parameter in contents.parameters.values())
    if saved and not adapter.has_average:
        warnings.warn(
            "the checkpoint has averages of the weights (EMA), which are not loaded, as this optimizer keeps none",
            stacklevel=5,
        )
    elif adapter.has_average and not saved and contents.parameters:
        warnings.warn(
            "the checkpoint has no averages of the weights (EMA): the averages begin with the loaded weights",
            stacklevel=5,
        )


# -- options and extra -------------------------------------------------------------------------------------------------


def _decode(checkpoint: Checkpoint, contents: Contents, text: str, prefix: str, *names: str) -> dict[str, Any]:
    """Return the dict that is encoded in `text`, with its tensors; raise DamagedError if it lacks one of `names`."""
    try:
        decoder = Decoder(text)
        if not isinstance(decoder.state, dict) or not all(name in decoder.state for name in names):
            raise ValueError(f"it is not a dict with {', '.join(names) or 'values'}")
    except Exception as error:
        if not is_damage(error):
            raise
        raise DamagedError(f"{checkpoint.path / CONTENTS} is damaged ({prefix}: {error})") from error
    requests = [ReadRequest(f"{prefix}.{number}", (0,), target) for number, target in enumerate(decoder.buffers)]
    read_blocks(checkpoint.path, contents.tensors, requests)
    return decoder.state


def _extra_of_this_rank(checkpoint: Checkpoint, contents: Contents, ranks: Ranks) -> dict[str, Any] | None:
    if contents.world_size != ranks.world_size:
        return None
    return _decode(checkpoint, contents, contents.extra_of_ranks[ranks.rank], f"extra_of_rank.{ranks.rank}")
