"""Adds up what a round holds: the sums that the server formed in place, and the gradients that it holds whole."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from redisacc._arguments import Array
from redisacc._dtypes import EXACT_IN_DOUBLE, DType
from redisacc._parked import Gradient
from redisacc.errors import CorruptDataError

_COUNT = np.dtype("<u8")


# Gradients hold what they hold: infinities and overflow are results, not mistakes of ours.
def _ieee() -> np.errstate:
    return np.errstate(all="ignore")


def _parse_rows(fields: Mapping[bytes, bytes], where: str) -> tuple[Array, Array, list[bytes]]:
    """Indices, counts, and packed rows of a ``sums`` hash."""
    for field, row in fields.items():
        if not (field.isdigit() and len(field) <= 19 and (field == b"0" or field[0] != ord("0"))):
            raise CorruptDataError(f"{where}: {field[:64]!r} is no index")
        if len(row) < _COUNT.itemsize:
            raise CorruptDataError(f"{where}: the row of index {field.decode()} has {len(row)} bytes")
    try:
        indices = np.array([int(field) for field in fields], np.int64)
    except OverflowError:
        raise CorruptDataError(f"{where}: an index above 2**63 - 1") from None
    rows = list(fields.values())
    counts = np.frombuffer(b"".join(row[:8] for row in rows), _COUNT)
    return indices, counts, rows


def _from_packed(data: bytes, dtype: DType, where: str) -> Array:
    """Packed real numbers as elements of the sum dtype, flat."""
    numbers = np.frombuffer(data, dtype.in_place_dtype)
    if dtype.is_integer:
        if not (np.abs(numbers) <= EXACT_IN_DOUBLE).all() or (numbers != np.trunc(numbers)).any():
            raise CorruptDataError(f"{where}: a sum of {dtype.name} that is no exact integer")
        return numbers.astype(dtype.sum)
    elements: Array = numbers.view(dtype.sum.newbyteorder("<"))
    return elements


def _mean(total: Array, counts: Any, dtype: DType) -> Array:
    """Divides by counts, which broadcast against the total."""
    if dtype.is_integer:
        divisor = np.asarray(counts).astype(dtype.sum)
        floor: Array = total // divisor
        # numpy rounds down; an integer mean truncates toward zero.
        mean: Array = floor + ((total < 0) & (floor * divisor != total))
        return mean
    if dtype.components == 2:
        # A complex division by a real count would be rounded more than once.
        real = dtype.sum.type(0).real.dtype
        pairs = np.ascontiguousarray(total)[..., np.newaxis].view(real)
        divided = pairs / np.asarray(counts).astype(real)[..., np.newaxis]
        return np.ascontiguousarray(divided).view(dtype.sum).reshape(total.shape)
    return np.asarray(total / np.asarray(counts).astype(dtype.sum))


class DenseTotal:
    """The sum of dense gradients of one shape."""

    def __init__(self, dtype: DType, shape: tuple[int, ...], *, chunk: int, where: str) -> None:
        self._dtype = dtype
        self.shape = shape
        self._chunk = chunk
        self._where = where
        self._sum: Array | None = None
        # Gradients in it.
        self.number = 0

    def add_sums(self, fields: Mapping[bytes, bytes]) -> None:
        """Adds what was summed in place: chunk number → count and packed chunk."""
        if not fields:
            return
        indices, counts, rows = _parse_rows(fields, self._where)
        order = np.argsort(indices)
        size = math.prod(self.shape)
        if not np.array_equal(indices[order], np.arange(math.ceil(size / self._chunk))):
            raise CorruptDataError(f"{self._where} hasn't the chunks of a gradient of {size} elements")
        if (counts != counts[0]).any() or counts[0] > EXACT_IN_DOUBLE:
            raise CorruptDataError(f"{self._where}: chunks that were held by different numbers of gradients")
        data = b"".join([rows[i][_COUNT.itemsize :] for i in order])
        if len(data) != size * self._dtype.components * self._dtype.in_place_dtype.itemsize:
            raise CorruptDataError(f"{self._where} has {len(data)} bytes for {size} elements of {self._dtype.name}")
        self._sum = _from_packed(data, self._dtype, self._where).reshape(self.shape)
        self.number += int(counts[0])

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient."""
        self.number += gradient.number
        if self._sum is None:
            # Not added to zeros: -0.0 stays -0.0.
            self._sum = gradient.values.astype(self._dtype.sum)
            return
        if not self._sum.flags.writeable:
            self._sum = self._sum.copy()
        with _ieee():
            np.add(self._sum, gradient.values, out=self._sum, casting="unsafe")

    def sum(self) -> Gradient:
        """What was added, as one gradient of the sum dtype."""
        total = np.zeros(self.shape, self._dtype.sum) if self._sum is None else self._sum
        return Gradient(total, number=self.number)

    def result(self, reduction_type: str, num_accumulated: int) -> Array:
        """The sum, or the sum divided by the number of gradients, in the accumulator's dtype."""
        total = np.zeros(self.shape, self._dtype.sum) if self._sum is None else self._sum
        with _ieee():
            if reduction_type == "MEAN":
                total = _mean(total, num_accumulated, self._dtype)
            return _returned(total, self._dtype)


