"""Read checkpoints of DeepSpeed's ZeRO stages 1 and 2.

    latest                                            the name of a folder
    global_step3/mp_rank_00_model_states.pt           the weights, and names and shapes by param group
    global_step3/*zero_pp_rank_R_mp_rank_00_optim_states.pt

Each rank's file has, for every param group, one flat range of fp32 weights and of each kind of state, and maps the
parameters to elements of that range (`param_slice_mappings`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from shardstep.convert.from_torch import check_dense, take_model
from shardstep.convert.source import LazyTensor, Source, SourceError, SourceGroup, TrainedParameter, lazy_tensor
from shardstep.convert.unpickling import load_torch_file
from shardstep.planning.geometry import boxes_of_range
from shardstep.state.blocks import Block, blocks_of_whole
from shardstep.stepping.masters import MASTER, NARROW

_MODEL_FILE = "mp_rank_00_model_states.pt"
_RANK_FILE = re.compile(r"zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
# Keys of the model's file that describe the checkpoint; all others are the program's, and become extra.
_OWN_KEYS = {
    "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
    "frozen_param_fragments", "data_sampler", "random_ltd", "sparse_tensor_module_names", "skipped_steps",
    "global_steps", "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config",
    "ds_version",
}  # fmt: skip


class _Fragment:
    """Stand-in for DeepSpeed's fragment_address: `numel` elements from `start`."""

    def __init__(self, numel: int = 0, start: int = 0) -> None:
        self.numel, self.start = numel, start


class _Stage:
    """Stand-in for the enumeration of ZeRO's stages."""

    def __init__(self, value: int) -> None:
        self.value = value


class _Scaler:
    """Stand-in for a loss scaler: it has its attributes, and no methods."""


# Classes that these files refer to; torch.load uses the stand-ins, which have no code, in their place.
_STAND_INS = [
    (_Fragment, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_Stage, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Scaler, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
]


def folder_of(path: Path) -> Path | None:
    """Return the folder with the files: `path`, or the folder in it that its file `latest` names."""
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
    assert folder is not None, "detect_kind has found it"
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
            _add_group(source, _FlatGroup(folder, number, ranks), shapes)
    else:
        source.notes.append("it has no optimizer's state: weights only")
    return source


def _check_kind(folder: Path) -> None:
    if not (folder / _MODEL_FILE).is_file():
        if any(folder.glob("zero_pp_rank_*_model_states.pt")):
            raise SourceError(
                f"{folder} is of ZeRO stage 3, which has sharded weights and cannot be read: make one file of them "
                "with DeepSpeed's zero_to_fp32.py, and convert that"
            )
        raise SourceError(f"{folder} has no {_MODEL_FILE}")
    if any(folder.glob("mp_rank_01_*")) or any(folder.glob("layer_*")):
        raise SourceError(
            f"{folder} is of a model in several parts (tensor or pipeline parallel), which cannot be read: merge them "
            "with DeepSpeed first"
        )


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
            f"{file} has no {', '.join(missing)}: only files of ZeRO 1 and 2 of DeepSpeed 0.9 or later can be read"
        )
    assert isinstance(state, Mapping), "no key is missing"
    if not isinstance(state["base_optimizer_state"], Mapping):
        raise SourceError(f"{file} was saved with elastic_checkpoint, which cannot be read: save it without")
    return state


def _check_ranks(ranks: Sequence[Mapping[str, Any]], head: Mapping[str, Any], files: Sequence[Path]) -> None:
    counts = ranks[0]["partition_count"]
    if any(count != len(ranks) for count in counts):
        raise SourceError(f"{files[0].parent} has files of {len(ranks)} ranks, and {max(counts)} ranks wrote it")
    if len(head["param_shapes"]) != len(counts):
        raise SourceError(
            f"{files[0].parent} is damaged: weights have {len(head['param_shapes'])} groups, state has {len(counts)}"
        )


