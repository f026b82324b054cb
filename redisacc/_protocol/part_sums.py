"""Adds up buffered gradients part by part, also while they are still being uploaded.

A gradient is uploaded in parts, and every gradient of a round is cut in the same way. So the first parts of all
gradients can be added while the others are on their way. The gradients are always added in the order of their places,
in every part, so the sum is the same bit for bit, whenever and by whomever it is added up.

Before the round is granted, nobody knows which gradients it will hold. Uploads that have been announced are taken for
granted, and the sum remembers which gradients each part contains. When the round is known, whatever does not agree with
it is added up again.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from redisacc._data.encodings import BLOCKS, decode_by_piece, per_item, stored_bytes
from redisacc._data.sums import DenseSum, RoundSum
from redisacc._data.validation import Array
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._protocol.buffered_sections import add_sparse_sections, whole_gradient
from redisacc._protocol.inline_reader import InlineReader
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError

# How many bytes are requested before they are needed, so that the server always has something to send.
WINDOW_BYTES = 4 * 2**20

# How many bytes of sparse sections may wait in memory for those of gradients that come before them.
WAITING_BYTES = 64 * 2**20

# If headers announce more bytes than this, the server is asked for the lengths before memory is allocated.
TRUSTED_BYTES = 64 * 2**20

# An upload that makes no progress for so many seconds no longer holds up those that come after it.
STALLED = 0.5


class _Piece(NamedTuple):
    """Consecutive elements of a dense section in a part.

    Attributes:
        section: the number of the section.
        dtype: what they are stored as: elements, or BLOCKS.
        first: the place of the first element in the section.
        number: the number of elements.
        start: their first byte in the part.
    """

    section: int
    dtype: np.dtype[Any]
    first: int
    number: int
    start: int

    @property
    def nbytes(self) -> int:
        """The bytes that the elements have in the part."""
        return stored_bytes(self.dtype, self.number)

    def elements(self, part: Array, where: str) -> Iterator[tuple[int, Array]]:
        """Yields the elements, maybe in pieces, each with the place of its first element in the section.

        Args:
            part: the bytes of the part.
            where: the key of the part, for errors.
        """
        stored = part[self.start : self.start + self.nbytes].view(self.dtype)
        if self.dtype == BLOCKS:
            for first, elements in decode_by_piece(stored, self.number, where):
                yield self.first + first, elements
        else:
            yield self.first, stored


# For each part with elements of dense sections, the pieces of these sections in it.
_Cut = tuple[tuple[_Piece, ...], ...]


@dataclass(slots=True, eq=False)
class _Upload:
    """A gradient, as far as its parts have arrived at the server.

    Attributes:
        gradient: the gradient.
        cut: what its dense parts hold; None: it cannot be added part by part.
        there: for each part whether it has arrived.
        admitted: whether the gradient is in the round, so that its parts have their final names.
        moved_at: when the last part arrived, on ``time.monotonic()``'s clock.
        sparse_parts: the number of parts before the dense ones.
        sparse: the bytes of its sparse sections, as far as they have been fetched.
        requested: for each sparse part whether it has been fetched or is on its way.
        left: how many sparse parts are still to be fetched.
    """

    gradient: BufferedGradient
    cut: _Cut | None
    there: bytearray
    admitted: bool
    moved_at: float
    sparse_parts: int
    sparse: Array | None = None
    requested: bytearray = field(default_factory=bytearray)
    left: int = 0

    def __post_init__(self) -> None:
        self.forget_sparse()

    def admit(self) -> None:
        """Notes that the round has the gradient."""
        self.admitted = True
        self.there[:] = b"\1" * len(self.there)

    def forget_sparse(self) -> None:
        """Begins anew with the sparse sections."""
        self.sparse, self.requested, self.left = None, bytearray(self.sparse_parts), self.sparse_parts


@dataclass(slots=True, eq=False)
class _Cell:
    """The dense elements that the same part of every gradient holds, and their sum.

    Attributes:
        number: the number of the part, counted from the first dense one.
        added: how many gradients, from the first on, are in the sum.
        requested: how many are in the sum or on their way.
        turn: grows when what is on its way has become of no use.
    """

    number: int
    added: int = 0
    requested: int = 0
    turn: int = 0

    def rewind(self, added: int) -> None:
        """Requests again whatever comes after so many gradients."""
        self.added = self.requested = added
        self.turn += 1


@dataclass(slots=True, eq=False)
class _Part:
    """A part that is on its way.

    Attributes:
        key: its key.
        upload: the gradient that it belongs to.
        number: its number.
        memory: where it goes.
        cell: the cell to which it is added; None: it is of sparse sections.
        turn: the turn of the cell for which it was requested.
        begins: whether it is the first of the cell.
        placed: whether ``memory`` is that of the sum.
    """

    key: str
    upload: _Upload
    number: int
    memory: Array
    cell: _Cell | None = None
    turn: int = 0
    begins: bool = False
    placed: bool = False


class PartSums:
    """The sum of the gradients of a round that are buffered in parts.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        round_sum: an empty sum for the round, which gets the sum.
        bets: how many gradients the round will probably hold. Later ones are not added before the round is known.
    """

    def __init__(self, transport: Transport, keys: Keys, round_sum: RoundSum, *, bets: int = 0) -> None:
        self._transport = transport
        self._keys = keys
        self._sum = round_sum
        self._bets = bets
        # All gradients that are known, in the order of their places.
        self._uploads: list[_Upload] = []
        self._by_id: dict[str, _Upload] = {}
        self._admitted = 0
        self._cut: _Cut | None = None
        self._cells: list[_Cell] = []
        # How many gradients, from the first on, are in the sums of the sparse sections.
        self._sparse_added = 0
        self._has_sparse = not all(isinstance(section, DenseSum) for section in round_sum.sections)
        # How many come before the last one that was added whole, that one included. Nothing may begin anew before it:
        # it is in the sums of all sections.
        self._whole = 0
        self._ready: deque[tuple[_Cell, int, int]] = deque()
        self._awaited: deque[_Part] = deque()
        self._awaited_bytes = 0
        self._passage = np.empty(0, np.uint8)
        self._on_pause: Callable[[], bool] | None = None

    # Messages and lookups that tell of gradients.

    def announce(self, gradient: BufferedGradient, *, admitted: bool = False) -> None:
        """Notes a gradient whose upload has begun, or that is in the round."""
        known = self._by_id.get(gradient.id)
        if known is not None and not _alike(known.gradient, gradient):
            self._remove(known)
            known = None
        if known is None:
            known = self._upload_of(gradient)
            place = len(self._uploads)
            while place and self._uploads[place - 1].gradient.order > gradient.order:
                place -= 1
            self._uploads.insert(place, known)
            self._by_id[gradient.id] = known
            self._rewind(place)
        if admitted:
            self.admit(gradient.id)

    @property
    def known(self) -> int:
        """The number of gradients that were announced."""
        return len(self._uploads)

    def knows(self, gradient: str) -> bool:
        """Returns whether this gradient was announced."""
        return gradient in self._by_id

    def arrive(self, gradient: str, parts: int) -> None:
        """Notes that the server has this many parts of a gradient, from the first on."""
        upload = self._by_id.get(gradient)
        if upload is None:
            return
        upload.moved_at = time.monotonic()
        for part in range(min(parts, len(upload.there))):
            if not upload.there[part]:
                upload.there[part] = True
                if upload.cut is not None and part >= upload.sparse_parts:
                    self._advance(self._cells[part - upload.sparse_parts])

    def admit(self, gradient: str) -> None:
        """Notes that the round has this gradient, all of whose parts are at the server."""
        upload = self._by_id[gradient]
        if upload.admitted:
            return
        upload.admit()
        self._admitted += 1
        for cell in self._cells:
            self._advance(cell)

    def _upload_of(self, gradient: BufferedGradient) -> _Upload:
        sparse_parts, start = 0, 0
        while start < gradient.sparse_bytes and sparse_parts < len(gradient.lengths):
            start += gradient.lengths[sparse_parts]
            sparse_parts += 1
        cut = _cut_of(gradient, sparse_parts) if start == gradient.sparse_bytes and not gradient.inline else None
        if cut is not None and self._cut is None:
            self._cut = cut
            # Whatever has been added before was added whole.
            self._cells = [_Cell(number, self._sparse_added, self._sparse_added) for number in range(len(cut))]
        if cut == self._cut:
            # The same object, for comparisons.
            cut = self._cut
        elif cut is not None:
            cut = None
        return _Upload(
            gradient, cut, bytearray(len(gradient.lengths)), False, time.monotonic(), 0 if cut is None else sparse_parts
        )

    def _remove(self, upload: _Upload) -> None:
        place = self._uploads.index(upload)
        del self._uploads[place]
        del self._by_id[upload.gradient.id]
        self._admitted -= upload.admitted
        self._rewind(place)

    def _rewind(self, place: int) -> None:
        """Begins anew with everything that contains gradients from this place on."""
        for cell in self._cells:
            if cell.requested > place:
                cell.rewind(0 if cell.added > place else cell.added)
        self._rewind_sparse(place)
        for cell in self._cells:
            self._advance(cell)

    def _rewind_sparse(self, place: int) -> None:
        """Begins anew with the sparse sections if their sums contain gradients from this place on.

        If that, or what has begun anew before, concerns a gradient that was added whole, everything begins anew.
        """
        if self._sparse_added > place:
            if self._has_sparse:
                self._forget_sparse()
            else:
                self._sparse_added = place
        if self._done < self._whole:
            self._whole = 0
            self._forget_sparse()
            for cell in self._cells:
                cell.rewind(0)

    def _forget_sparse(self) -> None:
        self._sparse_added = 0
        for section in self._sum.sections:
            if not isinstance(section, DenseSum):
                section.clear()
        for upload in self._uploads:
            upload.forget_sparse()

    def skip_stalled(self) -> None:
        """Removes an upload that stands still and holds up others, which have arrived further."""
        now = time.monotonic()
        for place, upload in enumerate(self._uploads[: self._bound]):
            if upload.admitted or now - upload.moved_at < STALLED:
                continue
            mine = sum(upload.there)
            if any(sum(later.there) > mine for later in self._uploads[place + 1 :]):
                self._remove(upload)
                return

    # Choosing the parts that are requested next.

    @property
    def _bound(self) -> int:
        """How many gradients, from the first on, are added before the round is known."""
        return min(max(self._bets, self._admitted), len(self._uploads))

    def _advance(self, cell: _Cell) -> None:
        """Requests as many parts of a cell as are there, in order."""
        bound = self._bound
        while cell.requested < bound:
            upload = self._uploads[cell.requested]
            if upload.cut is None or not upload.there[upload.sparse_parts + cell.number]:
                break
            self._ready.append((cell, cell.requested, cell.turn))
            cell.requested += 1

    def _request(self) -> list[str]:
        """Requests as much as the window has room for. Returns the keys."""
        keys: list[str] = []
        while self._awaited_bytes < WINDOW_BYTES:
            part = self._next_dense() or self._next_sparse()
            if part is None:
                break
            self._awaited.append(part)
            self._awaited_bytes += len(part.memory)
            keys.append(part.key)
        return keys

    def _next_dense(self) -> _Part | None:
        while self._ready:
            cell, place, turn = self._ready.popleft()
            if turn != cell.turn:
                continue
            upload = self._uploads[place]
            number = upload.sparse_parts + cell.number
            length = upload.gradient.lengths[number]
            assert upload.cut is not None
            pieces = upload.cut[cell.number]
            if len(self._passage) < length:
                self._passage = np.empty(length, np.uint8)
            part = _Part(self._key(upload, number), upload, number, self._passage[:length], cell, turn, place == 0)
            if part.begins and len(pieces) == 1 and pieces[0].nbytes == length:
                place_in_sum = self._piece_of_sum(pieces[0])
                if place_in_sum.dtype == pieces[0].dtype:
                    part.memory, part.placed = place_in_sum.view(np.uint8), True
            return part
        return None

    def _piece_of_sum(self, piece: _Piece) -> Array:
        section = self._sum.sections[piece.section]
        assert isinstance(section, DenseSum)
        return section.piece(piece.first, piece.number)

    def _next_sparse(self) -> _Part | None:
        waiting = 0
        for place in range(self._sparse_added, self._bound):
            upload = self._uploads[place]
            if upload.cut is None:
                break
            if not upload.left:
                waiting += upload.gradient.sparse_bytes
                continue
            if waiting > WAITING_BYTES:
                break
            start = 0
            for number in range(upload.sparse_parts):
                length = upload.gradient.lengths[number]
                if upload.there[number] and not upload.requested[number]:
                    if upload.sparse is None:
                        upload.sparse = np.empty(upload.gradient.sparse_bytes, np.uint8)
                    upload.requested[number] = True
                    memory = upload.sparse[start : start + length]
                    return _Part(self._key(upload, number), upload, number, memory)
                start += length
            waiting += upload.gradient.sparse_bytes
        return None

    def _key(self, upload: _Upload, number: int) -> str:
        name = self._keys.part if upload.admitted else self._keys.staged
        return name(upload.gradient.id, number)

    # Arrivals of fast_socket:

    def wanted(self) -> list[str]:
        """Returns the keys of the parts that have not arrived."""
        self.more()
        return [part.key for part in self._awaited]

    def more(self) -> list[str]:
        """Returns the keys of the parts that are requested now."""
        if self._on_pause is not None and self._on_pause():
            return []
        return self._request()

    def expected(self) -> memoryview:
        """Returns where the next part goes if it is as long as its header says."""
        return self._awaited[0].memory.data

    def begin(self, length: int) -> memoryview:
        """Returns where the next part goes, given its length in bytes."""
        part = self._awaited[0]
        if length != len(part.memory):
            raise CorruptDataError(f"{part.key} has {length} bytes, and its header says {len(part.memory)}")
        return part.memory.data

    def missing(self) -> None:
        """Notes that a part is not there, or has its final name by now.

        Raises:
            PartMissingError: it should be there.
        """
        part = self._arrived()
        upload = part.upload
        if part.key == self._keys.part(upload.gradient.id, part.number):
            raise PartMissingError(part.key)
        # If it was admitted meanwhile, it is requested by its final name. Otherwise, it was refused, or will be staged
        # again.
        upload.there[part.number] = upload.admitted
        if part.cell is None:
            if part.memory.base is upload.sparse:
                upload.requested[part.number] = False
        elif part.turn == part.cell.turn:
            part.cell.rewind(part.cell.added)
            self._advance(part.cell)

    def finish(self) -> None:
        """Adds the part that has arrived."""
        part = self._arrived()
        cell, upload = part.cell, part.upload
        if cell is None:
            # Otherwise it has been requested again since.
            if part.memory.base is upload.sparse:
                upload.left -= 1
                if not upload.left:
                    self._add_sparse()
        elif part.turn == cell.turn:
            if not part.placed:
                assert upload.cut is not None
                for piece in upload.cut[cell.number]:
                    section = self._sum.sections[piece.section]
                    assert isinstance(section, DenseSum)
                    for first, elements in piece.elements(part.memory, part.key):
                        section.add_piece(first, elements, begins=part.begins)
            cell.added += 1

    def _arrived(self) -> _Part:
        part = self._awaited.popleft()
        self._awaited_bytes -= len(part.memory)
        return part

    def _add_sparse(self) -> None:
        """Adds the sparse sections that have been fetched, in order."""
        while self._sparse_added < self._bound:
            upload = self._uploads[self._sparse_added]
            if upload.cut is None or upload.left:
                break
            if upload.sparse is not None:
                add_sparse_sections(self._sum, upload.gradient, upload.sparse, self._key(upload, 0))
                upload.sparse = None
            self._sparse_added += 1

    # Adding up, ahead and at the end.

    def look_ahead(self, inline: InlineReader, on_pause: Callable[[], bool]) -> None:
        """Adds whatever has arrived, until nothing more is there.

        Args:
            inline: reads inline gradients of the current round.
            on_pause: called after each part: it announces what has been heard meanwhile, and returns whether to stop.

        Raises:
            PartMissingError, RedisAccError: something could not be read. The sum is of no more use.
        """
        self._on_pause = on_pause
        try:
            self._add(inline)
        finally:
            self._on_pause = None

    def complete(self, gradients: Sequence[BufferedGradient], inline: InlineReader) -> None:
        """Adds what has not been added of these gradients, and removes from the sum what is not one of them.

        Args:
            gradients: all buffered gradients of the round, in the order of their places.
            inline: reads those of them that are inline.

        Raises:
            PartMissingError: a part is not there. The sum is of no more use.
            CorruptDataError: a part is not as long as its header says, or its indices are not ascending. The sum is of
                no more use.
        """
        before = self._uploads
        self._settle(gradients)
        agree = 0
        while agree < min(len(before), len(self._uploads)) and before[agree] is self._uploads[agree]:
            agree += 1
        for cell in self._cells:
            cell.rewind(cell.added if cell.added <= agree else 0)
        self._rewind_sparse(agree)
        check_lengths(self._transport, self._keys, gradients)
        for cell in self._cells:
            self._advance(cell)
        self._add(inline)
        assert self._done == len(gradients)
        if not gradients:
            self._clear_dense()
        self._sum.number += sum([gradient.number for gradient in gradients])

    def _add(self, inline: InlineReader) -> None:
        """Adds whatever is there, in order."""
        while True:
            self._add_sparse()
            while self.wanted():
                self._transport.fetch(self)
                self._add_sparse()
            done = self._done
            if done == self._bound or not self._uploads[done].admitted or self._uploads[done].cut is not None:
                return
            self._add_whole(self._uploads[done].gradient, inline, begins=done == 0)
            self._sparse_added = self._whole = done + 1
            for cell in self._cells:
                cell.rewind(done + 1)
                self._advance(cell)

    @property
    def _done(self) -> int:
        """How many gradients, from the first on, have been added whole."""
        return min([self._sparse_added, *[cell.added for cell in self._cells]])

    def _settle(self, gradients: Sequence[BufferedGradient]) -> None:
        """Replaces the uploads by those of these gradients, and keeps those that are the same."""
        known = self._by_id
        self._uploads, self._by_id = [], {}
        for gradient in gradients:
            upload = known.get(gradient.id)
            if upload is None or not _alike(upload.gradient, gradient):
                upload = self._upload_of(gradient)
            upload.admit()
            self._uploads.append(upload)
            self._by_id[gradient.id] = upload
        self._admitted = len(self._uploads)

    def _add_whole(self, gradient: BufferedGradient, inline: InlineReader, *, begins: bool) -> None:
        """Adds a gradient that is inline, or cut in another way than the others."""
        if begins:
            self._clear_dense()
        data: Any
        if gradient.inline:
            data, where = inline.read(gradient), inline.where(gradient)
        else:
            whole = WholeParts(self._keys, gradient)
            self._transport.fetch(whole)
            data, where = whole.data, self._keys.part(gradient.id, 0)
        for section, of in zip(whole_gradient(gradient, data, where).sections, self._sum.sections, strict=True):
            of.add(section)

    def _clear_dense(self) -> None:
        for section in self._sum.sections:
            if isinstance(section, DenseSum):
                section.clear()


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


def _alike(one: BufferedGradient, other: BufferedGradient) -> bool:
    """Returns whether the bytes of two descriptions of a gradient mean the same, at the same place."""
    return (one.order, one.number, one.lengths, one.sections) == (
        other.order,
        other.number,
        other.lengths,
        other.sections,
    )


def _cut_of(gradient: BufferedGradient, sparse_parts: int) -> _Cut | None:
    """Returns what each part holds of dense sections; None if a part ends within an element or a block."""
    every: list[tuple[_Piece, ...]] = []
    start = gradient.sparse_bytes
    for length in gradient.lengths[sparse_parts:]:
        stop = start + length
        pieces = []
        for number, section in enumerate(gradient.sections):
            if section.is_sparse:
                continue
            offset, size = section.values[0], section.dtype.itemsize
            low, high = max(start, offset), min(stop, section.values[1])
            if low < high:
                if (low - offset) % size or (high - low) % size:
                    return None
                first, end = [(at - offset) // size * per_item(section.dtype) for at in (low, high)]
                end = min(end, math.prod(section.shape))
                pieces.append(_Piece(number, section.dtype, first, end - first, low - start))
        every.append(tuple(pieces))
        start = stop
    return tuple(every)
