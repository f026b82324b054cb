"""Looks at accumulators from outside, for the command line: which there are, what they take, single rows of them.

Everything here only reads, and in small pieces: a look must not hold up those who work.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redisacc import _parked
from redisacc._accumulator import PEEK_PATIENCE, ConditionalAccumulatorBase
from redisacc._arguments import INT64_MAX, Array
from redisacc._fetching import add_parked
from redisacc._info import Record
from redisacc._keys import NAMES, PREFIX, Keys
from redisacc._link import Link
from redisacc._parked import Gradient, Parked, PartMissing
from redisacc._rounds import all_rounds, scan
from redisacc._slices import IndexedSlices
from redisacc._totals import DenseTotal, SparseTotal
from redisacc.errors import (
    CorruptDataError,
    InvalidArgumentError,
    PeekTimeoutError,
    ServerError,
    ServerUnavailableError,
)

# Keys or members asked for in one SCAN, SSCAN.
SCAN_COUNT = 1000
# Commands that travel together.
BATCH = 500

_RECORD = re.compile(re.escape(PREFIX) + r"\{([^{}]+)\}")


def _scan(link: Link, *command: str, match: str) -> Iterator[bytes]:
    cursor = 0
    seen: set[bytes] = set()
    while True:
        reply, found = link.call(*command, cursor, "MATCH", match, "COUNT", SCAN_COUNT)
        cursor = int(reply)
        for item in found:
            if item not in seen:
                seen.add(item)
                yield item
        if cursor == 0:
            return


def scan_keys(link: Link, match: str) -> Iterator[str]:
    """All keys of a pattern, a few at a time. Keys that aren't text can't be ours and are left out."""
    for key in _scan(link, "SCAN", match=match):
        try:
            yield key.decode()
        except UnicodeDecodeError:
            continue


def escape_glob(text: str) -> str:
    """A pattern that matches exactly this text."""
    return re.sub(r"([\\*?\[\]^])", r"\\\1", text)


def list_names(link: Link, pattern: str = "*", *, private: bool = False) -> list[str]:
    """Names of accumulators, sorted. Private ones too if asked for, which means a walk over all keys of the server."""
    names = {name.decode(errors="backslashreplace") for name in _scan(link, "SSCAN", NAMES, match=pattern)}
    if private:
        for key in scan_keys(link, f"{PREFIX}{{{pattern}}}"):
            if (match := _RECORD.fullmatch(key)) is not None:
                names.add(match[1])
    return sorted(names)


@dataclass(frozen=True)
class Memory:
    """What keys of one sort take.

    Attributes:
        what: which keys: "record", "sums", "parked", "parts", …
        keys: how many there are.
        nbytes: what the server says that they take, with its own overhead; of parts, the bytes in them.
    """

    what: str
    keys: int
    nbytes: int


def memory(link: Link, keys: Keys) -> list[Memory]:
    """What an accumulator takes, by sort of key, taken rounds included; nothing where this user may not ask."""
    record, *rounds = [keys.record], *all_rounds(link, keys)
    sorts = {
        "record": record,
        "sums": [of.sums for of in rounds],
        "parked": [of.parked for of in rounds],
        "small": [of.small for of in rounds],
        "workers": [of.workers for of in rounds],
        "clients": [keys.clients],
        "takers": [keys.queue, keys.takers],
        "taken": [keys.taken],
    }
    flat = [key for group in sorts.values() for key in group]
    try:
        sizes = dict(zip(flat, link.pipeline([("MEMORY", "USAGE", key) for key in flat]), strict=True))
    except ServerUnavailableError:
        raise
    except ServerError:
        # A user who may look but not ask for this.
        return []
    found = []
    for what, group in sorts.items():
        there = [int(sizes[key]) for key in group if sizes[key] is not None]
        if there:
            found.append(Memory(what, len(there), sum(there)))
    number = size = 0
    for of in rounds:
        for entry in scan(link, of.parked).values():
            lengths = _parked.part_lengths(entry) or []
            number += len(lengths)
            size += sum(lengths)
    if number:
        found.append(Memory("parts", number, size))
    return found


@dataclass(frozen=True)
class Rows:
    """Rows of the current round.

    Attributes:
        indices: which, ascending; those that no gradient held are not among them.
        counts: how many gradients held each.
        sums: ``[n, *row]``: their sums, in the accumulator's dtype.
        results: what a take would return for them now: their sums or means.
        global_step, num_accumulated: of the same moment.
    """

    indices: Array
    counts: Array
    sums: Array
    results: Array
    global_step: int
    num_accumulated: int


def all_rows(accumulator: ConditionalAccumulatorBase[Any]) -> Rows:
    """The whole round: a dense gradient as its rows along the first dimension (a scalar as one)."""

    def reduce(total: SparseTotal | DenseTotal, number: int) -> tuple[Array, Array, Array, Array]:
        if isinstance(total, SparseTotal):
            return _reduced(accumulator, total, number)
        held = total.sum().values.astype(accumulator._dtype.storage)
        result = accumulator._result(total, number)
        assert not isinstance(result, IndexedSlices)
        rows = (held, result) if held.ndim else (held.reshape(1), result.reshape(1))
        return np.arange(len(rows[0])), np.full(len(rows[0]), number, np.uint64), *rows

    reduced: Any
    found = accumulator._look(reduce)
    reduced = found.gradient
    if reduced is None:
        return _nothing(accumulator, found.global_step)
    indices, counts, sums, results = reduced
    return Rows(indices, counts, sums, results, found.global_step, found.num_accumulated)


def _nothing(accumulator: ConditionalAccumulatorBase[Any], step: int) -> Rows:
    empty = np.empty((0, 0), accumulator._dtype.storage)
    return Rows(np.empty(0, np.int64), np.empty(0, np.uint64), empty, empty, step, 0)


def _reduced(
    accumulator: ConditionalAccumulatorBase[Any], total: SparseTotal, number: int
) -> tuple[Array, Array, Array, Array]:
    held = total.sum()
    assert held.indices is not None
    assert held.counts is not None
    with np.errstate(all="ignore"):
        sums = held.values.astype(accumulator._dtype.storage)
    result = accumulator._result(total, number)
    assert isinstance(result, IndexedSlices)
    return held.indices, held.counts, sums, result.values


def some_rows(accumulator: ConditionalAccumulatorBase[Any], indices: Sequence[int]) -> Rows:
    """Rows of a sparse accumulator, found in parked gradients by searching their indices: only they are read.

    Raises:
        PeekTimeoutError: gradients kept coming for 30 seconds and every attempt was disturbed.
    """
    if not all(0 <= index <= INT64_MAX for index in indices):
        raise InvalidArgumentError("an index must be between 0 and 2**63 - 1")
    wanted = sorted(set(indices))
    give_up = time.monotonic() + PEEK_PATIENCE
    while True:
        record = accumulator._record()
        try:
            rows = _rows_of(accumulator, record, wanted)
        except (CorruptDataError, PartMissing) as error:
            # Pieces of two rounds don't fit together either; only in one that stood still is it corruption.
            if accumulator._record().state == record.state:
                raise CorruptDataError(str(error)) from error
            rows = None
        if rows is not None and accumulator._record().state == record.state:
            return rows
        if time.monotonic() >= give_up:
            raise PeekTimeoutError(f"{accumulator.accumulator_ref} changed under every look at it")


def _rows_of(accumulator: ConditionalAccumulatorBase[Any], record: Record, wanted: list[int]) -> Rows:
    if record.num_accumulated == 0 or record.round_shape is None:
        return _nothing(accumulator, record.global_step)
    link, keys = accumulator._link, accumulator._keys
    parked = _parked.parse(
        keys,
        scan(link, keys.current.parked),
        dtype=accumulator._dtype,
        sparse=True,
        round_shape=record.round_shape,
    )
    total = accumulator._total(record.round_shape)
    total.number = 0
    large = [gradient for gradient in parked if not gradient.small]
    places = dict(zip((gradient.id for gradient in large), _find(link, keys, large, wanted), strict=True))
    # In order of arrival, in which a take adds them.
    for small, gradients in itertools.groupby(parked, lambda gradient: gradient.small):
        if small:
            add_parked(link, keys, keys.current, list(gradients), total=_Sieve(total, wanted))
        else:
            for gradient in gradients:
                total.add(_read_rows(link, keys, gradient, places[gradient.id]))
    fields = [str(index) for index in wanted]
    sums = link.call("HMGET", keys.current.sums, *fields)
    rows = {field.encode(): row for field, row in zip(fields, sums, strict=True) if row is not None}
    total.add_rows(rows, record.num_accumulated)
    indices, counts, held, results = _reduced(accumulator, total, record.num_accumulated)
    return Rows(indices, counts, held, results, record.global_step, record.num_accumulated)


@dataclass
class _Search:
    """A binary search for one index in one gradient, a step at a time."""

    gradient: Parked
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

    def look(self, value: int) -> None:
        middle = self.middle
        if value == self.index:
            self.found = middle
        elif value < self.index:
            self.low = middle + 1
        else:
            self.high = middle - 1


def _find(link: Link, keys: Keys, parked: list[Parked], wanted: list[int]) -> list[dict[int, int]]:
    """For each gradient, wanted index → its place. All searches go on together, one step in a round trip."""
    searches = [_Search(g, index, 0, g.shape[0] - 1) for g in parked for index in wanted]
    while going := [search for search in searches if not search.done]:
        for start in range(0, len(going), BATCH):
            batch = going[start : start + BATCH]
            ranges = [(search.gradient, 0, search.middle * 8, 8) for search in batch]
            for search, data in zip(batch, _read(link, keys, ranges), strict=True):
                search.look(int.from_bytes(data, "little", signed=True))
    found: list[dict[int, int]] = [{} for _ in parked]
    for number, search in enumerate(searches):
        if search.found is not None:
            found[number // len(wanted)][search.index] = search.found
    return found


class _Sieve:
    """Passes on those rows of gradients that are wanted."""

    takes_pieces = False

    def __init__(self, total: SparseTotal, wanted: list[int]) -> None:
        self._total = total
        self._wanted = np.array(wanted, np.int64)
        self.number = 0

    def add(self, gradient: Gradient) -> None:
        assert gradient.indices is not None
        places = np.flatnonzero(np.isin(gradient.indices, self._wanted))
        counts = None if gradient.counts is None else gradient.counts[places]
        self._total.add(Gradient(gradient.values[places], gradient.indices[places], counts, gradient.number))

    def add_piece(self, start: int, elements: Array) -> None:  # noqa: ARG002
        raise AssertionError("it takes no pieces")


def _read_rows(link: Link, keys: Keys, gradient: Parked, places: dict[int, int]) -> Gradient:
    row_shape = gradient.shape[1:]
    row = gradient.dtype.itemsize * int(np.prod(row_shape, dtype=np.int64))
    values = b"".join(_read(link, keys, [(gradient, 2, place * row, row) for place in places.values()]))
    counts = None
    if gradient.count_lengths:
        data = b"".join(_read(link, keys, [(gradient, 1, place * 8, 8) for place in places.values()]))
        counts = np.frombuffer(data, "<u8")
        if not ((counts >= 1) & (counts <= gradient.number)).all():
            raise CorruptDataError(f"{keys.part(gradient.id, 0)}: counts of a sum of {gradient.number} gradients")
    return Gradient(
        np.frombuffer(bytearray(values), gradient.dtype).reshape(len(places), *row_shape),
        np.array(list(places), np.int64),
        counts,
        gradient.number,
    )


def _read(link: Link, keys: Keys, ranges: Sequence[tuple[Parked, int, int, int]]) -> list[bytes]:
    """Pieces of sections of parked gradients: (gradient, which section, from byte, how many)."""
    commands: list[tuple[str | int, ...]] = []
    owners: list[int] = []
    for number, (gradient, section, first, length) in enumerate(ranges):
        part = sum(len(lengths) for lengths in gradient.sections[:section])
        start = 0
        for size in gradient.sections[section]:
            low, high = max(first, start), min(first + length, start + size)
            if low < high:
                commands.append(("GETRANGE", keys.part(gradient.id, part), low - start, high - start - 1))
                owners.append(number)
            start += size
            part += 1
    pieces = [b""] * len(ranges)
    for start in range(0, len(commands), BATCH):
        replies = link.pipeline(commands[start : start + BATCH])
        for number, reply in zip(owners[start : start + BATCH], replies, strict=True):
            pieces[number] += reply
    for (gradient, _, _, length), piece in zip(ranges, pieces, strict=True):
        if len(piece) != length:
            raise PartMissing(keys.part(gradient.id, 0))
    return pieces
