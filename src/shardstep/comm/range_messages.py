"""Parameters that travel as ranges of a bucket: as they lie there, or encoded."""

from __future__ import annotations

import torch

from shardstep.comm.encoding import Encoding, Scratch, encoding_of
from shardstep.comm.transport import Memory, Message


def range_message(memory: Memory, rank: int, scratch: Scratch) -> Message:
    """What `rank` holds of a bucket; `scratch` was made for buckets with this one among them."""
    values, encoding = memory.range_of(rank), encoding_of(memory.bucket)
    if encoding is None:
        return RangeMessage(values)
    return EncodedRangeMessage(values, encoding, scratch[values.device])


class RangeMessage:
    """One rank's range of a bucket, sent and received where it lies; a `Message`."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values = values
        self.nbytes = values.nbytes

    def prepare(self) -> None:
        """Nothing can go wrong here."""

    def outgoing(self) -> torch.Tensor:
        return self._values

    def landing(self) -> torch.Tensor:
        return self._values

    def landed(self, values: torch.Tensor) -> None:
        """The parameters are views of it."""

    def sent(self) -> None:
        """They have not changed."""


class EncodedRangeMessage:
    """The same in fewer bytes. Its holder, too, goes on with what the others decode; a `Message`."""

    def __init__(self, values: torch.Tensor, encoding: Encoding, scratch: torch.Tensor) -> None:
        self._values, self._encoding, self._scratch = values, encoding, scratch
        self.nbytes = encoding.nbytes(values.numel())

    def prepare(self) -> None:
        """Nothing can go wrong here."""

    def outgoing(self) -> torch.Tensor:
        return self._encoding.encode_front(self._values, self._scratch)

    def landing(self) -> torch.Tensor:
        return self._encoding.front(self._values)

    def landed(self, values: torch.Tensor) -> None:
        self._encoding.decode_front(self._values, self._scratch)

    def sent(self) -> None:
        self._encoding.decode_front(self._values, self._scratch)
