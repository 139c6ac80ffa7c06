"""fp32 values kept beside the weights, each rank's own pieces only: masters, and an average of the weights.

Parameters that are rounded have masters: they are of 16 bits, or they travel in fewer bits than they have
(comm/encoding.py). The optimizer steps the masters. These are then rounded into the parameters, and only parameters are
sent.

[Note: who writes a weight] A program may write to a weight itself: it loads a checkpoint, clamps, averages. The master
does not see that, and the next step would undo it. So where a weight may have been written to and is no longer its
rounded master, it becomes the master. torch counts writes. It does not count writes through `.data`, but a program that
uses `.data` asks for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardstep.comm.encoding import encoding_named
from shardstep.params.flat import FlatMemory
from shardstep.params.views import flat_gradient, quickly
from shardstep.planning import ParamSpec, Piece, Plan, read_specs
from shardstep.stepping.element_state import Entry, Slot
from shardstep.stepping.steppers import Scaling

NARROW = (torch.bfloat16, torch.float16)
_NARROW_NAMES = [str(dtype).removeprefix("torch.") for dtype in NARROW]
MASTER = "shardstep.master"  # in the state of a piece
_tensor: Any = torch.Tensor
_version_of: Any = _tensor._version.__get__


class Masters(Slot):
    """Masters of the buckets whose parameters are rounded. The others have none, and are stepped where they lie."""

    def __init__(self, memory: FlatMemory) -> None:
        buckets = memory.buckets
        super().__init__(
            memory,
            MASTER,
            {
                number: bucket.own.detach().to(torch.float32, copy=True)
                for number, bucket in enumerate(buckets)
                if bucket.values.dtype in NARROW or bucket.bucket.wire
            },
        )
        self._buckets_of: dict[int, list[int]] = {}
        for number in self.values:
            for segment in buckets[number].bucket.segments:
                self._buckets_of.setdefault(segment.param, []).append(number)
        self._params = [memory.params[index] for index in self._buckets_of]
        self._versions = self._read_versions()
        self._to_compare: set[int] = set()  # buckets whose parameters may have been written to
        self._loaded: set[int] = set()  # buckets whose masters were loaded, and whose weights may be loaded later

    def fill(self, own: Mapping[Piece, torch.Tensor]) -> None:
        self.follow_writes()  # masters that are not loaded follow what was written until now
        super().fill(own)
        loaded = {
            bucket for bucket in self.values if any(piece in own for piece, _ in self._memory.buckets[bucket].placed)
        }
        # Loaded masters are compared with the weights at the next step, because these may be loaded later.
        self._to_compare -= loaded
        self._loaded |= loaded

    def shown(self, param: torch.Tensor) -> None:
        """Note that the program has asked for the memory of `param`, and may write to it."""
        for index, other in zip(self._buckets_of, self._params, strict=True):
            if other is param:
                self._to_compare.update(self._buckets_of[index])

    def follow(self) -> None:
        """Before a step, let masters follow the weights that were written to: see [Note: who writes a weight]."""
        self._to_compare |= self._loaded
        self.follow_writes()
        self._loaded.clear()
        self._to_compare.clear()

    @torch.no_grad()
    def follow_writes(self) -> None:
        """Let masters follow between steps, before they are read. Loaded masters do not yet: their weights may come."""
        found = self._read_versions()
        if found != self._versions:
            rows = zip(self._buckets_of.values(), found, self._versions, strict=True)
            self._to_compare.update(bucket for buckets, new, old in rows if new != old for bucket in buckets)
            self._versions = found
        for number in self._to_compare:
            bucket, values = self._memory.buckets[number], self.values[number]
            values.copy_(_followed(values, bucket.own, bucket.bucket.wire))

    @torch.no_grad()
    def follow_frozen(self, parked: Mapping[Piece, Entry]) -> None:
        """Let the masters of frozen weights follow, which are in the state `parked`."""
        for piece, entry in parked.items():
            if MASTER in entry:
                param, spec = self._memory.frozen[piece.param], self._memory.plan.params[piece.param]
                weight = flat_gradient(param, param.detach())[piece.start : piece.stop]
                entry[MASTER] = _followed(entry[MASTER].to(param.device).reshape(-1), weight, spec.wire)

    @torch.no_grad()
    def write(self, buckets: Iterable[int]) -> None:
        """Round masters into the parameters after a step. Buckets that are encoded are rounded when they are sent."""
        for number in buckets:
            if number in self.values:
                self._memory.buckets[number].own.copy_(self.values[number])

    def of_encoded(self) -> dict[Piece, torch.Tensor]:
        """Return the masters of weights that are encoded when they are sent."""
        self.follow_writes()
        buckets = [(bucket, self.values.get(number)) for number, bucket in enumerate(self._memory.buckets)]
        return {
            piece: values[offset : offset + piece.numel]
            for bucket, values in buckets
            if bucket.bucket.wire and values is not None
            for piece, offset in bucket.placed
        }

    def _read_versions(self) -> list[int]:
        with quickly():
            return list(map(_version_of, self._params))


def _followed(master: torch.Tensor, weight: torch.Tensor, wire: str) -> torch.Tensor:
    """Return `master` where the weight is its rounding, and the weight where it was written to since."""
    rounded = encoding_named(wire).encode(master) if wire else master.to(weight.dtype)
    return torch.where(weight == rounded, master, weight.to(master.dtype))


def is_kept(spec: ParamSpec) -> bool:
    """Whether a parameter has a master if masters are on: it is rounded when it is held, or when it is sent."""
    return bool(spec.wire) or spec.dtype in _NARROW_NAMES


@torch.no_grad()
def make_exact(memory: FlatMemory, masters: Mapping[Piece, torch.Tensor]) -> None:
    """Replace weights that are roundings of these masters by the masters, for an optimizer that keeps none."""
    for bucket in memory.buckets:
        for piece, offset in bucket.placed:
            own = bucket.own[offset : offset + piece.numel]
            if piece in masters and own.dtype not in NARROW:
                master = masters[piece].to(own.device, own.dtype).reshape(-1)
                is_rounded = (own == master.to(NARROW[0])) | (own == master.to(NARROW[1]))
                own.copy_(torch.where(is_rounded, master, own))


Source = nn.Module | Mapping[str, torch.Tensor]


def given_masters(source: Source, groups: Sequence[Mapping[str, Any]]) -> dict[int, torch.Tensor]:
    """Return the values of `source` for the 16-bit parameters, by place; ValueError if one is missing or wrong."""
    values = source.state_dict() if isinstance(source, nn.Module) else source
    params = [param for group in groups for param in group["params"]]
    found: dict[int, torch.Tensor] = {}
    for place, (spec, param) in enumerate(zip(read_specs(groups), params, strict=True)):
        if param.dtype not in NARROW:
            continue
        value = values.get(spec.name)
        if value is None:
            raise ValueError(
                f"masters_from has no {spec.name}; it is the model's state_dict() before it was made 16-bit"
            )
        if value.shape != param.shape or not torch.equal(value.to(param), param.detach()):
            raise ValueError(
                f"masters_from[{spec.name!r}] is not what {spec.name} was rounded from: take state_dict() of the same "
                "model, copied before .bfloat16() or .half()"
            )
        found[place] = value.detach()
    if not found:
        raise ValueError(
            "masters_from is for parameters of bfloat16 and float16, and there is none: those of float32 are exact "
            "themselves, with `wire` as well. Leave it out"
        )
    return found


@torch.no_grad()
def cut_masters(
    given: Mapping[int, torch.Tensor],
    params: Sequence[torch.Tensor],
    plan: Plan,
    rank: int,
    broadcast: Callable[[Sequence[torch.Tensor]], None],
) -> dict[Piece, Entry]:
    """Return the masters of this rank's pieces, cut from the values that the group's first rank has."""
    own: dict[int, list[Piece]] = {}
    for piece in plan.pieces_of(rank):
        own.setdefault(piece.param, []).append(piece)
    entries: dict[Piece, Entry] = {}
    for place, value in given.items():
        # One at a time, so that there is never a second model; a copy, because it is the caller's.
        flat = flat_gradient(params[place], value.to(params[place].device, torch.float32, copy=True)).clone()
        broadcast([flat])
        for piece in own.get(place, ()):
            entries[piece] = {MASTER: flat[piece.start : piece.stop].clone()}
    return entries


def why_it_stalls(groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a warning if, without masters, steps of the learning rate's size vanish in rounding; else None."""
    for group in groups:
        lr, params = group.get("lr"), [param.detach() for param in group["params"] if param.dtype in NARROW]
        if not isinstance(lr, int | float) or not params:
            continue
        usual = sum(param.abs().sum(dtype=torch.float32).item() for param in params) / sum(p.numel() for p in params)
        least = usual * torch.finfo(params[0].dtype).eps / 2
        if 0 < lr < least:
            return (
                f'master="none": weights of {params[0].dtype} are about {usual:.1e} here, and what is less than '
                f"{least:.1e} is lost when it is added to one. With lr={lr:g} most steps change nothing: use "
                'ShardConfig(master="fp32") or master="stochastic"'
            )
    return None