class SparseTotal:
    """The sum of sparse gradients whose rows have one shape."""

    def __init__(self, dtype: DType, shape: tuple[int, ...], *, bound: int | None, where: str) -> None:
        self._dtype = dtype
        self._shape = shape
        self._bound = bound
        self._where = where
        self._gradients: list[Gradient] = []
        self._counts: list[Array] = []
        # Gradients in it, but for those that were summed in place.
        self.number = 0

    def add_sums(self, fields: Mapping[bytes, bytes]) -> None:
        """Adds what was summed in place: index → count and packed row."""
        if not fields:
            return
        indices, counts, rows = _parse_rows(fields, self._where)
        if (counts < 1).any() or (counts > EXACT_IN_DOUBLE).any():
            raise CorruptDataError(f"{self._where}: an index that was held by no gradient")
        expected = (
            _COUNT.itemsize + math.prod(self._shape) * self._dtype.components * self._dtype.in_place_dtype.itemsize
        )
        if any(len(row) != expected for row in rows):
            raise CorruptDataError(f"{self._where}: a row of another length than {expected} bytes")
        order = np.argsort(indices)
        data = b"".join([rows[i][_COUNT.itemsize :] for i in order])
        values = _from_packed(data, self._dtype, self._where).reshape(len(rows), *self._shape)
        self._gradients.append(Gradient(values, indices[order]))
        self._counts.append(counts[order])

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient; its indices are strictly increasing."""
        assert gradient.indices is not None
        self.number += gradient.number
        self._gradients.append(gradient)
        self._counts.append(np.ones(len(gradient.indices), np.uint64) if gradient.counts is None else gradient.counts)

    def result(self, reduction_type: str, num_accumulated: int) -> tuple[Array, Array]:
        """Sorted unique indices, and for each its sum, or that divided by the number of gradients that held it.

        Raises:
            CorruptDataError: an index that no gradient may have, or one that more gradients held than there were.
        """
        indices, total, counts = self._add_up()
        with _ieee():
            if len(indices) and self._bound is not None and indices[-1] >= self._bound:
                raise CorruptDataError(f"{self._where}: index {indices[-1]}, where dimension 0 is {self._bound}")
            if len(counts) and counts.max() > num_accumulated:
                raise CorruptDataError(
                    f"{self._where}: an index that {counts.max()} gradients held, of {num_accumulated}"
                )
            if reduction_type == "MEAN":
                total = _mean(total, counts.reshape(-1, *[1] * len(self._shape)), self._dtype)
            return indices, _returned(total, self._dtype)

    def sum(self) -> Gradient:
        """What was added, as one gradient of the sum dtype."""
        indices, total, counts = self._add_up()
        return Gradient(total, indices, counts, self.number)

    def _add_up(self) -> tuple[Array, Array, Array]:
        every = [gradient.indices for gradient in self._gradients if gradient.indices is not None]
        indices, places = np.unique(np.concatenate(every or [np.empty(0, np.int64)]), return_inverse=True)
        total = np.empty((len(indices), *self._shape), self._dtype.sum)
        counts = np.zeros(len(indices), np.uint64)
        start = 0
        with _ieee():
            for gradient, count in zip(self._gradients, self._counts, strict=True):
                at = places[start : start + len(count)]
                start += len(count)
                # No index stands twice in a gradient, so rows can be added through the places. A row's first
                # gradient isn't added to zeros: -0.0 stays -0.0.
                known = counts[at] > 0
                if known.any():
                    total[at[known]] += gradient.values[known].astype(self._dtype.sum, copy=False)
                total[at[~known]] = gradient.values[~known]
                counts[at] += count
        return indices.astype(np.int64, copy=False), total, counts


def _returned(total: Array, dtype: DType) -> Array:
    """In the accumulator's dtype and byte order, as memory of the caller's own."""
    result = np.ascontiguousarray(total.astype(dtype.storage, copy=False)).reshape(total.shape)
    return result if result.flags.writeable else result.copy()
