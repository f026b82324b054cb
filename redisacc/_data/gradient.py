"""A gradient in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redisacc._data.validation import Array


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
    """

    __slots__ = ("arrays", "counts", "indices", "ours")

    def __init__(
        self,
        values: Array | Sequence[Array],
        indices: Array | None = None,
        counts: Array | None = None,
        ours: bool = False,
    ) -> None:
        self.arrays: Sequence[Array] = (values,) if isinstance(values, np.ndarray) else values
        self.indices = indices
        self.counts = counts
        self.ours = ours

    @property
    def values(self) -> Array:
        """The values in one piece."""
        if len(self.arrays) != 1:
            self.arrays = (np.concatenate(self.arrays),)
        return self.arrays[0]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""
        return self.arrays[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.arrays[0].shape if len(self.arrays) == 1 else (self.size,)

    @property
    def size(self) -> int:
        """The number of elements of the values."""
        return sum([array.size for array in self.arrays])

    @property
    def nbytes(self) -> int:
        """The size of its arrays in bytes."""
        size = sum([array.nbytes for array in self.arrays])
        if self.indices is not None:
            size += self.indices.nbytes
        if self.counts is not None:
            size += self.counts.nbytes
        return size


@dataclass(slots=True)
class Gradient:
    """A gradient on its way to the server or back, or the sum of several.

    Attributes:
        sections: one for a dense or a sparse accumulator. The gradient of a tree has one for all dense leaves of a
            dtype, and one for each sparse leaf (``TreeSpec``).
        number: how many gradients this is the sum of.
        weight: the sum of their weights; None if all are 1.
        factor: by what the values still have to be multiplied: the weight of a single gradient. In a sum, the weights
            are in the values.
    """

    sections: tuple[Section, ...]
    number: int = 1
    weight: float | None = None
    factor: float = 1.0

    @property
    def nbytes(self) -> int:
        """The size of its arrays in bytes."""
        return sum([section.nbytes for section in self.sections])
