"""The parts of gradients and sums that were requested and have not arrived, and their memory."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from redisacc._data.validation import Array
from redisacc._format.buffered import ANNOUNCED_BYTES
from redisacc._protocol.sums.expected_gradients import Upload

# How many bytes are requested from all nodes together before they are needed.
MOST_WINDOW_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Bounds:
    """What a sum is made with, in bytes.

    Attributes:
        window: how many are requested from a node before they are needed, so that it always has something to send.
        waiting: how many of sparse sections may wait in memory for earlier gradients.
        reduced: smaller gradients are not announced, so reducers would learn of them too late.
    """

    window: int = 4 * 2**20
    waiting: int = 64 * 2**20
    reduced: int = ANNOUNCED_BYTES


BOUNDS = Bounds()


@dataclass(slots=True, eq=False)
class Cell:
    """The dense elements that the same part of every gradient holds, and their sum.

    Attributes:
        number: the number of the part, counted from the first dense one.
        added: how many leading gradients are in the sum.
        requested: how many are in the sum or on their way.
        turn: grows when the parts on their way are no longer needed.
        reduced: whether the sum of the first ones comes from a reducer, or is on its way from there.
        stored_as: the digest under which the sum was stored for takers.
    """

    number: int
    added: int = 0
    requested: int = 0
    turn: int = 0
    reduced: bool = False
    stored_as: str = ""

    def rewind(self, added: int) -> None:
        """Keeps the sum of this many gradients, and requests the later ones again."""
        self.added = self.requested = added
        self.turn += 1
        self.reduced = self.reduced and added > 0


@dataclass(slots=True, eq=False)
class Part:
    """A part that is on its way.

    Attributes:
        key: its key.
        lane: its lane. All parts of a cell have the same, so they arrive in order.
        upload: the gradient that it belongs to; of a sum, the first gradient in it.
        number: its number.
        length: its length in bytes.
        memory: where it goes; None: memory is lent to it when it begins to arrive.
        cell: the cell to which it is added; None: it belongs to sparse sections.
        turn: the turn of the cell for which it was requested.
        begins: whether it is the first of the cell.
        placed: whether ``memory`` is the memory of the sum itself.
        lent: the memory that it was lent, which may be longer than the part.
        sums: the number of gradients in it, if it is part of a reducer's sum; 0: it is part of a gradient.
        admitted: whether the round had the gradient when the part was requested, so that it has to be there.
    """

    key: str
    lane: int
    upload: Upload
    number: int
    length: int
    memory: Array | None = None
    cell: Cell | None = None
    turn: int = 0
    begins: bool = False
    placed: bool = False
    lent: Array | None = None
    sums: int = 0
    admitted: bool = False


class RequestedParts:
    """The parts that are on their way, in the order in which they were requested.

    Args:
        nodes: how many nodes they come from.
        window: how many bytes are requested from each of them.

    Attributes:
        window: further parts are requested while fewer bytes than this are on their way.
        nbytes: how many bytes are on their way.
    """

    def __init__(self, nodes: int, window: int) -> None:
        self.window = min(nodes * window, MOST_WINDOW_BYTES)
        self.nbytes = 0
        self._parts: deque[Part] = deque()
        # Memory that is lent to parts, one for each that arrives at the same time. The one used last is lent first,
        # because the processor's cache has it.
        self._spare: list[Array] = []

    @property
    def every(self) -> list[Part]:
        """The parts, as a new list."""
        return list(self._parts)

    @property
    def has_sums(self) -> bool:
        """Whether a part of a reducer's sum is among them."""
        return any(part.sums for part in self._parts)

    def add(self, part: Part) -> None:
        """Notes that a part is requested."""
        self._parts.append(part)
        self.nbytes += part.length

    def remove(self, part: Part) -> None:
        """Notes that a part is no longer on its way."""
        self._parts.remove(part)
        self.nbytes -= part.length
        if part.lent is not None:
            self._take_back(part)

    def begin_anew(self) -> None:
        """Takes back the memory of parts that had begun to arrive: they will be sent again from their beginning."""
        for part in self._parts:
            if part.lent is not None:
                self._take_back(part)

    def memory_of(self, part: Part) -> Array:
        """Returns the memory of a part, which may be lent."""
        if part.memory is None:
            spare = self._spare.pop() if self._spare else np.empty(0, np.uint8)
            part.lent = spare if len(spare) >= part.length else np.empty(part.length, np.uint8)
            part.memory = part.lent[: part.length]
        return part.memory

    def _take_back(self, part: Part) -> None:
        """Takes back the memory that was lent to a part. Its bytes stay until another part begins to arrive."""
        assert part.lent is not None
        self._spare.append(part.lent)
        part.lent = part.memory = None
