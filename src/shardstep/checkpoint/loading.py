"""Loading: each rank reads what it will hold, into memory of its own; when all have it, it becomes the model's."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from shardstep.checkpoint.background import finish_last
from shardstep.checkpoint.contents import (
    MODEL,
    Entry,
    Loading,
    dealt,
    model_entries,
    shared_entries,
    unwrapped,
    wish_for_whole,
)
from shardstep.checkpoint.folder import MISSING, Found, absolute, checksum_problems, find, size_problems
from shardstep.checkpoint.manifest import CONTENTS, METADATA, Contents, read_contents, read_manifest
from shardstep.checkpoint.optimizer_adapters import trainer_of, weight_key
from shardstep.checkpoint.options import (
    group_problems,
    of_other_classes,
    warn_of_classes,
    warn_of_options,
    without_names,
)
from shardstep.checkpoint.ranks import Ranks
from shardstep.checkpoint.storage import DamagedError, Wish, is_of_contents, read_wishes
from shardstep.checkpoint.together import ranks_of
from shardstep.state.serialization import Reader
from shardstep.stepping.masters import AVERAGE


class Extra(dict[str, Any]):
    """What `save` was given as `extra`. `own` is this rank's `extra_of_rank`, or None on another number of ranks."""

    own: dict[str, Any] | None
    path: Path  # which checkpoint it was


def load(path: str | Path, model: nn.Module, optimizer: Any = None, *, strict: bool = True) -> Extra:
    """Load a checkpoint, or the newest complete one in a folder of them. Called on all ranks, of any number.

        extra = shardstep.load("run", model, opt)
        scheduler.load_state_dict(extra["scheduler"])

    Returns the `extra` that was saved. The optimizer may be of any kind and layout that `save` takes, or a list of
    them. What does not fit is refused, with everything that is missing, unexpected or of another shape; with
    `strict=False` what fits is loaded. If a rank fails, all raise, and the model and its optimizer are as they were.

    Every file's checksum is compared first. In a folder a damaged checkpoint is passed over, with a warning.
    """
    ranks, bare = ranks_of(optimizer, model), unwrapped(model)
    finish_last(ranks)
    candidates = _candidates(path, ranks)
    for name in candidates[:-1]:
        try:
            return _load(Path(name), bare, optimizer, ranks, strict=strict)
        except DamagedError as error:
            warnings.warn(f"passed over: {error}", stacklevel=2)
    return _load(Path(candidates[-1]), bare, optimizer, ranks, strict=strict)


def _load(path: Path, model: nn.Module, optimizer: Any, ranks: Ranks, *, strict: bool) -> Extra:
    """DamagedError, on all ranks and before anything is changed, if this one cannot be read."""
    found, contents = _whole(path, ranks)
    read, failure = None, None
    try:
        read = _read(found, contents, model, optimizer, ranks, strict=strict)
    except Exception as error:
        failure = error
    facts = [] if read is None else [str(one.entry) for one in read.shared]  # each is given by one rank to all
    ranks.agree("load", failure, f"path={found.path}", f"strict={strict}", *facts)
    assert read is not None, "agreed"
    with _take_others(model, read.others, ranks):
        _commit(ranks, read.shared, read.loading)
    try:
        read.loading.finish()
    except Exception as error:
        failure = error
    ranks.agree("a hook after load", failure)
    return read.extra


@contextmanager
def _take_others(model: nn.Module, others: Mapping[str, Any], ranks: Ranks) -> Iterator[None]:
    """What is no tensor goes to code of the model's own, which may refuse it: first, and taken back if the rest of the
    load fails inside."""
    if not others:
        yield
        return
    before: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        before = copy.deepcopy(model_entries(model)[1])  # a module may go on writing to what it has shown
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
    """What a rank has read, and nothing of it is the model's yet."""

    extra: Extra
    others: Mapping[str, Any]  # of the model's state_dict, what is no tensor
    shared: Sequence[_Shared]
    loading: Loading


class _Shared(NamedTuple):
    """What every rank has and one reads for all: on that rank with memory for it."""

    entry: Entry
    owner: int
    staged: torch.Tensor | None


