"""Reads parked gradients and adds them up as they arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from redisacc._arguments import Array
from redisacc._keys import Keys, RoundKeys
from redisacc._link import Link
from redisacc._parked import COUNT, INDEX, Gradient, Parked, PartMissing, part_keys
from redisacc.errors import CorruptDataError

# What is fetched in one round trip, about.
FETCH_BYTES = 16 * 2**20
FETCH_GRADIENTS = 1000

# Small gradients that one command fetches: none shall hold the server long.
SMALL_FIELDS = 16

# Headers that announce more than this are compared with what the server has before memory is set aside.
TRUSTED_BYTES = 64 * 2**20

_NOTHING: Mapping[bytes, bytes] = MappingProxyType({})


class Total(Protocol):
    """What gradients are added to: ``DenseTotal`` or ``SparseTotal``.

    Attributes:
        takes_pieces: whether gradients after the first may be added piece by piece.
        number: how many gradients are in it.
    """

    takes_pieces: bool
    number: int

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient; may keep its arrays until the sum is asked for."""

    def add_piece(self, start: int, elements: Array) -> None:
        """Adds consecutive elements of a gradient, from element ``start`` on, and keeps nothing."""


def add_parked(
    link: Link,
    keys: Keys,
    of: RoundKeys,
    parked: Sequence[Parked],
    *,
    total: Total,
    known: Mapping[bytes, bytes] = _NOTHING,
) -> None:
    """Adds parked gradients in the order given.

    Args:
        of: the round that they are in.
        known: fields of the round's ``small`` hash that have been read already.

    Raises:
        PartMissing: a part isn't there. The total is of no more use.
        CorruptDataError: a part has another length than its header says, or indices that aren't ascending. Likewise.
    """
    for batch in _batches(parked):
        large = [gradient for gradient in batch if not gradient.small]
        if sum(gradient.nbytes for gradient in large) > TRUSTED_BYTES:
            _check_lengths(link, keys, large)
        small = _fetch_small(link, of, [gradient for gradient in batch if gradient.small], known)
        if not large:
            for gradient in batch:
                _add_small(total, gradient, small[gradient.id], of)
            continue
        widest = max((length for gradient in large for length in gradient.value_lengths), default=0)
        arrivals = _Arrivals(keys, total, np.empty(widest if total.takes_pieces else 0, np.uint8))
        for gradient in batch:
            if gradient.small:
                arrivals.then(partial(_add_small, total, gradient, small[gradient.id], of))
            else:
                arrivals.expect(gradient)
        arrivals.fetch(link)


def _batches(parked: Sequence[Parked]) -> Iterator[list[Parked]]:
    batch: list[Parked] = []
    size = 0
    for gradient in parked:
        batch.append(gradient)
        size += gradient.nbytes
        if size >= FETCH_BYTES or len(batch) >= FETCH_GRADIENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Arrivals:
    """Parts of large gradients that are on their way, and what is done when each has come."""

    def __init__(self, keys: Keys, total: Total, passage: Array) -> None:
        self._keys = keys
        self._total = total
        self._passage = passage
        # Whether the sum will have begun when what is expected next comes.
        self._begun = total.number > 0
        # Key, where it goes, and what is done when it has come. That must not refer to us: a cycle would hold all these
        # arrays until the garbage collector comes, and the next round would need memory of its own.
        self._awaited: deque[tuple[str, memoryview, list[Callable[[], object]]]] = deque()

    def then(self, action: Callable[[], object]) -> None:
        """Does that when all that is expected so far has come."""
        if self._awaited:
            self._awaited[-1][2].append(action)
        else:
            action()

    def expect(self, gradient: Parked) -> None:
        """Adds that gradient when it has come."""
        names = part_keys(self._keys, gradient)
        self._begun = self._begun or self._total.number > 0
        if (
            self._total.takes_pieces
            and self._begun
            and all(length % gradient.dtype.itemsize == 0 for length in gradient.value_lengths)
        ):
            # Through the same memory, part after part, while each is still in the processor's cache.
            start = 0
            for name, length in zip(names, gradient.value_lengths, strict=True):
                place = self._passage[:length]
                self._add(name, place)
                self.then(partial(self._total.add_piece, start, place.view(gradient.dtype)))
                start += length // gradient.dtype.itemsize
            self.then(partial(_count, self._total, gradient.number))
            return
        arrays = [np.empty(sum(lengths), np.uint8) for lengths in gradient.sections]
        places = [
            array[start : start + length]
            for array, lengths in zip(arrays, gradient.sections, strict=True)
            for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)
        ]
        for name, place in zip(names, places, strict=True):
            self._add(name, place)
        self.then(partial(_add_whole, self._total, gradient, arrays, names[0]))
        self._begun = True

    def _add(self, name: str, place: Array) -> None:
        self._awaited.append((name, place.data, []))

    def fetch(self, link: Link) -> None:
        """Lets it all come."""
        if self._awaited:
            link.fetch(self)

    # What a link asks of who wants strings.

    def wanted(self) -> list[str]:
        """The keys of what hasn't come yet."""
        return [name for name, _, _ in self._awaited]

    def expected(self) -> memoryview:
        """Where the next string goes if it is as long as its header says."""
        return self._awaited[0][1]

    def begin(self, length: int) -> memoryview:
        """Where the next string goes, which has that length; -1: there is none."""
        name, place, _ = self._awaited[0]
        _check_length(name, length, len(place))
        return place

    def finish(self) -> None:
        """It has come."""
        _, _, actions = self._awaited.popleft()
        for action in actions:
            action()


