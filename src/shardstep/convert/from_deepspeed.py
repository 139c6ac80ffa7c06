"""Reads checkpoints of DeepSpeed's ZeRO stages 1 and 2.

    latest                                            the name of a folder
    global_step3/mp_rank_00_model_states.pt           the weights, and names and shapes by param group
    global_step3/*zero_pp_rank_R_mp_rank_00_optim_states.pt

Each rank's file has, for every param group, one flat range of fp32 weights and of each kind of state, and says which
part of which parameter lies where in it (`param_slice_mappings`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardstep.convert.from_torch import checked, take_model
from shardstep.convert.source import Block, Group, Lazy, Source, SourceError, Trained, cut, lazy
from shardstep.convert.unpickling import load_torch_file
from shardstep.planning.geometry import boxes
from shardstep.stepping.masters import MASTER, NARROW

_MODEL_FILE = "mp_rank_00_model_states.pt"
_RANK_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
# Of the model's file, what describes the checkpoint itself; the rest is the program's.
_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version",
}  # fmt: skip


class _Fragment:
    """Stands for DeepSpeed's fragment_address: `numel` elements from `start`."""

    def __init__(self, numel: int = 0, start: int = 0) -> None:
        self.numel, self.start = numel, start


class _Stage:
    """Stands for the enumeration of ZeRO's stages."""

    def __init__(self, value: int) -> None:
        self.value = value


class _Scaler:
    """Stands for a loss scaler: its attributes, and nothing that it does."""


# What such files name beside tensors; torch.load gives these classes instead, which can do nothing.
_STAND_INS = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def folder_of(path: Path) -> Path | None:
    """Where the files are: `path`, or the one that `latest` names."""
    if (path / _MODEL_FILE).is_file():
        return path
    latest = path / "latest"
    if latest.is_file() and latest.stat().st_size < 1000:
        name = latest.read_text(errors="replace").strip()
        if name and Path(name).name == name and (path / name).is_dir():
            return path / name
    return None


def read(path: Path) -> Source:
    folder = folder_of(path)
    assert folder is not None, "recognised before"
    _check_kind(folder)
    source = Source("a checkpoint of DeepSpeed", path)
    model_file = folder / _MODEL_FILE
    head = load_torch_file(model_file, _STAND_INS)
    if not isinstance(head, Mapping) or not isinstance(head.get("module"), Mapping):
        raise SourceError(f"{model_file} has no weights under 'module'")
    take_model(source, head["module"], model_file)
    for key, first in (head.get("shared_params") or {}).items():
        if key in source.model and first in source.model and key != first and first not in source.tied:
            source.tied[key] = first
    source.extra = {key: value for key, value in head.items() if key not in _OWN_KEYS and value is not None}
    source.extra.setdefault("step", head.get("global_steps"))
    files = _rank_files(folder)
    if files:
        ranks = [_rank_state(file) for file in files]
        _check_ranks(ranks, head, files)
        for number, shapes in enumerate(head["param_shapes"]):
            _take_group(source, _Flat(folder, number, ranks), shapes)
    else:
        source.notes.append("it has no optimizer's state: weights only")
    return source


def _check_kind(folder: Path) -> None:
    if not (folder / _MODEL_FILE).is_file():
        if any(folder.glob("zero_pp_rank_*_model_states.pt")):
            raise SourceError(
                f"{folder} is of ZeRO stage 3, whose weights are cut: DeepSpeed's own zero_to_fp32.py makes one file "
                "of them, which can be converted"
            )
        raise SourceError(f"{folder} has no {_MODEL_FILE}")
    if any(folder.glob("mp_rank_01_*")) or any(folder.glob("layer_*")):
        raise SourceError(f"{folder} is of a model in several parts (tensor or pipeline parallel), which is not read")


def _rank_files(folder: Path) -> list[Path]:
    found = {int(match[1]): file for file in folder.iterdir() if (match := _RANK_FILE.search(file.name))}
    missing = [rank for rank in range(max(found, default=-1) + 1) if rank not in found]
    if missing:
        raise SourceError(
            f"{folder} has no file of rank {missing[0]}: zero_pp_rank_{missing[0]}_mp_rank_00_optim_states.pt"
        )
    return [found[rank] for rank in sorted(found)]


