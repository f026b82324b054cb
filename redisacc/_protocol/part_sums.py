"""Adds up buffered gradients part by part, also while they are still being uploaded.

A gradient is uploaded in parts, and every gradient of a round is cut in the same way. So the first parts of all
gradients can be added while the others are on their way. The gradients are always added in the order of their places,
in every part, so the sum is the same bit for bit, whenever and by whomever it is added up.

Before the round is granted, nobody knows which gradients it will hold. Uploads that have been announced are taken for
granted, and the sum remembers which gradients each part contains. When the round is known, whatever does not agree with
it is added up again.

If a reducer works on the accumulator, a taker leaves the dense parts of the gradients that it expects to the reducer,
and fetches the parts of their sum instead. They are stored under a digest of the gradients that they contain, so a part
of another sum is never used. Whatever is not there in time, the taker adds up itself.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redisacc._data.sums import DenseSum, RoundSum
from redisacc._data.validation import Array
from redisacc._format.buffered import ANNOUNCED_BYTES, BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.part_cut import Cut, Piece, cut_of
from redisacc._protocol.buffered_sections import add_sparse_sections, whole_gradient
from redisacc._protocol.inline_reader import InlineReader
from redisacc._protocol.reliance import Reliance
from redisacc._protocol.uploads import Upload, Uploads
from redisacc._protocol.whole_parts import WholeParts, check_lengths
from redisacc._redis.lanes import LANES
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError, NotPermittedError

# How many bytes are requested before they are needed, so that the server always has something to send.
WINDOW_BYTES = 4 * 2**20
# The same for all partitions together.
MOST_WINDOW_BYTES = 64 * 2**20

# How many bytes of sparse sections may wait in memory for those of gradients that come before them.
WAITING_BYTES = 64 * 2**20

# Gradients are left to a reducer if their dense parts have more than this many times the bytes of their sum.
WORTHWHILE = 1.25

# How long a take waits for the parts of a sum that are missing when its round is granted, in seconds, for all of them
# together; and how long it pauses before it asks again.
SUM_PATIENCE = 0.05
SUM_PAUSE = 0.002

# Maximum number of parts of sums that are remembered because of messages, which anybody may forge.
MOST_STORED = 10_000

# Stores a part of a sum, given the digest of the gradients in it, its number, and its elements.
Store = Callable[[str, int, Sequence[Array]], None]


@dataclass(slots=True, eq=False)
class _Cell:
    """The dense elements that the same part of every gradient holds, and their sum.

    Attributes:
        number: the number of the part, counted from the first dense one.
        added: how many gradients, from the first on, are in the sum.
        requested: how many are in the sum or on their way.
        turn: grows when what is on its way has become of no use.
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
        """Requests again whatever comes after so many gradients."""
        self.added = self.requested = added
        self.turn += 1
        self.reduced = self.reduced and added > 0


@dataclass(slots=True, eq=False)
class _Part:
    """A part that is on its way.

    Attributes:
        key: its key.
        lane: its lane. All parts of a cell have the same, so they arrive in order.
        upload: the gradient that it belongs to; of a sum, the first gradient in it.
        number: its number.
        length: its length in bytes.
        memory: where it goes; None: the sums lend it memory when it begins to arrive.
        cell: the cell to which it is added; None: it is of sparse sections.
        turn: the turn of the cell for which it was requested.
        begins: whether it is the first of the cell.
        placed: whether ``memory`` is that of the sum.
        lent: the memory that it was lent, which may be longer than the part.
        sums: of how many gradients it is the sum, from a reducer; 0: it is of a gradient.
    """

    key: str
    lane: int
    upload: Upload
    number: int
    length: int
    memory: Array | None = None
    cell: _Cell | None = None
    turn: int = 0
    begins: bool = False
    placed: bool = False
    lent: Array | None = None
    sums: int = 0


# In place of the position of an upload: the sum of the expected gradients is requested.
_SUM = -1


