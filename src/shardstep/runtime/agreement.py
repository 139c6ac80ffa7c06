"""Ranks agree, or all of them raise the same error.

An optimizer that refuses one parameter, a checkpoint read by one rank only, a layer frozen on one rank only: each of
these used to end with one rank raising and the others waiting for it until the time-out. So whatever can fail or
differ ends in one exchange of forty-eight bytes, after which every rank knows how every other rank fared. Only when
something is wrong is there a second exchange, which carries the words.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn

from shardstep.runtime.collectives import Channel, PendingRecords, broadcast_bytes, gather_records

_RECORD = struct.Struct(">?7xQ32s")
_TEXT_NBYTES = 2048  # an error's text beyond this is cut before it is sent

# Errors are sent as a name and a text, and made again from this list: nothing that a peer sent is ever executed.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
}


class Facts:
    """Lines that must be the same on every rank, in the same order; the first that differs is what an error shows."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.text = "\n".join(lines)
        self.digest = hashlib.sha256(self.text.encode()).digest()

    def difference(self, reference: str) -> str:
        """The first line that differs from another rank's text."""
        pairs = zip_longest(self.text.split("\n"), reference.split("\n"), fillvalue="nothing more")
        ours, theirs = next((ours, theirs) for ours, theirs in pairs if ours != theirs)
        return f"it has <{ours}> where rank 0 has <{theirs}>"


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank brings to an agreement: how it fared, and what must be the same."""

    action: str  # for the error message
    failure: Exception | None
    facts: Facts


@dataclass(frozen=True, slots=True)
class _Record:
    failed: bool
    nbytes: int
    digest: bytes

    def pack(self) -> bytes:
        return _RECORD.pack(self.failed, self.nbytes, self.digest)


def _record_of(claim: Claim) -> _Record:
    return _Record(claim.failure is not None, len(claim.facts.text.encode()), claim.facts.digest)


def _read(pending: PendingRecords) -> list[_Record]:
    return [_Record(*_RECORD.unpack(raw)) for raw in pending.read()]


def _harmonious(records: Sequence[_Record]) -> bool:
    return not any(record.failed for record in records) and len({record.digest for record in records}) == 1


def agree(channel: Channel, claim: Claim) -> None:
    """Return on every rank, or raise the same error on every rank."""
    _settle(channel, claim, _send_record(channel, claim))


def _send_record(channel: Channel, claim: Claim) -> PendingRecords | None:
    return gather_records(channel, _record_of(claim).pack()) if channel.world_size > 1 else None


def _settle(channel: Channel, claim: Claim, pending: PendingRecords | None) -> None:
    """Return on every rank, or raise the same error on every rank; None: there is one rank."""
    if pending is None:
        if claim.failure is not None:
            raise claim.failure
        return
    records = _read(pending)
    if _harmonious(records):
        return
    if any(record.failed for record in records):
        _raise_failures(channel, claim)
    _raise_difference(channel, claim, records)


def _raise_failures(channel: Channel, claim: Claim) -> NoReturn:
    """Some ranks failed: everyone raises what the first of them raised."""
    own = "" if claim.failure is None else _error_text(claim.failure)
    texts = _gather_texts(channel, own)
    if claim.failure is not None and all(text == own for text in texts):
        raise claim.failure  # the same mistake on every rank: nothing to add
    failed = [rank for rank, text in enumerate(texts) if text]
    name, message = json.loads(texts[failed[0]])
    kind = _ERRORS.get(name, RuntimeError)
    prefix = "" if name in _ERRORS else f"{name}: "
    others = f" (failed on ranks {failed})" if len(failed) > 1 else ""
    raise kind(f"{claim.action} failed on rank {failed[0]}{others}: {prefix}{message}") from claim.failure


def _raise_difference(channel: Channel, claim: Claim, records: Sequence[_Record]) -> NoReturn:
    """No rank failed, but they do not hold the same: everyone raises the first difference to rank 0."""
    reference = broadcast_bytes(channel, claim.facts.text.encode(), records[0].nbytes, source=0).decode()
    own = "" if claim.facts.text == reference else _brief(claim.facts.difference(reference))
    texts = _gather_texts(channel, own)
    odd = [rank for rank, text in enumerate(texts) if text]
    raise RuntimeError(
        f"{claim.action}: the ranks do not agree. Rank {odd[0]}: {texts[odd[0]]}. "
        f"Ranks that differ from rank 0: {odd}. Give every rank the same, in the same order"
    )


def _gather_texts(channel: Channel, text: str) -> list[str]:
    packed = text.encode()[: 3 * _TEXT_NBYTES].ljust(3 * _TEXT_NBYTES, b"\0")
    return [raw.rstrip(b"\0").decode(errors="ignore") for raw in gather_records(channel, packed).read()]


def _error_text(error: Exception) -> str:
    return json.dumps([type(error).__name__, _brief(str(error))], ensure_ascii=False)


def _brief(text: str) -> str:
    packed = text.encode(errors="replace")
    return text if len(packed) <= _TEXT_NBYTES else packed[:_TEXT_NBYTES].decode(errors="ignore") + "..."


class StepAgreement:
    """The agreement of every step: `begin`, then `claim` before its messages are sent, then `finish` once they have
    arrived. A rank that failed, or does not agree, takes part in the messages of the step as they were planned before,
    so that nobody is left waiting, and raises in `finish`.

    The records are on their way before the parameters and are read after them: behind tens of megabytes on the same
    connection they would arrive last, and a rank that waited for them would pass nothing on meanwhile.

    This one is for a channel whose records arrive on the host: every rank raises in the same step.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._claimed: tuple[Claim, PendingRecords | None] | None = None

    def begin(self) -> None:
        """Raise what is left over from the step before."""

    def claim(self, claim: Claim, changed: bool) -> None:
        """How this rank fared; `changed`: its facts are not those of the last step."""
        del changed
        self._claimed = (claim, _send_record(self._channel, claim))

    def finish(self) -> None:
        """Raise if a rank failed, or if the ranks do not hold the same facts."""
        assert self._claimed is not None, "finish follows claim"
        (claim, records), self._claimed = self._claimed, None
        _settle(self._channel, claim, records)