def _rank_state(file: Path) -> Mapping[str, Any]:
    loaded = load_torch_file(file, _STAND_INS)
    state = loaded.get("optimizer_state_dict") if isinstance(loaded, Mapping) else None
    needed = ("base_optimizer_state", "single_partition_of_fp32_groups", "param_slice_mappings", "partition_count")
    missing = [key for key in needed if not isinstance(state, Mapping) or key not in state]
    if missing:
        raise SourceError(
            f"{file} has no {', '.join(missing)}: written by a DeepSpeed before 0.9, or not by its ZeRO 1 or 2"
        )
    assert isinstance(state, Mapping), "checked"
    if not isinstance(state["base_optimizer_state"], Mapping):
        raise SourceError(f"{file} was saved with elastic_checkpoint, which is not read")
    return state


def _check_ranks(ranks: Sequence[Mapping[str, Any]], head: Mapping[str, Any], files: Sequence[Path]) -> None:
    counts = ranks[0]["partition_count"]
    if any(count != len(ranks) for count in counts):
        raise SourceError(f"{files[0].parent} has files of {len(ranks)} ranks, and was written by {max(counts)}")
    if len(head["param_shapes"]) != len(counts):
        raise SourceError(
            f"{files[0].parent}: the weights have {len(head['param_shapes'])} groups, the state {len(counts)}"
        )


class _Flat:
    """One param group: what each rank has of it, flat."""

    def __init__(self, folder: Path, number: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.folder, self.number = folder, number
        self.states = [dict(rank["base_optimizer_state"]["state"].get(number, {})) for rank in ranks]
        self.weights = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        self.options = dict(ranks[0]["base_optimizer_state"]["param_groups"][number])
        self._mappings = [rank["param_slice_mappings"][number] for rank in ranks]

    def lazy(self, name: str, shape: tuple[int, ...], partitions: Sequence[torch.Tensor], what: str) -> Lazy:
        """Of a parameter, what the ranks have of it one after the other."""
        ranges: list[torch.Tensor] = []
        for rank, mapping in enumerate(self._mappings):
            fragment = mapping.get(name)
            if fragment is None or not fragment.numel:
                continue
            flat = checked(partitions[rank], what, self.folder)
            if fragment.start < 0 or fragment.start + fragment.numel > flat.numel():
                raise SourceError(f"{self.folder}: {what} of {name} lies outside of what rank {rank} has")
            ranges.append(flat[fragment.start : fragment.start + fragment.numel])
        if sum(one.numel() for one in ranges) != math.prod(shape):
            raise SourceError(f"{self.folder}: the ranks do not have all of {what} of {name} together")
        dtype = ranges[0].dtype if ranges else partitions[0].dtype
        return Lazy(shape, dtype, lambda: _blocks(shape, ranges))


def _blocks(shape: tuple[int, ...], ranges: Sequence[torch.Tensor]) -> Iterator[Block]:
    start = 0
    for flat in ranges:
        for box in boxes(shape, start, start + flat.numel()):
            values = flat[box.start - start : box.start - start + box.numel].view(box.sizes)
            for offsets, part in cut(values):
                yield tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), part
        start += flat.numel()


def _take_group(source: Source, flat: _Flat, shapes: Mapping[str, Any]) -> None:
    options = {key: value for key, value in flat.options.items() if key not in ("params", "param_names")}
    counter = options.pop("step", None) if "step" not in flat.states[0] else None  # its own fused Adam counts by group
    for name, size in shapes.items():
        shape = tuple(size)
        if name not in source.model or source.model[name].shape != shape:
            raise SourceError(f"{flat.folder}: the optimizer has {name} of shape {shape}, and the model has not")
        trained = source.trained[name] = Trained(shape, source.model[name].dtype)
        if trained.dtype in NARROW:
            trained.state[MASTER] = flat.lazy(name, shape, flat.weights, "fp32 weights")
        for key in flat.states[0]:
            _take_state(trained, flat, name, key)
        if counter is not None and trained.state:
            trained.state["step"] = lazy(torch.tensor(float(counter)))
    source.groups.append(Group(tuple(shapes), options))


def _take_state(trained: Trained, flat: _Flat, name: str, key: str) -> None:
    values = [state.get(key) for state in flat.states]
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim() == 1 and first.numel() == flat.weights[0].numel():
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise SourceError(f"{flat.folder}: not every rank has {key}")
        trained.state[key] = flat.lazy(name, trained.shape, values, key)  # type: ignore[arg-type]
    elif isinstance(first, torch.Tensor) and first.dim() == 0:
        trained.state[key] = lazy(first)
    elif key == "step" and isinstance(first, int | float):
        trained.state[key] = lazy(torch.tensor(float(first)))  # a tensor, as torch's optimizers have it
    elif isinstance(first, torch.Tensor):
        raise SourceError(
            f"{flat.folder}: {key} of group {flat.number} has shape {tuple(first.shape)} and is kept neither by "
            "element nor once: what it is of each parameter cannot be seen"
        )
    else:
        trained.values[key] = first
