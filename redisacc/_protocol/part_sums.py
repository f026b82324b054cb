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

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from redisacc._data.sums import RoundSum
from redisacc._format.buffered import ANNOUNCED_BYTES, BufferedGradient, PartMissingError
from redisacc._format.keys import Keys
from redisacc._format.part_cut import cut_of
from redisacc._format.staging import PartsArrived
from redisacc._protocol.buffered_sections import whole_gradient
from redisacc._protocol.dense_parts import DenseParts, Store
from redisacc._protocol.inline_reader import InlineReader
from redisacc._protocol.parts_in_flight import Part, PartsInFlight, lanes_of
from redisacc._protocol.reliance import Reliance
from redisacc._protocol.sparse_parts import SparseParts
from redisacc._protocol.stored_sums import StoredSums
from redisacc._protocol.uploads import Upload, Uploads
from redisacc._protocol.whole_parts import WholeParts, check_lengths
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError, NotPermittedError

# Gradients are left to a reducer if their dense parts have more than this many times the bytes of their sum.
WORTHWHILE = 1.25


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
        position: with ``store``: that of the only partition whose parts are added; None: all are.
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
        position: int | None = None,
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._sum = round_sum
        self._bets = bets
        self._stores = store is not None
        self._uploads = Uploads(bets)
        self._stored = StoredSums(reliance, transport.waits)
        self._dense = DenseParts(keys, round_sum, self._uploads, self._stored, store=store, position=position)
        self._sparse = SparseParts(keys, round_sum, self._uploads)
        # Of Arrivals: a lane for each partition, or lanes in which the parts of a single node take turns.
        self.homes = keys.homes if position is None else keys.homes[position : position + 1]
        self.lanes = lanes_of(keys, position)
        self._in_flight = PartsInFlight(len(self.homes) or 1)
        # Whether the dense parts of the gradients have so many more bytes than their sum that a reducer saves time.
        self.suits_reducer = False
        # Whether there is nothing to add before the round is known.
        self._idle = self._stores
        # How many come before the last one that was added whole, that one included. Nothing may begin anew before it:
        # it is in the sums of all sections.
        self._whole = 0
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

    def arrive(self, message: PartsArrived) -> None:
        """Notes that the server has some parts of a gradient."""
        upload, step = self._uploads.find(message.gradient), len(self._keys.partitions)
        # All parts of a gradient lie in partitions, or none does.
        if upload is None or (message.position is None) != (step == 0):
            return
        every = range(len(upload.there))
        there = every if message.position is None else every[message.position :: step]
        for part in upload.arrive(there[: message.parts]):
            cell = None if upload.cut is None else self._dense.cell(part - upload.sparse_parts)
            if cell is not None:
                self._dense.advance(cell, self._bound)

    def admit(self, gradient: str) -> None:
        """Notes that the round has this gradient, all of whose parts are at the server."""
        upload = self._uploads.find(gradient)
        if upload is not None and self._uploads.admit(upload):
            self._dense.advance_all(self._bound)

    def keep_admitted(self, gradients: Iterable[str]) -> None:
        """Removes gradients that were admitted and are not among these: they were compacted."""
        wanted = set(gradients)
        for upload in [upload for upload in self._uploads.every if upload.admitted]:
            if upload.gradient.id not in wanted:
                self._rewind(self._uploads.remove(upload))

    def sum_stored(self, digest: str, number: int) -> None:
        """Notes that a reducer has stored a part of the sum of the gradients with this digest."""
        cell = self._dense.cell(number)
        if self._stored.hear(digest, number) and cell is not None:
            self._dense.advance(cell, self._bound)

    @property
    def stores(self) -> bool:
        """Whether it stores the sum of the expected gradients, as far as these are known."""
        return self._stores and not self._idle and self._uploads.expected is not None

    @property
    def may_be_stored(self) -> bool:
        """Whether all expected gradients are in the round, so that nothing is missing for their sum to be stored."""
        return all(upload.admitted for upload in self._uploads.every[: self._uploads.expected])

    @property
    def is_stored(self) -> bool:
        """Whether the whole sum of the expected gradients is stored."""
        return all(cell.stored_as == self._uploads.digest for cell in self._dense.cells)

    def skip_stalled(self) -> None:
        """Removes an upload that stands still and holds up others, which have arrived further."""
        upload = self._uploads.stalled()
        if upload is not None:
            self._rewind(self._uploads.remove(upload))

    def _upload_of(self, gradient: BufferedGradient) -> Upload:
        sparse_parts, cut = cut_of(gradient) or (0, None)
        if sparse_parts % (len(self._keys.partitions) or 1):
            # Its dense parts lie in other partitions than those of the other gradients.
            sparse_parts, cut = 0, None
        if cut is not None and self._dense.cut is None:
            # Whatever has been added before was added whole.
            self._dense.set_cut(cut, self._sparse.added)
            if self._is_worthwhile(gradient, self._bets):
                # Smaller ones are not announced, so reducers learn of them when it is too late.
                self.suits_reducer = gradient.nbytes >= ANNOUNCED_BYTES
                self._stored.rely()
                self._idle = False
        if cut == self._dense.cut:
            # The same object, for comparisons.
            cut = self._dense.cut
        elif cut is not None:
            sparse_parts, cut = 0, None
        return Upload(gradient, cut, sparse_parts)

    def _is_worthwhile(self, gradient: BufferedGradient, number: int) -> bool:
        """Returns whether so many gradients like this one have more bytes in dense parts than their sum has."""
        return (gradient.nbytes - gradient.sparse_bytes) * number > WORTHWHILE * self._dense.nbytes_of(gradient)

    def _rewind(self, place: int) -> None:
        """Begins anew with everything that contains gradients from this place on."""
        for cell in self._dense.cells:
            if cell.requested > place:
                cell.rewind(0 if cell.added > place else cell.added)
        self._rewind_sparse(place)
        self._dense.advance_all(self._bound)

    def _rewind_sparse(self, place: int) -> None:
        """Begins anew with the sparse sections if their sums contain gradients from this place on.

        If that, or what has begun anew before, concerns a gradient that was added whole, everything begins anew.
        """
        self._sparse.rewind(place)
        if self._done < self._whole:
            self._whole = 0
            self._sparse.forget()
            for cell in self._dense.cells:
                cell.rewind(0)

    @property
    def _bound(self) -> int:
        """How many gradients, from the first on, are added before the round is known."""
        if self._idle:
            return 0
        expected, known = self._uploads.expected, len(self._uploads.every)
        if expected is None:
            expected = known if self._bets else 0
        return expected if self._stores else min(max(expected, self._uploads.num_admitted), known)

    @property
    def _done(self) -> int:
        """How many gradients, from the first on, have been added whole."""
        return min([self._sparse.added, *[cell.added for cell in self._dense.cells]])

    # Arrivals of fast_socket:

    def wanted(self) -> list[Part]:
        """Returns the parts that have not arrived."""
        self._in_flight.begin_anew()
        self.more()
        return self._in_flight.every

    def more(self) -> list[Part]:
        """Returns the parts that are requested now: as many as the window has room for."""
        requested: list[Part] = []
        if self._on_pause is not None and self._on_pause():
            return requested
        while self._in_flight.has_room:
            part = self._dense.next() or (None if self._stores else self._sparse.next(self._bound))
            if part is None:
                break
            self._in_flight.add(part)
            requested.append(part)
        return requested

    def expected(self, part: Part) -> memoryview:
        """Returns where a part goes if it is as long as its header says."""
        return self._in_flight.memory_of(part).data

    def begin(self, part: Part, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes."""
        if length != part.length:
            what = "the gradients in it need" if part.sums else "its header says"
            raise CorruptDataError(f"{part.key} has {length} bytes, and {what} {part.length}")
        return self._in_flight.memory_of(part).data

    def missing(self, part: Part) -> None:
        """Notes that a part is not there, or has its final name by now.

        Raises:
            PartMissingError: it should be there.
        """
        upload = part.upload
        wanted = part.memory is not None and part.memory.base is upload.sparse
        self._in_flight.remove(part)
        if not part.sums:
            if upload.admitted and part.key == self._keys.part(upload.gradient.id, part.number):
                raise PartMissingError(part.key)
            # If it was admitted meanwhile, it is requested by its final name. Otherwise, it was refused, or will be
            # staged again. In a partition, it has its final name from the beginning.
            upload.there[part.number] = upload.admitted
        if part.cell is not None:
            self._dense.miss(part.cell, part, self._bound)
        elif wanted:
            upload.requested[part.number] = False

    def finish(self, part: Part) -> None:
        """Adds a part that has arrived."""
        memory, upload = self._in_flight.memory_of(part), part.upload
        self._in_flight.remove(part)
        if part.cell is not None:
            self._dense.add(part.cell, part, memory, self._bound)
        elif memory.base is upload.sparse:
            # Otherwise it has been requested again since.
            upload.left -= 1
            if not upload.left:
                self._add_sparse()

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
        for cell in self._dense.cells:
            cell.rewind(cell.added if cell.added <= agree else 0)
        self._rewind_sparse(agree)
        check_lengths(self._transport, self._keys, gradients)
        self._fetch_sums()
        self._dense.advance_all(self._bound)
        self._add(inline)
        assert self._done == len(gradients)
        if not gradients:
            self._dense.clear()
        for gradient in gradients:
            self._sum.count(gradient.number, gradient.weight, gradient.factor)

    def _settled(self, gradient: BufferedGradient) -> Upload:
        """Returns the upload of a gradient of the round: the one that is known, if it is the same."""
        known = self._uploads.find(gradient.id)
        return known if known is not None and _alike(known.gradient, gradient) else self._upload_of(gradient)

    def _add(self, inline: InlineReader) -> None:
        """Adds whatever is there, in order."""
        while True:
            self._add_sparse()
            while self.wanted():
                self._fetch()
                self._add_sparse()
            done = self._done
            if self._stores or done == self._bound:
                return
            first = self._uploads.every[done]
            if not first.admitted or first.cut is not None:
                return
            self._add_whole(first.gradient, inline, begins=done == 0)
            self._sparse.added = self._whole = done + 1
            for cell in self._dense.cells:
                cell.rewind(done + 1)
                self._dense.advance(cell, self._bound)

    def _add_sparse(self) -> None:
        if not self._stores:
            self._sparse.add(self._bound)

    def _add_whole(self, gradient: BufferedGradient, inline: InlineReader, *, begins: bool) -> None:
        """Adds a gradient that is inline, or cut in another way than the others."""
        if begins:
            self._dense.clear()
        data: Any
        if gradient.inline:
            data, where = inline.read(gradient), inline.where(gradient)
        else:
            whole = WholeParts(self._keys, gradient)
            self._transport.fetch(whole)
            data, where = whole.data, self._keys.part(gradient.id, 0)
        for section, of in zip(whole_gradient(gradient, data, where).sections, self._sum.sections, strict=True):
            of.add(section, gradient.factor)

    def _fetch(self) -> None:
        """Fetches what is wanted. If a part of a reducer's sum is forged, it does without the reducer."""
        try:
            self._transport.fetch(self)
        except (CorruptDataError, NotPermittedError):
            if not self._in_flight.has_sums:
                raise
            self._stored.distrust()
            self.do_without_reducer()

    # With a reducer.

    def do_without_reducer(self) -> None:
        """Adds up everything here, whatever a reducer may have stored."""
        if not self._stored.wanted:
            return
        self._stored.wanted = False
        for part in self._in_flight.every:
            if part.sums:
                self._in_flight.remove(part)
        for cell in self._dense.cells:
            if cell.reduced and not cell.added:
                cell.rewind(0)
        self._dense.advance_all(self._bound)

    def _fetch_sums(self) -> None:
        """Fetches the sum of the gradients of the round from a reducer, and waits for it for a moment."""
        if not self._stored.wanted:
            return
        expected = self._uploads.expected
        # Otherwise, no reducer knows all of them, or can add them part by part.
        if expected is not None and all(
            upload.cut is not None and upload.gradient.nbytes >= ANNOUNCED_BYTES
            for upload in self._uploads.every[:expected]
        ):
            self._stored.wait(self._ask_for_sums, len(self._dense.cells))
        self.do_without_reducer()

    def _ask_for_sums(self) -> int:
        """Fetches the parts of the sum that are there. Returns how many are missing."""
        for cell in self._dense.cells:
            if cell.requested == 0:
                self._stored.suppose(self._uploads.digest, cell.number)
                self._dense.advance(cell, self._bound)
        while self.wanted():
            self._fetch()
        return len([cell for cell in self._dense.cells if not cell.added])


def _alike(one: BufferedGradient, other: BufferedGradient) -> bool:
    """Returns whether the bytes of two descriptions of a gradient mean the same, at the same place."""
    return (one.order, one.factor, one.header_digest) == (other.order, other.factor, other.header_digest)
