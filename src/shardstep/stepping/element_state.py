"""What this rank keeps for every element that it holds: the optimizer's state, and slots beside it.

The state of a piece is cut and joined with its parameter, in runs, and over several pieces. A slot is what shardstep
itself keeps: fp32 masters, an average of the weights (both in masters.py), and the step counts of stochastic rounding.

[Note: stochastic rounding] bfloat16 parameters without masters are stepped in float32, in memory that lasts as long as
the step; between two steps the optimizer has a tensor of their shape that takes no memory. Noise depends on the number
of the step. Where the class has that in its state, it is saved with it. Where it has not (SGD, Muon), steps are counted
here, and the count is saved, and moves to another rank, with the state of the piece. So a run that is resumed gets the
noise that it would have had.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardstep.params.flat import FlatMemory
from shardstep.params.views import dense_view, flat_gradient
from shardstep.planning import Piece
from shardstep.planning.runs import Run
from shardstep.stepping.kernel import Noise, round_to_bfloat16

Entry = dict[str, Any]  # the state of one piece; tensors that have as many elements as the piece are cut with it


def cut_entry(entry: Mapping[str, Any], piece: Piece, start: int, stop: int) -> Entry:
    """Return the state of elements [start, stop) of a parameter, cut from that of a piece which contains them."""
    if (start, stop) == (piece.start, piece.stop):
        return dict(entry)
    # Copies throughout: two pieces must not count their steps in one tensor, nor keep a larger one alive.
    return {
        name: value.reshape(-1)[start - piece.start : stop - piece.start].clone()
        if _is_cut(value, piece.numel)
        else copy.deepcopy(value)
        for name, value in entry.items()
    }


def _is_cut(value: Any, numel: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() == numel


def join_entries(entries: Sequence[Entry], numels: Sequence[int]) -> Entry:
    """Return the state of consecutive pieces as that of one piece."""
    if len(entries) == 1:
        return dict(entries[0])
    return {
        name: _cat([entry[name] for entry in entries])
        if all(_is_cut(entry[name], numel) for entry, numel in zip(entries, numels, strict=True))
        else entries[0][name]
        for name in entries[0]
    }


def cut_from_run(entry: Mapping[str, Any], run: Run, offset: int, numel: int) -> Entry:
    """Return the state of one piece of a run: views of what is kept per element, copies of counters."""
    if len(run.pieces) == 1:
        return dict(entry)
    return {
        name: value[offset : offset + numel] if _is_cut(value, run.numel) else copy.deepcopy(value)
        for name, value in entry.items()
    }


def join_in_run(run: Run, entries: Mapping[Piece, Entry], like: torch.Tensor) -> Entry:
    """Return the state of a run, joined from that of its pieces, whose counters are equal; on the device of `like`."""
    first = run.pieces[0]
    if len(run.pieces) == 1:
        return dict(entries[first])
    joined = dict(entries[first])
    for name, value in entries[first].items():
        if _is_cut(value, first.numel):
            whole = joined[name] = torch.zeros(run.numel, dtype=value.dtype, device=like.device)
            for piece, offset in zip(run.pieces, run.offsets, strict=True):
                whole[offset : offset + piece.numel] = entries[piece][name]
    return joined


def counts_alike(one: Entry | None, piece: Piece, other: Entry | None, neighbour: Piece) -> bool:
    """Whether the state of two pieces differs only in what is kept per element, so that it can be joined."""
    if one is None or other is None:
        return one is other
    return list(one) == list(other) and all(
        _is_cut(other[name], neighbour.numel) and other[name].dtype is value.dtype
        if _is_cut(value, piece.numel)
        else _equal(value, other[name])
        for name, value in one.items()
    )


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and one.dtype is other.dtype and torch.equal(one.cpu(), other.cpu())
    return type(one) is type(other) and bool(one == other)


def on_device_of(tensor: torch.Tensor, entry: Mapping[str, Any], group: Mapping[str, Any]) -> Entry:
    """Return the state where the optimizer expects it: tensors on the parameter's device, counters where a kernel reads
    them, or else where the class makes them."""
    with_tensor = bool(group.get("capturable") or group.get("fused"))
    counters = tensor.device if with_tensor else torch.get_default_device()
    return {
        name: value.to(tensor.device if value.dim() else counters) if isinstance(value, torch.Tensor) else value
        for name, value in entry.items()
    }


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Join parts on the parameter's device. Those that were received lie on the CPU, the others there."""
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.cat([part.to(device) for part in parts])


