"""Reads buffered gradients and adds them up as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from redisacc._data.gradient import Gradient
from redisacc._data.reducers import DenseReducer
from redisacc._data.validation import Array
from redisacc._format.buffered import COUNT, INDEX, BufferedGradient, PartMissingError, part_keys
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
    """Takes gradients one after the other, in order of arrival: a reducer, or a filter in front of one."""

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
                _add_inline(sink, gradient, inline[gradient.id], of)
            continue
        widest = max((length for gradient in large for length in gradient.value_lengths), default=0)
        arrivals = _Arrivals(keys, sink, np.empty(widest if isinstance(sink, DenseReducer) else 0, np.uint8))
        for gradient in batch:
            if gradient.inline:
                arrivals.then(partial(_add_inline, sink, gradient, inline[gradient.id], of))
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
    """Parts of gradients that are on their way, and what to do when each has arrived."""

    def __init__(self, keys: Keys, sink: GradientSink, passage: Array) -> None:
        self._keys = keys
        self._sink = sink
        self._passage = passage
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
        if (
            isinstance(sink, DenseReducer)
            and (self._begins or sink.number > 0)
            and all(length % gradient.dtype.itemsize == 0 for length in gradient.value_lengths)
        ):
            # Every part passes through the same memory and is added while it is still in the processor's cache.
            start = 0
            for name, length in zip(names, gradient.value_lengths, strict=True):
                place = self._passage[:length]
                self._add(name, place)
                self.then(partial(sink.add_piece, start, place.view(gradient.dtype)))
                start += length // gradient.dtype.itemsize
            self.then(partial(_count, sink, gradient.number))
            return
        arrays = [np.empty(sum(lengths), np.uint8) for lengths in gradient.sections]
        places = [
            array[start : start + length]
            for array, lengths in zip(arrays, gradient.sections, strict=True)
            for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)
        ]
        for name, place in zip(names, places, strict=True):
            self._add(name, place)
        self.then(partial(_add_whole, self._sink, gradient, arrays, names[0]))
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


def _count(reducer: DenseReducer, number: int) -> None:
    reducer.number += number


def _add_whole(sink: GradientSink, gradient: BufferedGradient, arrays: list[Array], where: str) -> None:
    indices, values = arrays[0].view(INDEX), arrays[2].view(gradient.dtype)
    counts = arrays[1].view(COUNT) if gradient.count_lengths else None
    sink.add(_checked(gradient, indices, counts, values, where, ours=True))


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


def _add_inline(sink: GradientSink, gradient: BufferedGradient, data: bytes, of: RoundKeys) -> None:
    first = sum(gradient.index_lengths)
    second = first + sum(gradient.count_lengths)
    indices = _elements(data, INDEX, 0, first)
    counts = _elements(data, COUNT, first, second) if gradient.count_lengths else None
    values = _elements(data, gradient.dtype, second, len(data))
    sink.add(_checked(gradient, indices, counts, values, f"{of.inline} {gradient.id}", ours=False))


def _elements(data: bytes, dtype: np.dtype[Any], start: int, stop: int) -> Array:
    # frombuffer refuses to make an array without elements.
    return np.frombuffer(data, dtype, (stop - start) // dtype.itemsize, start) if stop > start else np.empty(0, dtype)


def _checked(
    gradient: BufferedGradient, indices: Array, counts: Array | None, values: Array, where: str, *, ours: bool
) -> Gradient:
    """Returns the gradient that these arrays make up, checked."""
    if len(indices) and (indices[0] < 0 or not np.logical_and.reduce(indices[1:] > indices[:-1])):
        raise CorruptDataError(f"{where}: indices that are not ascending")
    if counts is not None and not ((counts >= 1) & (counts <= gradient.number)).all():
        raise CorruptDataError(f"{where}: counts of a sum of {gradient.number} gradients")
    return Gradient(values.reshape(gradient.shape), indices, counts, gradient.number, ours=ours)


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
