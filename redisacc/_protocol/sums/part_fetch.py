"""Fetches the parts that cells choose: as many at once as a window allows, into memory that is used again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from redisacc._arrays.validation import Array
from redisacc._format.buffered import PartMissingError
from redisacc._protocol.parts.fetch import wrong_length
from redisacc._protocol.sums.cells import Cells, Part, SumOptions

# How many bytes are requested from all nodes together before they are needed.
MOST_WINDOW_BYTES = 64 * 2**20


class PartFetch:
    """The parts that are fetched, as ``Arrivals`` of the sockets.

    Args:
        cells: choose the parts, and add them.
        options: of the sum.

    Attributes:
        homes: a key on each node, if each lane has a node of its own.
        lanes: in how many lanes the parts travel.
        in_flight: the parts that were requested and have not arrived, in the order of the requests.
        on_pause: called after each part; it returns whether to request no further ones. None means nothing is called.
    """

    def __init__(self, cells: Cells, options: SumOptions) -> None:
        self._cells = cells
        self.homes, self.lanes = options.homes, options.lanes
        self._window = min((len(self.homes) or 1) * options.window, MOST_WINDOW_BYTES)
        self._nbytes = 0
        self.in_flight: dict[Part, None] = {}
        self.on_pause: Callable[[], bool] | None = None
        # Memory that is lent to parts, one for each that arrives at the same time. The one used last is lent first,
        # because the processor's cache has it.
        self._spare: list[Array] = []

    def wanted(self) -> list[Part]:
        """Returns the parts that have not arrived. Those that had begun to arrive will be sent from their beginning."""
        for part in self.in_flight:
            if part.lent is not None:
                self._take_back(part)
        self.more()
        return list(self.in_flight)

    def more(self) -> list[Part]:
        """Returns the parts that are requested now: as many as the window has room for."""
        requested: list[Part] = []
        if self.on_pause is not None and self.on_pause():
            return requested
        while self._nbytes < self._window:
            part = self._cells.next()
            if part is None:
                break
            self.in_flight[part] = None
            self._nbytes += part.length
            requested.append(part)
        return requested

    def expected(self, part: Part) -> memoryview:
        """Returns where a part goes if it is as long as its header says, which may be memory that is lent to it."""
        if part.memory is None:
            spare = self._spare.pop() if self._spare else np.empty(0, np.uint8)
            part.lent = spare if len(spare) >= part.length else np.empty(part.length, np.uint8)
            part.memory = part.lent[: part.length]
        return part.memory.data

    def begin(self, part: Part, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != part.length:
            raise wrong_length(part.key, length, part.length, "what is in it" if part.is_sum else "its header")
        return self.expected(part)

    def missing(self, part: Part) -> None:
        """Notes that a part is not there.

        Raises:
            PartMissingError: it should be there.
        """
        if part.must_be_there:
            raise PartMissingError(part.key)
        self._cells.miss(part)
        self.forget(part)

    def finish(self, part: Part) -> None:
        """Adds a part that has arrived."""
        self._cells.finish(part)
        self.forget(part)

    def forget(self, part: Part) -> None:
        """Notes that a part is no longer on its way."""
        del self.in_flight[part]
        self._nbytes -= part.length
        if part.lent is not None:
            self._take_back(part)

    def _take_back(self, part: Part) -> None:
        """Takes back the memory that was lent to a part. Its bytes stay until another part begins to arrive."""
        assert part.lent is not None
        self._spare.append(part.lent)
        part.lent = part.memory = None
