"""Fetches the parts of gradients and of their sums, and hands each to those who add it when it has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import Keys
from redisacc._protocol.sums.dense_parts import DenseParts
from redisacc._protocol.sums.requested_parts import Part, RequestedParts
from redisacc._protocol.sums.sparse_parts import SparseParts
from redisacc.errors import CorruptDataError


class PartFetch:
    """The parts that are fetched, as ``Arrivals`` of the sockets.

    Args:
        keys: the keys of the accumulator.
        dense: chooses the dense parts, and adds them.
        sparse: the same for the sparse ones; None: only dense parts are fetched.
        homes: see below.
        lanes: see below.
        window: how many bytes are requested at once, over all lanes.

    Attributes:
        homes: a key on each node, if each lane has a node of its own.
        lanes: in how many lanes the parts travel.
        in_flight: the parts that were requested and have not arrived.
        on_pause: called after each part; it returns whether to request no further ones. None: nothing is called.
    """

    def __init__(
        self,
        keys: Keys,
        dense: DenseParts,
        sparse: SparseParts | None,
        *,
        homes: Sequence[str],
        lanes: int,
        window: int,
    ) -> None:
        self._keys = keys
        self._dense = dense
        self._sparse = sparse if sparse is not None and sparse.wanted else None
        self.homes = homes
        self.lanes = lanes
        self.in_flight = RequestedParts(len(homes) or 1, window)
        self.on_pause: Callable[[], bool] | None = None

    def wanted(self) -> list[Part]:
        """Returns the parts that have not arrived."""
        self.in_flight.begin_anew()
        self.more()
        return self.in_flight.every

    def more(self) -> list[Part]:
        """Returns the parts that are requested now: as many as the window has room for."""
        requested: list[Part] = []
        if self.on_pause is not None and self.on_pause():
            return requested
        if self._sparse is None and not any(self._dense.ready):
            return requested
        in_flight = self.in_flight
        while in_flight.nbytes < in_flight.window:
            part = self._dense.next()
            if part is None and self._sparse is not None:
                part = self._sparse.next()
            if part is None:
                break
            in_flight.add(part)
            requested.append(part)
        return requested

    def expected(self, part: Part) -> memoryview:
        """Returns where a part goes if it is as long as its header says."""
        memory = part.memory
        return (self.in_flight.memory_of(part) if memory is None else memory).data

    def begin(self, part: Part, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != part.length:
            what = "the gradients in it need" if part.sums else "its header says"
            raise CorruptDataError(f"{part.key} has {length} bytes, and {what} {part.length}")
        return self.in_flight.memory_of(part).data

    def missing(self, part: Part) -> None:
        """Notes that a part is not there.

        Raises:
            PartMissingError: it should be there.
        """
        upload = part.upload
        wanted = part.memory is not None and part.memory.base is upload.sparse
        self.in_flight.remove(part)
        if not part.sums:
            if part.admitted:
                raise PartMissingError(part.key)
            # If its gradient was admitted meanwhile, it is there. Otherwise, it was refused, or is written again.
            upload.there[part.number] = upload.admitted
        if part.cell is not None:
            self._dense.miss(part.cell, part)
        elif wanted:
            upload.requested[part.number] = False

    def finish(self, part: Part) -> None:
        """Adds a part that has arrived."""
        memory, upload, cell = part.memory, part.upload, part.cell
        assert memory is not None
        self.in_flight.remove(part)
        if cell is not None:
            if part.turn == cell.turn:
                self._dense.add(cell, part, memory)
                if part.sums:
                    self._dense.advance(cell)
        elif memory.base is upload.sparse:
            # Otherwise it has been requested again since.
            upload.left -= 1
            if not upload.left and self._sparse is not None:
                self._sparse.add()
