"""Parts of buffered gradients that are read as a whole."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError

# If headers announce more bytes than this, the server is asked for the lengths before memory is allocated.
TRUSTED_BYTES = 64 * 2**20


class WholeParts:
    """All parts of a gradient, on their way into one piece of memory.

    Args:
        keys: the keys of the accumulator.
        gradient: the gradient.

    Attributes:
        data: its bytes.
    """

    def __init__(self, keys: Keys, gradient: BufferedGradient) -> None:
        self.data = np.empty(gradient.nbytes, np.uint8)
        self._awaited: deque[tuple[str, memoryview]] = deque()
        start = 0
        for number, length in enumerate(gradient.lengths):
            self._awaited.append((keys.part(gradient.id, number), self.data[start : start + length].data))
            start += length

    def wanted(self) -> list[str]:
        """Returns the keys of the parts that have not arrived."""
        return [key for key, _ in self._awaited]

    def more(self) -> list[str]:
        """Returns none: everything was wanted from the beginning."""
        return []

    def expected(self) -> memoryview:
        """Returns where the next part goes if it is as long as its header says."""
        return self._awaited[0][1]

    def begin(self, length: int) -> memoryview:
        """Returns where the next part goes, given its length in bytes."""
        key, place = self._awaited[0]
        if length != len(place):
            raise CorruptDataError(f"{key} has {length} bytes, and its header says {len(place)}")
        return place

    def missing(self) -> None:
        """Raises PartMissingError."""
        raise PartMissingError(self._awaited[0][0])

    def finish(self) -> None:
        """Notes that the part has arrived."""
        self._awaited.popleft()


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
