"""Adds up the dense parts of the gradients of a round, cell by cell."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from redisacc._data.sums import DenseSum, RoundSum
from redisacc._data.validation import Array
from redisacc._format.buffered import BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.part_cut import Cut, Piece
from redisacc._protocol.sums.expected_gradients import ExpectedGradients
from redisacc._protocol.sums.reducer_sums import ReducerSums
from redisacc._protocol.sums.requested_parts import Cell, Part


class SumPart(NamedTuple):
    """A part of the sum of the expected gradients.

    Attributes:
        digest: the digest of the gradients in it.
        number: its number.
        pieces: which elements it has.
        elements: their sums, for each piece.
        gradients: how many gradients are in it.
        weight: the sum of their weights; None if all are 1.
    """

    digest: str
    number: int
    pieces: tuple[Piece, ...]
    elements: Sequence[Array]
    gradients: int
    weight: float | None


# Stores a part of a sum.
Store = Callable[[SumPart], None]

# In place of the position of an upload: the sum of the expected gradients is requested.
_SUM = -1


class DenseParts:
    """The cells of a round.

    Args:
        keys: the keys of the accumulator.
        round_sum: the sum of the round.
        uploads: the gradients that the round will probably hold.
        stored: the sums that reducers have stored.
        lanes: the number of lanes in which parts travel.
        store: stores the sum of the expected gradients, cell by cell; None: nothing is stored.
        position: the only partition whose cells are added, by position; None: all cells are.

    Attributes:
        cut: how the gradients are cut; None: none of them can be added part by part.
        cells: the cells that are added, in order.
        ready: the next requests of each partition. Partitions take turns; a single node has one queue.
    """

    def __init__(
        self,
        keys: Keys,
        round_sum: RoundSum,
        uploads: ExpectedGradients,
        stored: ReducerSums,
        *,
        lanes: int,
        store: Store | None,
        position: int | None = None,
    ) -> None:
        self.cut: Cut | None = None
        self.cells: list[Cell] = []
        self._position = position
        # By their numbers.
        self._by_number: dict[int, Cell] = {}
        self._keys = keys
        self._sum = round_sum
        self._uploads = uploads
        self._stored = stored
        self._store = store
        self._lanes = lanes
        self.ready: tuple[deque[tuple[Cell, int, int]], ...] = tuple([deque() for _ in keys.partitions or (0,)])
        self._turn = 0

    def set_cut(self, cut: Cut, added: int) -> None:
        """Makes the cells, after the first ``added`` gradients have been added whole."""
        self.cut = cut
        step = len(self._keys.partitions) or 1
        numbers = range(len(cut)) if self._position is None else range(self._position, len(cut), step)
        self.cells = [Cell(number, added, added) for number in numbers]
        self._by_number = {cell.number: cell for cell in self.cells}

    def cell(self, number: int) -> Cell | None:
        """Returns the cell with a number; None if it is not added here."""
        return self._by_number.get(number)

    def clear(self) -> None:
        """Sets the dense sums to zero."""
        for section in self._sum.sections:
            if isinstance(section, DenseSum):
                section.clear()

    def nbytes_of(self, gradient: BufferedGradient) -> int:
        """Returns the number of bytes in the sum of the dense sections of gradients like this one."""
        return sum(
            [
                math.prod(section.shape) * of.dtype.itemsize
                for section, of in zip(gradient.sections, self._sum.sections, strict=True)
                if isinstance(of, DenseSum)
            ]
        )

    # Choosing the parts that are requested next.

    def advance_all(self) -> None:
        """Queues requests for the parts of all cells that have arrived, in order."""
        for cell in self.cells:
            self.advance(cell)

    def advance(self, cell: Cell) -> None:
        """Queues requests for the parts of a cell that have arrived, in order."""
        if self._stored.wanted and cell.requested == 0:
            expected = self._uploads.expected
            if expected is not None and self._stored.has(self._uploads.digest, cell.number):
                self.ready[cell.number % len(self.ready)].append((cell, _SUM, cell.turn))
                cell.requested, cell.reduced = expected, True
            return
        while cell.requested < self._uploads.bound:
            upload = self._uploads.every[cell.requested]
            if upload.cut is None or not upload.there[upload.sparse_parts + cell.number]:
                break
            self.ready[cell.number % len(self.ready)].append((cell, cell.requested, cell.turn))
            cell.requested += 1
        if self._store is not None:
            self._offer(cell, self._store)

    def next(self) -> Part | None:
        """Returns the part to request next; None: there is none."""
        for _ in self.ready:
            ready = self.ready[self._turn]
            self._turn = (self._turn + 1) % len(self.ready)
            while ready:
                cell, place, turn = ready.popleft()
                if turn == cell.turn:
                    return self._part_of_sum(cell) if place == _SUM else self._part_of(cell, place)
        return None

    def _part_of(self, cell: Cell, place: int) -> Part:
        """Returns the part of a gradient, given its position."""
        upload = self._uploads.every[place]
        number = upload.sparse_parts + cell.number
        length = upload.gradient.lengths[number]
        assert upload.cut is not None
        pieces = upload.cut[cell.number]
        key, lane = self._keys.part(upload.gradient.id, number), cell.number % self._lanes
        part = Part(
            key, lane, upload, number, length, None, cell, cell.turn, begins=place == 0, admitted=upload.admitted
        )
        if part.begins and len(pieces) == 1 and pieces[0].nbytes == length and upload.gradient.factor == 1:
            place_in_sum = self._piece_of_sum(pieces[0])
            if place_in_sum.dtype == pieces[0].dtype:
                part.memory, part.placed = place_in_sum.view(np.uint8), True
        return part

    def _part_of_sum(self, cell: Cell) -> Part:
        """Returns the part of the sum of the expected gradients, which a reducer has stored."""
        assert self.cut is not None
        places = [self._piece_of_sum(piece) for piece in self.cut[cell.number]]
        length = sum([place.nbytes for place in places])
        key = self._keys.sum(self._uploads.digest, cell.number)
        lane, first = cell.number % self._lanes, self._uploads.every[0]
        part = Part(key, lane, first, cell.number, length, None, cell, cell.turn, sums=cell.requested)
        if len(places) == 1 and places[0].dtype == places[0].dtype.newbyteorder("<"):
            part.memory, part.placed = places[0].view(np.uint8), True
        return part

    def _piece_of_sum(self, piece: Piece) -> Array:
        section = self._sum.sections[piece.section]
        assert isinstance(section, DenseSum)
        return section.piece(piece.first, piece.number)

    # Parts that arrive.

    def add(self, cell: Cell, part: Part, memory: Array) -> None:
        """Adds a part that has arrived, of a gradient or of a reducer's sum."""
        if part.sums:
            self._keep_sum(cell, part, memory)
            return
        if not part.placed:
            assert part.upload.cut is not None
            for piece in part.upload.cut[cell.number]:
                section = self._sum.sections[piece.section]
                assert isinstance(section, DenseSum)
                for first, elements in piece.elements(memory, part.key):
                    section.add_piece(first, elements, part.upload.gradient.factor, begins=part.begins)
        cell.added += 1
        if self._store is not None:
            self._offer(cell, self._store)

    def _keep_sum(self, cell: Cell, part: Part, memory: Array) -> None:
        """Uses a part of a reducer's sum of the first gradients as the sum of the cell."""
        if not part.placed:
            assert self.cut is not None
            start = 0
            for piece in self.cut[cell.number]:
                place = self._piece_of_sum(piece)
                stop = start + place.nbytes
                place[:] = memory[start:stop].view(place.dtype.newbyteorder("<"))
                start = stop
        cell.added = part.sums

    def miss(self, cell: Cell, part: Part) -> None:
        """Notes that a part is not at the server, unless it is no longer needed."""
        if part.turn != cell.turn:
            return
        if part.sums:
            self._stored.lose(self._uploads.digest, cell.number)
            cell.rewind(0)
        else:
            cell.rewind(cell.added)
            self.advance(cell)

    def _offer(self, cell: Cell, store: Store) -> None:
        """Stores a part of the sum if it contains exactly the expected gradients."""
        if cell.added != self._uploads.expected or cell.stored_as == self._uploads.digest:
            return
        assert self.cut is not None
        cell.stored_as = self._uploads.digest
        pieces = self.cut[cell.number]
        number, weight = self._uploads.counted
        store(SumPart(cell.stored_as, cell.number, pieces, list(map(self._piece_of_sum, pieces)), number, weight))