def _read(found: Found, contents: Contents, model: nn.Module, optimizer: Any, ranks: Ranks, *, strict: bool) -> _Read:
    entries, others = model_entries(model)
    trainer: Any = None if optimizer is None else trainer_of(optimizer, model, ranks.rank, ranks.world_size)
    groups = list(_read_text(found, contents, contents.groups, "optim.options", "groups")["groups"])
    told = _read_text(found, contents, contents.extra, "extra", "extra", "model")
    problems = [*_model_problems(contents, entries), *_other_problems(told["model"], others)]
    names, groups = _check(found, contents, problems, trainer, groups, strict=strict)
    extra = Extra(told["extra"])
    extra.path, extra.own = found.path, _own_extra(found, contents, ranks)
    loading = Loading() if trainer is None else trainer.load(contents, groups, names)
    shared = _find_shared(contents, entries, trainer, ranks)
    kept = {} if trainer is None else {name: trainer.keeps_master(name) for name in names}
    staged = [
        wish_for_whole(weight_key(contents, key, to.dtype, keeps_master=kept.get(key, False)), to)
        for key, to in ((one.entry.key, one.staged) for one in shared)
        if to is not None
    ]
    read_wishes(found.path, contents.tensors, [*loading.wishes, *staged])
    loading.wishes.clear()
    loading.check()
    return _Read(extra, told["model"], shared, loading)


def _find_shared(contents: Contents, entries: Sequence[Entry], trainer: Any, ranks: Ranks) -> list[_Shared]:
    for entry in entries:
        if any(size > 1 and not step for size, step in zip(entry.tensor.shape, entry.tensor.stride(), strict=True)):
            raise ValueError(f"{entry.key} is expanded: several of its elements share memory, and cannot be loaded")
    rows = zip(shared_entries(entries, trainer), dealt(entries, trainer, ranks.world_size), strict=True)
    return [
        _Shared(entry, owner, torch.empty_like(entry.tensor, requires_grad=False) if owner == ranks.rank else None)
        for entry, owner in rows
        if MODEL + entry.key in contents.tensors and contents.tensors[MODEL + entry.key].shape == entry.tensor.shape
    ]


@torch.no_grad()
def _commit(ranks: Ranks, shared: Sequence[_Shared], loading: Loading) -> None:
    """All that could refuse has been asked."""
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
        ranks.give(tensor, owner)


# -- which one ---------------------------------------------------------------------------------------------------------


def _candidates(path: str | Path, ranks: Ranks) -> list[str]:
    """What `path` may mean, the newest first; the same on every rank, as are the warnings."""
    wanted, text, failure = Path(), "", None
    try:
        wanted = absolute(path)
    except Exception as error:
        failure = error
    ranks.agree("load", failure, f"path={wanted}")  # before the first rank looks: it would speak of another place
    try:
        if ranks.rank == 0:
            text = json.dumps(_found_at(wanted))
    except Exception as error:
        failure = error
    ranks.agree("load", failure)
    names, problems = json.loads(ranks.told(text))
    for problem in problems:
        warnings.warn(f"passed over: {problem}", stacklevel=3)
    return list(names)


def _found_at(path: Path) -> tuple[list[str], list[str]]:
    """Names of checkpoints, one at least, and what is wrong with others."""
    found, problems = find(path)
    if found:
        return [str(one.path) for one in found], problems
    if problems:
        raise ValueError("no checkpoint can be read:\n  " + "\n  ".join(problems))
    if (path / METADATA).is_file():
        raise ValueError(
            f"{path} was written by torch.distributed.checkpoint and not by shardstep.save: "
            f"`shardstep convert {path} DST --to dcp` makes one of it that can be loaded"
        )
    raise FileNotFoundError(f"there is no complete checkpoint at {path}" + _near(path))


def _near(path: Path) -> str:
    if path.is_dir():
        return ": it has no manifest.json, and nor has any folder in it"
    there = sorted(one.name for one in path.parent.iterdir())[:8] if path.parent.is_dir() else []
    return f"; {path.parent} has {', '.join(there)}" if there else ""


