"""Sums gradients in numpy, and divides the sum for a mean."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from redisacc._arrays.dtypes import DType
from redisacc._arrays.gradient import Gradient, Section
from redisacc._arrays.validation import Array
from redisacc.errors import CorruptDataError

# Sections wait until they have at least this many bytes together before they are added to a smaller sum.
WINDOW_BYTES = 16 * 2**20

# Up to this many bytes, all rows are divided, even those that only one gradient held: finding the others took longer.
DIVIDE_ALL_BYTES = 64 * 1024

# Sums of weights may differ by this share of them if they were formed in different orders.
ROUNDING = 1e-9

# The union of indices is found through a table of all rows if the table has at most this many entries for each index.
DENSE_UNION = 32


# Infinities and overflow come from the callers' gradients: they are results, and no reason for numpy to warn.
_ieee = partial(np.errstate, all="ignore")


def _column(counts: Array, rows: Array) -> Array:
    return counts.reshape(-1, *[1] * (rows.ndim - 1))


def _mean(total: Array, counts: Any, dtype: DType) -> Array:
    """Divides a total by counts that broadcast against it, in the memory of the total where that is possible."""
    if dtype.is_integer:
        divisor = np.asarray(counts).astype(dtype.sum)
        floor: Array = total // divisor
        # numpy rounds down; an integer mean truncates toward zero.
        mean: Array = floor + ((total < 0) & (floor * divisor != total))
        return mean
    real = dtype.sum.type(0).real.dtype
    divisor = np.asarray(counts, real)
    for part in _real_parts(total):
        np.divide(part, divisor, out=part)
    return total


def _scaled(values: Array, factor: float, dtype: DType, out: Array | None = None) -> Array:
    """Returns values multiplied by a factor in the sum dtype, which rounds the factor and each product once.

    Args:
        values: the values.
        factor: a weight.
        dtype: the element type.
        out: where the products go; None means new memory.
    """
    widened = values.astype(dtype.sum, order="C", copy=False)
    products = np.empty(widened.shape, dtype.sum) if out is None else out
    real = dtype.sum.type(0).real.dtype
    with _ieee():
        for part, to in zip(_real_parts(widened), _real_parts(products), strict=True):
            np.multiply(part, real.type(factor), out=to)
    return products


def _real_parts(values: Array) -> tuple[Array, ...]:
    """Returns values as real numbers: real and imaginary parts. A complex operation would round more than once."""
    return (values.real, values.imag) if values.dtype.kind == "c" else (values,)


def _sum_of_one(section: Section, factor: float, dtype: DType) -> Array:
    """Returns the values of a section, multiplied by a factor, in the sum dtype, in memory that may be written to.

    They are not added to zeros, so -0.0 stays -0.0.
    """
    values = section.values
    if factor != 1:
        return _scaled(values, factor, dtype)
    if section.ours and values.dtype == dtype.sum and values.flags.c_contiguous:
        return values
    return values.astype(dtype.sum, order="C")


class DenseSum:
    """The sum of dense sections of one shape.

    Args:
        dtype: the element type.
        shape: the shape of each section.
        has_weights: whether sections are multiplied by their weights.

    Attributes:
        shape: the shape of each section.
        dtype: the dtype of the sum.
    """

    def __init__(self, dtype: DType, shape: tuple[int, ...], *, has_weights: bool = True) -> None:
        self._dtype = dtype
        self.dtype = dtype.sum
        self.shape = shape
        self._has_weights = has_weights
        self._sum: Array | None = None

    def add(self, section: Section, factor: float = 1.0) -> None:
        """Adds a section, multiplied by its weight."""
        factor = factor if self._has_weights else 1.0
        if self._sum is None:
            self._sum = _sum_of_one(section, factor, self._dtype)
            return
        values = section.values if factor == 1 else _scaled(section.values, factor, self._dtype)
        with _ieee():
            np.add(self._sum, values, out=self._sum, casting="unsafe")

    def add_piece(self, start: int, elements: Array, factor: float = 1.0, *, begins: bool) -> None:
        """Adds consecutive elements of a section, multiplied by its weight, and keeps no reference to them.

        Args:
            start: the place of the first element in the section.
            elements: the elements.
            factor: the weight.
            begins: whether they are the first elements that are added there. They replace whatever the memory holds.
        """
        piece = self.piece(start, len(elements))
        if factor != 1 and self._has_weights:
            if begins:
                _scaled(elements, factor, self._dtype, piece)
                return
            elements = _scaled(elements, factor, self._dtype)
        if begins:
            # They are not added to zeros, so -0.0 stays -0.0.
            np.copyto(piece, elements, casting="unsafe")
            return
        with _ieee():
            np.add(piece, elements, out=piece, casting="unsafe")

    def piece(self, start: int, number: int) -> Array:
        """Returns the memory of consecutive elements of the sum. Before ``add_piece``, it holds anything."""
        if self._sum is None:
            self._sum = np.empty(self.shape, self._dtype.sum)
        return self._sum.reshape(-1)[start : start + number]

    def clear(self) -> None:
        """Makes the sum empty."""
        self._sum = None

    def sum(self) -> Section:
        """Returns everything that was added, as one section of the sum dtype."""
        return Section(np.zeros(self.shape, self._dtype.sum) if self._sum is None else self._sum)

    def result(self, reduction_type: str, divisor: float | Array) -> Array:
        """Returns the sum or, for "MEAN", the sum divided by ``divisor``, in the accumulator's dtype.

        Args:
            reduction_type: "MEAN" or "SUM".
            divisor: the number of gradients (int) or the sum of their weights (float), or such a number for each
                element.
        """
        total = np.zeros(self.shape, self._dtype.sum) if self._sum is None else self._sum
        if reduction_type == "MEAN" and not (isinstance(divisor, int) and divisor <= 1):
            with _ieee():
                total = _mean(total, divisor, self._dtype)
        return _returned(total, self._dtype)


class SparseSum:
    """The sum of sparse sections whose rows have one shape.

    Sections wait until they have half the size of the sum, or WINDOW_BYTES if that is more, and are then added
    together. The time is therefore proportional to what is added, regardless of the number of sections and of whether
    they share indices. They take the memory of two sums and of the waiting sections.

    Args:
        dtype: the element type.
        shape: the shape of a row.
        bound: the declared dimension 0, below which all indices must be; None if it was not declared.
        where: the source of the gradients, for errors.
        counts_weights: whether the mean of a row is divided by the weights of the gradients that held its index, and
            not by their number.
    """

    def __init__(
        self, dtype: DType, shape: tuple[int, ...], *, bound: int | None, where: str, counts_weights: bool = True
    ) -> None:
        self._dtype = dtype
        self._shape = shape
        self._bound = bound
        self._where = where
        self._counts_weights = counts_weights
        # Pairs of a section and its factor. Once there is a sum, it comes first.
        self._waiting: list[tuple[Section, float]] = []
        self._bytes = 0
        self._sum_bytes = 0

    def add(self, section: Section, factor: float = 1.0) -> None:
        """Adds a section with strictly increasing indices, multiplied by its weight."""
        assert section.indices is not None
        if not len(section.indices):
            # Nothing to add. If a single other section is added, that one needs no copy.
            return
        self._waiting.append((section, factor))
        self._bytes += section.nbytes
        if self._bytes > self._sum_bytes + max(self._sum_bytes // 2, WINDOW_BYTES):
            self._keep(*self._add_up())

    def clear(self) -> None:
        """Makes the sum empty."""
        self._waiting, self._bytes, self._sum_bytes = [], 0, 0

    def result(self, reduction_type: str, divisor: float, sparse_mean: str = "index") -> tuple[Array, Array]:
        """Returns the sorted unique indices, and the reduced row of each in the accumulator's dtype.

        For "MEAN", the sum of a row is divided by the number of gradients that held its index, or their weights; or, if
        ``sparse_mean`` is "round", by ``divisor``.

        Args:
            reduction_type: "MEAN" or "SUM".
            divisor: the number of gradients (int) or the sum of their weights (float).
            sparse_mean: "index" or "round".

        Raises:
            CorruptDataError: an index is out of bounds, or more gradients held it than the round has.
        """
        indices, total, counts = self._checked(*self._add_up(), divisor)
        if reduction_type == "MEAN" and not (isinstance(divisor, int) and divisor <= 1):
            with _ieee():
                by_round = sparse_mean == "round"
                total = _mean(total, divisor, self._dtype) if by_round else self._mean_of_rows(total, counts)
        return indices, _returned(total, self._dtype)

    def total(self, divisor: float) -> tuple[Array, Array, Array]:
        """Returns the sorted unique indices, the sum of each row, and what the mean of each by its index divides by.

        They are the memory of the sum. The argument and the errors are those of ``result``.
        """
        found = self.sum()
        assert found.indices is not None
        assert found.counts is not None
        return self._checked(found.indices, found.values, found.counts, divisor)

    def _checked(self, indices: Array, total: Array, counts: Array, divisor: float) -> tuple[Array, Array, Array]:
        if len(indices) and self._bound is not None and indices[-1] >= self._bound:
            raise CorruptDataError(
                f"{self._where}: index {indices[-1]} is not below {self._bound}, which is dimension 0"
            )
        # .max() would be slower, because it goes through a Python function.
        most = np.maximum.reduce(counts, initial=0)
        if most > divisor and is_above(most, divisor):
            what = "gradients" if isinstance(divisor, int) else "weights in total"
            raise CorruptDataError(f"{self._where}: an index occurs in {most} {what}, but the round has only {divisor}")
        return indices, total, counts

    def _mean_of_rows(self, total: Array, counts: Array) -> Array:
        if total.nbytes <= DIVIDE_ALL_BYTES:
            return _mean(total, _column(counts, total), self._dtype)
        (several,) = (counts != 1).nonzero()
        if 2 * len(several) > len(counts):
            return _mean(total, _column(counts, total), self._dtype)
        # Dividing by 1 changes nothing.
        rows = _mean(total.take(several, axis=0), _column(counts.take(several), total), self._dtype)
        put_rows(total, several, rows)
        return total

    def sum(self, *, has_weights: bool = False) -> Section:
        """Returns everything that was added, as one section of the sum dtype.

        Args:
            has_weights: whether a weight of the round differs from 1, though perhaps none of these sections has it.
        """
        indices, total, counts = self._add_up()
        self._keep(indices, total, counts)
        return Section(total, indices, counts.astype(np.float64) if has_weights and self._counts_weights else counts)

    def _add_up(self) -> tuple[Array, Array, Array]:
        """Returns the sorted unique indices of the waiting sections, the sums of their rows, and their counts."""
        if len(self._waiting) == 1:
            ((section, factor),) = self._waiting
            assert section.indices is not None
            indices = section.indices.astype(np.int64, copy=not section.ours)
            counts = section.counts
            if counts is None:
                share = self._share(factor)
                counts = np.empty(len(indices), share.dtype)
                counts.fill(share)
            return indices, _sum_of_one(section, factor, self._dtype), counts
        indices, places = _union([_indices_of(section) for section, _ in self._waiting], self._bound)
        total = np.empty((len(indices), *self._shape), self._dtype.sum)
        counts = np.zeros(len(indices), self._counts_dtype)
        with _ieee():
            for (section, factor), at in zip(self._waiting, places, strict=True):
                values = section.values.astype(total.dtype, copy=False)
                if factor != 1:
                    values = _scaled(values, factor, self._dtype)
                _add_rows(total, counts, values, self._share(factor) if section.counts is None else section.counts, at)
        return indices, total, counts

    def _share(self, factor: float) -> np.number[Any]:
        """Returns for how much a gradient of this weight counts at its indices."""
        return np.float64(factor) if factor != 1 and self._counts_weights else np.uint64(1)

    @property
    def _counts_dtype(self) -> np.dtype[Any]:
        """What holds the counts of all waiting sections: uint64 while all weights are 1."""
        has_weights = self._counts_weights and any(
            factor != 1 or (section.counts is not None and section.counts.dtype == np.float64)
            for section, factor in self._waiting
        )
        return np.dtype(np.float64 if has_weights else np.uint64)

    def _keep(self, indices: Array, total: Array, counts: Array) -> None:
        """Replaces the waiting sections by their sum."""
        whole = Section(total, indices, counts, ours=True)
        self._waiting, self._bytes, self._sum_bytes = [(whole, 1.0)], whole.nbytes, whole.nbytes


def _indices_of(section: Section) -> Array:
    assert section.indices is not None
    return section.indices


def _add_rows(total: Array, counts: Array, values: Array, held: Any, at: Array) -> None:
    """Adds rows at their places, which are all different, and what they count there.

    Where the count is 0, the total is undefined: the first row that arrives there is copied. That takes a third of the
    time of an addition through places, and -0.0 stays -0.0.
    """
    before = counts.take(at)
    (again,) = before.nonzero()
    if len(again) == len(total):
        # There is a row for every index of the union, and none of them is new.
        total += values
    elif len(again):
        places = at.take(again)
        sums = total.take(places, axis=0)
        sums += values.take(again, axis=0)
        put_rows(total, at, values)
        put_rows(total, places, sums)
    else:
        put_rows(total, at, values)
    counts.put(at, before + held)


def put_rows(total: Array, at: Array, rows: Array) -> None:
    """Does ``total[at] = rows`` with each row as one piece of memory, which takes half as long."""
    assert total.flags.c_contiguous
    assert total.dtype == rows.dtype
    row_bytes = rows.itemsize * math.prod(rows.shape[1:])
    if row_bytes:
        row = np.dtype((np.void, row_bytes))
        flat = np.ascontiguousarray(rows).reshape(-1)
        total.reshape(-1).view(row).put(at, flat.view(row))


def _union(every: list[Array], bound: int | None) -> tuple[Array, list[Array]]:
    """Returns the sorted union of ascending index vectors, and the places of each vector's indices in it."""
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
        # Entries for indices outside the union stay undefined: nothing looks them up.
        place = np.empty(bound, np.intp)
        place[union] = np.arange(len(union))
        return union, [place.take(indices) for indices in every]
    union, inverse = np.unique(np.concatenate(every), return_inverse=True)
    return union, np.split(inverse, np.cumsum([len(indices) for indices in every])[:-1])


