"""Adds up what a round holds: the sums that the server formed in place, and the gradients that it holds whole."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from redisacc._arguments import Array
from redisacc._dtypes import EXACT_IN_DOUBLE, DType
from redisacc._parked import Gradient
from redisacc.errors import CorruptDataError

_COUNT = np.dtype("<u8")
# Of the largest int64.
_DIGITS = 19
# The field beside the rows: lua/include/sums_total.lua.
_TOTAL = b"total"
_TOTAL_TEXT = re.compile(rb"([0-9]{1,15}) ([0-9]{1,15})")

# Gradients of at least so many bytes wait before they are added to a smaller sum.
WINDOW_BYTES = 16 * 2**20

# So few rows are sorted in Python: with cold caches numpy's code took longer.
FEW = 512

# Up to so many bytes all rows are divided, also those that only one gradient held: to find the others took longer.
SMALL_BYTES = 64 * 1024

# The union of indices is found through a table of all rows if that has at most so many entries for each index.
DENSE_UNION = 32


# Gradients hold what they hold: infinities and overflow are results, not mistakes of ours.
def _ieee() -> np.errstate:
    return np.errstate(all="ignore")


def _parse_total(fields: Mapping[bytes, bytes], where: str) -> tuple[dict[bytes, bytes], int, int]:
    """The rows of a ``sums`` hash, and of how many gradients and how many of their rows they must be the sum."""
    rows = dict(fields)
    total = rows.pop(_TOTAL, b"")
    match = _TOTAL_TEXT.fullmatch(total)
    if match is None:
        raise CorruptDataError(f"{where}: total is {total[:64]!r}: the hash was evicted or removed")
    return rows, int(match[1]), int(match[2])


def _check_held(held: int, wanted: int, where: str) -> None:
    if held != wanted:
        raise CorruptDataError(f"{where}: of {wanted} rows of gradients only {held} were found: evicted or removed")


def _parse_indices(fields: Mapping[bytes, bytes], where: str) -> list[int]:
    """The indices that a ``sums`` hash has as its fields, and nothing else than their usual decimal text."""
    usual = max(map(len, fields)) <= _DIGITS
    if usual:
        try:
            numbers = list(map(int, fields))
        except ValueError:
            usual = False
        else:
            # What Python writes of a list, but for its brackets.
            usual = str(numbers)[1:-1].encode() == b", ".join(fields) and min(numbers) >= 0
    if not usual:
        raise CorruptDataError(f"{where}: {next(filter(_is_no_index, fields))[:64]!r} is no index")
    return numbers


def _order(numbers: list[int]) -> list[int]:
    """The places of numbers, in ascending order of these."""
    if len(numbers) <= FEW:
        return sorted(range(len(numbers)), key=numbers.__getitem__)
    order: list[int] = np.array(numbers).argsort().tolist()
    return order


def _as_int64(numbers: list[int], where: str) -> Array:
    try:
        return np.array(numbers, np.int64)
    except OverflowError:
        raise CorruptDataError(f"{where}: an index above 2**63 - 1") from None


def _is_no_index(field: bytes) -> bool:
    return not field.isdigit() or len(field) > _DIGITS or str(int(field)).encode() != field


def _from_packed(data: bytearray | Array, dtype: DType, where: str) -> Array:
    """Packed real numbers as elements of the sum dtype, flat."""
    numbers = np.frombuffer(data, dtype.in_place_dtype)
    if dtype.is_integer:
        if not (np.abs(numbers) <= EXACT_IN_DOUBLE).all() or (numbers != np.trunc(numbers)).any():
            raise CorruptDataError(f"{where}: a sum of {dtype.name} that is no exact integer")
        return numbers.astype(dtype.sum)
    elements: Array = numbers.view(dtype.sum.newbyteorder("<"))
    return elements


def _column(counts: Array, rows: Array) -> Array:
    return counts.reshape(-1, *[1] * (rows.ndim - 1))


def _mean(total: Array, counts: Any, dtype: DType) -> Array:
    """Divides by counts, which broadcast against the total; in its memory where that is possible."""
    if dtype.is_integer:
        divisor = np.asarray(counts).astype(dtype.sum)
        floor: Array = total // divisor
        # numpy rounds down; an integer mean truncates toward zero.
        mean: Array = floor + ((total < 0) & (floor * divisor != total))
        return mean
    real = dtype.sum.type(0).real.dtype
    divisor = np.asarray(counts, real)
    # A complex division by a real count would be rounded more than once: each part is divided for itself.
    for part in (total.real, total.imag) if dtype.components == 2 else (total,):
        np.divide(part, divisor, out=part)
    return total


def _sum_of_one(gradient: Gradient, dtype: DType) -> Array:
    """A gradient in the sum dtype, as memory that may be written to. Not added to zeros: -0.0 stays -0.0."""
    values = gradient.values
    if gradient.ours and values.dtype == dtype.sum and values.flags.c_contiguous:
        return values
    return values.astype(dtype.sum, order="C")


class DenseTotal:
    """The sum of dense gradients of one shape."""

    takes_pieces = True

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
        fields, number, held = _parse_total(fields, self._where)
        if not fields:
            _check_held(0, held, self._where)
            if math.prod(self.shape):
                raise CorruptDataError(f"{self._where} hasn't the chunks of a gradient of shape {list(self.shape)}")
            self.add(Gradient(np.zeros(self.shape, self._dtype.sum), number=number, ours=True))
            return
        numbers, rows = _parse_indices(fields, self._where), list(fields.values())
        order = _order(numbers)
        size = math.prod(self.shape)
        # A forged shape may promise any number of chunks: none of them is counted up.
        if len(order) != math.ceil(size / self._chunk) or [numbers[i] for i in order] != list(range(len(order))):
            raise CorruptDataError(f"{self._where} hasn't the chunks of a gradient of {size} elements")
        head = number.to_bytes(_COUNT.itemsize, "little")
        if any(row[: _COUNT.itemsize] != head for row in rows):
            raise CorruptDataError(f"{self._where}: chunks that were held by different numbers of gradients")
        data = bytearray().join(rows[i][_COUNT.itemsize :] for i in order)
        if len(data) != size * self._dtype.components * self._dtype.in_place_dtype.itemsize:
            raise CorruptDataError(f"{self._where} has {len(data)} bytes for {size} elements of {self._dtype.name}")
        sums = Gradient(_from_packed(data, self._dtype, self._where).reshape(self.shape), number=number, ours=True)
        self.add(sums)

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient."""
        self.number += gradient.number
        if self._sum is None:
            self._sum = _sum_of_one(gradient, self._dtype)
            return
        with _ieee():
            np.add(self._sum, gradient.values, out=self._sum, casting="unsafe")

    def add_piece(self, start: int, elements: Array) -> None:
        """Adds consecutive elements, from element ``start`` on."""
        assert self._sum is not None
        piece = self._sum.reshape(-1)[start : start + len(elements)]
        with _ieee():
            np.add(piece, elements, out=piece, casting="unsafe")

    def sum(self) -> Gradient:
        """What was added, as one gradient of the sum dtype."""
        total = np.zeros(self.shape, self._dtype.sum) if self._sum is None else self._sum
        return Gradient(total, number=self.number)

    def result(self, reduction_type: str, num_accumulated: int) -> Array:
        """The sum, or the sum divided by the number of gradients, in the accumulator's dtype."""
        total = np.zeros(self.shape, self._dtype.sum) if self._sum is None else self._sum
        with _ieee():
            if reduction_type == "MEAN" and num_accumulated > 1:
                total = _mean(total, num_accumulated, self._dtype)
            return _returned(total, self._dtype)


