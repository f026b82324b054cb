"""A gradient in memory, dense or sparse."""

from __future__ import annotations

from dataclasses import dataclass

from redisacc._data.validation import Array


@dataclass(slots=True)
class Gradient:
    """A gradient on its way to the server or back, or the sum of several.

    Attributes:
        values: the array of a dense gradient, or the rows ``[n, *row]`` of a sparse one.
        indices: strictly increasing int64 ``[n]`` of a sparse gradient; None for a dense one.
        counts: uint64 ``[n]``: how many gradients held each index, if this is a sparse sum of several; else None.
        number: how many gradients this is the sum of.
        ours: whether the arrays are our own memory, which may be written to and handed out. A caller's arrays are not.
    """

    values: Array
    indices: Array | None = None
    counts: Array | None = None
    number: int = 1
    ours: bool = False

    @property
    def nbytes(self) -> int:
        """The size of its arrays in bytes."""
        size: int = self.values.nbytes
        if self.indices is not None:
            size += self.indices.nbytes
        if self.counts is not None:
            size += self.counts.nbytes
        return size
