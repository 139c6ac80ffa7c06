"""One rank's part of the state, which says that it is one.

torch's programs take what `state_dict()` returns for all there is: they save it on rank 0 alone, or load it somewhere
else. A part that looked like the whole would be lost, or taken for it, and nobody would hear of it. So tensors of which
ranks hold ranges are `PartOfTensor`s. torch.distributed.checkpoint writes and reads each rank's ranges, by the protocol
that it has for such tensors; copies can be made; whatever else is done with one raises, and says what to do.
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
    """A tensor of which this rank has some: `held[i]` are elements `ranges[i]`, flat in the order of memory; or, if
    that is all, a tensor in its own shape."""

    ranges: list[tuple[int, int]]
    held: list[torch.Tensor]

    @staticmethod
    def __new__(
        cls,
        like: torch.Tensor,
        ranges: Sequence[tuple[int, int]],
        values: Sequence[torch.Tensor],
        *,
        device: Any = None,
    ) -> PartOfTensor:
        """In the shape of `like`, and with its order of memory; of the dtype of `values`."""
        first = values[0] if values else like
        made: PartOfTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=first.dtype, device=device or first.device
        )
        made.ranges, made.held = list(ranges), list(values)
        return made

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()

    @property
    def is_whole(self) -> bool:
        return self.ranges == [(0, self.numel())]

    def of(self, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop), as they were given; ValueError if this part has not got them."""
        if (start, stop) not in self.ranges:
            raise ValueError(
                f"this part of a state_dict has elements {self.ranges}, and this rank holds [{start}, {stop}): it was "
                "taken before the parameters were shared out anew. Load a checkpoint of shardstep.save instead"
            )
        return self.held[self.ranges.index((start, stop))]

    def whole(self) -> torch.Tensor:
        """All of it, if this rank has all: no copy, if it lies in one piece."""
        if len(self.held) == 1 and self.held[0].shape == self.shape:
            return self.held[0]
        return dense_view(self.held[0] if len(self.held) == 1 else torch.cat(self.held), 0, self)

    def blocks(self) -> Iterator[Block]:
        for (start, stop), values in zip(self.ranges, self.held, strict=True):
            if values.shape == self.shape:
                yield from blocks_of_whole(values)
            else:
                yield from blocks_of_range(self, values, start, stop)

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> PartOfTensor:
        return PartOfTensor(self, self.ranges, [change(values) for values in self.held])

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"PartOfTensor(shape={tuple(self.shape)}, dtype={self.dtype}, elements {self.ranges} of {self.numel()})"

    def __deepcopy__(self, memo: Any) -> PartOfTensor:
        return self.each(torch.clone)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(REMEDY)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """What those need that make copies of a state_dict: to another device, or into another that was made before."""
        part, kwargs = args[0], kwargs or {}
        if func in (_aten.detach.default, _aten.alias.default, _aten.clone.default, _aten._to_copy.default):
            return part.each(lambda values: func(values, *args[1:], **kwargs))
        if func in (_aten.empty_like.default, _aten.zeros_like.default):
            return part.each(lambda values: func(values, *args[1:], **kwargs))
        if func is _aten.new_empty.default and tuple(args[1]) == tuple(part.shape):
            return PartOfTensor(part, [], [], device=kwargs.get("device"))  # whoever copies it sets the rest
        if func is _aten.copy_.default and isinstance(args[1], PartOfTensor) and args[1].ranges == part.ranges:
            for own, given in zip(part.held, args[1].held, strict=True):
                own.copy_(given, *args[2:], **kwargs)
            return part
        raise RuntimeError(f"{func} cannot be done: {REMEDY}")

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
    """The "state" of a state_dict, of one rank; and the plan by which ranks held it."""

    def __init__(self, state: Any = (), plan: Plan | None = None) -> None:
        super().__init__(state)
        self.plan = plan

    def __deepcopy__(self, memo: Any) -> PartOfState:
        return PartOfState(copy.deepcopy(dict(self), memo), self.plan)

    def __copy__(self) -> PartOfState:
        return PartOfState(self, self.plan)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise RuntimeError(REMEDY)


def parts_by_place(entries: Mapping[Piece, Entry], params: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """This rank's state by the place of the parameter: of what has elements, `PartOfTensor`s."""
    found: dict[int, list[tuple[Piece, Entry]]] = {}
    for piece, entry in sorted(entries.items(), key=lambda item: (item[0].param, item[0].start)):
        found.setdefault(piece.param, []).append((piece, entry))
    return {
        place: {key: _part(params[place], [(piece, entry[key]) for piece, entry in rows]) for key in rows[0][1]}
        for place, rows in found.items()
    }


def _part(param: torch.Tensor, rows: Sequence[tuple[Piece, Any]]) -> Any:
    piece, value = rows[0]
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value  # the same in every piece
    if value.shape != param.shape and value.numel() == piece.numel:
        return PartOfTensor(param, [(one.start, one.stop) for one, _ in rows], [values for _, values in rows])
    return PartOfTensor(value, [(0, value.numel())], [value])  # in the parameter's shape, or one of its own


def joined(state: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """The same without parts, on a rank that has all."""
    return {
        place: {key: value.whole() if isinstance(value, PartOfTensor) else value for key, value in entry.items()}
        for place, entry in state.items()
    }


def assemble(pieces: dict[Piece, Entry], params: Sequence[torch.Tensor]) -> dict[int, dict[str, Any]]:
    """The state of all ranks, whole, by place; `pieces` is empty afterwards, so that one parameter is there twice."""
    by_place: dict[int, list[Piece]] = {}
    for piece in pieces:
        by_place.setdefault(piece.param, []).append(piece)
    found: dict[int, dict[str, Any]] = {}
    for _, own in sorted(by_place.items()):
        found |= joined(parts_by_place({piece: pieces.pop(piece) for piece in own}, params))
    return found
