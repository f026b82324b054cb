"""A gradient in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np

from redisacc._arrays.validation import Array

_NBYTES = attrgetter("nbytes")
_SIZE = attrgetter("size")


class Section:
    """A dense array, or rows of a larger one, in a gradient.

    Args:
        values: the array of a dense section, or the rows ``[n, *row]`` of a sparse one. A dense section of a tree may
            be several vectors, one after the other, which are put together only where that is needed.
        indices: see below.
        counts: see below.
        ours: see below.

    Attributes:
        arrays: the values, as they were given.
        indices: strictly increasing int64 ``[n]`` of a sparse section; None for a dense one.
        counts: ``[n]``: how many gradients held each index (uint64) or the sum of their weights (float64), if this is a
            sparse sum of several; else None.
        ours: whether the arrays are our own memory, which may be written to and handed out. A caller's arrays are not.
        dtype: the dtype of the values.
        shape: the shape of the values.
        size: the number of elements of the values.
        nbytes: the size of its arrays in bytes.
    """

    __slots__ = ("arrays", "counts", "dtype", "indices", "nbytes", "ours", "shape", "size")

    def __init__(
        self,
        values: Array | Sequence[Array],
        indices: Array | None = None,
        counts: Array | None = None,
        ours: bool = False,
    ) -> None:
        # Each call of a handle reads these several times, so they are attributes and not properties.
        self.dtype: np.dtype[Any]
        self.shape: tuple[int, ...]
        self.size: int
        if isinstance(values, np.ndarray):
            self.arrays: Sequence[Array] = (values,)
            self.dtype, self.shape, self.size = values.dtype, values.shape, values.size
            self.nbytes = values.nbytes
        else:
            self.arrays = values
            self.dtype, self.size = values[0].dtype, sum(map(_SIZE, values))
            self.shape = values[0].shape if len(values) == 1 else (self.size,)
            self.nbytes = sum(map(_NBYTES, values))
        self.indices = indices
        self.counts = counts
        self.ours = ours
        if indices is not None:
            self.nbytes += indices.nbytes
        if counts is not None:
            self.nbytes += counts.nbytes

    @property
    def values(self) -> Array:
        """The values in one piece."""
        if len(self.arrays) != 1:
            self.arrays = (np.concatenate(self.arrays),)
        return self.arrays[0]


@dataclass(slots=True, init=False)
class Gradient:
    """A gradient on its way to the server or back, or the sum of several.

    Attributes:
        sections: one for a dense or a sparse accumulator. The gradient of a tree has one for all dense leaves of a
            dtype, and one for each sparse leaf (``AccumulatorSpec``).
        number: how many gradients this is the sum of.
        weight: the sum of their weights; None if all are 1.
        factor: factor by which the values still have to be multiplied: the weight of a single gradient. In a sum, the
            weights are in the values.
        nbytes: the size of its arrays in bytes.
    """

    sections: tuple[Section, ...]
    number: int
    weight: float | None
    factor: float
    nbytes: int = field(init=False)

    def __init__(
        self, sections: tuple[Section, ...], number: int = 1, weight: float | None = None, factor: float = 1.0
    ) -> None:
        self.sections = sections
        self.number = number
        self.weight = weight
        self.factor = factor
        self.nbytes = sections[0].nbytes if len(sections) == 1 else sum(map(_NBYTES, sections))
