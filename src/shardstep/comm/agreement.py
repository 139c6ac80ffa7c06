"""Ranks agree, or all of them raise the same error.

An optimizer that refuses one parameter, a checkpoint read by one rank only, a layer frozen on one rank only: each of
these used to end with one rank raising and the others waiting for it until the time-out. So whatever can fail or
differ ends in one exchange of 33 bytes, after which every rank knows how every other rank fared. Only when something is
wrong are there more, which carry the words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from typing import NoReturn, TypeVar

from shardstep.comm.channel import Channel, go_on_from, names_taken
from shardstep.comm.control import Answer, open_poll

_TEXT_NBYTES = 2048  # an error's text beyond this is cut before it is sent
_RECORD_NBYTES = 33  # whether a rank failed, and a digest
_MOST_WORDS = 4  # of how many ranks an error says what they have

# Errors are sent as a name and a text, and made again from this list: nothing that a peer sent is ever executed.
_ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        AttributeError,
        IndexError,
        KeyError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
        OSError,
        FileNotFoundError,
        PermissionError,
    )
}


_Kind = TypeVar("_Kind", bound=type[Exception])
_Made = TypeVar("_Made")


def travels(kind: _Kind) -> _Kind:
    """A class of errors, made of a text, that all ranks raise as such when one does."""
    _ERRORS[kind.__name__] = kind
    return kind


class Facts:
    """Lines that must be the same on every rank, in the same order; the first that differs is what an error shows."""

    def __init__(self, lines: Iterable[str] = ()) -> None:
        self.text = "\n".join(lines)
        self.digest = hashlib.sha256(self.text.encode()).digest()

    def difference(self, reference: str) -> str:
        """The first line that differs from another rank's text. One that a rank lacks leaves the rest beside others."""
        own, other = self.text.split("\n"), reference.split("\n")
        pairs = zip_longest(own, other)
        ours, theirs = next((ours, theirs) for ours, theirs in pairs if ours != theirs)
        if ours is not None and ours not in other and (theirs is None or theirs in own):
            return f"it has <{ours}>, which rank 0 has not"
        if theirs is not None and theirs not in own and (ours is None or ours in other):
            return f"it has no <{theirs}>, which rank 0 has"
        return f"it has <{ours}> where rank 0 has <{theirs}>"


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank brings to an agreement: how it fared, and what must be the same."""

    action: str  # for the error message
    failure: BaseException | None
    facts: Facts


class Agreement:
    """The agreement of every step: `claim` before its messages are sent, `finish` once they have arrived.

    A rank that failed, or does not agree, takes part in the messages of the step as they were planned before, so that
    nobody is left waiting, and raises in `finish`: as every rank does.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._action = action = [""]  # not by way of self, which would be a cycle
        self._poll = open_poll(channel, lambda record: f"end {action[0]}")
        self.is_exchanged_when_read = self._poll.goes_together
        self._claim = Claim("", None, Facts())
        self.is_open = False  # claimed, and not yet finished

    def expect(self) -> None:
        """Post the receives of the other ranks' records: a claim follows."""
        self._poll.expect(_RECORD_NBYTES)

    def claim(self, claim: Claim) -> None:
        """How this rank fared. It is on its way when this returns."""
        self._claim, self.is_open, self._action[0] = claim, True, claim.action
        self._poll.ask(bytes([claim.failure is not None]) + claim.facts.digest, soon=True)

    def finish(self) -> None:
        """Raise if a rank failed, or if the ranks do not hold the same facts."""
        assert self.is_open, "finish follows claim"
        self.is_open = False
        claim, answer = self._claim, self._poll.answer()
        if answer.any[0]:
            self._raise_failures(claim, answer)
        if not answer.equal:
            self._raise_difference(claim)

    def _raise_failures(self, claim: Claim, answer: Answer) -> NoReturn:
        """Some ranks failed: everyone raises what the first of them raised."""
        own = "" if claim.failure is None else _error_text(claim.failure)
        failed = [rank for rank, record in enumerate(answer.rows()) if record[0]]
        text = self._text_of(own, failed[0])
        alike = not self._ask(bytes([own != text])).any[0]
        if claim.failure is not None and (alike or not isinstance(claim.failure, Exception)):
            raise claim.failure  # the same mistake on every rank: nothing to add; nor to Ctrl-C, which ends a program
        name, message = json.loads(text)
        kind = _ERRORS.get(name, RuntimeError)
        prefix = "" if name in _ERRORS else f"{name}: "
        others = f" (failed on ranks {failed})" if len(failed) > 1 else ""
        raise kind(f"{claim.action} failed on rank {failed[0]}{others}: {prefix}{message}") from claim.failure

    def _raise_difference(self, claim: Claim) -> NoReturn:
        """No rank failed, but they do not hold the same: everyone raises the first difference to rank 0."""
        reference = self._text_of(claim.facts.text, 0)
        own = "" if claim.facts.text == reference else _brief(claim.facts.difference(reference))
        odd = [rank for rank, record in enumerate(self._ask(bytes([own != ""])).rows()) if record[0]]
        words = " ".join(f"Rank {rank}: {self._text_of(own, rank)}." for rank in odd[:_MOST_WORDS])
        raise RuntimeError(
            f"{claim.action}: the ranks do not agree. {words} "
            f"Ranks that differ from rank 0: {odd}. Give every rank the same, in the same order"
        )

    def _text_of(self, own: str, source: int) -> str:
        """A text of rank `source`, on every rank: the others add nothing to it."""
        packed = own.encode() if self._channel.rank == source else b""
        size = int.from_bytes(self._ask(len(packed).to_bytes(8, "big")).any, "big")
        return self._ask(packed.ljust(size, b"\0")).any.decode() if size else ""

    def _ask(self, record: bytes) -> Answer:
        # A question of its own: records of one question have one length, and these are asked once.
        poll = open_poll(self._channel, lambda record: "raise an error")
        poll.ask(record)
        return poll.answer()


def agree(channel: Channel, claim: Claim) -> None:
    """Return on every rank, or raise the same error on every rank."""
    agreement = Agreement(channel)
    agreement.claim(claim)
    agreement.finish()


def attempt(channel: Channel, action: str, work: Callable[[], _Made], facts: Iterable[str] = ()) -> _Made:
    """Return what `work` returns, which sends nothing; raise on every rank if it raises on one, also by Ctrl-C."""
    made: list[_Made] = []
    failure: BaseException | None = None
    try:
        made.append(work())
    except BaseException as error:
        failure = error
    agree(channel, Claim(action, failure, Facts(facts)))
    return made.pop()


class FinalAgreement:
    """The agreement behind what takes names (of messages, of questions): a rank may have failed between two of them.

    Ranks that count differently would wait for each other for ever, so they go on with the highest count of all.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel, self._poll = channel, open_poll(channel)

    def agree(self, claim: Claim) -> None:
        self._poll.ask(names_taken(self._channel))
        answer = self._poll.answer()
        if not answer.equal:
            go_on_from(self._channel, answer.rows())
        agree(self._channel, claim)


def _error_text(error: BaseException) -> str:
    return json.dumps([type(error).__name__, _brief(str(error))], ensure_ascii=False)


def _brief(text: str) -> str:
    packed = text.encode(errors="replace")
    return text if len(packed) <= _TEXT_NBYTES else packed[:_TEXT_NBYTES].decode(errors="ignore") + "..."
