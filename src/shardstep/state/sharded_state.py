"""One rank's part of the optimizer state, in types that cannot be mistaken for the whole state.

Programs take what `state_dict()` returns for the whole state: they save it on rank 0 alone, or load it elsewhere. If a
part looked like the whole, state would be lost without an error. So tensors of which this rank holds ranges are
`PartOfTensor`s. torch.distributed.checkpoint writes and reads each rank's ranges by its protocol for such tensors, and
they can be copied. Any other operation raises an error that says what to do.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardstep.params.views import dense_view
from shardstep.planning import Piece, Plan
from shardstep.state.blocks import Block, blocks_of_range, blocks_of_whole
from shardstep.stepping.element_state import Entry

REMEDY = (
    "this is one rank's part of a sharded optimizer's state. Save with shardstep.save(path, model, opt) on all ranks, "
    "or with torch.distributed.checkpoint.save; or call opt.consolidate_state_dict(to=0) on all ranks, and then "
    "opt.state_dict() on rank 0 is the whole"
)
_aten = torch.ops.aten


class PartOfTensor(torch.Tensor):
    """A tensor of which this rank has only some elements: `range_values[i]` are the elements `ranges[i]`.

    They are flat, in memory order; or in the tensor's own shape, if this rank has all of them.
    """

    ranges: list[tuple[int, int]]
    range_values: list[torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        values: Sequence[torch.Tensor],
        *,
        device: Any = None,
    ) -> PartOfTensor:
        """Make a part with the shape and the memory order of `like`, and the dtype of `values`."""
        first = values[0] if values else like
        made: PartOfTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=first.dtype, device=device or first.device
        )
        made.ranges, made.range_values = list(ranges), list(values)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def is_whole(self) -> bool:
        return self.ranges == [(0, self.numel())]

    def values_of(self, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop); raise ValueError if this part does not have exactly that range."""
        if (start, stop) not in self.ranges:
            raise ValueError(
                f"this part of a state_dict has elements {self.ranges}, and this rank holds [{start}, {stop}): it was "
                "saved before a new plan changed what each rank holds. Load a checkpoint of shardstep.save instead"
            )
        return self.range_values[self.ranges.index((start, stop))]

    def to_whole(self) -> torch.Tensor:
        """Return the whole tensor, on a rank that has all elements. One range is not copied."""
        if len(self.range_values) == 1 and self.range_values[0].shape == self.shape:
            return self.range_values[0]
        return dense_view(
            self.range_values[0] if len(self.range_values) == 1 else torch.cat(self.range_values), 0, self
        )

    def blocks(self) -> Iterator[Block]:
        """Yield this rank's elements as blocks of the tensor's shape."""
        for (start, stop), values in zip(self.ranges, self.range_values, strict=True):
            if values.shape == self.shape:
                yield from blocks_of_whole(values)
            else:
                yield from blocks_of_range(self, values, start, stop)

    def map_values(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartOfTensor:
        """Return a part with `change` applied to the values of each range."""
        return PartOfTensor(self, self.ranges, [change(values) for values in self.range_values])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PartOfTensor(shape={tuple(self.shape)}, dtype={self.dtype}, elements {self.ranges} of {self.numel()})"

    def __deepcopy__(self, memo: Any) -> PartOfTensor:
        return self.map_values(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(REMEDY)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Run the operations that copy a state_dict, to a device or into another state_dict; refuse all others."""
        part, kwargs = args[0], kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default):
            return part.map_values(lambda values: func(values, *args[1:], **kwargs))
        if func in (_aten.empty_like.default, _aten.zeros_like.default):
            return part.map_values(lambda values: func(values, *args[1:], **kwargs))
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(part.shape):
            return PartOfTensor(part, [], [], device=kwargs.get("device"))  # the caller sets ranges and values
        if func is _aten.copy_.default and isinstance(args[1], PartOfTensor) and args[1].ranges == part.ranges:
            for own, given in zip(part.range_values, args[1].range_values, strict=True):
                own.copy_(given, *args[2:], **kwargs)
            return part
        raise RuntimeError(f"{func} does not work here: {REMEDY}")

    # -- torch.distributed.checkpoint ---------------------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(one.offsets), one.values.size()) for one in self.blocks()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, torch.Size(one.offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(torch.Size(one.offsets), one.values.size()), properties, self.size()
                ),
            )
            for one in self.blocks()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(one.values for one in self.blocks() if torch.Size(one.offsets) == index.offset)


class PartOfState(dict[Any, Any]):
    """One rank's "state" of a state_dict, and the plan that says which rank held which elements."""

    def __init__(self, state: Any = (), plan: Plan | None = None) -> None:
        super().__init__(state)
        self.plan = plan

    def __deepcopy__(self, memo: Any) -> PartOfState:
        return PartOfState(copy.deepcopy(dict(self), memo), self.plan)

    def __copy__(self) -> PartOfState:
        return PartOfState(self, self.plan)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(REMEDY)


def parts_by_param(entries: Mapping[Piece, Entry], params: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """Return this rank's state by the index of the parameter, with tensors as `PartOfTensor`s."""
    found: dict[int, list[tuple[Piece, Entry]]] = {}
    for piece, entry in sorted(entries.items(), key=lambda item: (item[0].param, item[0].start)):
        found.setdefault(piece.param, []).append((piece, entry))
    return {
        index: {key: _part(params[index], [(piece, entry[key]) for piece, entry in rows]) for key in rows[0][1]}
        for index, rows in found.items()
    }


def _part(param: torch.Tensor, rows: Sequence[tuple[Piece, Any]]) -> Any:
    piece, value = rows[0]
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value  # equal in all pieces of the parameter
    if value.shape != param.shape and value.numel() == piece.numel:
        return PartOfTensor(param, [(one.start, one.stop) for one, _ in rows], [values for _, values in rows])
    return PartOfTensor(value, [(0, value.numel())], [value])  # in the parameter's shape, or one of its own


def join_parts(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Return the state with whole tensors in place of parts, on a rank that has all elements."""
    return {
        index: {key: value.to_whole() if isinstance(value, PartOfTensor) else value for key, value in entry.items()}
        for index, entry in state.items()
    }


def assemble(pieces: dict[Piece, Entry], params: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """Return the whole state by parameter index, from the state of all ranks' pieces.

    `pieces` is emptied on the way, so that only one parameter's state is in memory twice.
    """
    by_param: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_param.setdefault(piece.param, []).append(piece)
    found: dict[int, dict[str, Any]] = {}
    for _, own in sorted(by_param.items()):
        found |= join_parts(parts_by_param({piece: pieces.pop(piece) for piece in own}, params))
    return found