class Slot:
    """One value for every element that this rank holds, beside the optimizer's own state.

    `values` has a tensor for each bucket, laid out like this rank's range of it. `key` is the slot's name in the state
    of a piece: with that it is saved, and moves to another rank when that comes to hold the piece.
    """

    def __init__(self, memory: FlatMemory, key: str, values: dict[int, torch.Tensor]) -> None:
        self._memory, self.key, self.values = memory, key, values

    @property
    def nbytes(self) -> int:
        """Bytes that all buckets' values take."""
        return sum(values.nbytes for values in self.values.values())

    def split(self, entries: Mapping[Piece, Entry]) -> tuple[dict[Piece, torch.Tensor], dict[Piece, Entry]]:
        """Return this slot's values out of the state of pieces, and the rest; ValueError if a size does not fit."""
        own: dict[Piece, torch.Tensor] = {}
        rest = {piece: {**entry} for piece, entry in entries.items()}
        for number in self.values:
            for piece, _ in self._memory.buckets[number].placed:
                saved = rest.get(piece, {}).pop(self.key, None)
                if saved is None:
                    continue
                if saved.numel() != piece.numel:
                    name = self._memory.plan.params[piece.param].name
                    raise ValueError(
                        f"{self.key} of {name} has {saved.numel()} elements where {piece.numel} are held: load what "
                        "was saved of this model"
                    )
                own[piece] = saved
        return own, {piece: entry for piece, entry in rest.items() if entry}

    def fill(self, own: Mapping[Piece, torch.Tensor]) -> None:
        """Copy in the values that `split` has found."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                if piece in own:
                    values[offset : offset + piece.numel].copy_(own[piece].reshape(-1))

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        """Add views of the values to the state of pieces."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                entries.setdefault(piece, {})[self.key] = values[offset : offset + piece.numel]


COUNT = "shardstep.rounded"  # in the state of a piece
SEED = 20_240_229  # of the noise: the same on all ranks, and in every run


class StochasticRounding(Slot):
    """Steps bfloat16 parameters in float32 and rounds them stochastically: see [Note: stochastic rounding].

    What it keeps is a step count for each piece whose optimizer has none in its state.
    """

    def __init__(self, memory: FlatMemory) -> None:
        super().__init__(memory, COUNT, {})
        buckets = [bucket for bucket in memory.buckets if bucket.values.dtype is torch.bfloat16]
        self._pieces = {piece for bucket in buckets for piece, _ in bucket.placed}
        self.counts: dict[Piece, torch.Tensor] = {}  # the kernel counts in the same dict, on the device

    def split(self, entries: Mapping[Piece, Entry]) -> tuple[dict[Piece, torch.Tensor], dict[Piece, Entry]]:
        live = {piece: entry for piece, entry in entries.items() if piece in self._pieces}
        own = {piece: torch.as_tensor(entry[COUNT]).clone() for piece, entry in live.items() if COUNT in entry}
        parked = {piece: entry for piece, entry in entries.items() if piece not in self._pieces}
        return own, {**parked, **without_counts(live)}

    def fill(self, own: Mapping[Piece, torch.Tensor]) -> None:
        self.counts.clear()
        self.counts.update(own)

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        for piece, count in self.counts.items():
            entries.setdefault(piece, {})[COUNT] = count

    @staticmethod
    def placeholder(shape: torch.Size, device: torch.device) -> torch.Tensor:
        """Return a float32 tensor of this shape in the memory of one element."""
        return torch.zeros((), dtype=torch.float32, device=device).expand(shape)

    @torch.no_grad()
    def load(self, tensor: torch.Tensor, values: torch.Tensor, home: torch.Tensor) -> None:
        """Give `tensor` the flat bfloat16 `values` in float32, in its own shape, laid out like the parameter `home`."""
        wide = values.to(torch.float32)
        tensor.data = wide if tensor.dim() == 1 else dense_view(wide, 0, home)

    @torch.no_grad()
    def store(self, tensor: torch.Tensor, values: torch.Tensor, run: Run, state: dict[str, Any]) -> None:
        """Round what `tensor` has after a step into the flat bfloat16 `values`, and release its memory."""
        stepped = flat_gradient(tensor, tensor)
        step = self._count(run.pieces[0], state)
        for piece, offset in zip(run.pieces, run.offsets, strict=True):
            part = slice(offset, offset + piece.numel)
            values[part] = round_to_bfloat16(stepped[part], Noise(SEED, step, piece.param), piece.start)
        tensor.data = self.placeholder(tensor.shape, tensor.device)

    def _count(self, piece: Piece, state: Mapping[str, Any]) -> int:
        """Return the number of this step: the optimizer's if it is on the host, or else our own."""
        count = state.get("step")
        if count is not None and not (isinstance(count, torch.Tensor) and count.device.type != "cpu"):
            self.counts.pop(piece, None)
            return int(count)
        own = self.counts.setdefault(piece, torch.zeros((), device="cpu"))
        own += 1
        return int(own)


def without_counts(entries: Mapping[Piece, Entry]) -> dict[Piece, Entry]:
    """Return the state without the counts of stochastic rounding, and without entries that had nothing else.

    Some classes take an entry that is there for one that they have made.
    """
    rest = {piece: {key: value for key, value in entry.items() if key != COUNT} for piece, entry in entries.items()}
    return {piece: entry for piece, entry in rest.items() if entry}