def check_can_be_rounded(groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for fp16: what is below its smallest number would be rounded up far too often, or never."""
    params = [param for group in groups for param in group["params"]]
    halves = [spec.name for spec, param in zip(read_specs(groups), params, strict=True) if param.dtype is torch.float16]
    if halves:
        raise ValueError(f'master="stochastic" is for bfloat16, and {halves[0]} is float16: use master="fp32"')


def check_is_encoded(groups: Sequence[Mapping[str, Any]], wire: str) -> None:
    """Raise if no parameter would be sent in that encoding."""
    specs = read_specs(groups)
    if not any(spec.encoded(wire).wire for spec in specs):
        raise ValueError(
            f'wire="{wire}" is for float32 matrices, and there is none: the first parameter, {specs[0].name}, has '
            f"{specs[0].dtype} and the shape {specs[0].shape}. Leave `wire` out; parameters of 16 bits, their "
            "gradients and vectors travel as they are"
        )


def has_narrow(params: Sequence[torch.Tensor]) -> bool:
    return any(param.dtype in NARROW for param in params)


AVERAGE = "shardstep.ema"  # in the state of a piece


class Average(Slot):
    """An exponential moving average of the weights; of the masters, where parameters have them.

    It begins with the weights as they are before the first step. A frozen parameter is shown as it is; its average is
    kept until it trains again.
    """

    def __init__(self, memory: FlatMemory, decay: float, masters: Masters | None) -> None:
        self._decay, self._masters = decay, masters
        self._before: list[torch.Tensor] = []  # the weights, while the parameters have the average
        wide = {
            number: bucket.own.detach().to(torch.promote_types(bucket.own.dtype, torch.float32), copy=True)
            for number, bucket in enumerate(memory.buckets)
        }
        super().__init__(memory, AVERAGE, wide)
        # Pieces that nothing was averaged of yet: their average is the weights.
        self._to_begin = {piece for bucket in memory.buckets for piece, _ in bucket.placed}

    @property
    def is_shown(self) -> bool:
        """Whether the parameters have the average's values."""
        return bool(self._before)

    def fill(self, own: Mapping[Piece, torch.Tensor]) -> None:
        """Take loaded averages. A piece without one begins anew: its weights are replaced by what is loaded."""
        super().fill(own)
        self._to_begin = {piece for bucket in self._memory.buckets for piece, _ in bucket.placed if piece not in own}

    def begin(self) -> None:
        """Before a step, begin the averages that have not begun, with the weights as they are now."""
        self._copy_weights()
        self._to_begin.clear()

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Copy the weights into averages that have not begun."""
        if not self._to_begin:
            return
        for number, values in self.values.items():
            now = self._now(number)
            for piece, offset in self._memory.buckets[number].placed:
                if piece in self._to_begin:
                    values[offset : offset + piece.numel].copy_(now[offset : offset + piece.numel])

    def put_into(self, entries: dict[Piece, Entry]) -> None:
        self._copy_weights()
        super().put_into(entries)

    @torch.no_grad()
    def follow(self, buckets: Iterable[int], scaling: Scaling | None = None) -> None:
        """Average in the stepped weights of these buckets, unless a GradScaler's `found_inf` has skipped the step."""
        for number in buckets:
            average, weight = self.values[number], 1 - self._decay
            now = self._now(number).to(average.dtype)
            if scaling is None:
                average.lerp_(now, weight)
            else:
                skips = scaling.found_inf.to(average.device, average.dtype).reshape(())
                average.lerp_(now, (1 - skips.clamp(max=1)) * weight)

    def _now(self, bucket: int) -> torch.Tensor:
        """Return what is averaged: the masters, or else the weights themselves."""
        masters = {} if self._masters is None else self._masters.values
        return masters[bucket] if bucket in masters else self._memory.buckets[bucket].own

    @torch.no_grad()
    def swap_in(self) -> None:
        """Copy the average into this rank's parameters."""
        if self._masters is not None:
            self._masters.follow_writes()  # now, because later the weights are the average
        self.begin()
        self._before = [bucket.own.clone() for bucket in self._memory.buckets]
        for number, bucket in enumerate(self._memory.buckets):
            bucket.own.copy_(self.values[number])

    @torch.no_grad()
    def swap_out(self) -> None:
        """Copy the weights back into this rank's parameters."""
        for bucket, values in zip(self._memory.buckets, self._before, strict=bool(self._before)):
            bucket.own.copy_(values)
        self._before = []


def drop_unused(entries: Mapping[Piece, Entry], memory: FlatMemory, keys: Collection[str]) -> dict[Piece, Entry]:
    """Return the state without masters and averages that are not kept here: they would be saved again, outdated.

    `keys` are those of the slots that are kept. The state of a frozen piece keeps what it will need when it trains.
    """
    live = {piece for bucket in memory.buckets for piece, _ in bucket.placed}

    def stays(piece: Piece, key: str) -> bool:
        if key not in (MASTER, AVERAGE):
            return True
        return piece not in live and key in keys and (key != MASTER or is_kept(memory.plan.params[piece.param]))

    rest = {p: {key: value for key, value in entry.items() if stays(p, key)} for p, entry in entries.items()}
    return {piece: entry for piece, entry in rest.items() if entry}