class _FlatGroup:
    """One param group, with the flat ranges of it that each rank has."""

    def __init__(self, folder: Path, number: int, ranks: Sequence[Mapping[str, Any]]) -> None:
        self.folder, self.number = folder, number
        self.states = [dict(rank["base_optimizer_state"]["state"].get(number, {})) for rank in ranks]
        self.weights = [rank["single_partition_of_fp32_groups"][number] for rank in ranks]
        self.options = dict(ranks[0]["base_optimizer_state"]["param_groups"][number])
        self._mappings = [rank["param_slice_mappings"][number] for rank in ranks]

    def lazy_tensor(
        self, name: str, shape: tuple[int, ...], partitions: Sequence[torch.Tensor], what: str
    ) -> LazyTensor:
        """Return a parameter's tensor, whose elements the ranks have one after the other in `partitions`."""
        ranges: list[torch.Tensor] = []
        for rank, mapping in enumerate(self._mappings):
            fragment = mapping.get(name)
            if fragment is None or not fragment.numel:
                continue
            flat = check_dense(partitions[rank], what, self.folder)
            if fragment.start < 0 or fragment.start + fragment.numel > flat.numel():
                raise SourceError(f"{self.folder} is damaged: {what} of {name} is outside of the range of rank {rank}")
            ranges.append(flat[fragment.start : fragment.start + fragment.numel])
        if sum(one.numel() for one in ranges) != math.prod(shape):
            raise SourceError(f"{self.folder} is incomplete: the ranks do not have all elements of {what} of {name}")
        dtype = ranges[0].dtype if ranges else partitions[0].dtype
        return LazyTensor(shape, dtype, lambda: _blocks(shape, ranges))


def _blocks(shape: tuple[int, ...], ranges: Sequence[torch.Tensor]) -> Iterator[Block]:
    start = 0
    for flat in ranges:
        for box in boxes_of_range(shape, start, start + flat.numel()):
            values = flat[box.start - start : box.start - start + box.numel].view(box.sizes)
            for offsets, part in blocks_of_whole(values):
                yield Block(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), part)
        start += flat.numel()


def _add_group(source: Source, flat: _FlatGroup, shapes: Mapping[str, Any]) -> None:
    options = {key: value for key, value in flat.options.items() if key not in ("params", "param_names")}
    counter = options.pop("step", None) if "step" not in flat.states[0] else None  # DeepSpeed's FusedAdam: per group
    for name, size in shapes.items():
        shape = tuple(size)
        if name not in source.model or source.model[name].shape != shape:
            raise SourceError(f"{flat.folder}: the optimizer has {name} of shape {shape}, and the model does not")
        trained = source.trained[name] = TrainedParameter(shape, source.model[name].dtype)
        if trained.dtype in NARROW:
            trained.state[MASTER] = flat.lazy_tensor(name, shape, flat.weights, "fp32 weights")
        for key in flat.states[0]:
            _add_state(trained, flat, name, key)
        if counter is not None and trained.state:
            trained.state["step"] = lazy_tensor(torch.tensor(float(counter)))
    source.groups.append(SourceGroup(tuple(shapes), options))


def _add_state(trained: TrainedParameter, flat: _FlatGroup, name: str, key: str) -> None:
    values = [state.get(key) for state in flat.states]
    first = values[0]
    if isinstance(first, torch.Tensor) and first.dim() == 1 and first.numel() == flat.weights[0].numel():
        if not all(isinstance(value, torch.Tensor) for value in values):
            raise SourceError(f"{flat.folder} is damaged: only some ranks have {key}")
        trained.state[key] = flat.lazy_tensor(name, trained.shape, values, key)  # type: ignore[arg-type]
    elif isinstance(first, torch.Tensor) and first.dim() == 0:
        trained.state[key] = lazy_tensor(first)
    elif key == "step" and isinstance(first, int | float):
        trained.state[key] = lazy_tensor(torch.tensor(float(first)))  # torch's optimizers keep it as a tensor
    elif isinstance(first, torch.Tensor):
        raise SourceError(
            f"{flat.folder}: {key} of group {flat.number} has shape {tuple(first.shape)}, neither one value per "
            "element nor a scalar, so it cannot be assigned to parameters"
        )
    else:
        trained.values[key] = first
