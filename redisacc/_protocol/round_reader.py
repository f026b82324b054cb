"""Reads a round, the current one or one that was taken, and adds it up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from redisacc._data.spec import AccumulatorSpec
from redisacc._data.sums import RoundSum
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.buffered import BufferedGradient
from redisacc._format.entries import parse_workers
from redisacc._format.keys import Keys, RoundKeys
from redisacc._format.shapes import round_shape_of
from redisacc._format.staging import PartsArrived, UploadBegun
from redisacc._protocol.inline_reader import INLINE_FIELDS, InlineReader
from redisacc._protocol.part_sums import TRUSTED_BYTES, PartSums, check_lengths
from redisacc._redis.fast_socket import Command
from redisacc._redis.hash_scan import Fields, scan, scan_command, scan_whole, scanned
from redisacc._redis.transport import TIMEOUT, Transport
from redisacc.errors import CorruptDataError


def all_rounds(transport: Transport, keys: Keys, *, timeout: float = TIMEOUT) -> list[RoundKeys]:
    """Returns the hashes of the current round, and of each round that was taken and is not yet acknowledged."""
    taken = scan(transport, keys.taken, timeout=timeout)
    return [keys.current, *(keys.taken_round(token.decode(errors="replace")) for token in taken)]


@dataclass(slots=True)
class RoundContents:
    """The hashes of a round.

    Attributes:
        of: their keys.
        sums: the ``sums`` hash.
        buffered: the buffered gradients, in the order of their places. Their parts are still to be fetched.
        inline: some fields of the ``inline`` hash. The others are still to be fetched.
        workers: worker's name → number of its gradients.
    """

    of: RoundKeys
    sums: Fields
    buffered: list[BufferedGradient]
    inline: Fields
    workers: dict[str, int]


def read_commands(of: RoundKeys) -> list[Command]:
    """Returns the commands that read the hashes of a round: small ones whole, of large ones the first piece."""
    return [
        scan_command(of.sums),
        scan_command(of.buffered),
        scan_command(of.workers),
        ("HSCAN", of.inline, 0, "COUNT", INLINE_FIELDS),
    ]


def read_whole(pieces: Sequence[Any]) -> bool:
    """Returns whether the replies to ``read_commands``, already checked, are all fields of these hashes."""
    return all(cursor in (b"0", 0) for cursor, _ in pieces)


class Interruption(Enum):
    """What a listener hears besides messages about gradients."""

    OVER = "the round is over"
    MISSED = "messages were missed"


# The upload of a gradient, a part of it, the id of a gradient that was admitted, or an interruption.
Heard = UploadBegun | PartsArrived | str | Interruption

# Maximum number of headers that are looked up in one round trip.
TOGETHER = 256
# Maximum number of uploads that are remembered because of messages, which anybody may forge.
MOST_ANNOUNCED = 1000


class RoundReader:
    """Adds up rounds of one accumulator, and may begin with a round while it is still growing."""

    def __init__(self, transport: Transport, keys: Keys, spec: AccumulatorSpec) -> None:
        self._transport = transport
        self._keys = keys
        self._spec = spec
        self.forget()

    def forget(self) -> None:
        """Drops what was added ahead: the round that it belongs to is over."""
        self._shape: tuple[int, ...] | None = None
        self._sum: RoundSum | None = None
        self._sums: PartSums | None = None
        self._inline = InlineReader(self._transport, self._keys.current, ())
        # The ids of gradients that have been admitted, and are still to be looked up.
        self._unknown: list[str] = []

    def look_ahead(self, heard: deque[Heard], num_required: int, interrupted: Callable[[], bool]) -> bool:
        """Adds gradients of the current round as far as they have arrived.

        Args:
            heard: what was heard of them, the oldest first. Another thread may append to it.
            num_required: how many gradients the round will probably hold.
            interrupted: returns whether to stop, because the round may be complete.

        Returns:
            Whether it was interrupted, so that there may be more to add.

        Raises:
            PartMissingError, RedisAccError: something could not be read. Call ``forget``.
        """

        def listen() -> bool:
            """Uses what has been heard. Returns whether to stop."""
            while heard and not isinstance(heard[0], Interruption):
                self._use(heard.popleft(), num_required)
            return bool(heard or self._unknown) or interrupted()

        while True:
            listen()
            if heard:
                if heard.popleft() is Interruption.OVER:
                    self.forget()
                else:
                    self._look_up(None, num_required)
                continue
            if self._unknown:
                ids, self._unknown = self._unknown[:TOGETHER], self._unknown[TOGETHER:]
                self._look_up(ids, num_required)
            if self._sums is not None:
                self._sums.skip_stalled()
                self._sums.look_ahead(self._inline, listen)
            if interrupted():
                return True
            if not (heard or self._unknown):
                return False

    def _use(self, message: Heard, num_required: int) -> None:
        if isinstance(message, UploadBegun):
            self._announce(message, num_required)
        elif isinstance(message, PartsArrived):
            if self._sums is not None:
                self._sums.arrive(message.gradient, message.parts)
        elif isinstance(message, str):
            if self._sums is not None and self._sums.knows(message):
                self._sums.admit(message)
            else:
                self._unknown.append(message)

    def _announce(self, message: UploadBegun, num_required: int) -> None:
        shape = round_shape_of(self._keys, message.round_shape)
        if shape is None or not self._begin(shape, num_required):
            return
        assert self._sums is not None
        try:
            (gradient,) = self._parse({message.gradient.encode(): message.entry}, shape)
        except CorruptDataError:
            # Anybody may publish. Should a gradient have this header, it shows when the round is read.
            return
        if gradient.nbytes <= TRUSTED_BYTES and self._sums.known < MOST_ANNOUNCED:
            self._sums.announce(gradient)

    def _begin(self, shape: tuple[int, ...], num_required: int) -> bool:
        """Begins to add up a round of this shape. Returns False if a round of another shape was begun."""
        if self._sums is None:
            self._shape = shape
            self._sum = self._spec.empty_sum(shape, where=self._keys.current.sums)
            self._sums = PartSums(self._transport, self._keys, self._sum, bets=num_required)
        return shape == self._shape

    def _look_up(self, ids: Sequence[str] | None, num_required: int) -> None:
        """Reads the headers of gradients that are buffered in the current round.

        Args:
            ids: which; None: all.
            num_required: as for ``look_ahead``.
        """
        current = self._keys.current.buffered
        get_shape = ("HGET", self._keys.record, "round_shape")
        if ids is None:
            shape, first = self._transport.pipeline([get_shape, scan_command(current)])
            entries = scan_whole(self._transport, current, first)
        else:
            shape, found = self._transport.pipeline([get_shape, ("HMGET", current, *ids)])
            entries = {name.encode(): entry for name, entry in zip(ids, found, strict=True) if entry is not None}
        round_shape = round_shape_of(self._keys, (shape or b"").decode(errors="replace"))
        if round_shape is None or not entries:
            return
        if not self._begin(round_shape, num_required):
            self.forget()
            self._begin(round_shape, num_required)
        assert self._sums is not None
        gradients = self._parse(entries, round_shape)
        check_lengths(self._transport, self._keys, gradients)
        for gradient in gradients:
            self._sums.announce(gradient, admitted=True)
        self._inline.expect(gradients)

    def contents(self, of: RoundKeys, pieces: Sequence[Any], shape: tuple[int, ...]) -> RoundContents:
        """Returns a round's hashes: what the replies to ``read_commands`` say, and the pieces still missing there."""
        return RoundContents(
            of=of,
            sums=scan_whole(self._transport, of.sums, pieces[0]),
            buffered=self._parse(scan_whole(self._transport, of.buffered, pieces[1]), shape),
            inline=scanned(of.inline, pieces[3])[1],
            workers=parse_workers(scan_whole(self._transport, of.workers, pieces[2]), of.workers),
        )

    def add_up(self, contents: RoundContents, shape: tuple[int, ...], num_accumulated: int) -> RoundSum:
        """Adds up all gradients of a round: those that are buffered, in the order of their places, then the sums.

        Args:
            contents: the round's hashes.
            shape: the shape that binds the round.
            num_accumulated: how many gradients the round was counted to hold.

        Raises:
            PartMissingError: a part of a buffered gradient is not there, or no longer.
            CorruptDataError: gradients that were counted are missing.
        """
        if shape != self._shape:
            # Another taker got the round that was begun.
            self.forget()
            self._begin(shape, 0)
        assert self._sums is not None
        assert self._sum is not None
        round_sum = self._sum
        inline = InlineReader(self._transport, contents.of, contents.buffered, contents.inline)
        self._sums.complete(contents.buffered, inline)
        self.forget()
        if contents.sums:
            round_sum.add(in_place.unpack(contents.sums, self._spec, shape, self._keys.current.sums))
        if round_sum.number != num_accumulated:
            raise CorruptDataError(
                f"{self._keys.record}: of {num_accumulated} gradients only {round_sum.number} were found: keys were "
                "evicted (set maxmemory-policy noeviction) or removed"
            )
        return round_sum

    def _parse(self, entries: Fields, shape: tuple[int, ...]) -> list[BufferedGradient]:
        return buffered_format.parse(self._keys, entries, self._spec, shape)
