"""Cells: the sum of one part of all gradients each, with the gradients in it.

Every gradient of a round is cut in the same way, so the sum of each part grows by itself. A cell knows which gradients
it contains, in their order, each with its place and weight (an ``Upload`` is all of that). If these are no longer the
first of the gradients that are wanted, it is cleared. So a guess about a round that is still growing costs time when it
was wrong, and changes no bit of a sum.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from redisacc._arrays.sums import DenseSum, RoundSum
from redisacc._arrays.validation import Array
from redisacc._format.buffered import ANNOUNCED_BYTES, BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.part_cut import Cut, Piece
from redisacc._protocol.sums.buffered_sections import add_sparse_sections
from redisacc._protocol.sums.expected_gradients import ExpectedGradients, SparseBytes, Upload
from redisacc._wire.lanes import LANES


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


@dataclass(frozen=True)
class SumOptions:
    """How the sum of a round is made.

    Attributes:
        keys: the keys of the accumulator.
        num_expected: how many gradients the round will probably hold; 0 if unknown. Later ones are not added before
            the round is known.
        by_worker: whether the places of gradients are the numbers of their workers.
        store: stores the parts of the sum of the expected gradients. With it, only the dense sections of these
            gradients are added. None means nothing is stored.
        position: with ``store``: the only partition whose parts are added, by position; None means all parts are.
        is_updated: whether a reducer updates the parameters with the sum, which then does not travel.
        window: how many bytes are requested from a node before they are needed, so that it always has something to
            send.
        waiting: how many bytes of sparse sections may wait in memory for earlier gradients.
        reduced: smaller gradients, in bytes, are not announced, so reducers would learn of them too late.
    """

    keys: Keys
    num_expected: int = 0
    by_worker: bool = False
    store: Store | None = None
    position: int | None = None
    is_updated: bool = False
    window: int = 4 * 2**20
    waiting: int = 64 * 2**20
    reduced: int = ANNOUNCED_BYTES

    @property
    def homes(self) -> Sequence[str]:
        """A key on each node, if there are partitions."""
        position, homes = self.position, self.keys.homes
        return homes if position is None else homes[position : position + 1]

    @property
    def lanes(self) -> int:
        """The number of lanes: one for each partition, or lanes in which the parts of a single node take turns."""
        return 1 if self.position is not None else len(self.keys.partitions) or LANES


@dataclass(slots=True, eq=False)
class Part:
    """A part that is on its way.

    Attributes:
        key: its key.
        lane: its lane. All parts of a cell have the same, so they arrive in order.
        cell: the number of the cell to which it is added; None means it belongs to sparse sections.
        number: its number among the parts of a gradient, or of a sum.
        length: its length in bytes.
        adds: the gradients that are in the cell with it: one, or those of a reducer's sum.
        is_sum: whether it is part of a reducer's sum.
        must_be_there: whether the round had the gradient when the part was requested.
        memory: where it goes; None means memory is lent to it when it begins to arrive.
        placed: whether ``memory`` is the memory of the sum itself.
        lent: the memory that it was lent, which may be longer than the part.
    """

    key: str
    lane: int
    cell: int | None
    number: int
    length: int
    adds: list[Upload]
    is_sum: bool = False
    must_be_there: bool = False
    memory: Array | None = None
    placed: bool = False
    lent: Array | None = None


@dataclass(slots=True, eq=False)
class Cell:
    """The sum of the elements that the same dense part of every gradient holds.

    Attributes:
        number: the number of the part, counted from the first dense one.
        pieces: the elements in it.
        summed: the gradients in the sum, which are always the first of those that are wanted.
        coming: the parts on their way that continue it, in their order. Others that still arrive are ignored.
        stored_as: the digest under which the sum was stored for takers.
    """

    number: int
    pieces: tuple[Piece, ...]
    summed: list[Upload]
    coming: deque[Part] = field(default_factory=deque)
    stored_as: str = ""

    def clear(self) -> None:
        """Begins again. The first gradient that is added replaces what the memory holds."""
        self.summed.clear()
        self.coming.clear()

    def keep_coming(self, wanted: Sequence[Upload]) -> None:
        """Ignores the parts on their way that do not continue the sum with these gradients."""
        after = [*self.summed, *[upload for part in self.coming for upload in part.adds]]
        while after != wanted[: len(after)]:
            del after[-len(self.coming.pop().adds) :]


@dataclass(eq=False)
class Rows:
    """The sum of the sparse sections. Their parts may arrive in any order.

    Attributes:
        options: how the sum is made.
        lanes: in how many lanes parts travel.
        round_sum: the sum of the round.
        uploads: the gradients that the round will probably hold.
        summed: the gradients in the sum, which are always the first of those that are wanted.
    """

    options: SumOptions
    lanes: int
    round_sum: RoundSum
    uploads: ExpectedGradients
    summed: list[Upload] = field(default_factory=list)

    def clear(self) -> None:
        """Drops the sum, so that everything is fetched and added again."""
        self.summed.clear()
        for section in self.round_sum.sections:
            if not isinstance(section, DenseSum):
                section.clear()
        for upload in self.uploads.every:
            upload.sparse = None

    def next(self) -> Part | None:
        """Returns the part to request next; None means there is none, or no room."""
        waiting = 0
        for place in range(len(self.summed), self.uploads.bound):
            upload = self.uploads.every[place]
            sparse = upload.sparse
            if upload.cut is None or (waiting > self.options.waiting and (sparse is None or sparse.left)):
                break
            for number in range(upload.sparse_parts):
                if upload.there[number] and (sparse is None or not sparse.requested[number]):
                    return self._part_of(upload, place, number)
            waiting += upload.gradient.sparse_bytes
        return None

    def _part_of(self, upload: Upload, place: int, number: int) -> Part:
        sparse = upload.sparse = upload.sparse or SparseBytes(upload)
        sparse.requested[number] = True
        start, length = sum(upload.gradient.lengths[:number]), upload.gradient.lengths[number]
        return Part(
            self.options.keys.part(upload.gradient.id, number),
            (number if self.options.keys.partitions else place + number) % self.lanes,
            None,
            number,
            length,
            [upload],
            must_be_there=upload.admitted,
            memory=sparse.memory[start : start + length],
        )

    def note(self, part: Part, *, is_there: bool) -> None:
        """Notes that a part has arrived, or that it is not at the server, unless it was requested again since."""
        sparse = part.adds[0].sparse
        if sparse is None or part.memory is None or part.memory.base is not sparse.memory:
            return
        if is_there:
            sparse.left -= 1
            self.add()
        else:
            sparse.requested[part.number] = False

    def add(self) -> None:
        """Adds the sections that have been fetched, in the order of their gradients."""
        while len(self.summed) < self.uploads.bound:
            upload = self.uploads.every[len(self.summed)]
            if upload.cut is None:
                break
            if upload.sparse_parts:
                if upload.sparse is None or upload.sparse.left > 0:
                    break
                where = self.options.keys.part(upload.gradient.id, 0)
                add_sparse_sections(self.round_sum, upload.gradient, upload.sparse.memory, where)
                upload.sparse = None
            self.summed.append(upload)


class Cells:
    """The cells of a round: one for each dense part, and one for all rows.

    Args:
        options: how the sum is made.
        round_sum: the sum of the round.
        uploads: the gradients that the round will probably hold.

    Attributes:
        dense: the cells that are added, by their numbers.
        rows: the sum of the sparse sections; None means there are none, or they are not added.
        lanes: in how many lanes parts travel.
        ready: the cells that may have a part to request, for each partition. Partitions take turns.
        leaves_to_reducer: whether the dense parts of the expected gradients are left to a reducer.
        stored: the parts of reducers' sums that are taken for stored: the digest of the gradients, and the number.
    """

    def __init__(self, options: SumOptions, round_sum: RoundSum, uploads: ExpectedGradients) -> None:
        self._options = options
        self._keys = options.keys
        self.lanes = options.lanes
        self._store = options.store
        self._sum = round_sum
        self._uploads = uploads
        self.dense: dict[int, Cell] = {}
        has_rows = set(map(type, round_sum.sections)) != {DenseSum}
        self.rows = Rows(options, self.lanes, round_sum, uploads) if has_rows and self._store is None else None
        self._every: list[Cell | Rows] = [] if self.rows is None else [self.rows]
        self.leaves_to_reducer = False
        self.stored: set[tuple[str, int]] = set()
        # The gradients up to the last one that was added whole, which all cells contain.
        self._whole: list[Upload] = []
        self.ready: tuple[dict[Cell, None], ...] = tuple([{} for _ in self._keys.partitions or (0,)])
        self._turn = 0

    def begin(self, cut: Cut) -> None:
        """Makes the dense cells. Whatever has been added before was added whole."""
        step = len(self._keys.partitions) or 1
        position = self._options.position
        numbers = range(len(cut)) if position is None else range(position, len(cut), step)
        self.dense = {number: Cell(number, cut[number], [*self._whole]) for number in numbers}
        self._every += self.dense.values()

    @property
    def done(self) -> int:
        """How many leading gradients are in the sums with all their parts."""
        return min([len(cell.summed) for cell in self._every], default=len(self._whole))

    def nbytes_of(self, gradient: BufferedGradient) -> int:
        """Returns the number of bytes in the sum of the dense sections of gradients like this one."""
        return sum(
            [
                math.prod(section.shape) * of.dtype.itemsize
                for section, of in zip(gradient.sections, self._sum.sections, strict=True)
                if isinstance(of, DenseSum)
            ]
        )

    def clear_dense(self) -> None:
        """Sets the dense sums to zero, before a whole gradient is added, or if there is none."""
        for section in self._sum.sections:
            if isinstance(section, DenseSum):
                section.clear()

    def note_whole(self, upload: Upload) -> None:
        """Notes that a gradient was added to all sums, after all those that precede it."""
        self._whole = self._uploads.every[: self.done + 1]
        for cell in self._every:
            cell.summed.append(upload)
        self.advance_all()

    def keep_prefixes(self) -> None:
        """Clears the cells whose gradients are not the first of those that are wanted now, and empties the queue."""
        wanted = self._uploads.every
        spoilt = [cell for cell in self._every if cell.summed != wanted[: len(cell.summed)]]
        if self._whole and (spoilt or self._whole != wanted[: len(self._whole)]):
            # What was added whole can be added again only to all of them.
            spoilt, self._whole = self._every, []
        for cell in spoilt:
            cell.clear()
        for dense in self.dense.values():
            if dense.coming:
                dense.keep_coming(wanted)
        for ready in self.ready:
            ready.clear()

    # Choosing the parts that are requested next.

    def advance_all(self) -> None:
        """Queues all cells: more of their parts may be there."""
        for number, cell in self.dense.items():
            self.ready[number % len(self.ready)][cell] = None
            if self._store is not None:
                self._offer(cell, self._store)

    def advance(self, number: int) -> None:
        """Queues a cell, if there is one of this number: more of its parts may be there."""
        cell = self.dense.get(number)
        if cell is not None:
            self.ready[number % len(self.ready)][cell] = None
            if self._store is not None:
                self._offer(cell, self._store)

    def next(self) -> Part | None:
        """Returns the part to request next; None means there is none."""
        for _ in self.ready:
            ready = self.ready[self._turn]
            self._turn = (self._turn + 1) % len(self.ready)
            while ready:
                cell = next(iter(ready))
                part = self._next_of(cell)
                if part is not None:
                    cell.coming.append(part)
                if part is None or len(cell.summed) + len(cell.coming) >= self._uploads.bound:
                    # There is no other one.
                    del ready[cell]
                if part is not None:
                    return part
        return None if self.rows is None else self.rows.next()

    def _next_of(self, cell: Cell) -> Part | None:
        """Returns the next part of a cell, of a gradient or of a reducer's sum, if it is there."""
        place = len(cell.summed)
        for part in cell.coming:
            place += len(part.adds)
        if self.leaves_to_reducer and not place:
            is_stored = (self._uploads.digest, cell.number) in self.stored
            return self._part_of_sum(cell) if self._uploads.expected and is_stored else None
        if place >= self._uploads.bound:
            return None
        upload = self._uploads.every[place]
        number = upload.sparse_parts + cell.number
        if upload.cut is None or not upload.there[number]:
            return None
        length, pieces = upload.gradient.lengths[number], upload.cut[cell.number]
        key, lane = self._keys.part(upload.gradient.id, number), cell.number % self.lanes
        part = Part(key, lane, cell.number, number, length, [upload], must_be_there=upload.admitted)
        if not place and len(pieces) == 1 and pieces[0].nbytes == length and upload.gradient.factor == 1:
            memory = self._piece_of_sum(pieces[0])
            if memory.dtype == pieces[0].dtype:
                part.memory, part.placed = memory.view(np.uint8), True
        return part

    def _part_of_sum(self, cell: Cell) -> Part:
        """Returns the part of the sum of the expected gradients, which a reducer has stored."""
        places = list(map(self._piece_of_sum, cell.pieces))
        length = sum([place.nbytes for place in places])
        key, lane = self._keys.sum(self._uploads.digest, cell.number), cell.number % self.lanes
        adds = self._uploads.every[: self._uploads.expected]
        part = Part(key, lane, cell.number, cell.number, length, adds, is_sum=True)
        if len(places) == 1 and places[0].dtype == places[0].dtype.newbyteorder("<"):
            part.memory, part.placed = places[0].view(np.uint8), True
        return part

    def _piece_of_sum(self, piece: Piece) -> Array:
        section = self._sum.sections[piece.section]
        assert isinstance(section, DenseSum)
        return section.piece(piece.first, piece.number)

    # Parts that arrive, or do not.

    def finish(self, part: Part) -> None:
        """Adds a part that has arrived, unless it is no longer wanted."""
        if part.cell is None:
            assert self.rows is not None
            self.rows.note(part, is_there=True)
            return
        cell = self.dense[part.cell]
        if cell.coming and cell.coming[0] is part:
            if not part.placed:
                self._add(cell, part)
            cell.coming.popleft()
            cell.summed += part.adds
            if part.is_sum:
                self.advance(cell.number)
            elif self._store is not None:
                self._offer(cell, self._store)

    def _add(self, cell: Cell, part: Part) -> None:
        memory = part.memory
        assert memory is not None
        if part.is_sum:
            start = 0
            for place in map(self._piece_of_sum, cell.pieces):
                stop = start + place.nbytes
                place[:] = memory[start:stop].view(place.dtype.newbyteorder("<"))
                start = stop
            return
        (upload,) = part.adds
        assert upload.cut is not None
        for piece in upload.cut[cell.number]:
            section = self._sum.sections[piece.section]
            assert isinstance(section, DenseSum)
            for first, elements in piece.elements(memory, part.key):
                section.add_piece(first, elements, upload.gradient.factor, begins=not cell.summed)

    def miss(self, part: Part) -> None:
        """Notes that a part is not at the server."""
        if not part.is_sum:
            (upload,) = part.adds
            # If its gradient was admitted meanwhile, it is there. Otherwise, it was refused, or is written again.
            upload.there[part.number] = upload.admitted
        if part.cell is None:
            assert self.rows is not None
            self.rows.note(part, is_there=False)
            return
        cell = self.dense[part.cell]
        if cell.coming and cell.coming[0] is part:
            cell.coming.clear()
            if part.is_sum:
                self.stored.discard((self._uploads.digest, cell.number))
            else:
                self.advance(cell.number)

    def _offer(self, cell: Cell, store: Store) -> None:
        """Stores a part of the sum if it contains exactly the expected gradients."""
        if len(cell.summed) != self._uploads.expected or cell.stored_as == self._uploads.digest:
            return
        cell.stored_as = self._uploads.digest
        elements = list(map(self._piece_of_sum, cell.pieces))
        store(SumPart(cell.stored_as, cell.number, cell.pieces, elements, *self._uploads.counted))
