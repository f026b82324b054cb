"""Reads the record of an accumulator, and the current round as it was at one moment, without taking it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from redisacc._arrays.results import Round
from redisacc._arrays.spec import AccumulatorSpec
from redisacc._arrays.sums import RoundSum
from redisacc._clock import durations, running_time
from redisacc._format.buffered import PartMissingError
from redisacc._format.keys import Keys, ParameterKeys, parse_partitions
from redisacc._format.record import Record
from redisacc._format.stored_text import parsed
from redisacc._protocol.rounds.round_reader import RoundReader, part_lost, read_commands, read_whole
from redisacc._protocol.scripts import OF_ACCUMULATORS, refused
from redisacc._protocol.waiting.lifetime import Lifetime
from redisacc._text import shown
from redisacc._wire.transport import Transport
from redisacc.errors import CorruptDataError, WaitTimeoutError

# The keys of an accumulator, or of parameters.
OfName = TypeVar("OfName", Keys, ParameterKeys)


class RecordReader:
    """Reads the record, and raises if the name belongs to another accumulator by now.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        incarnation: of the accumulator that was opened.
        lifetime: of the handle that reads; None means it belongs to no handle.

    Attributes:
        transport, keys, lifetime: as given.
    """

    def __init__(self, transport: Transport, keys: Keys, incarnation: str, lifetime: Lifetime | None = None) -> None:
        self.transport, self.keys, self.lifetime = transport, keys, lifetime or Lifetime(keys.name)
        self._incarnation = incarnation

    def read(self) -> Record:
        """Returns the record as it is now.

        Raises:
            NotFoundError: the accumulator was deleted.
            CancelledError: the handle was closed.
        """
        self.lifetime.check()
        record = Record(self.keys, self.transport.call(*Record.command(self.keys)))
        self.check(record.incarnation)
        return record

    def check(self, incarnation: str) -> None:
        """Raises NotFoundError unless this is the incarnation that was opened."""
        if incarnation != self._incarnation:
            raise refused(OF_ACCUMULATORS["replaced"], self.keys)


def with_partitions(transport: Transport, keys: OfName) -> OfName:
    """Returns the keys with the partitions that the record lists, whatever else the record holds.

    Raises:
        CorruptDataError: redisacc did not write the record's list of partitions.
    """
    text = transport.call("HGET", keys.record, "partitions")
    return type(keys)(keys.name, parsed(keys.record, "partitions", text or b"", parse_partitions))


# A function of its own, so that the memory of a disturbed attempt is free before the next one begins.
def _attempt(
    records: RecordReader, spec: AccumulatorSpec, reduce: Callable[[RoundSum, float], Any]
) -> Round[Any] | None:
    """Returns the current round; None if the accumulator has changed meanwhile."""
    transport, keys = records.transport, records.keys
    current = keys.current
    before, *pieces, after = transport.pipeline([Record.command(keys), *read_commands(current), Record.command(keys)])
    record = Record(keys, before)
    records.check(record.incarnation)
    if record.state != Record(keys, after).state:
        return None
    number, shape = record.num_accumulated, record.round_shape
    if number == 0:
        return Round(None, record.global_step, 0)
    try:
        if shape is None:
            raise CorruptDataError(f"{keys.record}: a round of {number} gradients has no shape")
        reader = RoundReader(transport, keys, spec)
        contents = reader.contents(current, pieces, shape, number, record.given_weight)
        found = reader.reduced(contents, record.global_step, record.staleness, reduce)
    except (CorruptDataError, PartMissingError) as error:
        # Pieces of two rounds do not fit together either: it is corruption only if nothing changed.
        if records.read().state != record.state:
            return None
        if isinstance(error, PartMissingError):
            lost = part_lost(
                keys,
                error,
                "the current round",
                "A take of the round raises this error, too; after that, recover(skip_lost=True) hands the round out "
                "without that gradient",
            )
            if lost is not None:
                raise lost from error
        raise CorruptDataError(str(error)) from error
    # If nothing was left to read, everything was read between two equal records.
    is_sure = (not contents.buffered and read_whole(pieces)) or records.read().state == record.state
    return found if is_sure else None


def read_round(records: RecordReader, spec: AccumulatorSpec, reduce: Callable[[RoundSum, float], Any]) -> Round[Any]:
    """Returns the current round, read in pieces. Its gradient is None if the round is empty.

    It starts over if the accumulator changed meanwhile.

    Args:
        records: reads the record of the accumulator.
        spec: the specification of the accumulator.
        reduce: makes the gradient from the sum and the divisor of a mean.

    Raises:
        WaitTimeoutError: gradients kept arriving for 30 seconds and interrupted every attempt.
        DataLossError: a node of the partitions has lost a part of a gradient.
        CorruptDataError: the pieces do not fit together, although nothing changed meanwhile.
    """
    deadline = running_time() + durations.call
    while True:
        found = _attempt(records, spec, reduce)
        if found is not None:
            return found
        if running_time() >= deadline:
            raise WaitTimeoutError(
                f"accumulator {shown(records.keys.name)} changed during every attempt to read it, for "
                f"{durations.call:.0f} s: gradients arrive faster than the round can be read"
            )
