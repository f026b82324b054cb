"""Adds up buffered gradients part by part, also while they are still being uploaded.

A gradient is uploaded in parts, and every gradient of a round is cut in the same way. So the first parts of all
gradients can be added while the others are on their way. In every part, gradients are added in the order of their
places. So the sum is the same bit for bit, whichever process adds it up, and whenever.

Before the round is granted, its gradients are not known. Announced uploads are assumed to be in it, and each cell knows
which gradients it contains. When the round is known, the cells that do not match it are added up again.

If a reducer works on the accumulator, a taker leaves the dense parts of the gradients that it expects to the reducer,
and fetches the parts of their sum instead. They are stored under a digest of the gradients that they contain, so a part
of another sum is never used. The taker itself adds up the parts that are not there in time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from redisacc._arrays.sums import RoundSum
from redisacc._arrays.validation import Array
from redisacc._clock import clock, durations
from redisacc._format.attempts import PartsArrived
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.part_cut import Cut, have_same_elements
from redisacc._protocol.parts.fetch import check_lengths, fetch_gradient, wrong_length
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.sums.buffered_sections import whole_gradient
from redisacc._protocol.sums.cells import Cells, Part, SumOptions
from redisacc._protocol.sums.expected_gradients import ExpectedGradients, Upload
from redisacc._protocol.waiting.wait import until
from redisacc._wire.faults import NotPermittedError
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError

# How often a handle calls for a reducer, in seconds.
CALL_INTERVAL = 1.0


class ReducerReliance:
    """Decides for one handle whether its takes rely on a reducer.

    After a take for which the sum came too late, they do without for 1, 2, 4, … 64 seconds. A sum that was there in
    time ends that.
    """

    def __init__(self) -> None:
        self._pause = durations.without_reducer
        self._resumes_at = 0.0
        self._call_again = 0.0

    @property
    def relies(self) -> bool:
        """Whether a take that begins now relies on a reducer, if there is one."""
        return clock.now() >= self._resumes_at

    def calls(self) -> bool:
        """Returns whether to call for a reducer now: once a second."""
        now = clock.now()
        if now < self._call_again:
            return False
        self._call_again = now + CALL_INTERVAL
        return True

    def call_no_more(self) -> None:
        """Notes that the server refuses calls."""
        self._call_again = math.inf

    def succeed(self) -> None:
        """Notes that the whole sum was there in time."""
        self._pause, self._resumes_at = durations.without_reducer, 0.0

    def fail(self) -> None:
        """Notes that a part of the sum was not there in time."""
        self._resumes_at = clock.now() + self._pause
        self._pause = min(2 * self._pause, durations.longest_without_reducer)


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
        self.homes, self.lanes = options.homes, cells.lanes
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
        return list(self.in_flight)

    def more(self) -> list[Part]:
        """Returns the parts that are requested now: as many as the window has room for."""
        requested: list[Part] = []
        if self.on_pause is not None and self.on_pause():
            return requested
        cells = self._cells
        while self._nbytes < self._window and (cells.rows is not None or any(cells.ready)):
            part = cells.next()
            if part is None:
                break
            self.in_flight[part] = None
            self._nbytes += part.length
            requested.append(part)
        return requested

    def begin(self, part: Part, length: int) -> memoryview:
        """Returns where a part goes, given its length in bytes: perhaps memory that is lent to it."""
        if length != part.length:
            raise wrong_length(part.key, length, part.length, "what is in it" if part.is_sum else "its header")
        if part.memory is None:
            spare = self._spare.pop() if self._spare else np.empty(0, np.uint8)
            part.lent = spare if len(spare) >= length else np.empty(length, np.uint8)
            part.memory = part.lent[:length]
        return part.memory.data

    def missing(self, part: Part) -> None:
        """Notes that a part is not there.

        Raises:
            PartMissingError: it should be there.
        """
        if part.must_be_there:
            raise PartMissingError(part.key)
        self._cells.miss(part)
        self.finish(part, arrived=False)

    def finish(self, part: Part, *, arrived: bool = True) -> None:
        """Notes that a part is no longer on its way, and adds it if it has arrived."""
        if arrived:
            self._cells.finish(part)
        del self.in_flight[part]
        self._nbytes -= part.length
        if part.lent is not None:
            self._take_back(part)

    def _take_back(self, part: Part) -> None:
        """Takes back the memory that was lent to a part. Its bytes stay until another part begins to arrive."""
        assert part.lent is not None
        self._spare.append(part.lent)
        part.lent = part.memory = None


# Gradients are left to a reducer if their dense parts have more than this many times the bytes of their sum.
WORTHWHILE = 1.25

# How long a take that waits for parts of a sum pauses before it asks again, in seconds.
SUM_PAUSE = 0.002

# Maximum number of parts of sums that are remembered because of messages, which any client can forge.
MOST_STORED = 10_000


class PartSums:
    """The sum of the gradients of a round that are buffered in parts.

    Args:
        transport: the way to the server.
        round_sum: an empty sum for the round.
        options: how the sum is made.
        reliance: notes whether a reducer was in time; None means no reducer's sum is used.

    Attributes:
        round_sum: as given.
    """

    def __init__(
        self,
        transport: Transport,
        round_sum: RoundSum,
        options: SumOptions,
        reliance: ReducerReliance | None = None,
    ) -> None:
        self._transport = transport
        self.round_sum = round_sum
        self._options = options
        self._keys = options.keys
        self._reliance = reliance
        self._stores = options.store is not None
        # The first gradient that can be added part by part, and how it is cut.
        self._first: BufferedGradient | None = None
        self._cut: Cut | None = None
        self._uploads = ExpectedGradients(
            options.num_expected, holds_early=options.by_worker, holds_all=self._stores, ignored=self._stores
        )
        self._cells = Cells(options, round_sum, self._uploads)
        self._parts = PartFetch(self._cells, options)

    # Messages and lookups that tell of gradients.

    def announce(self, gradient: BufferedGradient, *, admitted: bool = False, lease: float = 0.0) -> None:
        """Notes a gradient whose upload has begun, under a lease of some seconds or none, or that is in the round."""
        if not self._uploads.makes_way_for(gradient, admitted=admitted):
            return
        known = self._uploads.find(gradient.id)
        if known is None or not known.is_of(gradient):
            self._uploads.insert(self._upload_of(gradient, lease))
        if admitted:
            self.admit(gradient.id)
        else:
            self._follow()

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
            self._cells.advance(part - upload.sparse_parts)

    def admit(self, gradient: str) -> None:
        """Notes that the round has this gradient, and the server all its parts."""
        upload = self._uploads.find(gradient)
        if upload is not None:
            self._uploads.admit(upload)
            self._follow()

    def keep_admitted(self, gradients: Collection[str]) -> None:
        """Removes gradients that were admitted and are not among these: they were compacted."""
        self._uploads.keep_admitted(gradients)
        self._follow()

    def sum_stored(self, digest: str, number: int) -> None:
        """Notes that a reducer has stored a part of the sum of the gradients with this digest."""
        if len(self._cells.stored) < MOST_STORED:
            self._cells.stored.add((digest, number))
            self._cells.advance(number)

    def skip_stalled(self) -> None:
        """Removes a stalled upload that holds up later ones with more parts."""
        if self._uploads.drop_stalled():
            self._follow()

    @property
    def suits_reducer(self) -> bool:
        """Whether the dense parts of the gradients are so much larger than their sum that a reducer saves time."""
        return self._first is not None and self._first.nbytes >= self._options.reduced and self._is_worthwhile

    def end(self, inline: InlineReader) -> bool | None:
        """Stores what it can of the expected gradients, because the round is over.

        Args:
            inline: as for ``look_ahead``.

        Returns:
            Whether their whole sum is stored; None if it is not to be.
        """
        if not self._stores or self._uploads.ignored or self._uploads.expected is None:
            return None
        # If they are all in the round, nothing is missing for their sum to be stored.
        if all(upload.admitted for upload in self._uploads.every[: self._uploads.expected]):
            self.look_ahead(inline, lambda: False)
        return all(cell.stored_as == self._uploads.digest for cell in self._cells.dense.values())

    def _follow(self) -> None:
        """Clears the cells that contain what is no longer wanted, and adds what is wanted now."""
        self._cells.keep_prefixes()
        self._cells.advance_all()

    def _upload_of(self, gradient: BufferedGradient, lease: float = 0.0) -> Upload:
        sparse_parts, cut = gradient.cut or (0, None)
        if sparse_parts % (len(self._keys.partitions) or 1):
            # Its dense parts are in different partitions from the other gradients'.
            cut = None
        elif cut is not None and self._cut is None:
            # All others are compared with it.
            self._first, self._cut = gradient, cut
            self._cells.begin(cut)
            if (self._stores or self._reliance is not None) and self._is_worthwhile:
                self._cells.leaves_to_reducer = self._reliance is not None
                self._uploads.ignored = False
        elif cut is not None and not have_same_elements(cut, self._cut or ()):
            cut = None
        return Upload(gradient, cut, 0 if cut is None else sparse_parts, lease)

    @property
    def _is_worthwhile(self) -> bool:
        first = self._first
        assert first is not None
        nbytes = (first.nbytes - first.sparse_bytes) * self._options.num_expected
        return nbytes > (0 if self._options.is_updated else WORTHWHILE * self._cells.nbytes_of(first))

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
        if self._cells.leaves_to_reducer:
            self._fetch_sums()
        self._cells.advance_all()
        done = self._add(inline)
        assert done == len(gradients)
        if not gradients:
            self._cells.clear_dense()
        for gradient in gradients:
            self.round_sum.count(gradient.number, gradient.weight, gradient.factor)

    def complete_rows(self, gradients: Sequence[BufferedGradient]) -> bool:
        """Makes the sparse sums contain exactly these gradients. ``complete`` may follow.

        The argument and the errors are those of ``complete``.

        Returns:
            Whether they do. If not, a gradient cannot be added part by part.
        """
        self._settle(gradients)
        if any(upload.cut is None for upload in self._uploads.every):
            return False
        # No dense cell is queued.
        self._fetch_all()
        return True

    def _settle(self, gradients: Sequence[BufferedGradient]) -> None:
        """Notes which gradients the round has, and clears the cells that contain others."""
        self._uploads.settle(list(map(self._settled, gradients)))
        self._cells.keep_prefixes()
        check_lengths(self._transport, self._keys, gradients)

    def _settled(self, gradient: BufferedGradient) -> Upload:
        """Returns the upload of a gradient of the round: the one that is known, if it is the same."""
        known = self._uploads.find(gradient.id)
        return known if known is not None and known.is_of(gradient) else self._upload_of(gradient)

    def _add(self, inline: InlineReader) -> int:
        """Adds whatever is there, in order. Returns how many leading gradients are in the sums with all their parts."""
        while True:
            self._fetch_all()
            done = self._cells.done
            if self._stores or done >= self._uploads.bound:
                return done
            first = self._uploads.every[done]
            if not first.admitted or first.cut is not None:
                return done
            if not done:
                self._cells.clear_dense()
            self._add_whole(first.gradient, inline)
            self._cells.note_whole(first)

    def _add_whole(self, gradient: BufferedGradient, inline: InlineReader) -> None:
        """Adds a gradient that is inline, or cut differently from the others."""
        data: Any
        if gradient.inline:
            data, where = inline.read(gradient), inline.where(gradient)
        else:
            data = fetch_gradient(self._transport, self._keys, gradient)
            where = self._keys.part(gradient.id, 0)
        for section, of in zip(whole_gradient(gradient, data, where).sections, self.round_sum.sections, strict=True):
            of.add(section, gradient.factor)

    def _fetch_all(self) -> None:
        """Fetches and adds the parts that are there. Does without the reducer if a part of its sum is forged."""
        if self._cells.rows is not None:
            self._cells.rows.add()
        while self._parts.more() or self._parts.in_flight:
            try:
                self._transport.fetch(self._parts)
            except (CorruptDataError, NotPermittedError):
                if not any(part.is_sum for part in self._parts.in_flight):
                    raise
                if self._reliance is not None:
                    self._reliance.fail()
                self.do_without_reducer()

    # With a reducer.

    def do_without_reducer(self) -> None:
        """Adds up everything here, whatever a reducer may have stored."""
        if not self._cells.leaves_to_reducer:
            return
        self._cells.leaves_to_reducer = False
        for part in [part for part in self._parts.in_flight if part.is_sum]:
            self._parts.finish(part, arrived=False)
            if part.cell is not None and part in self._cells.dense[part.cell].coming:
                self._cells.dense[part.cell].coming.clear()
        self._cells.advance_all()

    def _fetch_sums(self) -> None:
        """Fetches a reducer's sum of the gradients of the round, waits briefly for it, and notes whether it came."""
        expected, reliance = self._uploads.expected, self._reliance
        # Otherwise, a reducer does not know all of them, or cannot add them part by part.
        if expected is not None and all(
            upload.cut is not None and upload.gradient.nbytes >= self._options.reduced
            for upload in self._uploads.every[:expected]
        ):
            assert reliance is not None
            deadline = clock.now() + durations.sum_patience
            if until(self._transport.waits, self._fetched_sums, every=SUM_PAUSE, deadline=deadline):
                reliance.succeed()
            else:
                reliance.fail()
        self.do_without_reducer()

    def _fetched_sums(self) -> bool | None:
        """Fetches the parts of the sum that are there. Returns None if some may still come, and False if none will."""
        cells = self._cells.dense.values()
        for cell in cells:
            if not (cell.summed or cell.coming):
                self._cells.stored.add((self._uploads.digest, cell.number))
                self._cells.advance(cell.number)
        self._fetch_all()
        if all(cell.summed for cell in cells):
            return True
        return None if self._cells.leaves_to_reducer else False
