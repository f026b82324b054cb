"""Adds up buffered gradients part by part, also while they are still being uploaded.

A gradient is uploaded in parts, and every gradient of a round is cut in the same way. So the first parts of all
gradients can be added while the others are on their way. In every part, gradients are added in the order of their
places. So the sum is the same bit for bit, whichever process adds it up, and whenever.

Before the round is granted, its gradients are not known. Announced uploads are assumed to be in it, and the sum
remembers which gradients each part contains. When the round is known, the parts that do not match it are added up
again.

If a reducer works on the accumulator, a taker leaves the dense parts of the gradients that it expects to the reducer,
and fetches the parts of their sum instead. They are stored under a digest of the gradients that they contain, so a part
of another sum is never used. The taker itself adds up the parts that are not there in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any

from redisacc._data.sums import RoundSum
from redisacc._format.buffered import BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.part_cut import have_same_elements
from redisacc._format.staging import PartsArrived
from redisacc._protocol.parts.fetch import check_lengths, fetch_gradient
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.sums.buffered_sections import whole_gradient
from redisacc._protocol.sums.dense_parts import DenseParts, Store
from redisacc._protocol.sums.expected_gradients import ExpectedGradients, Upload
from redisacc._protocol.sums.part_fetch import PartFetch
from redisacc._protocol.sums.reducer_reliance import ReducerReliance
from redisacc._protocol.sums.reducer_sums import ReducerSums
from redisacc._protocol.sums.requested_parts import BOUNDS, Bounds
from redisacc._protocol.sums.sparse_parts import SparseParts
from redisacc._redis.faults import NotPermittedError
from redisacc._redis.lanes import LANES
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError

# Gradients are left to a reducer if their dense parts have more than this many times the bytes of their sum.
WORTHWHILE = 1.25


_ADDED = attrgetter("added")


class PartSums:
    """The sum of the gradients of a round that are buffered in parts.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        round_sum: an empty sum for the round.
        num_expected: how many gradients the round will probably hold; 0 if unknown. Later ones are not added before
            the round is known.
        by_worker: whether the places of gradients are the numbers of their workers.
        reliance: notes whether a reducer was in time; None: no reducer's sum is used.
        store: stores the parts of the sum of the expected gradients. With it, only the dense sections of these
            gradients are added. None: nothing is stored.
        position: with ``store``: the only partition whose parts are added, by position; None: all parts are.
        is_updated: whether a reducer updates the parameters with the sum, which then does not travel.
        bounds: see there.
    """

    def __init__(
        self,
        transport: Transport,
        keys: Keys,
        round_sum: RoundSum,
        *,
        num_expected: int = 0,
        by_worker: bool = False,
        reliance: ReducerReliance | None = None,
        store: Store | None = None,
        position: int | None = None,
        is_updated: bool = False,
        bounds: Bounds = BOUNDS,
    ) -> None:
        self._transport = transport
        self._keys = keys
        self._sum = round_sum
        self._is_updated = is_updated
        self._reduced_bytes = bounds.reduced
        self._num_expected = num_expected
        self._stores = store is not None
        self._by_worker = by_worker
        self._uploads = ExpectedGradients(num_expected, by_worker=by_worker)
        self._stored = ReducerSums(reliance, transport.waits)
        homes = keys.homes if position is None else keys.homes[position : position + 1]
        # A lane for each partition, or lanes in which the parts of a single node take turns.
        lanes = 1 if position is not None else len(keys.partitions) or LANES
        self._dense = DenseParts(
            keys, round_sum, self._uploads, self._stored, lanes=lanes, store=store, position=position
        )
        self._sparse = SparseParts(keys, round_sum, self._uploads, lanes=lanes, most_waiting=bounds.waiting)
        sparse = None if self._stores else self._sparse
        self._parts = PartFetch(keys, self._dense, sparse, homes=homes, lanes=lanes, window=bounds.window)
        # Whether the dense parts of the gradients are so much larger than their sum that a reducer saves time.
        self.suits_reducer = False
        # Whether there is nothing to add before the round is known.
        self._idle = self._stores
        # The number of gradients up to the last one that was added whole, inclusive. That one is in the sums of all
        # sections, so a rewind to before it drops all of them.
        self._whole = 0

    # Messages and lookups that tell of gradients.

    def announce(self, gradient: BufferedGradient, *, admitted: bool = False, lease: float = 0.0) -> None:
        """Notes a gradient whose upload has begun, under a lease of some seconds or none, or that is in the round."""
        if self._by_worker and not self._makes_way_for(gradient, admitted=admitted):
            return
        known = self._uploads.find(gradient.id)
        if known is not None and not _alike(known.gradient, gradient):
            self._rewind(self._uploads.remove(known))
            known = None
        if known is None:
            self._rewind(self._uploads.insert(self._upload_of(gradient, lease)))
        if admitted:
            self.admit(gradient.id)

    def _makes_way_for(self, gradient: BufferedGradient, *, admitted: bool) -> bool:
        """Removes another upload of the same worker. Returns False if this one is not expected in the round."""
        rival = self._uploads.rival(gradient)
        if not admitted and (self._uploads.is_full or (rival is not None and rival.admitted)):
            return False
        if rival is not None:
            # A worker that was started again uploads its gradient again.
            self._rewind(self._uploads.remove(rival))
        return True

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
        # All parts of a gradient are in partitions, or none is.
        if upload is None or (message.position is None) != (step == 0):
            return
        every = range(len(upload.there))
        there = every if message.position is None else every[message.position :: step]
        for part in upload.arrive(there[message.first : message.first + message.parts]):
            cell = None if upload.cut is None else self._dense.cell(part - upload.sparse_parts)
            if cell is not None:
                self._dense.advance(cell)

    def admit(self, gradient: str) -> None:
        """Notes that the round has this gradient, and the server all its parts."""
        upload = self._uploads.find(gradient)
        if upload is not None and self._uploads.admit(upload):
            for late in self._uploads.late():
                self._rewind(self._uploads.remove(late))
            self._set_bound()
            self._dense.advance_all()

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
            self._dense.advance(cell)

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
        """Removes a stalled upload that holds up later ones with more parts."""
        upload = self._uploads.stalled()
        if upload is not None:
            self._rewind(self._uploads.remove(upload))

    def _upload_of(self, gradient: BufferedGradient, lease: float = 0.0) -> Upload:
        sparse_parts, cut = gradient.cut or (0, None)
        if sparse_parts % (len(self._keys.partitions) or 1):
            # Its dense parts are in different partitions from the other gradients'.
            sparse_parts, cut = 0, None
        if cut is not None and self._dense.cut is None:
            # Whatever has been added before was added whole.
            self._dense.set_cut(cut, self._sparse.added)
            if self._is_worthwhile(gradient, self._num_expected):
                self.suits_reducer = gradient.nbytes >= self._reduced_bytes
                self._stored.rely()
                self._idle = False
        if cut is not None and not have_same_elements(cut, self._dense.cut or ()):
            sparse_parts, cut = 0, None
        return Upload(gradient, cut, sparse_parts, lease)

    def _is_worthwhile(self, gradient: BufferedGradient, number: int) -> bool:
        """Returns whether the dense parts of this many such gradients are so large that a reducer saves time."""
        nbytes = (gradient.nbytes - gradient.sparse_bytes) * number
        return nbytes > (0 if self._is_updated else WORTHWHILE * self._dense.nbytes_of(gradient))

    def _rewind(self, place: int) -> None:
        """Drops every sum that contains gradients from this place on, so that it is added up again."""
        self._set_bound()
        for cell in self._dense.cells:
            if cell.requested > place:
                cell.rewind(0 if cell.added > place else cell.added)
        self._rewind_sparse(place)
        self._dense.advance_all()

    def _rewind_sparse(self, place: int) -> None:
        """Drops the sums of sparse sections if they contain gradients from this place on.

        If a dropped sum, here or in the dense cells, contained a gradient that was added whole, drops all sums.
        """
        self._sparse.rewind(place)
        if self._done < self._whole:
            self._whole = 0
            self._sparse.forget()
            for cell in self._dense.cells:
                cell.rewind(0)

    def _set_bound(self) -> None:
        """Computes how many leading gradients are added before the round is known."""
        if self._idle:
            self._uploads.bound = 0
            return
        expected, known = self._uploads.expected, len(self._uploads.every)
        if expected is None:
            expected = self._uploads.leading
            holds = self._stores or self._uploads.holds_early
        else:
            holds = self._stores
        self._uploads.bound = expected if holds else min(max(expected, self._uploads.num_admitted), known)

    @property
    def _done(self) -> int:
        """How many leading gradients are in the sums with all their parts."""
        done: int = min((self._sparse.added, *map(_ADDED, self._dense.cells)))
        return done

    # Adding up, ahead and at the end.

    def look_ahead(self, inline: InlineReader, on_pause: Callable[[], bool]) -> None:
        """Adds whatever has arrived, until nothing more is there.

        Args:
            inline: reads inline gradients of the current round.
            on_pause: called after each part: it announces what has been heard meanwhile, and returns whether to stop.

        Raises:
            PartMissingError, RedisAccError: something could not be read. The sum is no longer usable.
        """
        self._parts.on_pause = on_pause
        try:
            self._add(inline)
        finally:
            self._parts.on_pause = None

    def complete(self, gradients: Sequence[BufferedGradient], inline: InlineReader) -> None:
        """Makes the sum contain exactly these gradients: adds missing ones, and drops what contains others.

        Args:
            gradients: all buffered gradients of the round, in the order of their places.
            inline: reads the inline ones.

        Raises:
            PartMissingError: a part is not there. The sum is no longer usable.
            CorruptDataError: a part is not as long as its header says, or its indices are not ascending. The sum is no
                longer usable.
        """
        self._settle(gradients)
        if self._stored.wanted:
            self._fetch_sums()
        self._dense.advance_all()
        self._add(inline)
        assert self._done == len(gradients)
        if not gradients:
            self._dense.clear()
        for gradient in gradients:
            self._sum.count(gradient.number, gradient.weight, gradient.factor)

    def complete_rows(self, gradients: Sequence[BufferedGradient]) -> bool:
        """Makes the sparse sums contain exactly these gradients. ``complete`` may follow.

        The argument and the errors are those of ``complete``.

        Returns:
            Whether they do. If not, a gradient cannot be added part by part.
        """
        self._settle(gradients)
        if any(upload.cut is None for upload in self._uploads.every):
            return False
        while self._sparse.added < len(gradients):
            self._fetch()
            self._sparse.add()
        return True

    def _settle(self, gradients: Sequence[BufferedGradient]) -> None:
        """Notes which gradients the round has, and drops what contains others."""
        agree = self._uploads.settle(list(map(self._settled, gradients)))
        self._set_bound()
        for cell in self._dense.cells:
            if cell.requested:
                cell.rewind(cell.added if cell.added <= agree else 0)
        self._rewind_sparse(agree)
        check_lengths(self._transport, self._keys, gradients)

    def _settled(self, gradient: BufferedGradient) -> Upload:
        """Returns the upload of a gradient of the round: the one that is known, if it is the same."""
        known = self._uploads.find(gradient.id)
        return known if known is not None and _alike(known.gradient, gradient) else self._upload_of(gradient)

    def _add(self, inline: InlineReader) -> None:
        """Adds whatever is there, in order."""
        while True:
            self._add_sparse()
            while self._parts.more() or self._parts.in_flight.nbytes:
                self._fetch()
                self._add_sparse()
            done = self._done
            if self._stores or done == self._uploads.bound:
                return
            first = self._uploads.every[done]
            if not first.admitted or first.cut is not None:
                return
            self._add_whole(first.gradient, inline, begins=done == 0)
            self._sparse.added = self._whole = done + 1
            for cell in self._dense.cells:
                cell.rewind(done + 1)
                self._dense.advance(cell)

    def _add_sparse(self) -> None:
        if not self._stores:
            self._sparse.add()

    def _add_whole(self, gradient: BufferedGradient, inline: InlineReader, *, begins: bool) -> None:
        """Adds a gradient that is inline, or cut differently from the others."""
        if begins:
            self._dense.clear()
        data: Any
        if gradient.inline:
            data, where = inline.read(gradient), inline.where(gradient)
        else:
            data = fetch_gradient(self._transport, self._keys, gradient)
            where = self._keys.part(gradient.id, 0)
        for section, of in zip(whole_gradient(gradient, data, where).sections, self._sum.sections, strict=True):
            of.add(section, gradient.factor)

    def _fetch(self) -> None:
        """Fetches the parts that are wanted. Does without the reducer if a part of its sum is forged."""
        try:
            self._transport.fetch(self._parts)
        except (CorruptDataError, NotPermittedError):
            if not self._parts.in_flight.has_sums:
                raise
            self._stored.distrust()
            self.do_without_reducer()

    # With a reducer.

    def do_without_reducer(self) -> None:
        """Adds up everything here, whatever a reducer may have stored."""
        if not self._stored.wanted:
            return
        self._stored.wanted = False
        for part in self._parts.in_flight.every:
            if part.sums:
                self._parts.in_flight.remove(part)
        for cell in self._dense.cells:
            if cell.reduced and not cell.added:
                cell.rewind(0)
        self._dense.advance_all()

    def _fetch_sums(self) -> None:
        """Fetches a reducer's sum of the gradients of the round, and waits briefly for it."""
        expected = self._uploads.expected
        # Otherwise, a reducer does not know all of them, or cannot add them part by part.
        if expected is not None and all(
            upload.cut is not None and upload.gradient.nbytes >= self._reduced_bytes
            for upload in self._uploads.every[:expected]
        ):
            self._stored.wait(self._ask_for_sums, len(self._dense.cells))
        self.do_without_reducer()

    def _ask_for_sums(self) -> int:
        """Fetches the parts of the sum that are there. Returns how many are missing."""
        for cell in self._dense.cells:
            if cell.requested == 0:
                self._stored.suppose(self._uploads.digest, cell.number)
                self._dense.advance(cell)
        while self._parts.more() or self._parts.in_flight.nbytes:
            self._fetch()
        return len([cell for cell in self._dense.cells if not cell.added])


def _alike(one: BufferedGradient, other: BufferedGradient) -> bool:
    """Returns whether two descriptions of a gradient give its bytes the same meaning and the same place."""
    return (one.order, one.factor, one.header_digest) == (other.order, other.factor, other.header_digest)
