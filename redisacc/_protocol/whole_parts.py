"""Parts of buffered gradients that are read as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._redis.lanes import LANES
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError

# If headers announce more bytes than this, the server is asked for the lengths before memory is allocated.
TRUSTED_BYTES = 64 * 2**20


@dataclass(slots=True, eq=False, frozen=True)
class _WholePart:
    """A part that is on its way to its place among the others."""

    key: str
    lane: int
    place: memoryview


class WholeParts:
    """All parts of a gradient, on their way into one piece of memory.

    Args:
        keys: the keys of the accumulator.
        gradient: the gradient.

    Attributes:
        data: its bytes.
        lanes, homes: as ``Arrivals`` describes them.
    """

    def __init__(self, keys: Keys, gradient: BufferedGradient) -> None:
        self.data = np.empty(gradient.nbytes, np.uint8)
        self._awaited: list[_WholePart] = []
        self.homes = keys.homes
        self.lanes = len(self.homes) or LANES
        start = 0
        for number, length in enumerate(gradient.lengths):
            place = self.data[start : start + length].data
            self._awaited.append(_WholePart(keys.part(gradient.id, number), number % self.lanes, place))
            start += length

    def wanted(self) -> list[_WholePart]:
        """Returns the parts that have not arrived."""
        return list(self._awaited)

    def more(self) -> list[_WholePart]:
        """Returns none: everything was wanted from the beginning."""
        return []

    def expected(self, part: _WholePart) -> memoryview:
        """Returns where a part goes if it is as long as its header says."""
        return part.place

    def begin(self, part: _WholePart, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != len(part.place):
            raise CorruptDataError(f"{part.key} has {length} bytes, and its header says {len(part.place)}")
        return part.place

    def missing(self, part: _WholePart) -> None:
        """Raises PartMissingError."""
        raise PartMissingError(part.key)

    def finish(self, part: _WholePart) -> None:
        """Notes that a part has arrived."""
        self._awaited.remove(part)


def check_lengths(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> None:
    """Compares headers with the lengths on the server, so that a forged header allocates no memory.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        gradients: gradients in the round. If they claim no more than TRUSTED_BYTES together, nothing is asked.

    Raises:
        PartMissingError: a part is not there.
        CorruptDataError: a part has another length than its header says.
    """
    large = [gradient for gradient in gradients if not gradient.inline]
    if sum([gradient.nbytes for gradient in large]) <= TRUSTED_BYTES:
        return
    wanted = [
        (keys.part(gradient.id, number), length) for gradient in large for number, length in enumerate(gradient.lengths)
    ]
    lengths = transport.pipeline([("STRLEN", key) for key, _ in wanted])
    for (key, length), actual in zip(wanted, lengths, strict=True):
        if not actual:
            raise PartMissingError(key)
        if actual != length:
            raise CorruptDataError(f"{key} has {actual} bytes, and its header says {length}")


def lost_gradients(transport: Transport, keys: Keys, gradients: Sequence[BufferedGradient]) -> list[str]:
    """Returns the ids of the gradients of which a part is missing, or is not as long as the header says.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        gradients: gradients in a round.
    """
    wanted = [
        (gradient.id, keys.part(gradient.id, number), length)
        for gradient in gradients
        for number, length in enumerate(gradient.lengths)
    ]
    if not wanted:
        return []
    lengths = transport.pipeline([("STRLEN", key) for _, key, _ in wanted])
    return [gradient for (gradient, _, length), actual in zip(wanted, lengths, strict=True) if actual != length]
