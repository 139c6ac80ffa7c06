"""What this rank keeps for every element that it holds: the state of the optimizer, and slots beside it."""

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

Entry = dict[str, Any]  # the state of one piece; tensors with as many elements as the piece are cut with it


def cut_entry(entry: Mapping[str, Any], piece: Piece, start: int, stop: int) -> Entry:
    """The state of elements [start, stop) of a parameter, from that of a piece which contains them."""
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
    """The state of consecutive pieces as that of one."""
    if len(entries) == 1:
        return dict(entries[0])
    return {
        name: _cat([entry[name] for entry in entries])
        if all(_is_cut(entry[name], numel) for entry, numel in zip(entries, numels, strict=True))
        else entries[0][name]
        for name in entries[0]
    }


def cut_from_run(entry: Mapping[str, Any], run: Run, offset: int, numel: int) -> Entry:
    """The state of one piece of a run. Views of what is kept per element, copies of counters."""
    if len(run.pieces) == 1:
        return dict(entry)
    return {
        name: value[offset : offset + numel] if _is_cut(value, run.numel) else copy.deepcopy(value)
        for name, value in entry.items()
    }


def join_in_run(run: Run, entries: Mapping[Piece, Entry], like: torch.Tensor) -> Entry:
    """The state of a run from those of its pieces, which count alike; on the device of `like`."""
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
    """Whether the states of two pieces differ only in what is kept per element, so that they can be one."""
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
    """State where the optimizer expects it: with its tensor. Counters where it makes them, if no kernel reads them."""
    with_tensor = bool(group.get("capturable") or group.get("fused"))
    counters = tensor.device if with_tensor else torch.get_default_device()
    return {
        name: value.to(tensor.device if value.dim() else counters) if isinstance(value, torch.Tensor) else value
        for name, value in entry.items()
    }


def _cat(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """What was received lies on the CPU, what was kept on the parameter's device: there they go."""
    device = next((part.device for part in parts if part.device.type != "cpu"), parts[0].device)
    return torch.cat([part.to(device) for part in parts])


class Slot:
    """`key` is its name in the state of a piece, `values` are by bucket."""

    def __init__(self, memory: FlatMemory, key: str, values: dict[int, torch.Tensor]) -> None:
        self._memory, self.key, self.values = memory, key, values

    @property
    def nbytes(self) -> int:
        return sum(values.nbytes for values in self.values.values())

    def split(self, entries: Mapping[Piece, Entry]) -> tuple[dict[Piece, torch.Tensor], dict[Piece, Entry]]:
        """What the state of pieces has of it, and the rest of the state; ValueError if it is no piece's."""
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
        """Take what `split` has found."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                if piece in own:
                    values[offset : offset + piece.numel].copy_(own[piece].reshape(-1))
                    self.filled(number, piece)
                else:
                    self.missed(piece)

    def filled(self, bucket: int, piece: Piece) -> None:
        """A piece in a bucket was taken from saved state."""

    def missed(self, piece: Piece) -> None:
        """Saved state has nothing of a piece."""

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        """Into the state of pieces, views of it."""
        for number, values in self.values.items():
            for piece, offset in self._memory.buckets[number].placed:
                entries.setdefault(piece, {})[self.key] = values[offset : offset + piece.numel]


COUNT = "shardstep.rounded"  # in the state of a piece
SEED = 20_240_229  # the same on all ranks, and in every run


class StochasticRounding(Slot):
    """Of one share. What it keeps is one number for each piece whose optimizer counts no steps."""

    def __init__(self, memory: FlatMemory) -> None:
        super().__init__(memory, COUNT, {})
        buckets = [bucket for bucket in memory.buckets if bucket.values.dtype is torch.bfloat16]
        self._pieces = {piece for bucket in buckets for piece, _ in bucket.placed}
        self.counts: dict[Piece, torch.Tensor] = {}  # the kernel's too, if there is one; it has them on the device

    # -- state --------------------------------------------------------------------------------------------------------

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

    # -- stepping -----------------------------------------------------------------------------------------------------

    @staticmethod
    def stand_in(shape: torch.Size, device: torch.device) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=device).expand(shape)

    @torch.no_grad()
    def lend(self, tensor: torch.Tensor, own: torch.Tensor, home: torch.Tensor) -> None:
        """The values of `own`, flat, for the time of a step; `tensor` has the shape that is stepped.

        If that is the shape of the parameter, they lie as in its `home`.
        """
        values = own.to(torch.float32)
        tensor.data = values if tensor.dim() == 1 else dense_view(values, 0, home)

    @torch.no_grad()
    def take_back(self, tensor: torch.Tensor, own: torch.Tensor, run: Run, state: dict[str, Any]) -> None:
        """Round what was stepped into `own`."""
        values = flat_gradient(tensor, tensor)
        step = self._count(run.pieces[0], state)
        for piece, offset in zip(run.pieces, run.offsets, strict=True):
            part = slice(offset, offset + piece.numel)
            own[part] = round_to_bfloat16(values[part], Noise(SEED, step, piece.param), piece.start)
        tensor.data = self.stand_in(tensor.shape, tensor.device)

    def _count(self, piece: Piece, state: Mapping[str, Any]) -> int:
        """Of steps: the optimizer's, or ours."""
        count = state.get("step")
        if count is not None and not (isinstance(count, torch.Tensor) and count.device.type != "cpu"):
            self.counts.pop(piece, None)
            return int(count)  # nobody waits for a device to tell
        own = self.counts.setdefault(piece, torch.zeros((), device="cpu"))
        own += 1
        return int(own)


def without_counts(entries: Mapping[Piece, Entry]) -> dict[Piece, Entry]:
    """For optimizers that do not round by chance: to some, an entry that is there is one that they have made."""
    rest = {piece: {key: value for key, value in entry.items() if key != COUNT} for piece, entry in entries.items()}
    return {piece: entry for piece, entry in rest.items() if entry}