class DeferredStepAgreement(StepAgreement):
    """The same on a channel whose records arrive on an accelerator.

    Reading them at once would make the host wait for the device at every step. So a rank on which nothing changed
    reads them when its next step begins, and raises then; a rank that failed or changed reads them at once.
    """

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self._defer = False

    def begin(self) -> None:
        self._defer = False
        if self._claimed is not None:
            self.finish()

    def claim(self, claim: Claim, changed: bool) -> None:
        super().claim(claim, changed)
        self._defer = not changed and claim.failure is None

    def finish(self) -> None:
        if self._defer or self._claimed is None:
            return
        (claim, records), self._claimed = self._claimed, None
        assert records is not None, "one rank has nothing to defer"
        if (error := _verdict(claim, _read(records))) is not None:
            raise error


def step_agreement(channel: Channel) -> StepAgreement:
    """The agreement that suits where the channel's records arrive."""
    on_host = channel.device.type == "cpu" or channel.world_size == 1
    return StepAgreement(channel) if on_host else DeferredStepAgreement(channel)


def _verdict(claim: Claim, records: Sequence[_Record]) -> Exception | None:
    """What is wrong, from the records alone: a rank that has raised already takes part in no exchange of words."""
    if _harmonious(records):
        return None
    if claim.failure is not None:
        return claim.failure
    failed = [rank for rank, record in enumerate(records) if record.failed]
    if failed:
        return RuntimeError(f"{claim.action} failed on ranks {failed}; their own errors say why")
    odd = [rank for rank, record in enumerate(records) if record.digest != records[0].digest]
    return RuntimeError(
        f"{claim.action}: ranks {odd} do not hold the same as rank 0: the same parameters must be frozen, and have "
        "gradients, on every rank"
    )