def _whole(path: Path, ranks: Ranks) -> tuple[Found, Contents]:
    """DamagedError on all ranks if a file is missing, truncated or damaged; the ranks share the reading."""
    failure: Exception | None = None
    whole = None
    try:
        found = Found(path, read_manifest(path))
        problems = list(size_problems(found))
        if not problems:
            names = sorted(found.manifest.files)
            problems = list(checksum_problems(found, names[ranks.rank :: ranks.world_size]))
        if problems:
            raise DamagedError("; ".join(problems))
        whole = (found, read_contents(path, found.manifest))
    except (ValueError, *MISSING) as error:
        failure = DamagedError(str(error))
    except Exception as error:
        failure = error
    ranks.agree("load", failure)
    assert whole is not None, "agreed"
    return whole


# -- whether it fits ---------------------------------------------------------------------------------------------------


def _check(
    found: Found,
    contents: Contents,
    problems: list[str],
    trainer: Any,
    groups: list[dict[str, Any]],
    *,
    strict: bool,
) -> tuple[set[str], list[dict[str, Any]]]:
    """The parameters whose state is loaded, and the groups whose options are; ValueError with all that does not fit.
    `problems` are of the model."""
    known = set(contents.parameters)
    own = {} if trainer is None else dict(trainer.parameters)
    if trainer is not None:
        problems += _optimizer_problems(contents, own)
        problems += group_problems(groups, trainer.groups(), known)
    if problems and strict:
        raise ValueError(f"{found.path} does not fit:\n  " + "\n  ".join(problems) + "\nstrict=False loads what fits")
    if trainer is not None:
        others = of_other_classes(groups, trainer.groups(), trainer.lineages())
        groups = without_names(groups, others)
        known -= others.keys()
        warn_of_classes(others, lambda name: contents.parameters[name].state)
        warn_of_options(groups, trainer.groups())
        _warn_of_average(contents, trainer)
    return {name for name in own if name in known and own[name].shape == contents.parameters[name].shape}, groups


def _model_problems(contents: Contents, entries: Sequence[Entry]) -> Iterator[str]:
    own, saved = {entry.key: tuple(entry.tensor.shape) for entry in entries}, set(contents.model)
    yield from _names("missing in the checkpoint", [key for key in own if key not in saved])
    yield from _names("not in this model", [key for key in contents.model if key not in own])
    for key in contents.model:
        if key in own and contents.tensors[MODEL + key].shape != own[key]:
            yield f"{key} has shape {contents.tensors[MODEL + key].shape} in the checkpoint, and {own[key]} here"


def _other_problems(saved: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    yield from _names("missing in the checkpoint", [key for key in own if key not in saved])
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


def _warn_of_average(contents: Contents, trainer: Any) -> None:
    saved = any(AVERAGE in parameter.state for parameter in contents.parameters.values())
    if saved and not trainer.has_average:
        warnings.warn(
            "the checkpoint has averages of the weights, and this optimizer keeps none: they are not loaded",
            stacklevel=5,
        )
    elif trainer.has_average and not saved and contents.parameters:
        warnings.warn("the checkpoint has no averages of the weights: they begin with the weights", stacklevel=5)


# -- what is no tensor of the model or its state -----------------------------------------------------------------------


def _read_text(found: Found, contents: Contents, text: str, prefix: str, *names: str) -> dict[str, Any]:
    """A dict that has these names, with its tensors."""
    try:
        reader = Reader(text)
        if not isinstance(reader.state, dict) or not all(name in reader.state for name in names):
            raise ValueError(f"no dict of {', '.join(names) or 'values'}")
    except Exception as error:
        if not is_of_contents(error):
            raise
        raise DamagedError(f"{found.path / CONTENTS} is damaged ({prefix}: {error})") from error
    wishes = [Wish(f"{prefix}.{number}", (0,), target) for number, target in enumerate(reader.landing)]
    read_wishes(found.path, contents.tensors, wishes)
    return reader.state


def _own_extra(found: Found, contents: Contents, ranks: Ranks) -> dict[str, Any] | None:
    if contents.world_size != ranks.world_size:
        return None
    return _read_text(found, contents, contents.extra_of_ranks[ranks.rank], f"extra_of_rank.{ranks.rank}")
