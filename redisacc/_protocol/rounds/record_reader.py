"""Reads the record of one incarnation of an accumulator."""

from __future__ import annotations

from redisacc._format.keys import Keys
from redisacc._format.partitions import parse_partitions
from redisacc._format.record import Record
from redisacc._format.stored_text import of_ascii, parsed
from redisacc._protocol.scripts import OF_ACCUMULATORS, refused
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._redis.transport import TIMEOUT, Transport


class RecordReader:
    """Reads the record, and raises if the name belongs to another accumulator by now.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: of the accumulator that was opened.
        lifetime: of the handle that reads; None: it belongs to no handle.
    """

    def __init__(self, transport: Transport, keys: Keys, incarnation: str, lifetime: Lifetime | None = None) -> None:
        self._transport = transport
        self._keys = keys
        self._incarnation = incarnation
        self._lifetime = lifetime

    def read(self, timeout: float = TIMEOUT) -> Record:
        """Returns the record as it is now.

        Raises:
            NotFoundError: the accumulator was deleted.
            CancelledError: the handle was closed.
        """
        if self._lifetime is not None:
            self._lifetime.check()
        record = Record(self._keys, self._transport.call(*Record.command(self._keys), timeout=timeout))
        self.check(record.incarnation)
        return record

    def check(self, incarnation: str) -> None:
        """Raises NotFoundError unless this is the incarnation that was opened."""
        if incarnation != self._incarnation:
            raise refused(OF_ACCUMULATORS["replaced"], self._keys)


def with_partitions(transport: Transport, keys: Keys, *, timeout: float = TIMEOUT) -> Keys:
    """Returns the keys of an accumulator with the partitions that its record lists, whatever else the record holds.

    Raises:
        CorruptDataError: redisacc did not write the record's list of partitions.
    """
    text = transport.call(*Record.partitions_command(keys), timeout=timeout)
    partitions = parsed(keys.record, "partitions", text or b"", lambda text: parse_partitions(of_ascii(text)))
    return Keys(keys.name, partitions)
