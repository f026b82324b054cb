"""Reads buffered gradients and adds them up as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from redisacc._data.gradient import Gradient, Section
from redisacc._data.reducers import DenseReducer, RoundReducer
from redisacc._data.validation import Array
from redisacc._format.buffered import BufferedGradient, BufferedSection, PartMissingError, part_keys, section_view
from redisacc._format.keys import Keys, RoundKeys
from redisacc._redis.transport import Transport
from redisacc.errors import CorruptDataError

# About how much is fetched in one round trip.
FETCH_BYTES = 16 * 2**20
FETCH_GRADIENTS = 1000

# Maximum number of inline gradients that one command fetches, so that no command holds the server for long.
INLINE_FIELDS = 16

# If headers announce more bytes than this, the server is asked for the lengths before memory is allocated.
TRUSTED_BYTES = 64 * 2**20

_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})


class GradientSink(Protocol):
    """Takes gradients one after the other, in order of arrival: a reducer, or a filter in front of one.

    Only a reducer takes gradients that have parts.
    """

    def add(self, gradient: Gradient) -> None:
        """Takes a gradient. Its arrays may be kept."""


def add_buffered(
    transport: Transport,
    keys: Keys,
    of: RoundKeys,
    buffered: Sequence[BufferedGradient],
    *,
    sink: GradientSink,
    known: Mapping[bytes, bytes] = _NOTHING,
) -> None:
    """Adds buffered gradients in the order given.

    Args:
        transport: the way to the server.
        keys: the keys of the accumulator.
        of: the hashes of the round that they are in.
        buffered: the gradients, in order of arrival.
        sink: gets them.
        known: fields of the round's ``inline`` hash that have been read already.

    Raises:
        PartMissingError: a part is not there. The sink is of no more use.
        CorruptDataError: a part is not as long as its header says, or its indices are not ascending. The sink is of no
            more use.
    """
    for batch in _batches(buffered):
        large = [gradient for gradient in batch if not gradient.inline]
        if sum(gradient.nbytes for gradient in large) > TRUSTED_BYTES:
            _check_lengths(transport, keys, large)
        inline = _fetch_inline(transport, of, [gradient for gradient in batch if gradient.inline], known)
        if not large:
            for gradient in batch:
                _add_whole(sink, gradient, inline[gradient.id], f"{of.inline} {gradient.id}")
            continue
        assert isinstance(sink, RoundReducer)
        arrivals = _Arrivals(keys, sink, max(length for gradient in large for length in gradient.lengths))
        for gradient in batch:
            if gradient.inline:
                where = f"{of.inline} {gradient.id}"
                arrivals.then(partial(_add_whole, sink, gradient, inline[gradient.id], where))
            else:
                arrivals.expect(gradient)
        arrivals.fetch(transport)


def _batches(buffered: Sequence[BufferedGradient]) -> Iterator[list[BufferedGradient]]:
    batch: list[BufferedGradient] = []
    size = 0
    for gradient in buffered:
        batch.append(gradient)
        size += gradient.nbytes
        if size >= FETCH_BYTES or len(batch) >= FETCH_GRADIENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Arrivals:
    """Parts of gradients that are on their way, and what to do when each has arrived.

    Args:
        keys: the keys of the accumulator.
        sink: gets the gradients.
        widest: the length of the longest part in bytes.
    """

    def __init__(self, keys: Keys, sink: RoundReducer, widest: int) -> None:
        self._keys = keys
        self._sink = sink
        self._passage = np.empty(widest if any(map(_is_dense, sink.sections)) else 0, np.uint8)
        # Whether a gradient that is expected already begins the sum.
        self._begins = False
        # The key, where the part goes, and what to do when it has arrived. The actions must not refer to self: a cycle
        # would keep all arrays until the garbage collector runs, and the next round would need memory of its own.
        self._awaited: deque[tuple[str, memoryview, list[Callable[[], object]]]] = deque()

    def then(self, action: Callable[[], object]) -> None:
        """Runs ``action`` when everything that is expected so far has arrived."""
        if self._awaited:
            self._awaited[-1][2].append(action)
        else:
            action()

    def expect(self, gradient: BufferedGradient) -> None:
        """Adds a gradient when it has arrived."""
        names = part_keys(self._keys, gradient)
        sink = self._sink
        pieces = _dense_pieces(gradient) if self._begins or sink.number > 0 else None
        data = np.empty(gradient.nbytes if pieces is None else gradient.sparse_bytes, np.uint8)
        start = 0
        for number, (name, length) in enumerate(zip(names, gradient.lengths, strict=True)):
            if pieces is None or start < gradient.sparse_bytes:
                self._add(name, data[start : start + length])
            else:
                # It passes through the same memory as all others, and is added while it is still in the processor's
                # cache.
                place = self._passage[:length]
                self._add(name, place)
                for piece in pieces[number]:
                    self.then(partial(piece.add, sink, place))
            start += length
        self.then(partial(_add_rest if pieces else _add_whole, sink, gradient, data, names[0]))
        self._begins = True

    def _add(self, name: str, place: Array) -> None:
        self._awaited.append((name, place.data, []))

    def fetch(self, transport: Transport) -> None:
        """Fetches everything that is expected."""
        if self._awaited:
            transport.fetch(self)

    # Arrivals of fast_socket:

    def wanted(self) -> list[str]:
        """Returns the keys of the parts that have not arrived."""
        return [name for name, _, _ in self._awaited]

    def expected(self) -> memoryview:
        """Returns where the next part goes if it is as long as its header says."""
        return self._awaited[0][1]

    def begin(self, length: int) -> memoryview:
        """Returns where the next part goes, given its length in bytes, or -1 if there is none."""
        name, place, _ = self._awaited[0]
        _check_length(name, length, len(place))
        return place

    def finish(self) -> None:
        """Notes that the part has arrived."""
        _, _, actions = self._awaited.popleft()
        for action in actions:
            action()


def _is_dense(reducer: object) -> bool:
    return isinstance(reducer, DenseReducer)


@dataclass(slots=True)
class _Piece:
    """Consecutive elements of a dense section in a part.

    Attributes:
        section: the number of the section.
        dtype: the dtype of its elements.
        first: the place of the first element in the section.
        start: the first byte in the part.
        stop: the byte after the last one.
    """

    section: int
    dtype: np.dtype[Any]
    first: int
    start: int
    stop: int

    def add(self, reducer: RoundReducer, part: Array) -> None:
        """Adds the elements, given the bytes of the part."""
        section = reducer.sections[self.section]
        assert isinstance(section, DenseReducer)
        section.add_piece(self.first, part[self.start : self.stop].view(self.dtype))


def _dense_pieces(gradient: BufferedGradient) -> list[list[_Piece]] | None:
    """Returns what each part holds of dense sections; None if a part is cut as redisacc does not cut it."""
    every: list[list[_Piece]] = []
    start = 0
    for length in gradient.lengths:
        stop = start + length
        if start < gradient.sparse_bytes < stop:
            return None
        pieces = []
        for number, section in enumerate(gradient.sections):
            if section.is_sparse:
                continue
            offset, size = section.values[0], section.dtype.itemsize
            low, high = max(start, offset), min(stop, section.values[1])
            if low < high:
                if (low - offset) % size or (high - low) % size:
                    return None
                pieces.append(_Piece(number, section.dtype, (low - offset) // size, low - start, high - start))
        every.append(pieces)
        start = stop
    return every


def _add_whole(sink: GradientSink, gradient: BufferedGradient, data: Any, where: str) -> None:
    """Adds a gradient, given all its bytes: memory of our own, or immutable bytes."""
    ours = isinstance(data, np.ndarray)
    sections = [_checked(section, gradient.number, data, where, ours=ours) for section in gradient.sections]
    sink.add(Gradient(tuple(sections), gradient.number))


def _add_rest(reducer: RoundReducer, gradient: BufferedGradient, data: Array, where: str) -> None:
    """Adds the sparse sections of a gradient whose dense ones have been added, given their bytes, and counts it."""
    for section, of in zip(gradient.sections, reducer.sections, strict=True):
        if section.is_sparse:
            of.add(_checked(section, gradient.number, data, where, ours=True))
    reducer.number += gradient.number


def _fetch_inline(
    transport: Transport, of: RoundKeys, batch: list[BufferedGradient], known: Mapping[bytes, bytes]
) -> dict[str, bytes]:
    """Returns the bytes of inline gradients by id."""
    found = {gradient.id: known.get(gradient.id.encode()) for gradient in batch if gradient.nbytes}
    unknown = [name for name, data in found.items() if data is None]
    if unknown:
        asked = [unknown[start : start + INLINE_FIELDS] for start in range(0, len(unknown), INLINE_FIELDS)]
        for names, replies in zip(
            asked, transport.pipeline([("HMGET", of.inline, *ids) for ids in asked]), strict=True
        ):
            found.update(zip(names, replies, strict=True))
    inline = {}
    for gradient in batch:
        data = found.get(gradient.id, b"")
        _check_length(f"{of.inline} {gradient.id}", -1 if data is None else len(data), gradient.nbytes)
        inline[gradient.id] = data or b""
    return inline


def _checked(section: BufferedSection, number: int, data: Any, where: str, *, ours: bool) -> Section:
    """Returns a section of a gradient that is the sum of ``number``, checked."""
    found = section_view(section, data)
    indices, counts = found.indices, found.counts
    if indices is not None and len(indices):
        if indices[0] < 0 or not np.logical_and.reduce(indices[1:] > indices[:-1]):
            raise CorruptDataError(f"{where}: indices that are not ascending")
        if counts is not None and not ((counts >= 1) & (counts <= number)).all():
            raise CorruptDataError(f"{where}: counts of a sum of {number} gradients")
    found.ours = ours
    return found


def _check_lengths(transport: Transport, keys: Keys, batch: list[BufferedGradient]) -> None:
    """Compares headers with the lengths on the server, so that a forged header allocates no memory."""
    wanted = [(key, length) for g in batch for key, length in zip(part_keys(keys, g), g.lengths, strict=True)]
    for (key, length), actual in zip(wanted, transport.pipeline([("STRLEN", key) for key, _ in wanted]), strict=True):
        _check_length(key, actual or -1, length)


def _check_length(key: str, actual: Any, expected: int) -> None:
    if actual == -1:
        raise PartMissingError(key)
    if actual != expected:
        raise CorruptDataError(f"{key} has {actual} bytes, and its header says {expected}")