def is_above(weight: Any, total: float) -> Any:
    """Returns whether a number of gradients or a sum of weights, or each of several, is above one that contains it.

    Sums of weights may exceed it by as much as rounding explains.
    """
    return weight > (total if isinstance(total, int) else total * (1 + ROUNDING))


def _returned(total: Array, dtype: DType) -> Array:
    """Returns a total in the accumulator's dtype, in memory that the caller may keep and write to."""
    result = total
    if total.dtype != dtype.storage:
        with _ieee():
            result = total.astype(dtype.storage)
    if result.flags.c_contiguous and result.flags.writeable:
        return result
    return np.array(result, order="C")


class RoundSum:
    """The sum of the gradients of a round.

    Args:
        sections: an empty sum for each section of the gradients.
        where: the source of the gradients, for errors.

    Attributes:
        sections: the sum of each section.
        where: the source of the gradients, for errors.
        number: how many gradients are in the sum.
        weight: the sum of their weights; None if all are 1.
    """

    def __init__(self, sections: list[DenseSum | SparseSum], where: str) -> None:
        self.sections = sections
        self.where = where
        self.number = 0
        self.weight: float | None = None

    def add(self, gradient: Gradient) -> None:
        """Adds a gradient, multiplied by its weight."""
        self.count(gradient.number, gradient.weight, gradient.factor)
        for total, section in zip(self.sections, gradient.sections, strict=True):
            total.add(section, gradient.factor)

    def count(self, number: int, weight: float | None, factor: float) -> None:
        """Counts gradients whose sections have been added.

        Args:
            number: how many.
            weight: the sum of their weights, if these are in their values; None if all are 1.
            factor: factor by which a single one was multiplied.
        """
        if weight is None and factor != 1:
            weight = factor
        if self.weight is not None or weight is not None:
            self.weight = (self.number if self.weight is None else self.weight) + (number if weight is None else weight)
        self.number += number

    def sum(self) -> Gradient:
        """Returns everything that was added, as one gradient whose sections have the sum dtypes."""
        has_weights = self.weight is not None
        sections = [
            section.sum() if isinstance(section, DenseSum) else section.sum(has_weights=has_weights)
            for section in self.sections
        ]
        return Gradient(tuple(sections), self.number, self.weight)