class SparseTotal:
    """The sum of sparse gradients whose rows have one shape.

    Gradients wait until they are as large as the sum is, and are then added at once: that takes time in proportion to
    what is added, however many gradients there are and whether their indices are the same or different, and memory
    for two sums and the gradients that wait.
    """

    # Rows of several gradients are merged at once.
    takes_pieces = False

    def __init__(self, dtype: DType, shape: tuple[int, ...], *, bound: int | None, where: str) -> None:
        self._dtype = dtype
        self._shape = shape
        self._bound = bound
        self._where = where
        # The sum comes first, once there is one.
        self._waiting: list[Gradient] = []
        self._bytes = 0
        self._sum_bytes = 0
        # Gradients in it.
        self.number = 0

    def add_sums(self, fields: Mapping[bytes, bytes]) -> None:
        """Adds what was summed in place: index → count and packed row."""
        if not fields:
            return
        rows, number, held = _parse_total(fields, self._where)
        self.number += number
        _check_held(self.add_rows(rows, number), held, self._where)

    def add_rows(self, fields: Mapping[bytes, bytes], number: int) -> int:
        """Adds some of the rows that were summed in place, none of them by more than ``number`` gradients.

        Returns:
            Of how many rows of gradients they are the sum.
        """
        if not fields:
            return 0
        numbers = _parse_indices(fields, self._where)
        expected = (
            _COUNT.itemsize + math.prod(self._shape) * self._dtype.components * self._dtype.in_place_dtype.itemsize
        )
        if set(map(len, fields.values())) != {expected}:
            raise CorruptDataError(f"{self._where}: a row of another length than {expected} bytes")
        order = _order(numbers)
        stored = list(fields.values())
        indices = _as_int64([numbers[i] for i in order], self._where)
        rows = np.frombuffer(b"".join([stored[i] for i in order]), np.uint8).reshape(len(order), expected)
        counts = rows[:, : _COUNT.itemsize].copy().view(_COUNT).reshape(-1)
        # As Python's integers, of which no sum wraps.
        held = counts.tolist()
        if min(held) < 1 or max(held) > number:
            raise CorruptDataError(f"{self._where}: an index that was held by no gradient, or by more than there were")
        packed = rows[:, _COUNT.itemsize :].copy().reshape(-1)
        values = _from_packed(packed, self._dtype, self._where).reshape(len(indices), *self._shape)
        self._take_in(Gradient(values, indices, counts, number, ours=True))
        return sum(held)

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient; its indices are strictly increasing."""
        self.number += gradient.number
        self._take_in(gradient)

    def add_piece(self, start: int, elements: Array) -> None:
        """Isn't asked for."""
        raise NotImplementedError

    def _take_in(self, gradient: Gradient) -> None:
        self._waiting.append(gradient)
        self._bytes += gradient.nbytes
        if self._bytes > self._sum_bytes + max(self._sum_bytes // 2, WINDOW_BYTES):
            self._add_up()

    def result(self, reduction_type: str, num_accumulated: int) -> tuple[Array, Array]:
        """Sorted unique indices, and for each its sum, or that divided by the number of gradients that held it.

        Raises:
            CorruptDataError: an index that no gradient may have, or one that more gradients held than there were.
        """
        indices, total, counts = self._add_up()
        if len(indices) and self._bound is not None and indices[-1] >= self._bound:
            raise CorruptDataError(f"{self._where}: index {indices[-1]}, where dimension 0 is {self._bound}")
        # Not .max(), which goes through a function in Python.
        most = np.maximum.reduce(counts, initial=0)
        if most > num_accumulated:
            raise CorruptDataError(f"{self._where}: an index that {most} gradients held, of {num_accumulated}")
        with _ieee():
            if reduction_type == "MEAN" and num_accumulated > 1:
                total = self._mean_of_rows(total, counts)
            return indices, _returned(total, self._dtype)

    def _mean_of_rows(self, total: Array, counts: Array) -> Array:
        if total.nbytes <= SMALL_BYTES:
            return _mean(total, _column(counts, total), self._dtype)
        (several,) = (counts > 1).nonzero()
        if 2 * len(several) > len(counts):
            return _mean(total, _column(counts, total), self._dtype)
        # Dividing by 1 changes nothing.
        rows = _mean(total.take(several, axis=0), _column(counts.take(several), total), self._dtype)
        _put_rows(total, several, rows)
        return total

    def sum(self) -> Gradient:
        """What was added, as one gradient of the sum dtype."""
        indices, total, counts = self._add_up()
        return Gradient(total, indices, counts, self.number)

    def _add_up(self) -> tuple[Array, Array, Array]:
        if len(self._waiting) == 1:
            (gradient,) = self._waiting
            indices = _indices_of(gradient).astype(np.int64, copy=not gradient.ours)
            total = _sum_of_one(gradient, self._dtype)
            counts = np.ones(len(indices), np.uint64) if gradient.counts is None else gradient.counts
            return self._summed(indices, total, counts)
        indices, places = _union([_indices_of(gradient) for gradient in self._waiting], self._bound)
        total = np.empty((len(indices), *self._shape), self._dtype.sum)
        counts = np.zeros(len(indices), np.uint64)
        with _ieee():
            for gradient, at in zip(self._waiting, places, strict=True):
                _add_rows(total, counts, gradient, at)
        return self._summed(indices, total, counts)

    def _summed(self, indices: Array, total: Array, counts: Array) -> tuple[Array, Array, Array]:
        whole = Gradient(total, indices, counts, max(self.number, 1), ours=True)
        self._waiting, self._bytes, self._sum_bytes = [whole], whole.nbytes, whole.nbytes
        return indices, total, counts


def _indices_of(gradient: Gradient) -> Array:
    assert gradient.indices is not None
    return gradient.indices


def _add_rows(total: Array, counts: Array, gradient: Gradient, at: Array) -> None:
    """Adds a gradient's rows at their places, of which none stands twice; where the count is 0 the total is undefined.

    A row that comes for the first time is only copied: that takes a third of what an addition through places takes,
    and -0.0 stays -0.0.
    """
    values = gradient.values.astype(total.dtype, copy=False)
    before = counts.take(at)
    (again,) = before.nonzero()
    if len(again) == len(total):
        # It holds every index there is, and none is new.
        total += values
    elif len(again):
        places = at.take(again)
        sums = total.take(places, axis=0)
        sums += values.take(again, axis=0)
        _put_rows(total, at, values)
        _put_rows(total, places, sums)
    else:
        _put_rows(total, at, values)
    counts.put(at, before + (1 if gradient.counts is None else gradient.counts))


def _put_rows(total: Array, at: Array, rows: Array) -> None:
    """``total[at] = rows``, each row as one piece of memory: that takes half as long."""
    assert total.flags.c_contiguous
    assert total.dtype == rows.dtype
    row_bytes = rows.itemsize * math.prod(rows.shape[1:])
    if row_bytes:
        row = np.dtype((np.void, row_bytes))
        flat = np.ascontiguousarray(rows).reshape(-1)
        total.reshape(-1).view(row).put(at, flat.view(row))


def _union(every: list[Array], bound: int | None) -> tuple[Array, list[Array]]:
    """The sorted union of ascending index vectors, and for each vector the places of its indices in it."""
    if not every:
        return np.empty(0, np.int64), []
    if len(every) == 1:
        return every[0].astype(np.int64, copy=False), [np.arange(len(every[0]))]
    size = sum(map(len, every))
    if bound is not None and bound <= DENSE_UNION * size and all(len(i) == 0 or i[-1] < bound for i in every):
        # A table over all indices costs less than sorting.
        present = np.zeros(bound, bool)
        for indices in every:
            present[indices] = True
        (union,) = present.nonzero()
        # What stands beside the union is never looked up.
        place = np.empty(bound, np.intp)
        place[union] = np.arange(len(union))
        return union, [place.take(indices) for indices in every]
    union, inverse = np.unique(np.concatenate(every), return_inverse=True)
    return union, np.split(inverse, np.cumsum([len(indices) for indices in every])[:-1])


def _returned(total: Array, dtype: DType) -> Array:
    """In the accumulator's dtype and byte order, as memory of the caller's own."""
    result = total if total.dtype == dtype.storage else total.astype(dtype.storage)
    if result.flags.c_contiguous and result.flags.writeable:
        return result
    return np.array(result, order="C")
