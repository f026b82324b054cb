"""Reads rows of the current round as a take would return them now, without taking the round."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from redisacc._data.gradient import Gradient, Section
from redisacc._data.reducers import RoundReducer
from redisacc._data.spec import ArraySpec
from redisacc._data.validation import INT64_MAX, Array
from redisacc._format import buffered as buffered_format
from redisacc._format import in_place
from redisacc._format.buffered import BufferedGradient, PartMissingError
from redisacc._format.keys import DELETING, Keys
from redisacc._format.record import Record
from redisacc._protocol.buffer_reader import add_buffered
from redisacc._protocol.record_reader import RecordReader
from redisacc._protocol.snapshot import StartedRead, read_round, snapshot
from redisacc._redis.hash_scan import scan
from redisacc._redis.transport import Transport
from redisacc._text import shown
from redisacc.errors import AccumulatorNotFoundError, CorruptDataError, InvalidArgumentError

# The number of commands in one pipeline.
PIPELINED_COMMANDS = 500


@dataclass(frozen=True)
class Rows:
    """Rows of the current round.

    Attributes:
        indices: int64 ``[n]``, ascending. Indices that no gradient held are left out.
        counts: uint64 ``[n]``: how many gradients held each index.
        sums: ``[n, *row]``: the sums of the rows, in the accumulator's dtype.
        results: ``[n, *row]``: the sums or means that a take would return now.
        global_step: the step at the same moment.
        num_accumulated: the number of gradients at the same moment.
    """

    indices: Array
    counts: Array
    sums: Array
    results: Array
    global_step: int
    num_accumulated: int


class CurrentRows:
    """The rows of the current round of one accumulator. Reading them does not take the round.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.

    Attributes:
        spec: what the accumulator was created as.

    Raises:
        AccumulatorNotFoundError: there is no such accumulator.
        InvalidArgumentError: it is that of a tree, whose leaves have rows of their own.
    """

    def __init__(self, transport: Transport, keys: Keys) -> None:
        record = Record(keys, transport.call(*Record.command(keys)))
        if record.incarnation.startswith(DELETING):
            raise AccumulatorNotFoundError(f"accumulator {shown(keys.name)} is being deleted")
        if record.kind == "tree":
            raise InvalidArgumentError(f"the gradients of {shown(keys.name)} are trees, which have no rows")
        spec = record.spec()
        assert isinstance(spec, ArraySpec)
        self.spec: ArraySpec = spec
        self._transport = transport
        self._keys = keys
        self._records = RecordReader(transport, keys, record.incarnation)

    def all(self) -> Rows:
        """Returns the whole round. A dense gradient becomes rows along its first dimension, a scalar one row.

        Raises:
            PeekTimeoutError: gradients kept arriving for 30 seconds and disturbed every attempt.
        """
        found = read_round(self._transport, self._keys, self.spec, self._records, self._reduce)
        if found.gradient is None:
            return self._empty(found.global_step)
        indices, counts, sums, results = found.gradient
        return Rows(indices, counts, sums, results, found.global_step, found.num_accumulated)

    def some(self, indices: Sequence[int]) -> Rows:
        """Returns rows of a sparse accumulator. Nothing else is read: buffered gradients are searched for the indices.

        Args:
            indices: the indices of the rows, each in [0, 2**63 - 1].

        Raises:
            InvalidArgumentError: an index is out of range.
            PeekTimeoutError: gradients kept arriving for 30 seconds and disturbed every attempt.
        """
        for index in indices:
            if not 0 <= index <= INT64_MAX:
                raise InvalidArgumentError(f"an index must be in [0, {INT64_MAX}], not {index}")
        wanted = sorted(set(indices))

        def begin() -> StartedRead[Rows]:
            record = self._records.read()
            return StartedRead(record, lambda: (self._some(record, wanted), False))

        return snapshot(self._records, begin, self._keys.name)

    def _some(self, record: Record, wanted: list[int]) -> Rows:
        shape = record.round_shape
        if record.num_accumulated == 0 or shape is None:
            return self._empty(record.global_step)
        transport, keys = self._transport, self._keys
        gradients = buffered_format.parse(keys, scan(transport, keys.current.buffered), self.spec, shape)
        reducer = self.spec.reducer(shape, where=keys.current.sums)
        large = [gradient for gradient in gradients if not gradient.inline]
        places = dict(zip((gradient.id for gradient in large), _find(transport, keys, large, wanted), strict=True))
        # A take adds them in order of arrival.
        for inline, group in itertools.groupby(gradients, lambda gradient: gradient.inline):
            if inline:
                add_buffered(transport, keys, keys.current, list(group), sink=_Filter(reducer, wanted))
            else:
                for gradient in group:
                    reducer.add(_read_rows(transport, keys, gradient, places[gradient.id]))
        fields = [str(index) for index in wanted]
        sums = transport.call("HMGET", keys.current.sums, *fields)
        rows = {field.encode(): row for field, row in zip(fields, sums, strict=True) if row is not None}
        if rows:
            number = record.num_accumulated
            section, _ = in_place.unpack_rows(rows, number, self.spec.section, shape, keys.current.sums)
            reducer.add(Gradient((section,), number))
        reduced = self._reduce(reducer, record.num_accumulated)
        return Rows(*reduced, record.global_step, record.num_accumulated)

    def _empty(self, step: int) -> Rows:
        nothing = np.empty((0, 0), self.spec.dtype.storage)
        return Rows(np.empty(0, np.int64), np.empty(0, np.uint64), nothing, nothing, step, 0)

    def _reduce(self, reducer: RoundReducer, number: int) -> tuple[Array, Array, Array, Array]:
        """Returns indices, counts, sums and results."""
        (held,) = reducer.sum().sections
        with np.errstate(all="ignore"):
            sums = held.values.astype(self.spec.dtype.storage)
        result = self.spec.result(reducer, number)
        if held.indices is not None:
            assert held.counts is not None
            return held.indices, held.counts, sums, result.values
        if not sums.ndim:
            sums, result = sums.reshape(1), result.reshape(1)
        return np.arange(len(sums)), np.full(len(sums), number, np.uint64), sums, result


@dataclass
class _Search:
    """A binary search for one index in one gradient, one comparison at a time."""

    gradient: BufferedGradient
    index: int
    low: int
    high: int
    found: int | None = None

    @property
    def done(self) -> bool:
        return self.found is not None or self.low > self.high

    @property
    def middle(self) -> int:
        return (self.low + self.high) // 2

    def compare(self, value: int) -> None:
        middle = self.middle
        if value == self.index:
            self.found = middle
        elif value < self.index:
            self.low = middle + 1
        else:
            self.high = middle - 1


def _find(
    transport: Transport, keys: Keys, buffered: list[BufferedGradient], wanted: list[int]
) -> list[dict[int, int]]:
    """Returns wanted index → its place, for each gradient. All searches advance together, one step in a round trip."""
    searches = [_Search(g, index, 0, g.sections[0].shape[0] - 1) for g in buffered for index in wanted]
    while going := [search for search in searches if not search.done]:
        for start in range(0, len(going), PIPELINED_COMMANDS):
            batch = going[start : start + PIPELINED_COMMANDS]
            ranges = [
                (search.gradient, search.gradient.sections[0].indices[0] + search.middle * 8, 8) for search in batch
            ]
            for search, data in zip(batch, _read(transport, keys, ranges), strict=True):
                search.compare(int.from_bytes(data, "little", signed=True))
    found: list[dict[int, int]] = [{} for _ in buffered]
    for number, search in enumerate(searches):
        if search.found is not None:
            found[number // len(wanted)][search.index] = search.found
    return found


class _Filter:
    """Passes only the wanted rows of gradients on to a reducer."""

    def __init__(self, reducer: RoundReducer, wanted: list[int]) -> None:
        self._reducer = reducer
        self._wanted = np.array(wanted, np.int64)

    def add(self, gradient: Gradient) -> None:
        (section,) = gradient.sections
        assert section.indices is not None
        places = np.flatnonzero(np.isin(section.indices, self._wanted))
        counts = None if section.counts is None else section.counts[places]
        found = Section(section.values[places], section.indices[places], counts)
        self._reducer.add(Gradient((found,), gradient.number))


def _read_rows(transport: Transport, keys: Keys, gradient: BufferedGradient, places: dict[int, int]) -> Gradient:
    (section,) = gradient.sections
    row_shape = section.shape[1:]
    row = section.dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
    first = section.values[0]
    values = b"".join(_read(transport, keys, [(gradient, first + place * row, row) for place in places.values()]))
    counts = None
    if gradient.number > 1:
        first = section.counts[0]
        data = b"".join(_read(transport, keys, [(gradient, first + place * 8, 8) for place in places.values()]))
        counts = np.frombuffer(data, "<u8")
        if not ((counts >= 1) & (counts <= gradient.number)).all():
            raise CorruptDataError(f"{keys.part(gradient.id, 0)}: counts of a sum of {gradient.number} gradients")
    rows = np.frombuffer(bytearray(values), section.dtype).reshape(len(places), *row_shape)
    return Gradient((Section(rows, np.array(list(places), np.int64), counts),), gradient.number)


def _read(transport: Transport, keys: Keys, ranges: Sequence[tuple[BufferedGradient, int, int]]) -> list[bytes]:
    """Reads pieces of buffered gradients, each given as (gradient, first byte, length)."""
    commands: list[tuple[str | int, ...]] = []
    owners: list[int] = []
    for number, (gradient, first, length) in enumerate(ranges):
        start = 0
        for part, size in enumerate(gradient.lengths):
            low, high = max(first, start), min(first + length, start + size)
            if low < high:
                commands.append(("GETRANGE", keys.part(gradient.id, part), low - start, high - start - 1))
                owners.append(number)
            start += size
    pieces = [b""] * len(ranges)
    for start in range(0, len(commands), PIPELINED_COMMANDS):
        replies = transport.pipeline(commands[start : start + PIPELINED_COMMANDS])
        for number, reply in zip(owners[start : start + PIPELINED_COMMANDS], replies, strict=True):
            pieces[number] += reply
    for (gradient, _, length), piece in zip(ranges, pieces, strict=True):
        if len(piece) != length:
            raise PartMissingError(keys.part(gradient.id, 0))
    return pieces