def _count(total: Total, number: int) -> None:
    total.number += number


def _add_whole(total: Total, gradient: Parked, arrays: list[Array], where: str) -> None:
    indices, values = arrays[0].view(INDEX), arrays[2].view(gradient.dtype)
    counts = arrays[1].view(COUNT) if gradient.count_lengths else None
    total.add(_checked(gradient, indices, counts, values, where, ours=True))


def _fetch_small(link: Link, of: RoundKeys, batch: list[Parked], known: Mapping[bytes, bytes]) -> dict[str, bytes]:
    """The bytes of small gradients by id."""
    found = {gradient.id: known.get(gradient.id.encode()) for gradient in batch if gradient.nbytes}
    unknown = [name for name, data in found.items() if data is None]
    if unknown:
        asked = [unknown[start : start + SMALL_FIELDS] for start in range(0, len(unknown), SMALL_FIELDS)]
        for names, replies in zip(asked, link.pipeline([("HMGET", of.small, *ids) for ids in asked]), strict=True):
            found.update(zip(names, replies, strict=True))
    small = {}
    for gradient in batch:
        data = found.get(gradient.id, b"")
        _check_length(f"{of.small} {gradient.id}", -1 if data is None else len(data), gradient.nbytes)
        small[gradient.id] = data or b""
    return small


def _add_small(total: Total, gradient: Parked, data: bytes, of: RoundKeys) -> None:
    first = sum(gradient.index_lengths)
    second = first + sum(gradient.count_lengths)
    indices = _elements(data, INDEX, 0, first)
    counts = _elements(data, COUNT, first, second) if gradient.count_lengths else None
    values = _elements(data, gradient.dtype, second, len(data))
    total.add(_checked(gradient, indices, counts, values, f"{of.small} {gradient.id}", ours=False))


def _elements(data: bytes, dtype: np.dtype[Any], start: int, stop: int) -> Array:
    # frombuffer refuses to make an array without elements.
    return np.frombuffer(data, dtype, (stop - start) // dtype.itemsize, start) if stop > start else np.empty(0, dtype)


def _checked(
    gradient: Parked, indices: Array, counts: Array | None, values: Array, where: str, *, ours: bool
) -> Gradient:
    """A gradient of its indices, counts and elements."""
    if len(indices) and (indices[0] < 0 or not np.logical_and.reduce(indices[1:] > indices[:-1])):
        raise CorruptDataError(f"{where}: indices that aren't ascending")
    if counts is not None and not ((counts >= 1) & (counts <= gradient.number)).all():
        raise CorruptDataError(f"{where}: counts of a sum of {gradient.number} gradients")
    return Gradient(values.reshape(gradient.shape), indices, counts, gradient.number, ours=ours)


def _check_lengths(link: Link, keys: Keys, batch: list[Parked]) -> None:
    """Asks the server for the lengths: a forged header must not make us allocate what isn't there."""
    wanted = [(key, length) for g in batch for key, length in zip(part_keys(keys, g), g.lengths, strict=True)]
    for (key, length), actual in zip(wanted, link.pipeline([("STRLEN", key) for key, _ in wanted]), strict=True):
        _check_length(key, actual or -1, length)


def _check_length(key: str, actual: Any, expected: int) -> None:
    if actual == -1:
        raise PartMissing(key)
    if actual != expected:
        raise CorruptDataError(f"{key} has {actual} bytes, and its header says {expected}")
