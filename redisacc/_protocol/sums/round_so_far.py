"""The known state of a round that is still growing: messages and lookups tell of its gradients, and sums grow with it.

A waiting taker and a reducer share this. It changes nothing in Redis.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from redisacc._arrays.spec import AccumulatorSpec
from redisacc._format import buffered as buffered_format
from redisacc._format.attempts import PartsArrived, SumStored, UploadBegun, parse_message
from redisacc._format.buffered import BufferedGradient
from redisacc._format.keys import Keys
from redisacc._format.stored_text import round_shape_of
from redisacc._protocol.parts.fetch import TRUSTED_BYTES, check_lengths
from redisacc._protocol.parts.inline import InlineReader
from redisacc._protocol.sums.cells import Store, SumOptions
from redisacc._protocol.sums.part_sums import PartSums, ReducerReliance
from redisacc._wire.scans import Fields, scan_command, scan_whole
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError


class Interruption(Enum):
    """Events for a listener other than messages about gradients."""

    OVER = "the round is over"
    MISSED = "messages were missed"


# The upload of a gradient, a part of it, a part of a sum, the id of a gradient that was admitted, or an interruption.
Heard = UploadBegun | PartsArrived | SumStored | str | Interruption

_BUFFERED = re.compile(r"applied .*? buffered=(\S{1,64})")

# Maximum number of headers that are looked up in one round trip.
TOGETHER = 256
# Maximum number of messages that wait to be used. Beyond it, they are dropped, and the round is looked up instead.
MOST_HEARD = 10_000
# Maximum number of uploads that are remembered because of messages, which any client can forge.
MOST_ANNOUNCED = 1000


def heard_in(text: str | None) -> Heard | None:
    """Returns what a message on the channel ``wake`` says of gradients, or None. A message that was missed is None."""
    if text is None:
        return Interruption.MISSED
    message = parse_message(text)
    if message is not None:
        return message
    if text.startswith("taken "):
        return Interruption.OVER
    match = _BUFFERED.match(text[:1024])
    if match is None:
        return None
    return Interruption.MISSED if match[1] == "*" else match[1]


def note(heard: deque[Heard], message: Heard) -> None:
    """Adds a message to those that wait. If there are too many, the round is looked up: any client may publish."""
    if len(heard) >= MOST_HEARD:
        heard.clear()
        message = Interruption.MISSED
    heard.append(message)


@dataclass(eq=False)
class RoundSoFar:
    """The current round of an accumulator, as far as it is known.

    Attributes:
        transport: the way to the server.
        keys: the keys of the accumulator.
        spec: the specification of the accumulator.
        store: stores parts of the sum, as for ``SumOptions``; None means nothing is stored.
        position: with ``store``: the only partition whose parts are added, by position; None means all parts are.
        is_updated: whether reducers update the parameters with the sum of a round of which nothing is known yet. It
            then does not travel.
        reliance: notes whether a reducer was in time to which the next round is left; None means it is left to none.
        part_sums: the sums; None means no gradient is known.
        num_stored: how many rounds were over whose whole sum was stored.
        num_late: how many were over before that.
    """

    transport: Transport
    keys: Keys
    spec: AccumulatorSpec
    store: Store | None = None
    position: int | None = None
    is_updated: bool = False
    reliance: ReducerReliance | None = None
    part_sums: PartSums | None = None
    num_stored: int = 0
    num_late: int = 0
    _shape: tuple[int, ...] | None = None
    # Reads the inline gradients of the round; None means none were looked up.
    _inline_reader: InlineReader | None = None
    # The ids of gradients that have been admitted, and are still to be looked up.
    _unknown: list[str] = field(default_factory=list)

    def forget(self) -> None:
        """Drops the sums so far: their round is over."""
        self._shape = self.part_sums = self._inline_reader = None
        self._unknown = []

    @property
    def _inline(self) -> InlineReader:
        if self._inline_reader is None:
            self._inline_reader = InlineReader(self.transport, self.keys.current, ())
        return self._inline_reader

    def sums_of(self, shape: tuple[int, ...], num_required: int) -> PartSums:
        """Returns the sums of a round of this shape, and drops the sums of a round of another shape.

        Args:
            shape: the shape that binds the round.
            num_required: how many gradients the round will probably hold.
        """
        if self.part_sums is None or shape != self._shape:
            # Gradients that are still to be looked up may be of this round: they stay.
            if self.part_sums is not None:
                self._inline_reader = None
            self._shape = shape
            self.part_sums = PartSums(
                self.transport,
                self.spec.empty_sum(shape, where=self.keys.current.sums),
                SumOptions(
                    self.keys,
                    num_required,
                    by_worker=self.spec.order == "worker",
                    store=self.store,
                    position=self.position,
                    is_updated=self.is_updated,
                ),
                self.reliance,
            )
        return self.part_sums

    def look_ahead(self, heard: deque[Heard], num_required: int, interrupted: Callable[[], bool]) -> bool:
        """Adds gradients of the current round as far as they have arrived.

        Args:
            heard: messages about them, the oldest first. Another thread may append to it.
            num_required: how many gradients the round will probably hold.
            interrupted: returns whether to stop, because the round may be complete.

        Returns:
            Whether it was interrupted, so that there may be more to add.

        Raises:
            PartMissingError, RedisAccError: something could not be read. Call ``forget``.
        """

        def listen() -> bool:
            """Uses the messages heard so far. Returns whether to stop."""
            while heard and not isinstance(heard[0], Interruption):
                self._use(heard.popleft(), num_required)
            return bool(heard or self._unknown) or interrupted()

        while True:
            listen()
            if heard:
                if heard.popleft() is Interruption.OVER:
                    self._end()
                else:
                    self._look_up(None, num_required)
                continue
            if self._unknown:
                ids, self._unknown = self._unknown[:TOGETHER], self._unknown[TOGETHER:]
                self._look_up(ids, num_required)
            if self.part_sums is not None:
                self.part_sums.skip_stalled()
                self.part_sums.look_ahead(self._inline, listen)
            if interrupted():
                return True
            if not (heard or self._unknown):
                return False

    def _end(self) -> None:
        """Ends a round that was granted. Its taker may still wait for parts of the sum that are stored here."""
        is_stored = None if self.part_sums is None else self.part_sums.end(self._inline)
        if is_stored is not None:
            self.num_stored += is_stored
            self.num_late += not is_stored
        self.forget()

    def _use(self, message: Heard, num_required: int) -> None:
        sums = self.part_sums
        if isinstance(message, UploadBegun):
            self._announce(message, num_required)
        elif isinstance(message, str) and (sums is None or not sums.knows(message)):
            self._unknown.append(message)
        elif sums is None:
            return
        elif isinstance(message, PartsArrived):
            sums.arrive(message)
        elif isinstance(message, SumStored):
            sums.sum_stored(message.digest, message.part)
        elif isinstance(message, str):
            sums.admit(message)

    def _announce(self, message: UploadBegun, num_required: int) -> None:
        shape = round_shape_of(self.keys.record, message.round_shape)
        if shape is None or (self._shape is not None and shape != self._shape):
            return
        part_sums = self.sums_of(shape, num_required)
        try:
            (gradient,) = self._parse({message.gradient.encode(): message.entry}, shape)
        except CorruptDataError:
            # Any client may publish. If a gradient really has this header, reading the round reports it.
            return
        # On the word of the message, memory is allocated for the sparse sections. Dense ones go into the memory of the
        # sum, and its size is known if their shapes were declared.
        trusted = gradient.nbytes if self.spec.shapes is None else gradient.sparse_bytes
        if trusted <= TRUSTED_BYTES and part_sums.known < MOST_ANNOUNCED:
            part_sums.announce(gradient, lease=message.lease)

    def _look_up(self, ids: Sequence[str] | None, num_required: int) -> None:
        """Reads the headers of gradients that are buffered in the current round.

        Args:
            ids: which; None means all.
            num_required: as for ``look_ahead``.
        """
        current = self.keys.current.buffered
        get_shape = ("HGET", self.keys.record, "round_shape")
        if ids is None:
            shape, first = self.transport.pipeline([get_shape, scan_command(current)])
            entries = scan_whole(self.transport, current, first)
        else:
            shape, found = self.transport.pipeline([get_shape, ("HMGET", current, *ids)])
            entries = {name.encode(): entry for name, entry in zip(ids, found, strict=True) if entry is not None}
        round_shape = round_shape_of(self.keys.record, (shape or b"").decode(errors="replace"))
        gradients = self._parse(entries, round_shape) if round_shape is not None else []
        if ids is not None and any(gradient.number > 1 for gradient in gradients):
            # It replaces others, whose names no message has told.
            self._look_up(None, num_required)
            return
        if ids is None and self.part_sums is not None:
            self.part_sums.keep_admitted({gradient.id for gradient in gradients})
        if round_shape is None or not gradients:
            return
        check_lengths(self.transport, self.keys, gradients)
        part_sums = self.sums_of(round_shape, num_required)
        for gradient in gradients:
            part_sums.announce(gradient, admitted=True)
        self._inline.expect(gradients)

    def _parse(self, entries: Fields, shape: tuple[int, ...]) -> list[BufferedGradient]:
        return buffered_format.parse(self.keys, entries, self.spec, shape)