class PartSums:
    """The sum of the gradients of a round that are buffered in parts.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        round_sum: an empty sum for the round.
        bets: how many gradients the round will probably hold. Later ones are not added before the round is known.
        reliance: notes whether a reducer was in time; None: no reducer's sum is used.
        store: stores the parts of the sum of the first gradients, as many as the bets say. With it, these are all that
            is added, and of these the dense sections only. None: nothing is stored.
    """

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        round_sum: RoundSum,
        *,
        bets: int = 0,
        reliance: Reliance | None = None,
        store: Store | None = None,
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._sum = round_sum
        self._bets = bets
        self._reliance = reliance
        self._store = store
        self._uploads = Uploads(bets)
        self._cut: Cut | None = None
        self._cells: list[_Cell] = []
        # Whether there is nothing to add before the round is known.
        self._idle = store is not None
        # Of Arrivals: a lane for each partition, or lanes in which the parts of a single node take turns.
        self.homes = keys.homes
        self.lanes = len(self.homes) or LANES
        # Whether the dense parts of the expected gradients are left to a reducer.
        self._leaves_to_reducer = False
        # Digest -> the numbers of the parts that a reducer has stored under it.
        self._stored: dict[str, set[int]] = {}
        self._num_stored = 0
        # How many gradients, from the first on, are in the sums of the sparse sections.
        self._sparse_added = 0
        self._has_sparse = not all(isinstance(section, DenseSum) for section in round_sum.sections)
        # How many come before the last one that was added whole, that one included. Nothing may begin anew before it:
        # it is in the sums of all sections.
        self._whole = 0
        # What is requested next, for each partition, which take turns; a single node has everything in one place.
        self._ready: tuple[deque[tuple[_Cell, int, int]], ...] = tuple(deque() for _ in self.homes or (None,))
        self._turn = 0
        # Every node must always have something to send.
        self._window = min(len(self._ready) * WINDOW_BYTES, MOST_WINDOW_BYTES)
        self._awaited: deque[_Part] = deque()
        self._awaited_bytes = 0
        # Memory that is lent to parts, one for each that arrives at the same time. The one used last is lent first,
        # because the processor's cache has it.
        self._spare: list[Array] = []
        self._on_pause: Callable[[], bool] | None = None

    # Messages and lookups that tell of gradients.

    def announce(self, gradient: BufferedGradient, *, admitted: bool = False) -> None:
        """Notes a gradient whose upload has begun, or that is in the round."""
        known = self._uploads.find(gradient.id)
        if known is not None and not _alike(known.gradient, gradient):
            self._rewind(self._uploads.remove(known))
            known = None
        if known is None:
            self._rewind(self._uploads.insert(self._upload_of(gradient)))
        if admitted:
            self.admit(gradient.id)

    @property
    def known(self) -> int:
        """The number of gradients that were announced."""
        return len(self._uploads.every)

    def knows(self, gradient: str) -> bool:
        """Returns whether this gradient was announced."""
        return self._uploads.find(gradient) is not None

    def arrive(self, gradient: str, parts: int) -> None:
        """Notes that the server has this many parts of a gradient, from the first on."""
        upload = self._uploads.find(gradient)
        if upload is None:
            return
        for part in upload.arrive(parts):
            if upload.cut is not None and part >= upload.sparse_parts:
                self._advance(self._cells[part - upload.sparse_parts])

    def admit(self, gradient: str) -> None:
        """Notes that the round has this gradient, all of whose parts are at the server."""
        upload = self._uploads.find(gradient)
        if upload is not None and self._uploads.admit(upload):
            self._advance_all()

    def keep_admitted(self, gradients: Iterable[str]) -> None:
        """Removes gradients that were admitted and are not among these: they were compacted."""
        wanted = set(gradients)
        for upload in [upload for upload in self._uploads.every if upload.admitted]:
            if upload.gradient.id not in wanted:
                self._rewind(self._uploads.remove(upload))

    def sum_stored(self, digest: str, number: int) -> None:
        """Notes that a reducer has stored a part of the sum of the gradients with this digest."""
        if self._num_stored < MOST_STORED:
            self._num_stored += 1
            self._stored.setdefault(digest, set()).add(number)
            if number < len(self._cells):
                self._advance(self._cells[number])

    @property
    def stores(self) -> bool:
        """Whether it stores the sum of the expected gradients, as far as these are known."""
        return self._store is not None and not self._idle and self._uploads.expected is not None

    @property
    def may_be_stored(self) -> bool:
        """Whether all expected gradients are in the round, so that nothing is missing for their sum to be stored."""
        return all(upload.admitted for upload in self._uploads.every[: self._uploads.expected])

    @property
    def is_stored(self) -> bool:
        """Whether the whole sum of the expected gradients is stored."""
        return all(cell.stored_as == self._uploads.digest for cell in self._cells)

    def skip_stalled(self) -> None:
        """Removes an upload that stands still and holds up others, which have arrived further."""
        upload = self._uploads.stalled()
        if upload is not None:
            self._rewind(self._uploads.remove(upload))

    def _upload_of(self, gradient: BufferedGradient) -> Upload:
        sparse_parts, cut = cut_of(gradient) or (0, None)
        if sparse_parts % (len(self.homes) or 1):
            # Its dense parts lie in other partitions than those of the other gradients.
            sparse_parts, cut = 0, None
        if cut is not None and self._cut is None:
            self._cut = cut
            # Whatever has been added before was added whole.
            self._cells = [_Cell(number, self._sparse_added, self._sparse_added) for number in range(len(cut))]
            if self._is_worthwhile(gradient, self._bets):
                self._leaves_to_reducer = self._reliance is not None
                self._idle = False
        if cut == self._cut:
            # The same object, for comparisons.
            cut = self._cut
        elif cut is not None:
            sparse_parts, cut = 0, None
        return Upload(gradient, cut, sparse_parts)

    def _rewind(self, place: int) -> None:
        """Begins anew with everything that contains gradients from this place on."""
        for cell in self._cells:
            if cell.requested > place:
                cell.rewind(0 if cell.added > place else cell.added)
        self._rewind_sparse(place)
        self._advance_all()

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
        for upload in self._uploads.every:
            upload.forget_sparse()

    # Choosing the parts that are requested next.

    @property
    def _bound(self) -> int:
        """How many gradients, from the first on, are added before the round is known."""
        if self._idle:
            return 0
        expected, known = self._uploads.expected, len(self._uploads.every)
        if expected is None:
            expected = known if self._bets else 0
        return expected if self._store is not None else min(max(expected, self._uploads.num_admitted), known)

    def _advance_all(self) -> None:
        for cell in self._cells:
            self._advance(cell)

    def _advance(self, cell: _Cell) -> None:
        """Requests as many parts of a cell as are there, in order."""
        if self._leaves_to_reducer and cell.requested == 0:
            expected = self._uploads.expected
            if expected is not None and cell.number in self._stored.get(self._uploads.digest, ()):
                self._ready_for(cell).append((cell, _SUM, cell.turn))
                cell.requested, cell.reduced = expected, True
            return
        bound = self._bound
        while cell.requested < bound:
            upload = self._uploads.every[cell.requested]
            if upload.cut is None or not upload.there[upload.sparse_parts + cell.number]:
                break
            self._ready_for(cell).append((cell, cell.requested, cell.turn))
            cell.requested += 1
        self._offer(cell)

    def _request(self) -> list[_Part]:
        """Requests as much as the window has room for."""
        requested: list[_Part] = []
        while self._awaited_bytes < self._window:
            part = self._next_dense() or self._next_sparse()
            if part is None:
                break
            self._awaited.append(part)
            self._awaited_bytes += part.length
            requested.append(part)
        return requested

    def _ready_for(self, cell: _Cell) -> deque[tuple[_Cell, int, int]]:
        return self._ready[cell.number % len(self._ready)]

    def _next_ready(self) -> tuple[_Cell, int] | None:
        """Returns a cell, and the position of the upload whose part it needs next. The partitions take turns."""
        for _ in self._ready:
            ready = self._ready[self._turn]
            self._turn = (self._turn + 1) % len(self._ready)
            while ready:
                cell, place, turn = ready.popleft()
                if turn == cell.turn:
                    return cell, place
        return None

    def _next_dense(self) -> _Part | None:
        found = self._next_ready()
        if found is None:
            return None
        cell, place = found
        if place == _SUM:
            return self._part_of_sum(cell)
        upload = self._uploads.every[place]
        number = upload.sparse_parts + cell.number
        length = upload.gradient.lengths[number]
        assert upload.cut is not None
        pieces = upload.cut[cell.number]
        key, lane = self._key(upload, number), cell.number % self.lanes
        part = _Part(key, lane, upload, number, length, None, cell, cell.turn, begins=place == 0)
        if part.begins and len(pieces) == 1 and pieces[0].nbytes == length:
            place_in_sum = self._piece_of_sum(pieces[0])
            if place_in_sum.dtype == pieces[0].dtype:
                part.memory, part.placed = place_in_sum.view(np.uint8), True
        return part

    def _part_of_sum(self, cell: _Cell) -> _Part:
        """Returns the part of the sum of the expected gradients, which a reducer has stored."""
        assert self._cut is not None
        places = [self._piece_of_sum(piece) for piece in self._cut[cell.number]]
        length = sum([place.nbytes for place in places])
        key = self._keys.sum(self._uploads.digest, cell.number)
        lane, first = cell.number % self.lanes, self._uploads.every[0]
        part = _Part(key, lane, first, cell.number, length, None, cell, cell.turn, sums=cell.requested)
        if len(places) == 1 and places[0].dtype == places[0].dtype.newbyteorder("<"):
            part.memory, part.placed = places[0].view(np.uint8), True
        return part

    def _piece_of_sum(self, piece: Piece) -> Array:
        section = self._sum.sections[piece.section]
        assert isinstance(section, DenseSum)
        return section.piece(piece.first, piece.number)

    def _next_sparse(self) -> _Part | None:
        waiting = 0
        if self._store is not None:
            return None
        for place in range(self._sparse_added, self._bound):
            upload = self._uploads.every[place]
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
                    upload.requested[number] = True
                    memory = upload.memory_for_sparse()[start : start + length]
                    lane = (number if self.homes else place + number) % self.lanes
                    return _Part(self._key(upload, number), lane, upload, number, length, memory)
                start += length
            waiting += upload.gradient.sparse_bytes
        return None

    def _key(self, upload: Upload, number: int) -> str:
        name = self._keys.part if upload.admitted else self._keys.staged
        return name(upload.gradient.id, number)

    # Arrivals of fast_socket:

    def wanted(self) -> list[_Part]:
        """Returns the parts that have not arrived."""
        for part in self._awaited:
            # If it had begun to arrive, it begins anew.
            self._take_back(part)
        self.more()
        return list(self._awaited)

    def more(self) -> list[_Part]:
        """Returns the parts that are requested now."""
        if self._on_pause is not None and self._on_pause():
            return []
        return self._request()

    def expected(self, part: _Part) -> memoryview:
        """Returns where a part goes if it is as long as its header says."""
        return self._memory_of(part).data

    def begin(self, part: _Part, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != part.length:
            what = "the gradients in it need" if part.sums else "its header says"
            raise CorruptDataError(f"{part.key} has {length} bytes, and {what} {part.length}")
        return self._memory_of(part).data

    def missing(self, part: _Part) -> None:
        """Notes that a part is not there, or has its final name by now.

        Raises:
            PartMissingError: it should be there.
        """
        upload = part.upload
        wanted = part.memory is not None and part.memory.base is upload.sparse
        self._forget(part)
        if part.sums:
            assert part.cell is not None
            if part.turn == part.cell.turn:
                self._lose_sum(part.cell)
            return
        if part.key == self._keys.part(upload.gradient.id, part.number):
            raise PartMissingError(part.key)
        # If it was admitted meanwhile, it is requested by its final name. Otherwise, it was refused, or will be staged
        # again.
        upload.there[part.number] = upload.admitted
        if part.cell is None:
            if wanted:
                upload.requested[part.number] = False
        elif part.turn == part.cell.turn:
            part.cell.rewind(part.cell.added)
            self._advance(part.cell)

    def finish(self, part: _Part) -> None:
        """Adds a part that has arrived."""
        memory, cell, upload = self._memory_of(part), part.cell, part.upload
        self._forget(part)
        if cell is None:
            # Otherwise it has been requested again since.
            if memory.base is upload.sparse:
                upload.left -= 1
                if not upload.left:
                    self._add_sparse()
        elif part.turn == cell.turn:
            if part.sums:
                self._keep_sum(part, cell, memory)
                return
            if not part.placed:
                assert upload.cut is not None
                for piece in upload.cut[cell.number]:
                    section = self._sum.sections[piece.section]
                    assert isinstance(section, DenseSum)
                    for first, elements in piece.elements(memory, part.key):
                        section.add_piece(first, elements, begins=part.begins)
            cell.added += 1
            self._offer(cell)

    def _keep_sum(self, part: _Part, cell: _Cell, memory: Array) -> None:
        """Notes that a part of the sum of the first gradients is there."""
        if not part.placed:
            assert self._cut is not None
            start = 0
            for piece in self._cut[cell.number]:
                place = self._piece_of_sum(piece)
                stop = start + place.nbytes
                place[:] = memory[start:stop].view(place.dtype.newbyteorder("<"))
                start = stop
        cell.added = part.sums
        self._advance(cell)

    def _lose_sum(self, cell: _Cell) -> None:
        """Notes that a part of the sum of the expected gradients is not stored."""
        self._stored.get(self._uploads.digest, set()).discard(cell.number)
        cell.rewind(0)

    def _offer(self, cell: _Cell) -> None:
        """Stores a part of the sum if it contains exactly the expected gradients."""
        if self._store is None or cell.added != self._uploads.expected or cell.stored_as == self._uploads.digest:
            return
        assert self._cut is not None
        cell.stored_as = self._uploads.digest
        self._store(cell.stored_as, cell.number, [self._piece_of_sum(piece) for piece in self._cut[cell.number]])

    def _forget(self, part: _Part) -> None:
        """Notes that a part is no longer on its way."""
        self._awaited.remove(part)
        self._awaited_bytes -= part.length
        self._take_back(part)

    def _memory_of(self, part: _Part) -> Array:
        """Returns the memory of a part, which may be lent."""
        if part.memory is None:
            spare = self._spare.pop() if self._spare else np.empty(0, np.uint8)
            part.lent = spare if len(spare) >= part.length else np.empty(part.length, np.uint8)
            part.memory = part.lent[: part.length]
        return part.memory

    def _take_back(self, part: _Part) -> None:
        """Takes back the memory that was lent to a part. Its bytes stay until another part begins to arrive."""
        if part.lent is not None:
            self._spare.append(part.lent)
            part.lent = part.memory = None

    def _add_sparse(self) -> None:
        """Adds the sparse sections that have been fetched, in order."""
        while self._store is None and self._sparse_added < self._bound:
            upload = self._uploads.every[self._sparse_added]
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
        agree = self._uploads.settle([self._settled(gradient) for gradient in gradients])
        for cell in self._cells:
            cell.rewind(cell.added if cell.added <= agree else 0)
        self._rewind_sparse(agree)
        check_lengths(self._transport, self._keys, gradients)
        self._fetch_sums()
        self._advance_all()
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
                self._fetch()
                self._add_sparse()
            done = self._done
            if self._store is not None or done == self._bound:
                return
            first = self._uploads.every[done]
            if not first.admitted or first.cut is not None:
                return
            self._add_whole(first.gradient, inline, begins=done == 0)
            self._sparse_added = self._whole = done + 1
            for cell in self._cells:
                cell.rewind(done + 1)
                self._advance(cell)

    def _fetch(self) -> None:
        """Fetches what is wanted. If a part of a reducer's sum is forged, it does without the reducer."""
        try:
            self._transport.fetch(self)
        except (CorruptDataError, NotPermittedError):
            if not any(part.sums for part in self._awaited):
                raise
            if self._reliance is not None:
                self._reliance.fail()
            self.do_without_reducer()

    @property
    def _done(self) -> int:
        """How many gradients, from the first on, have been added whole."""
        return min([self._sparse_added, *[cell.added for cell in self._cells]])

    def _settled(self, gradient: BufferedGradient) -> Upload:
        """Returns the upload of a gradient of the round: the one that is known, if it is the same."""
        known = self._uploads.find(gradient.id)
        return known if known is not None and _alike(known.gradient, gradient) else self._upload_of(gradient)

    # With a reducer.

    def do_without_reducer(self) -> None:
        """Adds up everything here, whatever a reducer may have stored."""
        if not self._leaves_to_reducer:
            return
        self._leaves_to_reducer = False
        for part in [part for part in self._awaited if part.sums]:
            self._forget(part)
        for cell in self._cells:
            if cell.reduced and not cell.added:
                cell.rewind(0)
        self._advance_all()

    def _is_worthwhile(self, gradient: BufferedGradient, number: int) -> bool:
        """Returns whether so many gradients like this one have more bytes in dense parts than their sum has."""
        dense = sum(
            math.prod(section.shape) * of.dtype.itemsize
            for section, of in zip(gradient.sections, self._sum.sections, strict=True)
            if isinstance(of, DenseSum)
        )
        return (gradient.nbytes - gradient.sparse_bytes) * number > WORTHWHILE * dense

    def _fetch_sums(self) -> None:
        """Fetches the sum of the gradients of the round from a reducer, and waits for it for a moment."""
        if not self._leaves_to_reducer:
            return
        assert self._reliance is not None
        expected = self._uploads.expected
        if expected is None or not all(
            upload.cut is not None and upload.gradient.nbytes >= ANNOUNCED_BYTES
            for upload in self._uploads.every[:expected]
        ):
            # No reducer knows all of them, or can add them part by part.
            self.do_without_reducer()
            return
        missing = self._ask_for_sums()
        # If nothing of the sum is there, the reducer has probably bet on other gradients.
        if 0 < len(missing) < len(self._cells) or self._stored:
            deadline = time.monotonic() + SUM_PATIENCE
            while missing and self._leaves_to_reducer and time.monotonic() < deadline:
                time.sleep(SUM_PAUSE)
                missing = self._ask_for_sums()
        if missing:
            self._reliance.fail()
        else:
            self._reliance.succeed()
        self.do_without_reducer()

    def _ask_for_sums(self) -> list[_Cell]:
        """Requests the parts of the sum that are still missing. Returns the cells for which there are none yet."""
        for cell in self._cells:
            if cell.requested == 0:
                self._stored.setdefault(self._uploads.digest, set()).add(cell.number)
                self._advance(cell)
        while self.wanted():
            self._fetch()
        return [cell for cell in self._cells if not cell.added]

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


def _alike(one: BufferedGradient, other: BufferedGradient) -> bool:
    """Returns whether the bytes of two descriptions of a gradient mean the same, at the same place."""
    return (one.order, one.header_digest) == (other.order, other.header_digest)
